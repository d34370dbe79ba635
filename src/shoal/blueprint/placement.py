"""Where each piece of a model lies under a plan: stages, units, pieces and shards.

    whole model ─ stages (pp) ─▶ parts of a rank ─ cuts (tp, ep) ─▶ pieces ─ units (dp_shard) ─▶ gathered together

`shoal.parallel.compose` distributes a model by these rules, and predictions count by them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from shoal.blueprint.description import Description, Split, supports_sequence_parallel
from shoal.blueprint.layout import Layout
from shoal.blueprint.model_shapes import ModelShapes, Shape, Shapes, is_in, modules_around
from shoal.blueprint.partition import partition
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.table import stage_ranks

GATHERED_STAGES = 3
"""With more stages than this on one rank, torch gathers only those that compute next."""

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
    """What a submodule costs to compute: as its description says, else per token, in elements of its matrices. To look
    up an embedding is free, and of the experts only those cost that compute the token."""
    if model.description.costs:
        return model.description.costs.get(module, 0.0)
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

    Experts under ep are a unit of their own, inside their block and sharded before it. A parameter of shape () is in
    no unit.
    """
    present = [module for module in part.modules if any(is_in(name, [module]) for name in part.pieces)]
    found = list(units(model.description, present))
    chosen = model.units_beside_experts if plan.layout.ep > 1 else model.units
    if chosen is not None:
        found = [*(Unit((name,)) for name in chosen), Unit(("",), is_root=True)]
    left = {name: shape for name, shape in part.pieces.items() if shape}
    homes = {name: experts_of(model.description, name) if plan.layout.ep > 1 else None for name in left}
    filled = []
    for unit in found:
        own = {name: left.pop(name) for name in list(left) if is_in(name, unit.names)}
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
    Split.COLUMN: {"weight": 0, "bias": 0, "lora_B": 0},
    Split.ROW: {"weight": 1, "lora_A": 1},
    Split.VOCABULARY: {"weight": 0, "bias": 0},
}
"""Split of a layer → the dim of each of its parameters that tp cuts. ep cuts dim 0 of all in `Split.EXPERTS`."""


PARTIAL = {(Split.COLUMN, "lora_A"), (Split.ROW, "lora_B")}
"""Whole matrices of LoRA in split layers: each tp rank has the gradient of its own piece of the other matrix."""


def piece(plan: Plan, model: ModelShapes, name: str, *, rank: int) -> Shape:
    """The shape of the piece of a parameter on one rank of tp and ep."""
    shape = model.shape(name)
    axis, dim = "tp", cut_dim(model.description, name)
    if experts_of(model.description, name):
        axis, dim = "ep", 0
    if dim is None:
        return shape
    degree, index = _place_of(plan.layout, axis, rank)
    return (*shape[:dim], chunk(shape[dim], index=index, degree=degree), *shape[dim + 1 :])


def cut_dim(description: Description, name: str) -> int | None:
    """The dim along which tp cuts a parameter; None: it is whole."""
    module, _, own = name.rpartition(".")
    how, said = split_of(description, module), description.cut_of(name)
    return said if said is not None or how is None else CUT_DIMS.get(how, {}).get(own)


@lru_cache(maxsize=2**12)
def _place_of(layout: Layout, axis: str, rank: int) -> tuple[int, int]:
    """The degree of an axis, and the place of a rank on it."""
    return layout.degree(axis), layout.coordinate(rank)[axis]


def experts_of(description: Description, parameter: str) -> str | None:
    """The experts that a parameter belongs to: the submodule that is said to be some, with all inside it."""
    if not description.has_experts:
        return None
    return next(
        (module for module in modules_around(parameter) if split_of(description, module) is Split.EXPERTS), None
    )


def split_of(description: Description, module: str) -> Split | None:
    """How a submodule may be split; None: not at all."""
    return description.split_of(module)


def splits_tokens(plan: Plan, description: Description) -> bool:
    """Whether sequence parallelism is on: by the plan's `sp`, else wherever the model allows it from its embedding to
    its head."""
    if plan.layout.tp == 1:
        return False
    return plan.sp if plan.sp is not None else is_divided_by_default(description)


def is_divided_by_default(description: Description) -> bool:
    """Whether `sp` is on where a plan does not say it. Between blocks alone it is not: the number of tokens there, as
    of an image and its class, may be one that tp does not divide."""
    return supports_sequence_parallel(description) and not description.token_blocks


def divides_tokens_of(description: Description, module: str) -> bool:
    """Whether a submodule sees a part of the tokens under `sp`."""
    return not description.token_blocks or is_inside(module, description.token_blocks)


def is_partial(description: Description, name: str, *, splits_tokens: bool) -> bool:
    """Whether each tp rank has only its own share of a parameter's gradient: that of its tokens, or of its heads."""
    module, _, own = name.rpartition(".")
    around = [found for outer in modules_around(name) if (found := split_of(description, outer)) is not None]
    how, innermost = split_of(description, module), around[-1] if around else None
    is_late_bias = own == "bias" and how is Split.ROW  # added after the sum
    is_of_tokens = innermost in (Split.SEQUENCE, Split.ALL_TOKENS, Split.EXPERTS) or is_late_bias
    is_of_heads = bool({*around} & {Split.HEADS, Split.LATENT}) and description.cut_of(name) is None
    divides = splits_tokens and is_of_tokens and divides_tokens_of(description, module)
    return is_of_heads or (how, own) in PARTIAL or divides


def shard(shape: Shape, *, index: int, degree: int) -> int:
    """Elements of one rank's shard of a piece: some of its rows. One of shape () stays whole."""
    return prod(shape) if degree == 1 or not shape else chunk(shape[0], index=index, degree=degree) * prod(shape[1:])


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
