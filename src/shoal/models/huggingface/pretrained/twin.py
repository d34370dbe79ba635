"""First values of every parameter, by transformers' own rules, whichever rank draws them and in bounded memory.

transformers builds a model, and then calls `_init_weights` of the nearest model of its own on every module: first on
children, then on the module around them. Such a call may fill any parameter inside its module: that of T5's attention
fills the weights of its four layers. What no call fills keeps the value that the constructor gave it.

A twin is built once, as transformers does it, with parameters that have no memory. Meanwhile it notes for every
parameter which of these calls touched it, in their order, and what the constructor did to it. To draw one parameter, it
alone gets memory, and the same is done again from its own seed. All others stay without memory, so they are not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from shoal.errors import ShoalError, needs

Rule = tuple[Any, nn.Module]
"""A model of transformers, and a module for which its `_init_weights` is called."""
Part = tuple[torch.Size, tuple[int, ...], int]
"""A part of a storage: its shape, its strides and its offset."""


class Twin:
    """The whole model, with buffers and without parameters. Copies of a model, such as its stages, share it."""

    def __init__(self, construct: Callable[[], Any]) -> None:
        notes = _Notes()
        with torch.random.fork_rng(devices=[]), _without_memory(notes):
            torch.default_generator.manual_seed(0)  # what is random and no parameter is the same on all ranks
            self.model = construct()
        named = dict(self.model.named_parameters())
        first_name = {id(parameter): name for name, parameter in named.items()}
        both = list(self.model.named_parameters(remove_duplicate=False))
        self.firsts = {name: first_name[id(p)] for name, p in both if first_name[id(p)] != name}
        """Second name of a parameter → its first."""
        self.rules = {name: notes.rules.get(id(parameter), []) for name, parameter in named.items()}
        self.starts = {name: notes.starts[id(parameter)] for name, parameter in named.items()}
        for name in named:
            if isinstance(self.model.get_submodule(name.rpartition(".")[0]), ParametrizationList):
                self.rules[name] = []  # they fill the weight that is computed from it, which changes nothing
        self.places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in named}
        """First name of a parameter → every module that has it, and the name there."""
        for name, parameter in both:
            path, _, own = name.rpartition(".")
            self.places[first_name[id(parameter)]].append((self.model.get_submodule(path), own))

    def __deepcopy__(self, memo: dict[int, Any]) -> Twin:
        return self

    def draw(self, name: str, into: Tensor, generator: torch.Generator) -> None:
        """Fill a parameter as transformers does."""
        name = self.firsts.get(name, name)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.default_generator.manual_seed(generator.initial_seed())
            self._run_rules(name, into.fill_(torch.nan))
            if bool(into.isnan().any()):  # else they replace all of what the constructor gave
                torch.default_generator.manual_seed(generator.initial_seed())
                self._run_rules(name, into.copy_(self.starts[name].value()))
        if bool(into.isnan().any()):
            raise ShoalError(
                f"transformers does not say how {name} starts", fix="a folder with weights to start from", code="M078"
            )

    def _run_rules(self, name: str, into: Tensor) -> None:
        fresh = nn.Parameter(into, requires_grad=False)
        places = [(module, own, fresh) for module, own in self.places[name]]
        for author, module in self.rules[name]:
            try:
                with _holding(places):
                    author._init_weights(module)
            except NotImplementedError:  # RWKV makes values where another parameter of the module is
                own = {id(place[0]): place[1] for place in places}.get(id(module))
                others = [
                    (module, other, nn.Parameter(torch.full(parameter.shape, torch.nan), requires_grad=False))
                    for other, parameter in module.named_parameters(recurse=False)
                    if other != own
                ]
                with _holding([*places, *others]):
                    author._init_weights(module)


@contextmanager
def _holding(places: list[tuple[nn.Module, str, nn.Parameter]]) -> Iterator[None]:
    """Give modules parameters with memory for a while."""
    before = [(module, own, module._parameters[own]) for module, own, _ in places]
    for module, own, fresh in places:
        module._parameters[own] = fresh
    try:
        yield
    finally:
        for module, own, without_memory in before:
            module._parameters[own] = without_memory


@dataclass(frozen=True)
class _Start:
    """The value that a constructor gives to a tensor: what it does to the storage, of which the tensor is a part."""

    part: Part
    size: int
    steps: list[Callable[[Tensor], object]]

    def value(self) -> Tensor:
        """NaN where the constructor leaves memory as it is."""
        storage = torch.full((self.size,), torch.nan)
        for step in self.steps:
            step(storage)
        return storage.as_strided(*self.part)


@dataclass
class _Notes:
    """How every parameter of a twin gets its value, while the twin is built."""

    rules: dict[int, list[Rule]] = field(default_factory=dict)
    """id of a parameter → the calls that may fill it."""
    starts: dict[int, _Start] = field(default_factory=dict)
    """id of a parameter → its value before."""
    steps: dict[int, list[Callable[[Tensor], object]]] = field(default_factory=dict)
    """id of a storage → what constructors do to it. They may fill a tensor before it is a parameter."""
    kept: list[Any] = field(default_factory=list)
    """Parameters and storages, so that no later one gets the id of an earlier one."""

    def start_of(self, tensor: Tensor) -> _Start:
        """What is done to a tensor on the meta device, now and later."""
        self.kept.append(storage := tensor.untyped_storage())
        size = storage.nbytes() // tensor.element_size()
        return _Start(_part_of(tensor), size, self.steps.setdefault(storage._cdata, []))

    def registered(self, given: nn.Parameter, parameter: nn.Parameter) -> None:
        """The constructor made a parameter: with a value, or without memory."""
        if id(parameter) in self.starts:  # one that is tied
            return
        self.kept.append(parameter)
        self.starts[id(parameter)] = start = self.start_of(parameter)
        if not given.is_meta and given.numel():
            first = given.detach()[(0,) * given.dim()]
            value = first.clone() if bool((given == first).all()) else given.detach()  # one number takes no memory
            start.steps.append(partial(_change, start.part, Tensor.copy_, [value], {}))

    def changed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The constructor changed a tensor, or a part of one, in place."""
        given = dict(kwargs)
        target, *rest = args or (given.pop("tensor", None),)
        if not isinstance(target, Tensor) or not target.is_meta:
            return
        if any(isinstance(one, Tensor) and one.is_meta for one in (*rest, *given.values())):
            func, rest, given = Tensor.fill_, [torch.nan], {}  # values that are not known
        self.start_of(target).steps.append(partial(_change, _part_of(target), func, rest, given))

    def measured(self, weight: Tensor, args: tuple[Any, ...]) -> Tensor:
        """weight_norm learns the length of a weight apart from its direction."""
        length = torch.norm_except_dim(weight, *args)
        self.start_of(length).steps.append(partial(_measure, _part_of(length), self.start_of(weight), args))
        return length

    def used(self, tensors: Iterable[Any], rule: Rule) -> None:
        """A call of `_init_weights` used parameters: it may fill them."""
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self.kept.append(tensor)
                rules = self.rules.setdefault(id(tensor), [])
                if rule not in rules[-1:]:
                    rules.append(rule)


def _part_of(tensor: Tensor) -> Part:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _change(part: Part, func: Any, args: list[Any], kwargs: dict[str, Any], storage: Tensor) -> None:
    func(storage.as_strided(*part), *args, **kwargs)


def _measure(part: Part, weight: _Start, args: tuple[Any, ...], storage: Tensor) -> None:
    storage.as_strided(*part).copy_(torch.norm_except_dim(weight.value(), *args))


@contextmanager
def _without_memory(notes: _Notes) -> Iterator[None]:
    """Build modules whose parameters have no memory, and whose buffers do."""
    model_kind: Any = needs("transformers", what="a model of transformers", extra="hf").PreTrainedModel
    register_as_usual, start_as_usual = nn.Module.register_parameter, model_kind._initialize_weights
    watch = _Watch(notes)

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            given = parameter
            if not given.is_meta:  # one that is tied is there already
                parameter = nn.Parameter(given.to("meta"), given.requires_grad)
            notes.registered(given, parameter)
        register_as_usual(module, name, parameter)

    def start(author: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        watch.rule = (author, module)
        start_as_usual(author, module, *args, **kwargs)
        watch.rule = None

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    model_kind._initialize_weights = start
    try:
        with torch.device("cpu"), watch:
            yield
    finally:
        nn.Module.register_parameter = register_as_usual  # type: ignore[method-assign]
        model_kind._initialize_weights = start_as_usual


class _Watch(TorchFunctionMode):
    """Note how parameters get their values, and make tensors without values on the meta device: even for a moment,
    those of some experts fit in no memory."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes
        self.rule: Rule | None = None
        """The call of `_init_weights` that runs now; None: a constructor does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            return func(*args, **{**kwargs, "device": "meta"})
        if self.rule is not None:
            self.notes.used((*args, *kwargs.values()), self.rule)
        elif func is torch.norm_except_dim and args[0].is_meta:
            return self.notes.measured(args[0], args[1:])
        elif _is_in_place(func):
            self.notes.changed(func, args, kwargs)
        return func(*args, **kwargs)


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    is_change = name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
    return is_change or name == "__setitem__"
