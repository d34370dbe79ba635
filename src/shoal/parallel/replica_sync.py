"""Choose what keeps replicas equal: DDP, FSDP2, our own buckets of gradients, or local SGD (DiLoCo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.comm.compression.gradient_compression import build_average
from shoal.comm.mesh import Mesh
from shoal.comm.replicas.autotune import bucket_mb, fastest
from shoal.comm.replicas.transport import Transport
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import to_local
from shoal.parallel.data.bucket_averager import BucketAverager, CommThreads, make_equal
from shoal.parallel.data.ddp import StageSync, replicate
from shoal.parallel.data.diloco import LocalSGD
from shoal.parallel.data.gradient_reducer import GradientReducer
from shoal.parallel.data.gradient_sync import GradientSync
from shoal.parallel.parallel_model import StageModule
from shoal.parallel.policies import SyncPolicy
from shoal.parallel.tensor import TensorParallel
from shoal.predict.exact.data_traffic import BUCKET_BYTES


def uses_own_reducer(plan: Plan, sync: SyncPolicy) -> bool:
    """Whether replicas exchange by a reducer of our own, and not by torch's."""
    return bool(plan.compress or plan.sync or sync.algorithm != "builtin")


def with_buckets(
    sync: SyncPolicy, plan: Plan, parts: Sequence[StageModule], mesh: Mesh, *, is_sharded: bool
) -> tuple[SyncPolicy, str]:
    """The size of buckets that was left open, chosen by what the link can do, and why so; else as it is."""
    if sync.bucket_mb != "auto":
        return sync, ""
    axis = "dp_replicate" if is_sharded or plan.sync else plan.gradient_axis
    has_buckets = uses_own_reducer(plan, sync) or not (is_sharded or parts[0].stage is not None)
    if mesh.degree(axis) == 1 or not has_buckets:
        return replace(sync, bucket_mb=None), "25 MB, if at all: no buckets of gradients travel between replicas"
    trained = [to_local(p) for part in parts for p in part.model.parameters() if p.requires_grad]
    size, why = bucket_mb(Transport(mesh.group(axis), mesh.comm_device), sum(p.nbytes for p in trained))
    return replace(sync, bucket_mb=size), f"{size:.3g} MB: {why}"


@dataclass(frozen=True)
class ReplicaGroup:
    """The model of this rank, laid out, and the ranks that hold copies of it."""

    plan: Plan
    mesh: Mesh
    tensor: TensorParallel
    description: Description
    parts: Sequence[StageModule]
    is_sharded: bool

    @property
    def axis(self) -> str:
        """The axis along which our own reducer exchanges."""
        return "dp_replicate" if self.is_sharded or self.plan.sync else self.plan.gradient_axis

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank, by the names that they have on one device."""
        return {name: p for part in self.parts for name, p in part.model.named_parameters()}

    def kind_of(self, name: str) -> object:
        """Parameters of different kinds do not share a bucket."""
        return name in self.tensor.cuts, name in self.tensor.partial


def build_gradient_sync(group: ReplicaGroup, sync: SyncPolicy, *, seed: int) -> tuple[nn.Module, GradientSync]:
    """What a forward calls, and what keeps its replicas equal."""
    assert sync.bucket_mb != "auto"
    plan, mesh, model = group.plan, group.mesh, group.parts[0].model
    if uses_own_reducer(plan, sync) and mesh.degree(group.axis) > 1:
        return model, _own_sync(group, sync, seed)
    if group.is_sharded:
        return model, GradientSync()  # FSDP2 reduces over replicas, too
    peers = mesh.group_of_several(plan.gradient_axis)
    if group.parts[0].stage is not None:
        return model, GradientSync() if peers is None else StageSync(group.named, peers)
    return replicate(
        model,
        peers,
        device=mesh.device,
        bucket_mb=sync.bucket_mb,
        find_unused_parameters=sync.find_unused_parameters,
    )


def _own_sync(group: ReplicaGroup, sync: SyncPolicy, seed: int) -> GradientReducer | LocalSGD:
    """The bucketed reducer, or local SGD."""
    plan, mesh, axis = group.plan, group.mesh, group.axis
    transport = Transport(mesh.new_group(axis), mesh.comm_device, node=mesh.ranks_of_node(axis))
    named = group.named
    assert sync.bucket_mb != "auto"
    bucket_bytes = BUCKET_BYTES if sync.bucket_mb is None else round(sync.bucket_mb * 2**20)
    transport.algorithm, why = (
        fastest(transport, bucket_bytes) if sync.algorithm == "auto" else (sync.algorithm, "as set")
    )
    average = build_average(plan.compression)
    # What is not encoded gains nothing by a second lane, and NCCL may not be asked from two threads in any order.
    has_two = plan.compression is not None and transport.device.type == "cpu"
    comm_threads = CommThreads([transport, *([replace(transport, group=mesh.new_group(axis))] if has_two else [])], why)
    is_whole = not group.is_sharded and group.parts[0].stage is None
    if is_whole:
        make_equal(group.parts[0].model, transport)
    if plan.sync_spec is not None:
        _reject_tied_replicas(plan, mesh, group.description)
        return LocalSGD(
            named,
            comm_threads,
            average,
            plan.sync_spec,
            sync.outer,
            bucket_bytes,
            seed,
            group.kind_of,
            warmup_steps=_warmup_steps(plan, sync),
        )
    return GradientReducer(
        BucketAverager(named, comm_threads, average, bucket_bytes, seed, group.kind_of),
        follows_backward=is_whole,
        finds_unused=sync.find_unused_parameters,
        warmup_steps=_warmup_steps(plan, sync),
    )


def _warmup_steps(plan: Plan, sync: SyncPolicy) -> int:
    if sync.warmup_steps is not None:
        return sync.warmup_steps
    return plan.compression.warmup_steps if plan.compression is not None else 0


def _reject_tied_replicas(plan: Plan, mesh: Mesh, description: Description) -> None:
    """Two stages that hold one parameter would each encode their own copy of it."""
    if description.tied and mesh.degree("pp") > 1:
        raise ShoalError(
            f"sync={plan.sync} lets both copies of {description.tied[0][0]}, on two stages, go their own way",
            fix="pp=1, or a model whose weights are not tied",
            code="P058",
        )
