"""The shapes of a model as a value without torch, and the piece of each rank under a plan.

torch has the shapes of a model once it is built, and the pieces of a rank once the ranks are started. A `ModelShapes`
needs neither: `shoal.parallel.trace_shapes` reads it from a model on the meta device, or a test writes it.
`shoal.parallel.compose` distributes a model by the rules below (stages, units, pieces):

    whole model ─ stages (pp) ─▶ parts of a rank ─ cuts (tp, ep) ─▶ pieces ─ units (dp_shard) ─▶ gathered together
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from shoal.blueprint.description import Description, Split, supports_sequence_parallel
from shoal.blueprint.partition import partition
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.table import stage_ranks

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

GATHERED_STAGES = 3
"""With more stages than this on one rank, torch gathers only those that compute next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TPBoundary:
    """A point in the forward where an activation enters or leaves a region that tensor parallelism has split."""

    module: str
    """The split layer at this boundary."""
    way: Literal["enter", "leave", "logits"]
    """logits: it leaves a head that is split by vocabulary."""
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
    crossings: tuple[TPBoundary, ...] = ()
    """In the order of the forward. Several layers that read the same activation share one."""
    attentions: tuple[AttentionSite, ...] = ()
    dispatches: tuple[DispatchSite, ...] = ()
    routers: tuple[RouterSite, ...] = ()
    frozen: frozenset[str] = frozenset()
    """Parameters that need no gradient."""
    lookups: frozenset[str] = frozenset()
    """Parameters of embeddings, whose lookup costs no computation."""
    units_by_size: tuple[str, ...] = field(default=())
    """For a model without blocks: submodules that are sharding units, children before parents."""
    units_beside_experts: tuple[str, ...] = field(default=())
    """The same where ep divides experts, which are units of their own."""

    def shape(self, name: str) -> Shape:
        """The whole shape of a parameter, also by the second name of a tied one."""
        return self.parameters[next((first for first, second in self.description.tied if second == name), name)]

    def names_in(self, modules: Collection[str]) -> list[str]:
        """The parameters of some submodules; a tied one under its second name only where its first is elsewhere."""
        if "" in modules:
            return list(self.parameters)
        order = self._order
        own = sorted({name for module in modules for name in self._names_below.get(module, ())}, key=order.__getitem__)
        seconds = [second for first, second in self.description.tied if _is_in(second, modules) and first not in own]
        return own + seconds

    @cached_property
    def _order(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.parameters)}

    @cached_property
    def _names_below(self) -> Mapping[str, list[str]]:
        """Submodule → the parameters in it."""
        found: dict[str, list[str]] = {}
        for name in self.parameters:
            for module in _around(name):
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

    @classmethod
    def of(cls, plan: Plan) -> Sizes:
        """The sizes of a plan's precision: the table of `shoal.numerics.precision` in bytes."""
        weight = 8 if plan.precision == "fp64" else 4
        lower = {"bf16": 2, "fp16": 2, "fp8": 2}
        return cls(weight=weight, compute=lower.get(plan.precision, weight), reduce=weight, loss=weight)


# ---- stages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageShapes:
    """One stage of a model, or the whole model, on one rank."""

    stage: int
    modules: tuple[str, ...]
    """The submodules of the description in this stage."""
    pieces: Shapes
    """Name → shape of the piece that a rank of tp and ep holds of each parameter."""


def parts(plan: Plan, model: ModelShapes, rank: int) -> list[StageShapes]:
    """What a rank holds of a model, before anything is sharded."""
    return [
        StageShapes(stage, modules, {name: piece(plan, model, name, rank=rank) for name in model.names_in(modules)})
        for stage, modules in own_stages(plan, model, rank)
    ]


def own_stages(plan: Plan, model: ModelShapes, rank: int) -> list[tuple[int, tuple[str, ...]]]:
    """The stages of a rank, each with its submodules."""
    stage_owners, place = owners(plan), plan.layout.coordinate(rank)["pp"]
    every = enumerate(stages(plan, model))
    return [(stage, modules) for stage, modules in every if stage_owners[stage] == place]


def stages(plan: Plan, model: ModelShapes) -> list[tuple[str, ...]]:
    """The submodules of every stage; without a pipeline, one stage with all."""
    description, num_stages = model.description, plan.layout.pp * (plan.v or 1)
    if plan.layout.pp == 1:
        return [named(description) or ("",)]
    bounds = stage_bounds(model, num_stages=num_stages)
    before = [description.before_blocks, *[()] * (num_stages - 1)]
    after = [*[()] * (num_stages - 1), description.after_blocks]
    return [
        (*before[stage], *description.blocks[start:stop], *after[stage]) for stage, (start, stop) in enumerate(bounds)
    ]


def owners(plan: Plan) -> tuple[int, ...]:
    """The position on the pp axis of every stage."""
    return stage_ranks(plan.schedule or "", num_ranks=plan.layout.pp, v=plan.v or 1)


def stage_bounds(model: ModelShapes, *, num_stages: int) -> list[tuple[int, int]]:
    """Which blocks each stage has, balanced by what they cost to compute; embedding and head count too."""
    if num_stages not in model._bounds:
        model._bounds[num_stages] = _stage_bounds(model, num_stages)
    return model._bounds[num_stages]


def _stage_bounds(model: ModelShapes, num_stages: int) -> list[tuple[int, int]]:
    description = model.description
    costs = [matmul_elements(model, name) for name in description.blocks]
    first = sum(matmul_elements(model, name) for name in description.before_blocks)
    last = sum(matmul_elements(model, name) for name in description.after_blocks)
    return [(stage.start, stage.stop) for stage in partition(costs, num_stages, first=first, last=last)]


def matmul_elements(model: ModelShapes, module: str) -> float:
    """What a submodule costs to compute per token, in elements of its matrices. To look up an embedding is free, and of
    the experts only those cost that compute the token."""
    if module not in model._costs:
        model._costs[module] = _matmul_elements(model, module)
    return model._costs[module]


def _matmul_elements(model: ModelShapes, module: str) -> float:
    description = model.description
    active = (description.active_experts or 1) / description.num_experts if description.num_experts else 1.0
    shapes = {name: model.shape(name) for name in model.names_in([module])}
    return float(
        sum(
            prod(shape) * (active if experts_of(description, name) else 1.0)
            for name, shape in shapes.items()
            if len(shape) > 1 and name not in model.lookups
        )
    )


def named(description: Description) -> tuple[str, ...]:
    """All submodules of a description that hold parameters."""
    return (*description.before_blocks, *description.blocks, *description.after_blocks)


# ---- units ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """Submodules that are initialized, split and gathered together."""

    names: tuple[str, ...]
    is_block: bool = False
    is_last: bool = False
    """Whether the forward ends with it."""
    is_root: bool = False
    """Whether it is gathered with all parameters that no other unit holds."""
    is_rest: bool = False
    """Whether its names mean single modules without their submodules."""

    def holds(self, name: str) -> bool:
        """Whether a submodule belongs to it."""
        return name in self.names if self.is_rest else is_inside(name, self.names)


def units(description: Description, present: Collection[str]) -> Iterator[Unit]:
    """The units of a stage in which the submodules `present` have parameters. Without blocks, all is one unit.

    The embedding and the head are units of their own, unless they share a parameter: then the root unit holds both.
    """
    before = tuple(name for name in description.before_blocks if name in present)
    after = tuple(name for name in description.after_blocks if name in present)
    blocks = [name for name in description.blocks if name in present]
    if not blocks:
        yield Unit(("",), is_root=True)
        return
    are_tied = bool(description.tied and before and after)
    if are_tied:
        yield Unit((*before, *after), is_root=True)
    elif before:
        yield Unit(before)
    for name in blocks:
        yield Unit((name,), is_block=True)
    if after and not are_tied:
        yield Unit(after, is_last=True)


def sharded_units(plan: Plan, model: ModelShapes, part: StageShapes) -> list[tuple[Unit, Shapes]]:
    """The nonempty units of a stage with their pieces, as `fully_shard` gathers them.

    Experts under ep are a unit of their own, inside their block and sharded before it.
    """
    present = [module for module in part.modules if any(_is_in(name, [module]) for name in part.pieces)]
    found = list(units(model.description, present))
    if not model.description.blocks:
        by_size = model.units_beside_experts if plan.layout.ep > 1 else model.units_by_size
        found = [*(Unit((name,)) for name in by_size), Unit(("",), is_root=True)]
    left = dict(part.pieces)
    homes = {name: experts_of(model.description, name) if plan.layout.ep > 1 else None for name in left}
    filled = []
    for unit in found:
        own = {name: left.pop(name) for name in list(left) if _is_in(name, unit.names)}
        for home in dict.fromkeys(filter(None, map(homes.get, own))):
            experts = {name: own.pop(name) for name in list(own) if homes[name] == home}
            filled.append((Unit((home,)), experts))
        filled.append((unit, own))
    return [(unit, own) for unit, own in filled if own]


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that share each parameter with a rank: all that hold the same piece, unless nothing is sharded."""

    plan: Plan
    description: Description
    rank: int

    @cached_property
    def _degrees(self) -> Mapping[str, int]:
        is_sharded, layout = self.plan.is_sharded, self.plan.layout
        return {axis: layout.degree(axis) if is_sharded else 1 for axis in (self.plan.shard_axis, "edp")}

    @cached_property
    def _places(self) -> Mapping[str, int]:
        is_sharded, layout = self.plan.is_sharded, self.plan.layout
        return {axis: layout.place(self.rank, axis) if is_sharded else 0 for axis in (self.plan.shard_axis, "edp")}

    @cached_property
    def _axes(self) -> tuple[bool, str]:
        return self.plan.layout.ep > 1, self.plan.shard_axis

    def axis(self, name: str) -> str:
        """Along which a parameter is sharded."""
        divides_experts, axis = self._axes
        return "edp" if divides_experts and experts_of(self.description, name) is not None else axis

    def degree(self, name: str) -> int:
        """How many they are."""
        return self._degrees[self.axis(name)]

    def own(self, name: str, shape: Shape) -> int:
        """Elements that the rank has of a piece."""
        return shard(shape, index=self._places[self.axis(name)], degree=self.degree(name))

    def padded(self, name: str, shape: Shape) -> int:
        """Elements of FSDP2's padded shard, the same on every rank."""
        return shard(shape, index=0, degree=self.degree(name))


# ---- pieces ---------------------------------------------------------------------------------------------------------

CUT_DIMS: Mapping[Split, Mapping[str, int]] = {
    Split.COLUMN: {"weight": 0, "bias": 0},
    Split.ROW: {"weight": 1},
    Split.VOCABULARY: {"weight": 0, "bias": 0},
}
"""Split of a layer → the dim of each of its parameters that tp cuts. ep cuts dim 0 of all in `Split.EXPERTS`."""


def piece(plan: Plan, model: ModelShapes, name: str, *, rank: int) -> Shape:
    """The shape of the piece of a parameter on one rank of tp and ep."""
    shape = model.shape(name)
    module, _, own = name.rpartition(".")
    how = split_of(model.description, module)
    axis, dim = "tp", CUT_DIMS.get(how, {}).get(own) if how is not None else None
    if experts_of(model.description, name):
        axis, dim = "ep", 0
    if dim is None:
        return shape
    degree, index = _place_of(plan, axis, rank)
    return (*shape[:dim], chunk(shape[dim], index=index, degree=degree), *shape[dim + 1 :])


@lru_cache(maxsize=2**12)
def _place_of(plan: Plan, axis: str, rank: int) -> tuple[int, int]:
    """The degree of an axis, and the place of a rank on it."""
    return plan.layout.degree(axis), plan.layout.coordinate(rank)[axis]


def experts_of(description: Description, parameter: str) -> str | None:
    """The experts that a parameter belongs to: the submodule that is said to be some, with all inside it."""
    if not description.has_experts:
        return None
    return next((module for module in _around(parameter) if split_of(description, module) is Split.EXPERTS), None)


def _around(parameter: str) -> list[str]:
    """The submodules around a parameter, from the outermost to its own.

    >>> _around("model.norm.weight")
    ['model', 'model.norm']
    """
    path = parameter.split(".")
    return [".".join(path[:depth]) for depth in range(1, len(path))]


def split_of(description: Description, module: str) -> Split | None:
    """How a submodule may be split; None: not at all."""
    return description.split_of(module)


def splits_tokens(plan: Plan, description: Description) -> bool:
    """Whether sequence parallelism is on: by the plan's `sp`, else wherever the model allows it."""
    if plan.layout.tp == 1:
        return False
    return plan.sp if plan.sp is not None else supports_sequence_parallel(description)


def is_partial(description: Description, name: str, *, splits_tokens: bool) -> bool:
    """Whether each tp rank has only its own share of a parameter's gradient: that of its tokens, or of its heads."""
    module, _, own = name.rpartition(".")
    around = {split_of(description, outer) for outer in _around(name)}
    is_late_bias = own == "bias" and split_of(description, module) is Split.ROW  # added after the sum
    is_of_tokens = bool(around & {Split.SEQUENCE, Split.EXPERTS}) or is_late_bias
    return Split.HEADS in around or (splits_tokens and is_of_tokens)


def shard(shape: Shape, *, index: int, degree: int) -> int:
    """Elements of one rank's shard of a piece: some of its rows."""
    return prod(shape) if degree == 1 else chunk(shape[0], index=index, degree=degree) * prod(shape[1:])


def chunk(size: int, *, index: int, degree: int) -> int:
    """The size of part `index` when `size` is cut into `degree` parts as torch.chunk does; the last may be empty.

    >>> [chunk(37, index=index, degree=4) for index in range(4)]
    [10, 10, 10, 7]
    """
    each = -(-size // degree)
    return max(0, min(each, size - index * each))


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a submodule is one of these, or inside one; "" is the whole model."""
    return any(not module or name == module or name.startswith(f"{module}.") for module in modules)


def _is_in(name: str, modules: Collection[str]) -> bool:
    """Whether a parameter belongs to one of these submodules; "" is the whole model."""
    return any(not module or name.startswith(f"{module}.") for module in modules)
