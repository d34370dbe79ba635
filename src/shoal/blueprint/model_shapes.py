"""The shapes of a model as a value without torch, and the piece of each rank under a plan.

torch has the shapes of a model once it is built, and the pieces of a rank once the ranks are started. A `ModelShapes`
needs neither: `shoal.parallel.live_memory.trace_shapes` reads it from a model on the meta device, or a test writes it.
`shoal.parallel.compose` distributes a model by the rules below (stages, units, pieces):

    whole model ─ stages (pp) ─▶ parts of a rank ─ cuts (tp, ep) ─▶ pieces ─ units (dp_shard) ─▶ gathered together
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from shoal.blueprint.description import Description, Split, matches, supports_sequence_parallel
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
        own = [name for name in self.parameters if _is_in(name, modules)]
        seconds = [second for first, second in self.description.tied if _is_in(second, modules) and first not in own]
        return own + seconds

    def trained(self, pieces: Shapes) -> dict[str, Shape]:
        """The pieces that get a gradient."""
        frozen = self.frozen | {second for first, second in self.description.tied if first in self.frozen}
        return {name: shape for name, shape in pieces.items() if name not in frozen}


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
    """The stages of a rank with their pieces, before sharding."""
    stage_owners, place = owners(plan), plan.layout.coordinate(rank)["pp"]
    return [
        StageShapes(stage, modules, {name: piece(plan, model, name, rank=rank) for name in model.names_in(modules)})
        for stage, modules in enumerate(stages(plan, model))
        if stage_owners[stage] == place
    ]


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
    """The blocks of each stage, balanced by compute cost; embedding and head count too."""
    description = model.description
    costs = [matmul_elements(model, name) for name in description.blocks]
    first = sum(matmul_elements(model, name) for name in description.before_blocks)
    last = sum(matmul_elements(model, name) for name in description.after_blocks)
    return [(stage.start, stage.stop) for stage in partition(costs, num_stages, first=first, last=last)]


def matmul_elements(model: ModelShapes, module: str) -> float:
    """The compute cost of a submodule per token, in elements of its matrices.

    Embedding lookups are free, and only active experts count.
    """
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
    def _places(self) -> Mapping[str, int]:
        return {axis: self.plan.layout.place(self.rank, axis) for axis in (self.plan.shard_axis, "edp")}

    def axis(self, name: str) -> str:
        """The axis along which a parameter is sharded."""
        is_divided = self.plan.layout.ep > 1 and experts_of(self.description, name) is not None
        return "edp" if is_divided else self.plan.shard_axis

    def degree(self, name: str) -> int:
        """The number of ranks that share a parameter."""
        return self.plan.layout.degree(self.axis(name)) if self.plan.is_sharded else 1

    def own(self, name: str, shape: Shape) -> int:
        """Elements of the rank's shard of a piece."""
        index = self._places[self.axis(name)] if self.plan.is_sharded else 0
        return shard(shape, index=index, degree=self.degree(name))

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
    degree = plan.layout.degree(axis)
    if dim is None or degree == 1:
        return shape
    index = plan.layout.coordinate(rank)[axis]
    return (*shape[:dim], chunk(shape[dim], index=index, degree=degree), *shape[dim + 1 :])


def experts_of(description: Description, parameter: str) -> str | None:
    """The submodule with `Split.EXPERTS` around a parameter; None: it belongs to no experts."""
    if Split.EXPERTS not in description.splits.values():
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
    """The split of a submodule; None: not split."""
    return next((how for pattern, how in description.splits.items() if matches(pattern, module)), None)


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
