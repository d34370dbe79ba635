"""How replicas meet: what averages their gradients, or lets them meet every so many steps, in place of DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.comm.compression.reduce import build_average
from shoal.comm.mesh import Mesh
from shoal.comm.replicas.autotune import bucket_mb, fastest
from shoal.comm.replicas.transport import Transport
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import to_local
from shoal.parallel.data.bucket_averager import BucketAverager, CommThreads, make_equal
from shoal.parallel.data.gradient_reducer import GradientReducer
from shoal.parallel.data.local_sgd import LocalSGD
from shoal.parallel.options import Options
from shoal.parallel.parallel_model import StageModule
from shoal.parallel.tensor import TensorParallel
from shoal.predict.exact.traffic import BUCKET_BYTES


def uses_own_reducer(plan: Plan, options: Options) -> bool:
    """Whether replicas meet by a way of ours."""
    return bool(plan.compress or plan.sync or options.algorithm != "builtin")


def with_buckets(
    options: Options, plan: Plan, parts: Sequence[StageModule], mesh: Mesh, *, is_sharded: bool
) -> tuple[Options, str]:
    """The size of buckets that was left open, chosen by what the link can do, and why so; else as it is."""
    if options.bucket_mb != "auto":
        return options, ""
    axis = "dp_replicate" if is_sharded or plan.sync else plan.gradient_axis
    has_buckets = uses_own_reducer(plan, options) or not (is_sharded or parts[0].stage is not None)
    if mesh.degree(axis) == 1 or not has_buckets:
        return replace(options, bucket_mb=None), "25 MB, if at all: no buckets of gradients travel between replicas"
    trained = [to_local(p) for part in parts for p in part.model.parameters() if p.requires_grad]
    size, why = bucket_mb(Transport(mesh.group(axis), mesh.wire), sum(p.nbytes for p in trained))
    return replace(options, bucket_mb=size), f"{size:.3g} MB: {why}"


def build_gradient_sync(
    parts: Sequence[StageModule],
    plan: Plan,
    *,
    mesh: Mesh,
    tensor: TensorParallel,
    description: Description,
    options: Options,
    is_sharded: bool,
) -> GradientReducer | LocalSGD | None:
    """What lets replicas meet; None: there are none, or torch does it."""
    axis = "dp_replicate" if is_sharded or plan.sync else plan.gradient_axis
    if mesh.degree(axis) == 1 or not uses_own_reducer(plan, options):
        return None
    wire = Transport(mesh.new_group(axis), mesh.wire, node=mesh.ranks_of_node(axis))
    named = {name: p for part in parts for name, p in part.model.named_parameters()}
    assert options.bucket_mb != "auto"
    bucket_bytes = BUCKET_BYTES if options.bucket_mb is None else round(options.bucket_mb * 2**20)
    wire.algorithm, why = (
        fastest(wire, bucket_bytes) if options.algorithm == "auto" else (options.algorithm, "it was asked for")
    )
    average = build_average(plan.compression)
    # What is not encoded gains nothing by a second lane, and NCCL may not be asked from two threads in any order.
    has_two = plan.compression is not None and wire.device.type == "cpu"
    lanes = CommThreads([wire, *([replace(wire, group=mesh.new_group(axis))] if has_two else [])], why)
    is_whole = not is_sharded and parts[0].stage is None

    def kind_of(name: str) -> object:
        return name in tensor.cuts, name in tensor.partial

    if is_whole:
        make_equal(parts[0].model, wire)
    if plan.sync_spec is not None:
        _reject_tied_replicas(plan, mesh, description)
        return LocalSGD(
            named,
            lanes,
            average,
            plan.sync_spec,
            options.outer,
            bucket_bytes,
            options.seed,
            kind_of,
            warmup_steps=_warmup_steps(plan, options),
        )
    return GradientReducer(
        BucketAverager(named, lanes, average, bucket_bytes, options.seed, kind_of),
        follows_backward=is_whole,
        finds_unused=options.find_unused_parameters,
        warmup_steps=_warmup_steps(plan, options),
    )


def _warmup_steps(plan: Plan, options: Options) -> int:
    if options.warmup_steps is not None:
        return options.warmup_steps
    return plan.compression.warmup_steps if plan.compression is not None else 0


def _reject_tied_replicas(plan: Plan, mesh: Mesh, description: Description) -> None:
    """Two stages that hold one parameter would each encode their own copy of it."""
    if description.tied and mesh.degree("pp") > 1:
        raise ShoalError(
            f"sync={plan.sync} lets both copies of {description.tied[0][0]}, on two stages, go their own way",
            fix="pp=1, or a model whose weights are not tied",
        )
