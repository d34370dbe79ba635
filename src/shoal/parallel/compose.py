"""Lay a model over the ranks of a plan, one unit (a block, the embedding, the head) after the other:

    cut (pp) ─▶ fill ─▶ split (tp) ─▶ divide (ep) ─▶ recompute ─▶ compile ─▶ shard (dp_shard x cp)

One unit at a time is what lets a model that fits on no rank be laid over many: whatever a rank does not keep of a unit
is gone before the next one is filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.blueprint.description import Description
from shoal.blueprint.model_shapes import ModelShapes
from shoal.blueprint.placement import Unit, is_inside, named, owners, splits_tokens, stage_bounds, units
from shoal.blueprint.plan import Plan
from shoal.comm.mesh import Mesh
from shoal.numerics.fp8.convert import to_fp8
from shoal.numerics.init import initialise, materialise
from shoal.numerics.precision import Precision
from shoal.parallel.activation_checkpoint import recompute
from shoal.parallel.batch_norm import RunningStatistics, Sharing, batch_norms, statistics_of, synchronise
from shoal.parallel.checks import validate_model, why_loss_not_fused
from shoal.parallel.context.attention import Attention, ContextParallel
from shoal.parallel.context.attention import divide as divide_tokens
from shoal.parallel.data.frozen_parameters import FrozenParameters
from shoal.parallel.data.fsdp import FSDPSync, Sharding, prefetch
from shoal.parallel.data.fsdp_units import chosen_units
from shoal.parallel.data.gradient_sync import GradientSync
from shoal.parallel.expert.aux_loss import AuxLoss
from shoal.parallel.expert.experts import ExpertParallel, experts_in
from shoal.parallel.expert.experts import divide as divide_experts
from shoal.parallel.expert.router import note_routers, routers
from shoal.parallel.fused_loss_head import LossHead
from shoal.parallel.lora.layers import adapted_layers
from shoal.parallel.lora.quantize import pack_filled
from shoal.parallel.lora.whole_modules import peft_settings
from shoal.parallel.parallel_model import ParallelModel, StageModule
from shoal.parallel.pipeline.pipeline import Pipeline, Stage, cut
from shoal.parallel.pipeline.skeleton import skeleton_of
from shoal.parallel.pipeline.stage_io import Boundaries
from shoal.parallel.policies import ComputePolicy, Policies
from shoal.parallel.replica_sync import ReplicaGroup, build_gradient_sync, uses_own_reducer, with_buckets
from shoal.parallel.split_layers import note_split_layers, split
from shoal.parallel.tensor import TensorParallel


def compose(
    model: nn.Module,
    plan: Plan,
    *,
    description: Description,
    mesh: Mesh,
    tensor: TensorParallel,
    precision: Precision,
    policies: Policies,
) -> ParallelModel:
    """This rank's part of a model, laid out as a resolved plan says. The model's tensors are used up."""
    tensor.splits_tokens = splits_tokens(plan, description)
    originals = dict(model.named_parameters(remove_duplicate=False))
    by_hand = note_split_layers(model, tensor)
    shapes = {name: tuple(parameter.shape) for name, parameter in originals.items()} | by_hand
    validate_model(model, plan, description, tensor, shapes, policies, is_split_by_hand=bool(by_hand))
    compute, sync = policies.compute, policies.sync
    num_parameters = sum(math.prod(shapes[name]) for name, _ in model.named_parameters())
    routed = {name: router.num_experts for name, router in routers(model).items()}
    balance, is_own = _balance(model, plan, mesh, tensor), uses_own_reducer(plan, sync)
    setup = _Setup(plan, description, mesh, tensor, precision, policies, uses_own_reducer=is_own, balance=balance)
    setup.frozen_dtype = precision.frozen_dtype if adapted_layers(model) else precision.weight_dtype
    setup.is_fused = compute.fused_loss is not False and why_loss_not_fused(model, plan, description) is None
    batch_norm, tracks = _batch_norm(model, plan, mesh, compute)
    skeleton = skeleton_of(model) if mesh.degree("pp") > 1 else model
    parts = list(_cut(model, plan, description, mesh))
    for part in parts:
        _lay_out(part, setup)
    if setup.context is not None and skeleton is not model:
        divide_tokens(skeleton, description, setup.context, is_compiled=True)
    is_sharded, models = setup.sharding is not None, [part.model for part in parts]
    sync, bucket_chosen = with_buckets(sync, plan, parts, mesh, is_sharded=is_sharded)
    replicas = ReplicaGroup(plan, mesh, tensor, description, parts, is_sharded=is_sharded)
    called, replica_sync = build_gradient_sync(replicas, sync, seed=compute.seed)
    return ParallelModel(
        plan=plan,
        mesh=mesh,
        parts=parts,
        model=called,
        tensor=tensor,
        context=setup.context,
        head=setup.head,
        balance=setup.balance,
        routed=routed,
        experts=frozenset(setup.divided),
        pipeline=_pipeline(parts, skeleton, setup),
        shards=_shard_sync(models, shapes, plan, mesh) if is_sharded else GradientSync(),
        replicas=replica_sync,
        statistics=_statistics(models, plan, mesh) if tracks else None,
        batch_norm=batch_norm,
        frozen=FrozenParameters.of(models) if is_own or not is_sharded else FrozenParameters(),
        is_sharded=is_sharded,
        is_split_by_hand=bool(by_hand),
        originals=originals,
        shapes=shapes,
        num_parameters=num_parameters,
        tied=description.tied,
        peft_settings=peft_settings(skeleton),
        bucket_chosen=bucket_chosen,
    )


@dataclass
class _Setup:
    """Shared inputs and results of laying out every unit of a model."""

    plan: Plan
    description: Description
    mesh: Mesh
    tensor: TensorParallel
    precision: Precision
    policies: Policies
    uses_own_reducer: bool
    balance: AuxLoss | None
    frozen_dtype: torch.dtype = torch.float32
    """Of parameters without a gradient."""
    divided: set[str] = field(default_factory=set)
    """Parameters that were divided over ep."""
    is_fused: bool = False
    """Whether the head is to compute the loss."""
    head: LossHead | None = None
    """The layer that does."""

    def __post_init__(self) -> None:
        plan, mesh = self.plan, self.mesh
        self.compute = self.policies.compute
        self.sharding = self._sharding(plan.shard_axis)
        self.experts: ExpertParallel | None = None
        self.expert_sharding: Sharding | None = None
        if plan.layout.ep > 1:
            self.experts = ExpertParallel(mesh.groups["ep"], comm_device=mesh.comm_device)
            self.expert_sharding = self._sharding("edp")
        is_mixed = self.balance is not None and plan.layout.pp > 1
        self.as_now = self.balance.as_now if self.balance is not None and is_mixed else None
        """What a recomputed block has to find as it was: only in a pipeline do other microbatches come in between."""
        self.context: ContextParallel | None = None
        if plan.layout.cp > 1:
            assert plan.context is not None
            self.context = ContextParallel(mesh.groups["cp"], kind=plan.context, comm_device=mesh.comm_device)

    def _sharding(self, axis: str) -> Sharding | None:
        policy, is_own = self.policies.shard, self.uses_own_reducer
        return Sharding.of(self.plan, self.mesh, self.precision, axis, policy, uses_own_reducer=is_own)


def _lay_out(part: StageModule, setup: _Setup) -> None:
    """One part of the model, unit by unit."""
    model, description, sharding = part.model, setup.description, setup.sharding
    chosen = _chosen_units(model, setup)
    is_compiled_whole = not description.blocks or _is_compiled_as_one(part, setup)
    for unit in _units(model, description):
        _fill(model, unit, setup.compute.seed)
        pack_filled(model, unit.holds, setup.mesh.device, setup.frozen_dtype)
        if not unit.is_rest:
            split(model, unit.names, description, setup.tensor)
        experts = _divide_experts(model, unit, setup)
        _place(model, unit, setup)
        if setup.is_fused and description.head is not None and unit.holds(description.head):
            _give_loss_to_head(model, setup)  # before it is sharded, which makes another class of it
        for block in _modules(model, unit) if unit.is_block else ():
            _choose_attention(block, setup.compute)
            _choose_recomputed_swiglu(block, setup.compute)
            _convert_to_fp8(block, setup)
            if (
                setup.plan.recompute == "full"
            ):  # around what is compiled: a compiler would keep some of what it captures
                _compile(block, setup.compute)
                recompute(block, "full", setup.as_now)
            else:
                recompute(block, setup.plan.recompute, setup.as_now, is_compiled=bool(setup.compute.compile))
                _compile(block, setup.compute, unless=is_compiled_whole)
        for name in set(unit.names) & set(description.after_blocks) - {description.head}:
            _compile(model.get_submodule(name), setup.compute, unless=is_compiled_whole)  # the last norm
        if setup.expert_sharding is not None:
            for module in experts:
                setup.expert_sharding.shard(module)
        if sharding is not None and chosen is not None:
            inside = [name for name in chosen if unit.holds(name)]  # at once, so that no rank holds all of the model
            chosen = [name for name in chosen if name not in inside]
            _shard_each(model, inside, sharding)
        elif sharding is not None and not unit.is_root:
            sharding.shard(_modules(model, unit), is_last=unit.is_last)
    if not description.blocks:
        _choose_attention(model, setup.compute)
    if is_compiled_whole:
        _compile(model, setup.compute)
    setup.precision.install(model, setup.mesh.device)
    if setup.context is not None:
        divide_tokens(model, description, setup.context, is_compiled=bool(setup.compute.compile))
    if sharding is not None:
        _shard_each(model, chosen or (), sharding)
        root = part.stage or model
        sharding.shard(root, is_last=True)
        prefetch(root, setup.policies.shard)


def _shard_each(model: nn.Module, names: Sequence[str], sharding: Sharding) -> None:
    for name in names:
        sharding.shard(model.get_submodule(name))


def _chosen_units(model: nn.Module, setup: _Setup) -> Sequence[str] | None:
    """The units by class or by size; None: those of the description. They are chosen while all is whole, as the planner
    sees it."""
    divided = experts_in(model).values() if setup.experts is not None else ()
    policy, has_blocks = setup.policies.shard, bool(setup.description.blocks)
    return chosen_units(model, policy, has_blocks=has_blocks, except_for=divided) if setup.sharding else None


def _divide_experts(model: nn.Module, unit: Unit, setup: _Setup) -> list[nn.Module]:
    """Leave this rank its part of the experts of a unit."""
    if setup.experts is None:
        return []
    found = {name: module for name, module in experts_in(model).items() if unit.holds(name)}
    for name, module in found.items():
        divide_experts(module, setup.experts)
        setup.divided.update(f"{name}.{own}" for own, _ in module.named_parameters())
    return list(found.values())


def _shard_sync(models: Sequence[nn.Module], shapes: Mapping[str, tuple[int, ...]], plan: Plan, mesh: Mesh) -> FSDPSync:
    """FSDP2, and the ranks that average gradients of parameters of shape (), which it cannot cut. All ranks make that
    group if the model has one, also in stages that have none."""
    group = None if all(shapes.values()) else mesh.group(plan.number_axis)
    return FSDPSync(models, plan.zero or 0, group)


def _balance(model: nn.Module, plan: Plan, mesh: Mesh, tensor: TensorParallel) -> AuxLoss | None:
    """What the routers of a model share; None: it has none. They decide over whole sequences, and so with all ranks
    that have tokens of theirs."""
    if not routers(model):
        return None
    axes = [axis for axis, is_used in (("cp", plan.layout.cp > 1), ("tp", tensor.splits_tokens)) if is_used]
    balance = AuxLoss(mesh.group("_".join(axes)) if axes else None)
    note_routers(model, balance)
    return balance


def _batch_norm(model: nn.Module, plan: Plan, mesh: Mesh, compute: ComputePolicy) -> tuple[Sharing | None, bool]:
    """What batch norm shares between ranks; and whether there are running statistics that it does not share."""
    is_alone = plan.layout.degree("dp_cp") == 1
    if not compute.sync_batch_norm or is_alone:
        return None, bool(statistics_of(model)) and not is_alone
    sharing = synchronise(model, mesh.new_group("dp_cp"))
    shared = {f"{name}.{own}" for name, norm in batch_norms(model).items() for own, _ in norm.named_buffers()}
    return sharing, bool(statistics_of(model).keys() - shared)


def _statistics(modules: list[nn.Module], plan: Plan, mesh: Mesh) -> RunningStatistics:
    """Groups beside those of the mesh: a prediction of traffic is about gradients and activations."""
    everywhere = mesh.new_group("dp_cp")
    if plan.sync is None:
        return RunningStatistics(modules, every_step=everywhere, all_replicas=everywhere)
    within = mesh.new_group("dp_shard_cp") if plan.layout.degree("dp_shard_cp") > 1 else None
    return RunningStatistics(modules, every_step=within, all_replicas=everywhere)


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
    if any(tensor.is_meta for tensor in _tensors(model, unit)):
        materialise(model, "cpu", unit.holds)
        initialise(model, seed, unit.holds)


def _place(model: nn.Module, unit: Unit, setup: _Setup) -> None:
    """Move a unit to its device and precision. A parameter stays the object that it is, so that what is shared stays
    shared."""
    for tensor in _tensors(model, unit):
        dtype = setup.precision.wide_dtype
        if isinstance(tensor, nn.Parameter):
            dtype = setup.precision.weight_dtype if tensor.requires_grad else setup.frozen_dtype
        tensor.data = tensor.data.to(setup.mesh.device, dtype if tensor.is_floating_point() else tensor.dtype)


def _tensors(model: nn.Module, unit: Unit) -> Iterator[Tensor]:
    for name, module in model.named_modules():
        if unit.holds(name):
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)


def _choose_attention(module: nn.Module, compute: ComputePolicy) -> None:
    for attention in (inner for inner in module.modules() if isinstance(inner, Attention)):
        attention.backend = compute.attention


def _choose_recomputed_swiglu(block: nn.Module, compute: ComputePolicy) -> None:
    for module in (inner for inner in block.modules() if isinstance(getattr(inner, "recompute", None), bool)):
        module.recompute = compute.recompute_swiglu  # type: ignore[assignment]


def _convert_to_fp8(block: nn.Module, setup: _Setup) -> None:
    if setup.plan.precision == "fp8":
        to_fp8(block, setup.compute.fp8, setup.mesh.device, min_features=setup.compute.fp8_min_features)


def _give_loss_to_head(model: nn.Module, setup: _Setup) -> None:
    assert setup.description.head is not None
    layer = model.get_submodule(setup.description.head)
    assert isinstance(layer, nn.Linear)
    fp8 = setup.plan.precision == "fp8" and setup.compute.fp8_head == "gradients"
    scale, softcap = setup.description.logit_scale, setup.description.logit_softcap
    setup.head = LossHead(layer, fp8=fp8, always=bool(setup.compute.fused_loss), scale=scale, softcap=softcap)


def _is_compiled_as_one(part: StageModule, setup: _Setup) -> bool:
    """Whether nothing has to happen between blocks, and they are of many shapes, as in a convolutional network: what
    was compiled for one would fit few others, and what lies between them is worth fusing."""
    blocks = [part.model.get_submodule(name) for name in setup.description.blocks]
    kinds = {(type(block), *(parameter.shape for parameter in block.parameters())) for block in blocks}
    axes = (setup.sharding, part.stage, setup.context, setup.experts, setup.tensor.group)
    is_undivided = all(one is None for one in axes)
    return len(kinds) > 2 and is_undivided and setup.plan.recompute == "none" and setup.description.head is None


def _compile(block: nn.Module, compute: ComputePolicy, *, unless: bool = False) -> None:
    if compute.compile and not unless:
        backend = "inductor" if compute.compile is True else compute.compile
        block.forward = torch.compile(block.forward, backend=backend)


# ---- stages ---------------------------------------------------------------------------------------------------------


def _cut(model: nn.Module, plan: Plan, description: Description, mesh: Mesh) -> Iterator[StageModule]:
    """This rank's stages; the model itself where there is no pipeline."""
    degree = mesh.degree("pp")
    if degree == 1:
        yield StageModule(model)
        return
    assert plan.v is not None
    bounds = stage_bounds(_model_shapes(model, description), num_stages=degree * plan.v)
    taken: set[nn.Parameter] = set()
    for index, (start, stop) in enumerate(bounds):
        if owners(plan)[index] != mesh.coordinate["pp"]:
            continue
        is_last = index == len(bounds) - 1
        ends = (() if index else description.before_blocks, description.after_blocks if is_last else ())
        part, tape = cut(model, description, (*ends[0], *description.blocks[start:stop], *ends[1]))
        _untie(part, taken)
        taken.update(part.parameters())
        yield StageModule(part, Stage(part, tape, index, len(bounds)))


def _model_shapes(model: nn.Module, description: Description) -> ModelShapes:
    """The shapes of a model that its stages depend on."""
    lookups = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    seconds = {second for _, second in description.tied}
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False) if n not in seconds}
    return ModelShapes(description=description, parameters=shapes, stream=(), lookups=frozenset(lookups))


def _untie(part: nn.Module, taken: set[nn.Parameter]) -> None:
    """A parameter that a stage shares with an earlier one of the same rank becomes its own copy: see
    `ParallelModel`."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in taken:
                copies.setdefault(parameter, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
                setattr(module, name, copies[parameter])


def _pipeline(parts: list[StageModule], skeleton: nn.Module, setup: _Setup) -> Pipeline | None:
    stages = [part.stage for part in parts if part.stage is not None]
    if not stages:
        return None
    plan, mesh, precision = setup.plan, setup.mesh, setup.precision
    assert plan.schedule is not None
    bounds = stage_bounds(_model_shapes(skeleton, setup.description), num_stages=stages[0].num_stages)
    return Pipeline(
        stages=stages,
        schedule=plan.schedule,
        group=mesh.groups["pp"],
        device=mesh.device,
        comm_device=mesh.comm_device,
        num_stages=stages[0].num_stages,
        boundaries=Boundaries(skeleton, setup.description, bounds, setup.tensor),
        dtype=precision.compute_dtype,
        loss_dtype=precision.wide_dtype,
        owners=owners(plan),
    )
