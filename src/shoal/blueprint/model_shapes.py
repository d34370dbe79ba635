"""What predictions need to know of a model, without torch: its shapes, and who holds which piece under a plan.

torch knows the shapes of a model once it is built, and the pieces of a rank once the ranks are started. An
`ModelShapes` is a value: `shoal.parallel.live_memory.trace_shapes` reads it off a model without memory, or a test
writes it down. The rules below (stages, units, pieces) are those by which `shoal.parallel.compose` lays a model over
its ranks:

    whole model ─ stages (pp) ─▶ parts of a rank ─ cuts (tp, ep) ─▶ pieces ─ units (dp_shard) ─▶ gathered together
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from shoal.blueprint.description import Description, Split
from shoal.blueprint.partition import partition
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.table import stage_ranks
from shoal.blueprint.validation.legality import divides_tokens

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

GATHERED_STAGES = 3
"""Of more stages than this on one rank, torch keeps only those gathered that compute next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TPBoundary:
    """A place in the forward where an activation enters or leaves what tensor parallelism has split."""

    module: str
    """The split layer at which it crosses."""
    way: Literal["enter", "leave", "logits"]
    """logits: it leaves a head that is split by vocabulary."""
    shape: Shape
    """What crosses, whole, of one sample."""
    has_backward: bool = True
    """Whether a gradient comes back the same way."""
    is_repeated: bool = True
    """Whether a block that is recomputed crosses here again. After the last thing that its backward needs, it stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSite:
    """An attention: where tokens look at other tokens, which context parallelism has given to other ranks."""

    module: str
    queries: Shape
    """Of one sample: (heads, tokens, head dim)."""
    keys: Shape
    """The same of keys, and of values."""
    has_backward: bool = True
    is_repeated: bool = True
    """Whether a block that is recomputed attends again."""
    is_output_repeated: bool = True
    """Whether it then also needs what came out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSite:
    """Experts, to which tokens travel where they are divided over ranks."""

    module: str
    num_experts: int
    rows: int
    """Pairs of a token and an expert that computes it, of one sample."""
    dim: int
    """Elements of a row."""
    is_predicted: bool = True
    """Whether every token has so many rows, and not only some that are chosen as they come."""
    num_returns: int = 2
    """On how many of the two ways, there and back, a gradient travels."""
    is_repeated: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSite:
    """A router, which may have to look at a whole sequence."""

    module: str
    num_experts: int
    has_auxiliary: bool = False
    """Whether its loss asks how often each expert was chosen."""
    gathers_scores: bool = False
    """Whether it compares the tokens of a sequence with each other: capacity, and expert choice."""
    is_repeated: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """A model as predictions see it."""

    description: Description
    parameters: Shapes
    """Name → whole shape, in the order of the model; a tied one under its first name only."""
    stream: Shape
    """What travels from block to block for one sample: (tokens, model dim)."""
    crossings: tuple[TPBoundary, ...] = ()
    """In the order of the forward. Several layers that read the same activation share one."""
    attentions: tuple[AttentionSite, ...] = ()
    dispatches: tuple[DispatchSite, ...] = ()
    routers: tuple[RouterSite, ...] = ()
    frozen: frozenset[str] = frozenset()
    """Parameters that need no gradient."""
    lookups: frozenset[str] = frozenset()
    """Parameters of embeddings, which cost nothing to compute with."""
    units_by_size: tuple[str, ...] = field(default=())
    """For a model without blocks: submodules that are sharded as one, children before parents."""
    units_beside_experts: tuple[str, ...] = field(default=())
    """The same where experts are divided over ep, and are units of their own already."""

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
    """What parameters are gathered in, and activations travel in."""
    reduce: int
    """What shards of gradients are reduced in."""
    loss: int

    @classmethod
    def of(cls, plan: Plan) -> Sizes:
        """Those of a plan's precision; the table of `shoal.numerics.precision` in bytes."""
        weight = 8 if plan.precision == "fp64" else 4
        lower = {"bf16": 2, "fp16": 2, "fp8": 2}
        return cls(weight=weight, compute=lower.get(plan.precision, weight), reduce=weight, loss=weight)


# ---- stages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageShapes:
    """The model, or one stage of it, as one rank holds it."""

    stage: int
    modules: tuple[str, ...]
    """The submodules of the description that live there."""
    pieces: Shapes
    """Name → shape of what a rank of tp and ep holds of each parameter."""


def parts(plan: Plan, anatomy: ModelShapes, rank: int) -> list[StageShapes]:
    """What a rank holds of a model, before anything is sharded."""
    return [
        StageShapes(stage, modules, {name: piece(plan, anatomy, name, rank=rank) for name in anatomy.names_in(modules)})
        for stage, modules in own_stages(plan, anatomy, rank)
    ]


def own_stages(plan: Plan, anatomy: ModelShapes, rank: int) -> list[tuple[int, tuple[str, ...]]]:
    """The stages of a rank, each with its submodules."""
    stage_owners, place = owners(plan), plan.layout.coordinate(rank)["pp"]
    every = enumerate(stages(plan, anatomy))
    return [(stage, modules) for stage, modules in every if stage_owners[stage] == place]


def stages(plan: Plan, anatomy: ModelShapes) -> list[tuple[str, ...]]:
    """The submodules of every stage; without a pipeline, one stage with all."""
    description, num_stages = anatomy.description, plan.layout.pp * (plan.v or 1)
    if plan.layout.pp == 1:
        return [named(description) or ("",)]
    bounds = stage_bounds(anatomy, num_stages=num_stages)
    before = [description.before_blocks, *[()] * (num_stages - 1)]
    after = [*[()] * (num_stages - 1), description.after_blocks]
    return [
        (*before[stage], *description.blocks[start:stop], *after[stage]) for stage, (start, stop) in enumerate(bounds)
    ]


def owners(plan: Plan) -> tuple[int, ...]:
    """The place on the pp axis of every stage."""
    return stage_ranks(plan.schedule or "", num_ranks=plan.layout.pp, v=plan.v or 1)


def stage_bounds(anatomy: ModelShapes, *, num_stages: int) -> list[tuple[int, int]]:
    """Which blocks each stage has, balanced by what they cost to compute; embedding and head count too."""
    if num_stages not in anatomy._bounds:
        anatomy._bounds[num_stages] = _stage_bounds(anatomy, num_stages)
    return anatomy._bounds[num_stages]


def _stage_bounds(anatomy: ModelShapes, num_stages: int) -> list[tuple[int, int]]:
    description = anatomy.description
    costs = [matmul_elements(anatomy, name) for name in description.blocks]
    first = sum(matmul_elements(anatomy, name) for name in description.before_blocks)
    last = sum(matmul_elements(anatomy, name) for name in description.after_blocks)
    return [(stage.start, stage.stop) for stage in partition(costs, num_stages, first=first, last=last)]


def matmul_elements(anatomy: ModelShapes, module: str) -> float:
    """What a submodule costs to compute per token, in elements of its matrices. To look up an embedding is free, and of
    the experts only those cost that compute the token."""
    if module not in anatomy._costs:
        anatomy._costs[module] = _matmul_elements(anatomy, module)
    return anatomy._costs[module]


def _matmul_elements(anatomy: ModelShapes, module: str) -> float:
    description = anatomy.description
    active = (description.active_experts or 1) / description.num_experts if description.num_experts else 1.0
    shapes = {name: anatomy.shape(name) for name in anatomy.names_in([module])}
    return float(
        sum(
            prod(shape) * (active if experts_of(description, name) else 1.0)
            for name, shape in shapes.items()
            if len(shape) > 1 and name not in anatomy.lookups
        )
    )


def named(description: Description) -> tuple[str, ...]:
    """All submodules that a description names as places for parameters."""
    return (*description.before_blocks, *description.blocks, *description.after_blocks)


# ---- units ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """Submodules that are filled, split and gathered together."""

    names: tuple[str, ...]
    is_block: bool = False
    is_last: bool = False
    """Whether the forward ends with it."""
    is_root: bool = False
    """Whether it is gathered with what no other unit holds."""
    is_rest: bool = False
    """Whether its names are those of single modules, without what is inside them."""

    def holds(self, name: str) -> bool:
        """Whether a submodule belongs to it."""
        return name in self.names if self.is_rest else is_inside(name, self.names)


def units(description: Description, present: Collection[str]) -> Iterator[Unit]:
    """The units of a part, of which these submodules have parameters. Without blocks, all is one unit.

    The embedding and the head are units of their own, unless they share a parameter: then only the unit that holds
    everything else, the root, can hold both.
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


def sharded_units(plan: Plan, anatomy: ModelShapes, part: StageShapes) -> list[tuple[Unit, Shapes]]:
    """The units of a part with the pieces in each: what `fully_shard` gathers together. None is empty.

    Experts that ep has divided are a unit of their own, inside their block and sharded before it.
    """
    present = [module for module in part.modules if any(_is_in(name, [module]) for name in part.pieces)]
    found = list(units(anatomy.description, present))
    if not anatomy.description.blocks:
        by_size = anatomy.units_beside_experts if plan.layout.ep > 1 else anatomy.units_by_size
        found = [*(Unit((name,)) for name in by_size), Unit(("",), is_root=True)]
    left = dict(part.pieces)
    homes = {name: experts_of(anatomy.description, name) if plan.layout.ep > 1 else None for name in left}
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
    """Who shares each parameter with a rank: all who hold the same of it, unless nothing is sharded."""

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
        """Elements that FSDP2 keeps and sends for them, the same on every rank: the last ranks fill up what they
        lack."""
        return shard(shape, index=0, degree=self.degree(name))


# ---- pieces ---------------------------------------------------------------------------------------------------------

CUT_DIMS: Mapping[Split, Mapping[str, int]] = {
    Split.COLUMN: {"weight": 0, "bias": 0},
    Split.ROW: {"weight": 1},
    Split.VOCABULARY: {"weight": 0, "bias": 0},
}
"""How a layer is split → which dim of each of its parameters tp cuts. ep cuts dim 0 of all in `Split.EXPERTS`."""


def piece(plan: Plan, anatomy: ModelShapes, name: str, *, rank: int) -> Shape:
    """The shape of what one rank of tp and ep holds of a parameter."""
    shape = anatomy.shape(name)
    module, _, own = name.rpartition(".")
    how = split_of(anatomy.description, module)
    axis, dim = "tp", CUT_DIMS.get(how, {}).get(own) if how is not None else None
    if experts_of(anatomy.description, name):
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
    """The submodules that a parameter is in, from the outermost to its own.

    >>> _around("model.norm.weight")
    ['model', 'model.norm']
    """
    path = parameter.split(".")
    return [".".join(path[:depth]) for depth in range(1, len(path))]


def split_of(description: Description, module: str) -> Split | None:
    """How a submodule may be split; None: not at all."""
    return description.split_of(module)


def splits_tokens(plan: Plan, description: Description) -> bool:
    """Whether sequence parallelism is on: as the plan says, else wherever the model allows it."""
    if plan.layout.tp == 1:
        return False
    return plan.sp if plan.sp is not None else divides_tokens(description)


def is_partial(description: Description, name: str, *, splits_tokens: bool) -> bool:
    """Whether each tp rank has only its own share of a parameter's gradient: that of its tokens, or of its heads."""
    module, _, own = name.rpartition(".")
    around = {split_of(description, outer) for outer in _around(name)}
    is_late_bias = own == "bias" and split_of(description, module) is Split.ROW  # added after the sum
    is_of_tokens = bool(around & {Split.SEQUENCE, Split.EXPERTS}) or is_late_bias
    return Split.HEADS in around or (splits_tokens and is_of_tokens)


def shard(shape: Shape, *, index: int, degree: int) -> int:
    """Elements of a piece that one of the ranks that share it has: some of its rows."""
    return prod(shape) if degree == 1 else chunk(shape[0], index=index, degree=degree) * prod(shape[1:])


def chunk(size: int, *, index: int, degree: int) -> int:
    """How many of `size` things part `index` of `degree` has: all as many, but the last ones fewer or none.

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
