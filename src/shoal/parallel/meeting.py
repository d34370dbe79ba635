"""How replicas meet: what averages their gradients, or lets them meet every so many steps, in place of DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.blueprint.traffic import BUCKET_BYTES
from shoal.comm.averages import average_of
from shoal.comm.choose import fastest
from shoal.comm.mesh import Mesh
from shoal.comm.wire import Wire
from shoal.errors import ShoalError
from shoal.parallel.averager import Averager, Lanes, make_equal
from shoal.parallel.composed import Part
from shoal.parallel.islands import Islands
from shoal.parallel.options import Options
from shoal.parallel.reducer import Reducer
from shoal.parallel.tensor import TensorParallel


def meets_by_itself(plan: Plan, options: Options) -> bool:
    """Whether replicas meet by a way of ours."""
    return bool(plan.compress or plan.sync or options.algorithm != "builtin")


def meeting_of(
    parts: Sequence[Part],
    plan: Plan,
    *,
    mesh: Mesh,
    tensor: TensorParallel,
    description: Description,
    options: Options,
    is_sharded: bool,
) -> Reducer | Islands | None:
    """What lets replicas meet; None: there are none, or torch does it."""
    axis = "dp_replicate" if is_sharded or plan.sync else plan.gradient_axis
    if mesh.degree(axis) == 1 or not meets_by_itself(plan, options):
        return None
    wire = Wire(mesh.new_group(axis), mesh.wire, node=mesh.ranks_of_node(axis))
    named = {name: p for part in parts for name, p in part.model.named_parameters()}
    bucket_bytes = BUCKET_BYTES if options.bucket_mb is None else round(options.bucket_mb * 2**20)
    wire.algorithm, why = (
        fastest(wire, bucket_bytes) if options.algorithm == "auto" else (options.algorithm, "it was asked for")
    )
    average = average_of(plan.compression)
    # What is not encoded gains nothing by a second lane, and NCCL may not be asked from two threads in any order.
    has_two = plan.compression is not None and wire.device.type == "cpu"
    lanes = Lanes([wire, *([replace(wire, group=mesh.new_group(axis))] if has_two else [])], why)
    is_whole = not is_sharded and parts[0].stage is None

    def kind_of(name: str) -> object:
        return name in tensor.cuts, name in tensor.partial

    if is_whole:
        make_equal(parts[0].model, wire)
    if plan.synchrony is not None:
        _refuse_tied_islands(plan, mesh, description)
        return Islands(
            named,
            lanes,
            average,
            plan.synchrony,
            options.outer,
            bucket_bytes,
            options.seed,
            kind_of,
            exact_steps=_exact_steps(plan, options),
        )
    return Reducer(
        Averager(named, lanes, average, bucket_bytes, options.seed, kind_of),
        follows_backward=is_whole,
        finds_unused=options.find_unused,
        exact_steps=_exact_steps(plan, options),
    )


def _exact_steps(plan: Plan, options: Options) -> int:
    if options.exact_steps is not None:
        return options.exact_steps
    return plan.compression.exact_steps if plan.compression is not None else 0


def _refuse_tied_islands(plan: Plan, mesh: Mesh, description: Description) -> None:
    """Two stages that hold one parameter would each encode their own copy of it."""
    if description.tied and mesh.degree("pp") > 1:
        raise ShoalError(
            f"sync={plan.sync} lets both copies of {description.tied[0][0]}, on two stages, go their own way",
            fix="pp=1, or a model whose weights are not tied",
        )
