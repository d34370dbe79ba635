"""Which modules of a forward read whose outputs, found by running a model once without memory.

Modules that the description names are *placed*: before all blocks (-1), at the number of their block, or after all
blocks. Code between modules is run on every stage of a pipeline, so a stage needs only the outputs of modules:

    skip = down(x)                   down    call 0, placed at block 0
    x = middle(skip)                 middle  call 1, placed at block 1, reads output 0 of call 0
    x = up(torch.cat([x, skip]))     up      call 2, placed at block 2, reads outputs of calls 0 and 1

A module without parameters and buffers (a dropout, a pooling) is placed with the last output that it reads. If it reads
none, every stage runs it. Reads are those of operations, followed through views, in-place operations and closures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shoal.blueprint.description import Description
from shoal.blueprint.placement import is_inside
from shoal.parallel.pipeline.known_values import KnownValues, tensors_in
from shoal.parallel.pipeline.skeleton import Call

Source = tuple[int, int]
"""A tensor: the number of the call that returns it, and its number among the leaves of what that returns."""
BEFORE = -1


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of what a module returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(slots=True)
class ModuleCall:
    """One call of a module in a forward."""

    module: str
    position: int | None
    """Where it is placed; None: it reads no module's output, and every stage runs it."""
    reads: set[Source] = field(default_factory=set)
    leaves: tuple[Any, ...] = ()
    """What it returns: a `Leaf` for each tensor; anything else as it is."""
    spec: TreeSpec | None = None


@dataclass(slots=True)
class Forward:
    """The calls of one forward in their order."""

    calls: list[ModuleCall] = field(default_factory=list)
    output: set[Source] = field(default_factory=set)
    """What the output of the model depends on."""
    between: set[Source] = field(default_factory=set)
    """Read by code between modules."""
    changed_between: set[Source] = field(default_factory=set)
    """Changed in place by code between modules."""
    changed_inside: set[Source] = field(default_factory=set)
    """Changed in place by modules."""
    drawn: list[set[int]] = field(default_factory=list)
    """For each random operation between modules: the calls that read its result; -1 is the output of the model."""
    loose: set[str] = field(default_factory=set)
    """Parameters of placed modules that code between modules reads."""
    hidden: set[str] = field(default_factory=set)
    """Placed modules of which others read a trained value that they do not return, as an auxiliary loss."""

    def leaf(self, source: Source) -> Leaf:
        """The shape of a tensor."""
        found: Leaf = self.calls[source[0]].leaves[source[1]]
        return found


@torch.enable_grad()
def trace_calls(model: nn.Module, description: Description, call: Call) -> Forward:
    """Run a model without memory; its tensors are on the meta device."""
    places = positions(description)
    tracer = _Tracer(len(description.blocks), _storages(model, places))
    names = [*places, *unplaced(model, places)]
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            enter, leave = tracer.around(name, places.get(name))
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        known = KnownValues()
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        arguments, options = tree_map_only(Tensor, known.input_of(dtype), call)
        for mode in (torch.device("meta"), known, tracer):
            stack.enter_context(mode)
        output = model(*arguments, **options)
    tracer.end(output)
    return tracer.forward


def positions(description: Description) -> dict[str, int]:
    """Name of every module that a description names → where it is placed."""
    after = len(description.blocks)
    return {
        **dict.fromkeys(description.before_blocks, BEFORE),
        **{name: number for number, name in enumerate(description.blocks)},
        **dict.fromkeys(description.after_blocks, after),
    }


def unplaced(model: nn.Module, places: dict[str, int]) -> Iterator[str]:
    """The outermost modules without parameters and buffers that are beside the placed ones."""
    around = {outer for name in places for outer in _outer(name)}
    found: list[str] = []
    for name, module in model.named_modules():
        if not name or name in around or is_inside(name, [*places, *found]):
            continue
        if next(module.parameters(), None) is None and next(module.buffers(), None) is None:
            found.append(name)
            yield name


def _outer(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def rebuilt(call: ModuleCall, leaves: Sequence[Any]) -> Any:
    """What a module returns, put together from its leaves."""
    assert call.spec is not None
    return tree_unflatten(leaves, call.spec)


def flattened(output: object) -> list[Any]:
    """The leaves of what a module returns."""
    return tree_leaves(output)


# ---- reads ----------------------------------------------------------------------------------------------------------


def _key(tensor: Tensor) -> int:
    """The identity of a storage, which views and tensors that were changed in place share."""
    return int(tensor.untyped_storage()._cdata)


def _storages(model: nn.Module, places: dict[str, int]) -> dict[int, str]:
    return {_key(p): name for name, p in model.named_parameters() if is_inside(name, list(places))}


def _tensors(*values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class _Tracer(TorchDispatchMode):
    """Follow outputs of modules through every operation, by their storages."""

    def __init__(self, after: int, parameters: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward, self.after, self.parameters = Forward(), after, parameters
        self.sources: dict[int, set[Source]] = {}
        self.draws: dict[int, set[int]] = {}
        self.inner: dict[int, str] = {}
        self.alive: list[Tensor] = []  # or another storage would get the identity of a freed one
        self.inside: ModuleCall | None = None

    def around(self, name: str, position: int | None) -> tuple[Any, Any]:
        """Hooks before and after a module."""

        def enter(_module: nn.Module, _given: object) -> None:
            self.inside = ModuleCall(name, position)
            self.forward.calls.append(self.inside)

        def leave(_module: nn.Module, _given: object, output: object) -> object:
            assert self.inside is not None
            returned = self._returned(self.inside, output)
            self.inside = None
            return returned

        return enter, leave

    def _returned(self, one: ModuleCall, output: object) -> object:
        """Give every tensor of an output a storage of its own, which only this call has written."""
        leaves, one.spec = tree_flatten(output)
        for tensor in _tensors(leaves):  # a module may return what it got
            one.reads |= self.sources.get(_key(tensor), set())
            self._note_draws(tensor, len(self.forward.calls) - 1)
        if one.position is None:
            read = [self.forward.calls[number].position for number, _ in one.reads]
            one.position = max((place for place in read if place is not None), default=None)
        one.leaves = tuple(
            Leaf(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in leaves
        )
        if one.position is None:
            return output
        fresh = [_like(x) if isinstance(x, Tensor) else x for x in leaves]
        for number, tensor in enumerate(fresh):
            if isinstance(tensor, Tensor):
                self.alive.append(tensor)
                self.inner.pop(_key(tensor), None)
                self.sources[_key(tensor)] = {(len(self.forward.calls) - 1, number)}
        return tree_unflatten(fresh, one.spec)

    def end(self, output: object) -> None:
        """Note what the output depends on."""
        values = output if isinstance(output, dict | list | tuple | Tensor) else getattr(output, "__dict__", None)
        for tensor in _tensors(values):
            self.forward.output |= self.sources.get(_key(tensor), set())
            self._note_draws(tensor, -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = tensors_in(args, kwargs), kwargs or {}
        keys = {_key(tensor) for tensor in given}
        read = {source for key in keys for source in self.sources.get(key, ())}
        written = {_key(x) for x in tensors_in(*_written(func, args, kwargs))}
        changed = {source for key in written for source in self.sources.get(key, ())}
        result = func(*args, **kwargs)
        here = self.inside.module if self.inside is not None else ""
        inner = {self.inner[_key(x)] for x in given if x.requires_grad and _key(x) in self.inner}
        self.forward.hidden |= inner - {here}
        if self.inside is not None:
            self._computed_inside(self.inside, keys, result)
            self.inside.reads |= read
            self.forward.changed_inside |= changed
            for tensor in given:
                self._note_draws(tensor, len(self.forward.calls) - 1)
            return result
        self.forward.loose |= {self.parameters[key] for key in keys if key in self.parameters}
        self._pass_on(func, read, changed, keys, result)
        return result

    def _computed_inside(self, call: ModuleCall, keys: set[int], result: Any) -> None:
        """Note new storages of a placed module. It returns others, so who reads these did not get them from it."""
        for tensor in tensors_in(result) if call.position is not None else ():
            if _key(tensor) not in keys:
                self.alive.append(tensor)
                self.inner[_key(tensor)] = call.module

    def _pass_on(self, func: Any, read: set[Source], changed: set[Source], keys: set[int], result: Any) -> None:
        """An operation between modules: its results depend on all that it reads."""
        self.forward.between |= read
        self.forward.changed_between |= changed
        drawn = {number for key in keys for number in self.draws.get(key, ())}
        if read and torch.Tag.nondeterministic_seeded in func.tags:
            drawn.add(len(self.forward.drawn))
            self.forward.drawn.append(set())
        for tensor in tensors_in(result):
            self.alive.append(tensor)
            if read:
                self.sources.setdefault(_key(tensor), set()).update(read)
            if drawn:
                self.draws.setdefault(_key(tensor), set()).update(drawn)

    def _note_draws(self, tensor: Tensor, reader: int) -> None:
        for number in self.draws.get(_key(tensor), ()):
            self.forward.drawn[number].add(reader)


def _like(tensor: Tensor) -> Tensor:
    fresh = torch.empty_like(tensor, device="meta")
    return fresh.requires_grad_().clone() if tensor.requires_grad else fresh  # a leaf may not be changed in place


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation changes in place."""
    if not func._schema.is_mutable:
        return
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)
