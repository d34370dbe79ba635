"""Where a model meets a plan, in straight-line order, one unit (a block, the embedding, the head) after the other:

    cut ─▶ fill ─▶ split ─▶ recompute ─▶ compile ─▶ shard            pipeline outermost, then tp inside a unit, then dp

One unit at a time is what lets a model that fits on no rank be laid over many: whatever a rank does not keep of a unit
is gone before the next one is filled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.blueprint.balance import balance
from shoal.blueprint.description import Description, Split
from shoal.blueprint.legality import misfits
from shoal.blueprint.plan import Plan
from shoal.comm.mesh import Mesh
from shoal.errors import Problem, ShoalError, raise_if
from shoal.numerics.init import initialise, materialise
from shoal.numerics.precision import Precision
from shoal.parallel.composed import Composed, Part
from shoal.parallel.pipeline import Call, Pipeline, Stage, cut, stage_owner
from shoal.parallel.recompute import recompute
from shoal.parallel.replicate import replicate
from shoal.parallel.shard import Sharding, units_by_size
from shoal.parallel.tensor import TensorParallel, note_split_layers, split


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a run may say about how its model is laid out, beside the plan."""

    seed: int = 0
    bucket_mb: float | None = None
    find_unused: bool = False
    compiles: bool = False


def refuse_unbuilt(plan: Plan) -> None:
    """Raise for every word of a resolved plan that this version plans but cannot run."""
    words = [f"{axis}={getattr(plan, axis)}" for axis in ("cp", "ep") if getattr(plan, axis) != 1]
    words += [f"compress={plan.compress}"] if plan.compress else []
    words += [plan.precision] if plan.precision == "fp8" else []
    raise_if(
        (Problem(f"{word} cannot be run by this version", "leave it out") for word in words),
        title=f"plan '{plan}'",
    )


def compose(
    model: nn.Module,
    plan: Plan,
    *,
    description: Description,
    mesh: Mesh,
    tensor: TensorParallel,
    precision: Precision,
    options: Options,
) -> Composed:
    """This rank's part of a model, laid out as a resolved plan says. The model's tensors are used up."""
    tensor.splits_tokens = tensor.group is not None and splits_tokens(plan, description)
    originals = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in originals.items()}
    author_split = note_split_layers(model, tensor)
    num_parameters = sum(math.prod({**shapes, **author_split}[name]) for name, _ in model.named_parameters())
    if not author_split:
        raise_if(misfits(plan, description=description, features=shapes), title=f"plan '{plan.brief()}'")
    sharding = _sharding(plan, mesh, precision)
    skeleton = _without_memory(model) if mesh.degree("pp") > 1 else model
    parts = list(_cut(model, plan, description, mesh))
    for part in parts:
        for unit in _units(part.model, description):
            _fill(part.model, unit.names, options.seed)
            split(part.model, unit.names, description.splits, tensor)
            _place(part.model, unit.names, mesh.device, precision.weight_dtype)
            for block in unit.modules(part.model) if unit.is_block else ():
                recompute(block, plan.recompute)
                _compile(block, options)
            if sharding is not None and not unit.is_root:
                sharding.shard(unit.modules(part.model), is_last=unit.is_last)
        precision.install(part.model, mesh.device)
        if sharding is not None:
            if not description.blocks:
                for module in units_by_size(part.model):
                    sharding.shard(module)
            sharding.shard(part.stage or part.model)
    whole = parts[0].model
    if sharding is None and len(parts) == 1 and parts[0].stage is None:
        whole = replicate(whole, mesh=mesh, bucket_mb=options.bucket_mb, find_unused=options.find_unused)
    return Composed(
        plan=plan,
        mesh=mesh,
        parts=parts,
        model=whole,
        tensor=tensor,
        pipeline=_pipeline(plan, parts, skeleton, description, mesh, precision, tensor),
        is_sharded=sharding is not None and plan.layout.dp_shard > 1,
        originals=originals,
        shapes={**shapes, **author_split},
        num_parameters=num_parameters,
        tied=description.tied,
    )


def splits_tokens(plan: Plan, description: Description) -> bool:
    """Whether sequence parallelism is on: as the plan says, else where the model allows it."""
    if plan.sp is not None:
        return plan.sp
    return plan.layout.tp > 1 and Split.SEQUENCE in description.splits.values()


# ---- units ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """Submodules that are filled, split and gathered together."""

    names: tuple[str, ...]
    is_block: bool = False
    is_last: bool = False
    is_root: bool = False
    """Whether it is made of what no other unit holds."""

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The submodules themselves."""
        return [model.get_submodule(name) for name in self.names]


def _units(model: nn.Module, description: Description) -> Iterator[Unit]:
    """The units of a part: those of the description that have parameters there. Without blocks, all is one unit.

    The embedding and the head are units of their own, unless they share a parameter: then only the unit that holds
    everything else, the root, can hold both.
    """
    present = {name for name in _named(description) if any(True for _ in model.get_submodule(name).parameters())}
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


def _named(description: Description) -> tuple[str, ...]:
    return (*description.before_blocks, *description.blocks, *description.after_blocks)


def _fill(model: nn.Module, names: Sequence[str], seed: int) -> None:
    """Values for what was built on the meta device: whole tensors, drawn as on one device."""
    modules = [model.get_submodule(name) for name in names]
    if any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers())):
        materialise(model, "cpu", names)
        initialise(model, seed, names)


def _place(model: nn.Module, names: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
    for name in names:
        model.get_submodule(name).to(device, dtype)


def _compile(block: nn.Module, options: Options) -> None:
    if options.compiles:
        block.forward = torch.compile(block.forward)


def _sharding(plan: Plan, mesh: Mesh, precision: Precision) -> Sharding | None:
    """None: there is nobody to share anything with, and nothing to keep in host memory."""
    offloads = plan.offload == "parameters" and mesh.device.type != "cpu"
    if not plan.zero or (plan.layout.dp_shard == 1 and not offloads):
        return None
    lower = precision.compute_dtype != precision.weight_dtype
    axes = ("dp_replicate", "dp_shard") if plan.layout.dp_replicate > 1 else ("dp_shard",)
    return Sharding(
        mesh=mesh.device_mesh(axes),
        zero=plan.zero,
        compute_dtype=precision.compute_dtype if lower else None,
        reduce_dtype=precision.weight_dtype if lower else None,
        offloads_parameters=offloads,
        keeps_gathered=plan.layout.pp > 1,
    )


# ---- stages ---------------------------------------------------------------------------------------------------------


def _cut(model: nn.Module, plan: Plan, description: Description, mesh: Mesh) -> Iterator[Part]:
    """This rank's stages; the model itself where there is no pipeline."""
    degree = mesh.degree("pp")
    if degree == 1:
        yield Part(model)
        return
    assert plan.v is not None
    bounds = stage_bounds(model, description, num_stages=degree * plan.v)
    taken: set[nn.Parameter] = set()
    for index, (start, stop) in enumerate(bounds):
        if owners(plan)[index] != mesh.coordinate["pp"]:
            continue
        before = (*(description.before_blocks if index else ()), *description.blocks[:start])
        is_last = index == len(bounds) - 1
        after = (*description.blocks[stop:], *(() if is_last else description.after_blocks))
        part, received = cut(model, before=before, after=after)
        _untie(part, taken)
        taken.update(part.parameters())
        yield Part(part, Stage(part, received, index, len(bounds)))


def owners(plan: Plan) -> list[int]:
    """The place on the pp axis of every stage."""
    degree, num_stages = plan.layout.pp, plan.layout.pp * (plan.v or 1)
    is_v = plan.schedule in ("zbv", "dualpipev")
    return [stage_owner(stage, degree=degree, num_stages=num_stages, is_v=is_v) for stage in range(num_stages)]


def stage_bounds(model: nn.Module, description: Description, *, num_stages: int) -> list[tuple[int, int]]:
    """Which blocks each stage has, balanced by what they cost to compute; embedding and head count too."""
    costs = [matmul_parameters(model.get_submodule(name)) for name in description.blocks]
    first = sum(matmul_parameters(model.get_submodule(name)) for name in description.before_blocks)
    last = sum(matmul_parameters(model.get_submodule(name)) for name in description.after_blocks)
    return [(stage.start, stage.stop) for stage in balance(costs, num_stages, first=first, last=last)]


def matmul_parameters(module: nn.Module) -> float:
    """What a module costs to compute per token, in elements of its matrices. To look up an embedding costs nothing."""
    lookups = {p for inner in module.modules() if isinstance(inner, nn.Embedding) for p in inner.parameters()}
    return float(sum(p.numel() for p in module.parameters() if p.dim() > 1 and p not in lookups))


def _untie(part: nn.Module, taken: set[nn.Parameter]) -> None:
    """A parameter that a stage shares with an earlier one of the same rank becomes its own copy: see `Composed`."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in taken:
                copies.setdefault(parameter, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
                setattr(module, name, copies[parameter])


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy with shapes and without values."""
    tensors = (*model.parameters(), *model.buffers())
    memo = {id(tensor): _on_meta(tensor) for tensor in tensors}
    return copy.deepcopy(model, memo)


def _on_meta(tensor: Tensor) -> Tensor:
    there = torch.empty_like(tensor, device="meta")
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there


def _pipeline(
    plan: Plan,
    parts: list[Part],
    skeleton: nn.Module,
    description: Description,
    mesh: Mesh,
    precision: Precision,
    tensor: TensorParallel,
) -> Pipeline | None:
    stages = [part.stage for part in parts if part.stage is not None]
    if not stages:
        return None
    assert plan.schedule is not None
    wide = precision.weight_dtype
    return Pipeline(
        stages=stages,
        schedule=plan.schedule,
        group=mesh.groups["pp"],
        device=mesh.device,
        num_stages=stages[0].num_stages,
        activation=_Activation(skeleton, description.blocks[0], tensor),
        dtype=precision.compute_dtype,
        loss_dtype=wide,
        owners=owners(plan),
    )


@dataclass
class _Activation:
    """The shape of what travels between stages, found by running the model on tensors without memory."""

    skeleton: nn.Module
    block: str
    tensor: TensorParallel
    _known: dict[tuple[torch.Size, ...], tuple[int, ...]] = field(default_factory=dict)

    def __call__(self, call: Call) -> tuple[int, ...]:
        arguments, options = call
        key = tuple(x.shape for x in (*arguments, *options.values()) if isinstance(x, Tensor))
        if key not in self._known:
            shape = list(self._traced(arguments, options))
            if self.tensor.splits_tokens:
                shape[-2] //= self.tensor.degree
            self._known[key] = tuple(shape)
        return self._known[key]

    def _traced(self, arguments: tuple[object, ...], options: dict[str, object]) -> torch.Size:
        seen: list[object] = []
        hook = self.skeleton.get_submodule(self.block).register_forward_hook(lambda _m, _a, output: seen.append(output))
        try:
            with torch.no_grad(), torch.device("meta"):
                self.skeleton(*map(_meta, arguments), **{name: _meta(value) for name, value in options.items()})
        finally:
            hook.remove()
        if len(seen) != 1 or not isinstance(seen[0], Tensor):
            kind = type(seen[0]).__name__ if seen else "nothing"
            raise ShoalError(
                f"a pipeline sends one tensor from block to block, but {self.block} returned {kind}",
                fix="let each block return the tensor that the next block takes as its first argument",
            )
        return seen[0].shape


def _meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value
