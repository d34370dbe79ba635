"""The shapes of a model as a value, without torch.

torch has the shapes of a model once it is built. A `ModelShapes` needs no model: `shoal.parallel.inspect.trace_shapes`
reads it from one on the meta device, the planner makes it from dimensions, or a test writes it. `placement` says which
piece of it a rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True, kw_only=True, slots=True)
class TPBoundary:
    """A point in the forward where an activation enters or leaves a region that tensor parallelism has split."""

    module: str
    """The split layer at this boundary."""
    way: Literal["enter", "enter_whole", "share", "leave", "logits", "gather", "divide", "join"]
    """enter_whole: `sp` does not divide its tokens. logits: it leaves a head that is split by vocabulary. gather,
    share: it enters a whole module that needs all tokens, of which a rank has some, or all. divide, join: it enters the
    first block between which tokens are divided, or leaves the last one."""
    shape: Shape
    """The whole activation of one sample."""
    has_backward: bool = True
    """Whether a gradient crosses in the backward."""
    is_repeated: bool = True
    """Whether recompute crosses it again. Recompute stops after the last tensor that the backward needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSite:
    """An attention, whose tokens attend to tokens that context parallelism has given to other ranks."""

    module: str
    queries: Shape
    """Of one sample: (heads, tokens, head dim)."""
    keys: Shape
    """The shape of keys, and of values."""
    has_backward: bool = True
    is_repeated: bool = True
    """Whether recompute runs it again."""
    is_output_repeated: bool = True
    """Whether recompute also needs its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSite:
    """Experts. Where ep divides them, tokens travel to their ranks."""

    module: str
    num_experts: int
    rows: int
    """Pairs of a token and its expert, of one sample."""
    dim: int
    """Elements of a row."""
    is_predicted: bool = True
    """Whether the number of rows is fixed, not data-dependent."""
    num_returns: int = 2
    """How many of the two exchanges, dispatch and combine, have a gradient."""
    is_repeated: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSite:
    """A router, which may need a whole sequence."""

    module: str
    num_experts: int
    has_auxiliary: bool = False
    """Whether its loss needs the load of each expert."""
    gathers_scores: bool = False
    """Whether it compares the tokens of a sequence: capacity, and expert choice."""
    is_repeated: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """The parts of a model that decide its traffic and memory."""

    description: Description
    parameters: Shapes
    """Name → whole shape, in the order of the model; a tied one under its first name only."""
    stream: Shape
    """The activation between blocks for one sample: (tokens, model dim)."""
    crossings: tuple[tuple[int, int], ...] = ()
    """For each block, the elements that a stage which begins with it receives: of each sample, and of any number of
    samples. Empty: one activation of the shape `stream` everywhere."""
    tp_boundaries: tuple[TPBoundary, ...] = ()
    """In the order of the forward. Several layers that read the same activation share one."""
    attentions: tuple[AttentionSite, ...] = ()
    dispatches: tuple[DispatchSite, ...] = ()
    routers: tuple[RouterSite, ...] = ()
    frozen: frozenset[str] = frozenset()
    """Parameters that need no gradient."""
    lookups: frozenset[str] = frozenset()
    """Parameters of embeddings, whose lookup costs no computation."""
    units: tuple[str, ...] | None = None
    """Submodules that are sharding units, by class or by size, children before parents. None: the blocks are."""
    units_beside_experts: tuple[str, ...] | None = None
    """The same where ep divides experts, which are units of their own."""
    prefetched: int = 1
    """Units that the backward gathers ahead."""

    def shape(self, name: str) -> Shape:
        """The whole shape of a parameter, also by the second name of a tied one."""
        return self.parameters[next((first for first, second in self.description.tied if second == name), name)]

    def names_in(self, modules: Collection[str]) -> list[str]:
        """The parameters of some submodules; a tied one under its second name only where its first is elsewhere."""
        if "" in modules:
            return list(self.parameters)
        order = self._order
        own = sorted({name for module in modules for name in self._names_below.get(module, ())}, key=order.__getitem__)
        seconds = [second for first, second in self.description.tied if is_in(second, modules) and first not in own]
        return own + seconds

    @cached_property
    def _order(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.parameters)}

    @cached_property
    def _names_below(self) -> Mapping[str, list[str]]:
        """Submodule → the parameters in it."""
        found: dict[str, list[str]] = {}
        for name in self.parameters:
            for module in modules_around(name):
                found.setdefault(module, []).append(name)
        return found

    @cached_property
    def _bounds(self) -> dict[int, list[tuple[int, int]]]:
        """What `stage_bounds` has found."""
        return {}

    @cached_property
    def _costs(self) -> dict[str, float]:
        """What `matmul_elements` has found."""
        return {}

    @cached_property
    def has_adapters(self) -> bool:
        """Whether LoRA is trained, beside weights that are frozen."""
        return any(name.endswith(".lora_A") for name in self.parameters)

    def trained(self, pieces: Shapes) -> dict[str, Shape]:
        """Those that get a gradient."""
        return {name: shape for name, shape in pieces.items() if self.is_trained(name)}

    def is_trained(self, name: str) -> bool:
        """Whether a parameter gets a gradient."""
        return name not in self._frozen

    @cached_property
    def _frozen(self) -> frozenset[str]:
        return self.frozen | {second for first, second in self.description.tied if first in self.frozen}

    def kinds_in(self, modules: tuple[str, ...]) -> Mapping[str, int]:
        """The parameters of some submodules, alike ones of several layers under one name → how many they are."""
        if modules not in self._kinds:
            kinds: dict[tuple[str, Shape, bool], list[str]] = {}
            for name in self.names_in(modules):
                kind = (self.description.kind_of(name), self.shape(name), self.is_trained(name))
                kinds.setdefault(kind, []).append(name)
            self._kinds[modules] = {names[0]: len(names) for names in kinds.values()}
        return self._kinds[modules]

    @cached_property
    def _kinds(self) -> dict[tuple[str, ...], Mapping[str, int]]:
        """What `kinds_in` has found."""
        return {}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one element of each kind."""

    weight: int
    """Parameters, their gradients between microbatches, and the optimizer's state."""
    compute: int
    """Gathered parameters, and activations in messages."""
    reduce: int
    """Gradients in a reduce-scatter."""
    loss: int
    frozen: int | None = None
    """Frozen weights below adapters. None: as other weights."""

    @classmethod
    def of(cls, plan: Plan, reduce_dtype: str = "fp32") -> Sizes:
        """The sizes of a plan's precision: the table of `shoal.numerics.precision` in bytes; and of `reduce_dtype`."""
        weight = 8 if plan.precision == "fp64" else 4
        lower = {"bf16": 2, "fp16": 2, "fp8": 2}
        reduced = 2 if reduce_dtype == "bf16" else weight
        return cls(weight=weight, compute=lower.get(plan.precision, weight), reduce=reduced, loss=weight)


def modules_around(parameter: str) -> list[str]:
    """The submodules around a parameter, from the outermost to its own.

    >>> modules_around("model.norm.weight")
    ['model', 'model.norm']
    """
    path = parameter.split(".")
    return [".".join(path[:depth]) for depth in range(1, len(path))]


def is_in(name: str, modules: Collection[str]) -> bool:
    """Whether a parameter belongs to one of these submodules; "" is the whole model."""
    return any(not module or name.startswith(f"{module}.") for module in modules)
