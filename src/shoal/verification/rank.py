"""Run a verification on the plan's ranks: train as `shoal train` does, observe, and return the findings.

    rank 0    one process [1] ─┐
    all       prepare [2] ─────┴─ steps, gathered [3] ─ a step, counted [4] ─ predict [5] ─ compare [6] on rank 0

[1] The reference is computed first, on rank 0 alone: the others wait for it in their first collective.
[2] The model starts on the meta device if it can, as in `shoal train`: so its initial values are verified, too.
[3] Gradients are gathered before clipping and update, weights after. Copies of one piece are compared as they are on
    the ranks, before they are gathered: gathering takes one of them, and would hide that the others differ.
[4] Nothing is gathered in this step, which would be counted. Memory is counted before each microbatch.
[5] The prediction sees the plan and the shapes, and no number that was counted.
[6] The first step, and in it the first tensor, that differs is the one whose cause is looked for: later differences
    follow from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store

from shoal.blueprint.layout import AXES
from shoal.blueprint.plan import Plan
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.traffic_counter import Traffic, count
from shoal.comm.world import World
from shoal.data.batch import length, rows
from shoal.errors import ShoalError
from shoal.numerics.init import can_fill
from shoal.numerics.local_tensor import to_local
from shoal.parallel.context.attention import Attention
from shoal.parallel.expert.experts import Experts
from shoal.parallel.expert.router import Router
from shoal.parallel.inspect.live_memory import live_memory, peak_bytes
from shoal.parallel.inspect.trace_shapes import trace_shapes
from shoal.parallel.parallel_model import ParallelModel
from shoal.predict.exact.state_memory import Memory, has_moment, memory
from shoal.predict.exact.traffic import LossTraffic, Messages, traffic
from shoal.train.build_model import adapt, adapter_of, describe, without_memory
from shoal.train.loss.objective import CrossEntropy, call_of
from shoal.train.run import Run
from shoal.verification.case import Case
from shoal.verification.compare import Comparison, Disagreement, Observation, compare
from shoal.verification.compression_error import CompressionError, compression_error
from shoal.verification.diagnosis.causes import likely_cause
from shoal.verification.diagnosis.evidence import Context, Piece
from shoal.verification.exact_casts import keeping_float64
from shoal.verification.reference import fresh_model, observe_reference, optimizer_for, turn_off_dropout
from shoal.verification.replica_traffic import ReplicaTraffic, replica_traffic, shortened


@dataclass
class RankFindings:
    """The findings of one rank."""

    verdict: Comparison | None = None
    """On rank 0 only."""
    cause: str | None = None
    traffic: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    """Axis → operation → calls and bytes of one step, counted."""
    predicted_traffic: Mapping[str, Mapping[str, Messages]] | None = None
    """The predicted traffic; None: the model cannot be traced on the meta device."""
    memory: Memory | None = None
    """The largest memory before a microbatch; counted."""
    predicted_memory: Memory | None = None
    """The predicted memory; None: no microbatch starts after the backward of another."""
    peak: int = 0
    """Peak bytes; measured."""
    compression_error: CompressionError | None = None
    """The error of compression, if the plan has it; on rank 0 only."""
    replica_traffic: ReplicaTraffic | None = None
    """Communication between replicas under compression or local SGD."""


def verify_on_rank(placement: Placement | None, store: Store | None, case: Case) -> RankFindings:
    """Join the ranks of the case, and verify."""
    num_ranks = placement.local_world_size if placement else 1
    is_crowded = case.device == "cuda" and num_ranks > torch.cuda.device_count()  # NCCL needs a GPU for each rank
    world = World.start(
        placement, device=case.device, backend="gloo" if is_crowded else None, store=store, threads=case.threads
    )
    with world:
        return verify_in(world, case)


def verify_in(world: World, case: Case) -> RankFindings:
    """Train and observe; rank 0 also computes the reference, and compares."""
    references, initial = observe_reference(case) if world.is_main else ([], {})  # [1]
    shard = {field.name: getattr(case.shard, field.name) for field in fields(case.shard)}
    run = Run(case.plan, loss=case.loss, seed=case.seed, clip=case.clip, world=world, **shard)
    is_foreign = _prepare(run, case)  # [2]
    with keeping_float64(case.plan.precision, is_foreign=is_foreign):
        candidates = [_observe(run, batch) for batch in case.batches]  # [3]
        pieces = _pieces(run)
        sent, held = _count(run, case)  # [4]
    findings = RankFindings(traffic=sent.to_mapping(), memory=held, peak=peak_bytes(world.device))
    _predict(findings, run, case)  # [5]
    if case.compressed is not None:
        _observe_replicas(findings, case.compressed, world, case, references[0].gradients if references else None)
    if world.is_main:
        findings.verdict = compare(references, candidates, tolerance=case.tolerance)
        context = Context(
            layout=case.plan.layout,
            num_microbatches=case.plan.num_microbatches(length(case.batches[0])),
            num_stages=case.plan.layout.pp * (case.plan.v or 1),
            pieces=pieces,
            clip=case.clip,
            initial=initial,
            tolerance=case.tolerance,
        )
        if findings.verdict.first is not None:  # [6]
            findings.cause = likely_cause(findings.verdict.first, references, candidates, context)
    return findings


def _observe_replicas(
    findings: RankFindings, requested: Plan, world: World, case: Case, exact: Mapping[str, Tensor] | None
) -> None:
    """Measure the error of compression, and the communication between replicas under the requested plan."""
    plans = [replace(requested, sync=None)] if requested.compress else []
    for plan in [*plans, *([shortened(requested)] if requested.sync_spec is not None else [])]:
        run = Run(plan, loss=case.loss, seed=case.seed, clip=None, world=world, warmup_steps=0)
        _prepare(run, case)
        share = _share(run, case.batches[0])
        if plan.sync is None:
            findings.compression_error = compression_error(run, share, exact)
        findings.replica_traffic = replica_traffic(
            run, requested, functools.partial(run.step, share), functools.partial(_have_equal_weights, run)
        )
        run.composed.close()


def _have_equal_weights(run: Run) -> bool:
    return not any(run.world.all_gather_object(bool(list(_disagreements(run.composed, "weight")))))


def _prepare(run: Run, case: Case) -> bool:
    """Prepare the model as a run of the plan would: from the meta device, if it has init rules for all values. Returns
    whether it is a model of another package."""
    model = without_memory(case.build)
    if model is not None and can_fill(model):
        turn_off_dropout(model)
    else:
        model = fresh_model(case)
    is_foreign = adapter_of(model) is not None
    run.prepare(model)
    if run.composed.head is not None:
        run.composed.head.always = True  # as for large models, and on a GPU
    run.prepare(optimizer_for(case, run.parameters))
    return is_foreign


def _observe(run: Run, batch: Any) -> Observation:
    gradients: dict[str, Tensor | None] = {}
    disagreements: list[Disagreement] = []

    def look() -> None:
        # [3] before `full_tensors`, which takes one copy of each piece
        disagreements.extend(_disagreements(run.composed, "gradient"))
        scale = run.loss_scale.scale  # in fp16; clipping removes it later
        full = run.composed.full_tensors("gradient")
        gradients.update({name: tensor if tensor is None else tensor / scale for name, tensor in full})

    run.on_gradients = look
    loss = run.step(_share(run, batch))
    run.on_gradients = None
    disagreements.extend(_disagreements(run.composed, "weight"))
    weights = {**dict(run.composed.full_tensors("weight")), **run.composed.biases()}
    assert run.report is not None
    every = [one for rank in run.world.all_gather_object(disagreements, kinds=(Disagreement,)) for one in rank]
    return Observation(
        loss=float(loss),
        grad_norm=float(run.report.grad_norm),
        gradients={name: tensor for name, tensor in gradients.items() if tensor is not None},
        weights={name: tensor for name, tensor in weights.items() if tensor is not None},
        disagreements=tuple(dict.fromkeys(every)),
    )


def _count(run: Run, case: Case) -> tuple[Traffic, Memory]:
    """Count this rank's communication in one step, and its largest memory before a microbatch."""
    if len(case.batches) == 1:
        run.step(_share(run, case.batches[-1]))  # [4] some messages are sent once in a run, in its second step
    held: list[Memory] = []
    run.on_microbatch = lambda number: held.append(live_memory(run.composed, run.optimizer))
    with count(run.mesh.groups) as traffic:
        run.step(_share(run, case.batches[-1]))
    run.on_microbatch = None
    return traffic, max(held, key=lambda memory: memory.total)


def _predict(findings: RankFindings, run: Run, case: Case) -> None:
    """Predict the traffic and the memory that were counted."""
    model = without_memory(case.build)
    if model is None or run.composed.is_split_by_hand:
        return
    batch = length(case.batches[0])
    share = rows(case.batches[0], 0, case.plan.microbatch_size(batch))
    try:
        description = describe(model)
        adapt(model, description, None)
        shapes = trace_shapes(model, description, call_of(run.objective, share), case.shard)
    except ShoalError:
        if adapter_of(model) is None:
            raise
        return  # its own attention, which a trace replaces, is not known
    except Exception:  # user code that needs real values; the comparison holds without a prediction
        return
    loss = LossTraffic(
        splits_logits=isinstance(run.objective, CrossEntropy),
        defers_count=run.defers_count,
        compares_samples=run.compares_samples,
    )
    findings.predicted_traffic = traffic(case.plan, shapes, batch=batch, rank=run.world.rank, loss=loss)
    if has_moment(case.plan, rank=run.world.rank, num_microbatches=case.plan.num_microbatches(batch)):
        states = 2 if case.plan.precision == "fp64" else 1  # of `optimizer_for`
        findings.predicted_memory = memory(case.plan, shapes, rank=run.world.rank, optimizer_states=states)


def _share(run: Run, batch: Any) -> Any:
    """This rank's part of a global batch."""
    size = length(batch) // run.degree
    return rows(batch, run.coordinate * size, (run.coordinate + 1) * size)


def _pieces(run: Run) -> dict[str, Piece]:
    """The place of every parameter: the dim that tp cuts, its stage, and its role."""
    composed = run.composed
    mine = {
        name: replace(
            roles.get(name, Piece()), tp_dim=composed.tensor.cuts.get(name), stage=part.stage.index if part.stage else 0
        )
        for part in composed.parts
        for roles in [_roles(part.model)]
        for name, _ in part.model.named_parameters()
    }
    merged: dict[str, Piece] = {}
    for pieces in run.world.all_gather_object(mine, kinds=(Piece,)):
        for name, piece in pieces.items():
            merged.setdefault(name, piece)
    return merged


def _roles(model: nn.Module) -> dict[str, Piece]:
    """The parameters where ranks communicate inside the forward: of attention, routers and experts."""
    found: dict[str, Piece] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, Attention) and parent:
            names = [f"{parent}.{own}" for own, _ in model.get_submodule(parent).named_parameters()]
            found |= dict.fromkeys(names, Piece(role="attention", module=parent))
        elif isinstance(module, Router):
            has_loss = module.auxiliary_coefficient > 0 or module.z_coefficient > 0
            found[f"{name}.weight"] = Piece(
                role="router", module=parent, has_bias=module.bias is not None, has_loss=has_loss
            )
        elif isinstance(module, Experts):
            names = [f"{name}.{own}" for own, _ in module.named_parameters()]
            found |= dict.fromkeys(names, Piece(role="expert", module=parent, num_experts=module.num_experts))
    return found


@torch.no_grad()
def _disagreements(composed: ParallelModel, what: str) -> Iterator[Disagreement]:
    """Tensors that this rank and others along an axis should hold equally, and do not. One exchange for each axis."""
    for axis in AXES:
        group = composed.mesh.group_of_several(axis)
        replicated = {
            name: _value(parameter, what)
            for name, parameter in composed.named.items()
            if composed.is_replicated(name, axis)
        }
        if group is None or not replicated:
            continue
        flat = torch.cat([tensor.reshape(-1).double() for tensor in replicated.values()])
        others = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(others, flat, group=group)
        for name, *pieces in zip(
            replicated, *(one.split([t.numel() for t in replicated.values()]) for one in others), strict=True
        ):
            if pieces[0].numel():
                values = torch.stack(pieces)
                spread = float((values.max(0).values - values.min(0).values).max())
                if spread:  # also true for NaN
                    yield Disagreement(axis, what, name, spread / float(values.abs().max()))  # type: ignore[arg-type]


def _value(parameter: torch.nn.Parameter, what: str) -> Tensor:
    if what == "weight":
        return to_local(parameter.detach())
    return torch.zeros_like(to_local(parameter.detach())) if parameter.grad is None else to_local(parameter.grad)
