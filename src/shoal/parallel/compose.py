"""Where a model meets a plan, in straight-line order, one unit (a block, the embedding, the head) after the other:

    cut ─▶ fill ─▶ split ─▶ recompute ─▶ compile ─▶ shard            pipeline outermost, then tp inside a unit, then dp

One unit at a time is what lets a model that fits on no rank be laid over many: whatever a rank does not keep of a unit
is gone before the next one is filled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.blueprint.anatomy import (
    Anatomy,
    Unit,
    is_inside,
    named,
    owners,
    splits_tokens,
    stage_bounds,
    units,
)
from shoal.blueprint.description import Description
from shoal.blueprint.legality import misfits
from shoal.blueprint.plan import Plan
from shoal.comm.mesh import Mesh
from shoal.errors import Problem, ShoalError, raise_if
from shoal.numerics.init import initialise, materialise
from shoal.numerics.precision import Precision
from shoal.parallel.composed import Composed, Part
from shoal.parallel.pipeline import Pipeline, Stage, cut
from shoal.parallel.recompute import recompute
from shoal.parallel.replicate import replicate
from shoal.parallel.shard import Sharding, units_by_size
from shoal.parallel.stream import Activation
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
        title=f"plan '{plan.brief()}'",
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
    tensor.splits_tokens = splits_tokens(plan, description)
    originals = dict(model.named_parameters(remove_duplicate=False))
    by_hand = note_split_layers(model, tensor)
    shapes = {name: tuple(parameter.shape) for name, parameter in originals.items()} | by_hand
    names = [name for name, _ in model.named_modules()]
    found = misfits(plan, description=description, features=shapes, modules=names, is_split_by_hand=bool(by_hand))
    raise_if(found, title=f"plan '{plan.brief()}'")
    raise_if(_ties_that_break(model, plan, description))
    _refuse_unlike(model, plan, tensor)
    num_parameters = sum(math.prod(shapes[name]) for name, _ in model.named_parameters())
    sharding = _sharding(plan, mesh, precision)
    if sharding is not None and options.find_unused:
        raise ShoalError(
            "find_unused lets ranks leave parameters out, but sharded ranks have to meet for every one of them",
            fix=f"zero=0 instead of zero={plan.zero}, or a forward that uses the same parameters on every rank",
        )
    skeleton = _without_memory(model) if mesh.degree("pp") > 1 else model
    parts = list(_cut(model, plan, description, mesh))
    for part in parts:
        for unit in _units(part.model, description):
            _fill(part.model, unit, options.seed)
            if not unit.is_rest:
                split(part.model, unit.names, description.splits, tensor)
            _place(part.model, unit, mesh.device, precision.weight_dtype)
            for block in _modules(part.model, unit) if unit.is_block else ():
                recompute(block, plan.recompute)
                _compile(block, options)
            if sharding is not None and not unit.is_root:
                sharding.shard(_modules(part.model, unit), is_last=unit.is_last)
        if not description.blocks:
            _compile(part.model, options)
        precision.install(part.model, mesh.device)
        if sharding is not None:
            for module in units_by_size(part.model) if not description.blocks else ():
                sharding.shard(module)
            sharding.shard(part.stage or part.model, is_last=True)
    whole = parts[0].model
    if sharding is None and parts[0].stage is None:
        whole = replicate(whole, mesh=mesh, bucket_mb=options.bucket_mb, find_unused=options.find_unused)
    return Composed(
        plan=plan,
        mesh=mesh,
        parts=parts,
        model=whole,
        tensor=tensor,
        pipeline=_pipeline(plan, parts, skeleton, description, mesh, precision, tensor),
        is_sharded=sharding is not None,
        is_split_by_hand=bool(by_hand),
        originals=originals,
        shapes=shapes,
        num_parameters=num_parameters,
        tied=description.tied,
    )


# ---- what a layout could not keep ----------------------------------------------------------------------------------


def _ties_that_break(model: nn.Module, plan: Plan, description: Description) -> Iterator[Problem]:
    """Parameters with several names, which a layout would turn into several parameters."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    layout = plan.layout
    is_cut = layout.tp > 1 or layout.pp > 1 or (layout.dp_shard > 1 and bool(description.blocks))
    for shared in (shared for shared in names.values() if len(shared) > 1 and is_cut):
        ends = [is_inside(shared[0].rpartition(".")[0], description.before_blocks)]
        ends.append(is_inside(shared[-1].rpartition(".")[0], description.after_blocks))
        if tuple(shared) not in description.tied or not all(ends):
            yield Problem(
                f"{' and '.join(shared)} are one parameter, and this plan would make several of it",
                f"describe() with tied=(({', '.join(map(repr, shared[:2]))}),), the first in before_blocks and the"
                " second in after_blocks; other ties need tp=1, pp=1 and zero=0",
            )


def _refuse_unlike(model: nn.Module, plan: Plan, tensor: TensorParallel) -> None:
    """Whole models that differ from rank to rank, of which each would keep another piece. DDP sends rank 0's to all."""
    layout = plan.layout
    if layout.world_size in (1, layout.dp_replicate) or any(p.is_meta for p in model.parameters()):
        return
    sums = {n: float(p.detach().double().sum()) for n, p in model.named_parameters() if n not in tensor.cuts}
    every: list[dict[str, float]] = [{} for _ in range(layout.world_size)]
    dist.all_gather_object(every, sums)
    unlike = next((name for name in sums if any(repr(other.get(name)) != repr(sums[name]) for other in every)), None)
    if unlike is not None:
        raise ShoalError(
            f"{unlike} does not have the same values on every rank before it is laid out",
            fix="the same torch.manual_seed on every rank before the model is built, and weights loaded on every rank",
        )


# ---- units ----------------------------------------------------------------------------------------------------------


def _units(model: nn.Module, description: Description) -> Iterator[Unit]:
    """The units of a part. What no module of the description holds is a unit too, which the root gathers."""
    present = [name for name in named(description) if any(True for _ in model.get_submodule(name).parameters())]
    yield from units(description, present)
    rest = [
        name for name, module in model.named_modules() if _holds(module) and not is_inside(name, named(description))
    ]
    if rest and description.blocks:
        yield Unit(tuple(rest), is_root=True, is_rest=True)


def _holds(module: nn.Module) -> bool:
    """Whether a module itself, not one inside it, has parameters or buffers."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(tensors)


def _modules(model: nn.Module, unit: Unit) -> list[nn.Module]:
    return [model.get_submodule(name) for name in unit.names]


def _fill(model: nn.Module, unit: Unit, seed: int) -> None:
    """Values for what was built on the meta device: whole tensors, drawn as on one device."""
    if any(tensor.is_meta for _, tensor in _tensors(model, unit)):
        materialise(model, "cpu", unit.holds)
        initialise(model, seed, unit.holds)


def _place(model: nn.Module, unit: Unit, device: torch.device, dtype: torch.dtype) -> None:
    """Move a unit to its device and precision. A parameter stays the object that it is, so that what is shared stays
    shared."""
    for _, tensor in _tensors(model, unit):
        tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def _tensors(model: nn.Module, unit: Unit) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if unit.holds(name):
            yield from module.named_parameters(recurse=False)
            yield from module.named_buffers(recurse=False)


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
    bounds = stage_bounds(_anatomy(model, description), num_stages=degree * plan.v)
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


def _anatomy(model: nn.Module, description: Description) -> Anatomy:
    """As much of a model's anatomy as its stages depend on."""
    lookups = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    seconds = {second for _, second in description.tied}
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False) if n not in seconds}
    return Anatomy(description=description, parameters=shapes, stream=(), lookups=frozenset(lookups))


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
        wire=mesh.wire,
        num_stages=stages[0].num_stages,
        activation=Activation(skeleton, description.blocks, tensor),
        dtype=precision.compute_dtype,
        loss_dtype=wide,
        owners=owners(plan),
    )
