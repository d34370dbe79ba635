"""Initial values that depend only on the seed and on the parameter's name.

torch draws a model's weights from one global stream, in the order in which layers are created. So a model that is cut
in two, or built on another device or in another precision, gets other weights. Here every parameter has its own stream,
keyed by its full name. It is drawn in float32 on the CPU, and then copied to its device and dtype. So all layouts start
equal, bit for bit, and adding a layer changes no other. (On one kind of CPU: torch computes normal draws with other
instructions on x86 than on ARM, and some differ in the last bit.)

The model defines the distributions. The nearest enclosing module with a method

    init_parameter(name: str, parameter: Tensor, generator: torch.Generator) -> None

fills each parameter inside it, given its name relative to that module. Without such a method, `reset_parameters()` of
the layer that owns the parameter is the rule. Buffers, such as the statistics of batch norm, use the latter, unless
that module has a method `init_buffer(name: str) -> Tensor`. A tensor without any rule keeps its value.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import Problem, raise_if

Where = Callable[[str], bool]
"""A predicate on full names of submodules."""


def everywhere(name: str) -> bool:
    """Accept all submodules."""
    return True


def key(seed: int, *names: str | int) -> int:
    """Return 64 bits that depend on the seed and the names alone, the same in every process and version of Python.

    >>> key(0, "model.norm.weight") == key(0, "model.norm.weight") != key(1, "model.norm.weight")
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *names):
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)  # with its length: ("ab", "c") is not ("a", "bc")
    return int.from_bytes(digest.digest(), "little")


def has_init_rule(model: nn.Module) -> bool:
    """Whether any module defines how its parameters start; else the code that built the model sets their values."""
    return any(callable(getattr(module, "init_parameter", None)) for module in model.modules())


def can_fill(model: nn.Module) -> bool:
    """Whether `initialise` fills everything, so that the model may be built on the meta device."""
    return has_init_rule(model) and not _without_rule(list(_owners(model, everywhere)))


@torch.no_grad()
def initialise(model: nn.Module, seed: int, where: Where = everywhere) -> None:
    """Fill every parameter that has a rule, in place, and every buffer of torch's own layers.

    `where` selects submodules by name. A model on the meta device needs `materialise` first. Parameters that are one
    tensor are filled once, under the first of their names. A part of a model that holds only the second of them draws
    the same values if its `describe()` names the pair.
    """
    owners = list(_owners(model, where))
    raise_if(_still_on_meta(owners))
    first_name = _first_names(model)
    filled: set[Tensor] = set()
    for owner in owners:
        parameters = {name: p for name, p in owner.parameters.items() if p not in filled}
        for name in [name for name in parameters if owner.is_drawn(name)]:
            _draw(owner, name, first_name.get(owner.prefix + name, owner.prefix + name), parameters[name], seed)
        filled.update(parameters.values())
        for name, buffer in owner.buffers.items() if owner.fills_buffers else ():
            buffer.copy_(owner.author.init_buffer((owner.prefix + name).removeprefix(owner.author_prefix)))
        left = {name: parameter for name, parameter in parameters.items() if not owner.is_drawn(name)}
        left_to_layer = {**({} if owner.fills_buffers else owner.buffers), **left}
        if left_to_layer and owner.has_reset:
            fresh = _reset_copy(owner.module, key(seed, owner.prefix.removesuffix(".")))
            for name, tensor in left_to_layer.items():
                tensor.copy_(getattr(fresh, name))


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device | str, where: Where = everywhere) -> None:
    """Allocate memory on `device` for everything on the meta device; move the rest there.

    `where` selects submodules by name. torch's `to_empty` also drops existing values, makes two parameters of a shared
    one, and accepts tensors that nothing will ever fill: that is a `ShoalError` here.
    """
    owners = list(_owners(model, where))
    raise_if(_without_rule(owners))
    _release_freed_memory()
    moved: dict[Tensor, Tensor] = {}
    for owner in owners:
        for name, tensor in {**owner.parameters, **owner.buffers}.items():
            if tensor not in moved:
                there = _empty_as(tensor, device) if tensor.is_meta else tensor.to(device)
                is_parameter = isinstance(tensor, nn.Parameter) and there is not tensor
                moved[tensor] = nn.Parameter(there, requires_grad=tensor.requires_grad) if is_parameter else there
            setattr(owner.module, name, moved[tensor])


def _release_freed_memory() -> None:
    """Return memory to the system that C's allocator keeps for later. It keeps blocks of up to 32 MiB, and what was
    freed between blocks in use adds up to half of a model that is laid out unit by unit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _empty_as(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Same as `torch.empty_like`, which imports sympy for a tensor on the meta device: 0.4 s."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@torch.no_grad()
def init_missing(model: nn.Module, seed: int) -> None:
    """Fill the parameters that are still uninitialized: NaN throughout. All others keep their values."""
    named = model.named_parameters(remove_duplicate=False)
    hollow = {name: parameter for name, parameter in named if _is_hollow(parameter)}
    homes = {name.rpartition(".")[0] for name in hollow}
    owned = [{**owner.parameters, **owner.buffers} for owner in _owners(model, homes.__contains__)]
    uninitialized = set(hollow.values())
    kept = [(tensor, tensor.clone()) for tensors in owned for tensor in tensors.values() if tensor not in uninitialized]
    if hollow:
        initialise(model, seed, homes.__contains__)
    for tensor, value in kept:
        tensor.copy_(value)


def _is_hollow(parameter: Tensor) -> bool:
    if parameter.is_meta or not parameter.is_floating_point() or not parameter.numel():
        return False
    first = parameter[(0,) * parameter.dim()]  # decides for most without reading the rest
    return bool(first.isnan()) and bool(parameter.isnan().all())


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module with the tensors that it owns, and the enclosing module that defines how to fill them."""

    prefix: str  # of the full names: "" or "model.norm."
    module: nn.Module
    author: Any  # the nearest module with init_parameter, or None
    author_prefix: str

    @property
    def parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters(recurse=False, remove_duplicate=False))

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.module.named_buffers(recurse=False, remove_duplicate=False))

    @property
    def fills_buffers(self) -> bool:
        return callable(getattr(self.author, "init_buffer", None))

    @property
    def has_reset(self) -> bool:
        return callable(getattr(self.module, "reset_parameters", None))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Parameters that were added to the module, which fills them itself: `init_adapter`."""
        return getattr(self.module, "adapter_names", ())

    def is_drawn(self, name: str) -> bool:
        """Whether a parameter has a stream of its own; else `reset_parameters` fills it."""
        return self.author is not None or name in self.adapters


def _owners(model: nn.Module, where: Where) -> Iterator[_Owner]:
    """Yield in the order of `named_parameters`, so that the first name of a shared tensor is the one torch reports."""
    authors: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if callable(getattr(module, "init_parameter", None)):
            authors[prefix] = module
        author_prefix = max((p for p in authors if prefix.startswith(p)), key=len, default="")
        if where(name):
            yield _Owner(prefix, module, authors.get(author_prefix), author_prefix)


def _draw(owner: _Owner, name: str, full_name: str, parameter: Tensor, seed: int) -> None:
    is_drawn_there = parameter.dtype == torch.float32 and parameter.device.type == "cpu"  # else it takes memory twice
    value = parameter.detach() if is_drawn_there else torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    module: Any = owner.module
    own_seed = getattr(module, "adapter_seed", None) if name in owner.adapters else None
    generator = torch.Generator(device="cpu").manual_seed(key(seed if own_seed is None else own_seed, full_name))
    if name in owner.adapters:
        module.init_adapter(name, value, generator)
    else:
        owner.author.init_parameter(full_name.removeprefix(owner.author_prefix), value, generator)
    if not is_drawn_there:
        parameter.copy_(value)


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Fill what adapters have added to a model, and nothing else. On the meta device nothing is filled."""
    for owner in _owners(model, everywhere):
        for name in owner.adapters:
            parameter = owner.parameters[name]
            if not parameter.is_meta:
                _draw(owner, name, owner.prefix + name, parameter, seed)


def _reset_copy(module: nn.Module, seed: int) -> Any:
    """Return a copy of the module on the CPU, in float32, after its own `reset_parameters`.

    That method uses torch's global stream, which is restored afterwards. It is seeded directly because
    `torch.manual_seed` would also reseed every GPU.
    """
    memo: dict[int, Any] = {id(p): _float32_on_cpu(p) for p in module.parameters()}
    memo |= {id(b): b.to("cpu", copy=True) for b in module.buffers()}
    fresh: Any = copy.deepcopy(module, memo)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        fresh.reset_parameters()
    return fresh


def _float32_on_cpu(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    return nn.Parameter(parameter.detach().to("cpu", dtype, copy=True), requires_grad=parameter.requires_grad)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Map the second name of a tied parameter to the first."""
    describe = getattr(model, "describe", None)
    if not callable(describe):
        return dict(getattr(model, "first_names", {}))
    return {second: first for first, second in describe().tied}


def _still_on_meta(owners: list[_Owner]) -> list[Problem]:
    first_name: dict[Tensor, str] = {}
    for owner in owners:
        for name, tensor in {**owner.parameters, **owner.buffers}.items():
            first_name.setdefault(tensor, owner.prefix + name)
    names = [name for tensor, name in first_name.items() if tensor.is_meta]
    if not names:
        return []
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    what = f"{len(names)} tensors are on the meta device and have no values: {some}"
    return [Problem("M050", what, "materialise(model, device) first")]


def _without_rule(owners: list[_Owner]) -> list[Problem]:
    """Report every tensor on the meta device that `initialise` would leave uninitialized."""
    problems = []
    for owner in owners:
        kind = type(owner.module).__name__
        if not owner.has_reset:
            parameters = {} if owner.author is not None else owner.parameters
            buffers = {} if owner.fills_buffers else owner.buffers
            for name, tensor in {**parameters, **buffers}.items():
                if tensor.is_meta:
                    what = f"{owner.prefix}{name} is on the meta device, and {kind} does not define how to fill it"
                    fix = f"give {kind} a method reset_parameters(), or build the model outside of torch.device('meta')"
                    problems.append(Problem("M051", what, fix))
    return problems
