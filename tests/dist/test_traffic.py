"""What is counted on a rank, against numbers that follow from shapes: collectives, DDP, FSDP2, DTensor, pipelining."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.traffic_counter import Traffic, count, message_of
from shoal.comm.world import World
from tests.dist.pool import on_ranks

# torch 2.13 has new names for these two, and warns of the old ones
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

Calls = dict[str, tuple[int, int]]


def of(traffic: Traffic, axis: str) -> Calls:
    """Operation → (calls, bytes) of one axis, having seen that no other axis has any."""
    assert {key[0] for key in traffic.calls} <= {axis}
    return {
        operation: (traffic.calls[axis, operation], traffic.bytes[axis, operation]) for _, operation in traffic.calls
    }


def nonzero(**calls: tuple[int, int]) -> Calls:
    return {operation: counted for operation, counted in calls.items() if counted[0]}


def default_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# ---- collectives of one's own ---------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_every_collective(world: World) -> None:
    n, after, before = world.size, (world.rank + 1) % world.size, (world.rank - 1) % world.size
    part, full = torch.ones(3), torch.ones(3 * n)  # 12 and 12·n bytes
    parts = [torch.ones(3) for _ in range(n)]
    with count({"dp": default_group()}) as traffic:
        dist.all_reduce(part)
        dist.all_reduce(part.double())
        dist.broadcast(part, 0)
        dist.reduce(part, 0)
        all_gather(full, part)
        dist.all_gather(parts, part)
        reduce_scatter(part, full)
        dist.all_to_all_single(torch.empty_like(full), full)
        dist.gather(part, parts if world.is_main else None)
        dist.scatter(part, parts if world.is_main else None)
        dist.barrier()
        works = [dist.isend(part, after), dist.irecv(torch.empty(3), before)]
        ops = [dist.P2POp(dist.isend, part, after), dist.P2POp(dist.irecv, torch.empty(3), before)]
        for work in [*works, *dist.batch_isend_irecv(ops)]:
            assert work is not None
            work.wait()
    assert of(traffic, "dp") == {
        "all_reduce": (2, 12 + 24),
        "broadcast": (1, 12),
        "reduce": (1, 12),
        "all_gather": (2, 2 * 12 * n),
        "reduce_scatter": (1, 12 * n),
        "all_to_all": (1, 12 * n),
        "gather": (1, 12),
        "scatter": (1, 12),
        "barrier": (1, 0),
        "send": (2, 24),
        "recv": (2, 24),
    }
    assert traffic.of_axis("dp") == (13, 36 + 12 + 12 + 24 * n + 12 * n + 12 * n + 12 + 12 + 24)  # without recv


@on_ranks(4)
def test_bytes_go_to_the_axis_of_the_group(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = dist.new_group()
    with count({"dp": mesh.get_group("dp"), "tp": [mesh.get_group("tp")]}) as traffic:
        dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
        dist.all_reduce(torch.ones(10), group=mesh.get_group("dp"))
        dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(1000), group=unnamed)
    dist.all_reduce(torch.ones(1))  # after: not counted
    assert [traffic.of_axis(axis).bytes for axis in ("tp", "dp", "world", "other")] == [4, 40, 400, 4000]
    assert list(traffic.to_mapping()) == ["dp", "other", "tp", "world"]
    with count({"cp": unnamed, "dp_cp": [mesh.get_group("dp"), unnamed]}) as twice_named:
        dist.all_reduce(torch.ones(1), group=unnamed)
        dist.all_reduce(torch.ones(10), group=mesh.get_group("dp"))
    assert (twice_named.of_axis("cp"), twice_named.of_axis("dp_cp")) == ((1, 4), (1, 40))
    dist.destroy_process_group(unnamed)


@on_ranks(2)
def test_a_group_that_this_rank_is_not_in(world: World) -> None:
    group = dist.new_group([0])
    with count({"pp": group}) as traffic:
        if world.rank == 0:
            dist.all_reduce(torch.ones(2), group=group)
    assert traffic.of_axis("pp") == ((1, 8) if world.rank == 0 else (0, 0))


@on_ranks(2)
def test_counts_may_be_nested_and_added(world: World) -> None:
    with count({}) as outer:
        dist.all_reduce(torch.ones(1))
        with count({"dp": default_group()}) as inner:
            dist.barrier()
            dist.all_reduce(torch.ones(2))
    assert outer.of_axis("world") == (3, 12)
    assert inner.of_axis("dp") == (2, 8)
    both = inner + outer
    assert (both.of_axis("dp"), both.of_axis("world")) == ((2, 8), (3, 12))
    assert json.loads(json.dumps(inner.to_mapping())) == {
        "dp": {"all_reduce": {"calls": 1, "bytes": 8}, "barrier": {"calls": 1, "bytes": 0}}
    }


@on_ranks(2)
def test_an_operator_that_is_not_known_keeps_its_name(world: World) -> None:
    @torch.library.custom_op("c10d::whisper", mutates_args=())
    def whisper(text: Tensor, group_name: str) -> Tensor:
        return text.clone()

    with count({"dp": default_group()}) as traffic:
        whisper(torch.ones(3), default_group().group_name)
    assert of(traffic, "dp") == {"whisper": (1, 12)}


@pytest.mark.parametrize(
    ("operator", "args", "expected"),
    [  # what gloo or eager code never calls: see the schemas in torch.ops.c10d and torch.ops._c10d_functional
        ("allgather_into_tensor_coalesced_", ([torch.ones(4), torch.ones(2)], [torch.ones(2), torch.ones(1)]), 24),
        ("reduce_scatter_tensor_coalesced_", ([torch.ones(2), torch.ones(1)], [torch.ones(4), torch.ones(2)]), 24),
        ("reduce_scatter_", ([torch.ones(2)], [[torch.ones(2), torch.ones(2)]]), 16),
        ("allreduce_coalesced_", ([torch.ones(4), torch.ones(2)],), 24),
        ("all_reduce_coalesced", ([torch.ones(4), torch.ones(2)], "sum", "0"), 24),
        ("alltoall_", ([torch.ones(1)], [torch.ones(2)]), 8),
        ("shard_dim_alltoall", (torch.ones(2), 0, 1, "0"), 8),
    ],
)
def test_message_of_rare_operators(operator: str, args: tuple[Any, ...], expected: int) -> None:
    operation, num_bytes = message_of(operator, args, None)
    assert num_bytes == expected
    assert operation in {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}


# ---- DDP ------------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_ddp_reduces_each_parameter_once(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    size = 8 * (4 * 5 + 5 + 5 * 3 + 3)
    ddp = DistributedDataParallel(model)
    with count({"dp_replicate": default_group()}) as first:
        ddp(torch.ones(2, 4).double()).sum().backward()
    assert of(first, "dp_replicate") == {"all_reduce": (1, size)}
    with count({"dp_replicate": default_group()}) as second:  # buckets are formed anew, once, and rank 0 tells how
        ddp(torch.ones(2, 4).double()).sum().backward()
    one_time = 4 * (4 + 1) + 4 * 1  # the order of 4 parameters and the number of buckets; the size of 1 bucket: int32
    assert of(second, "dp_replicate") == {"all_reduce": (1, size), "broadcast": (2, one_time)}
    with count({"dp_replicate": default_group()}) as accumulating, ddp.no_sync():
        ddp(torch.ones(2, 4).double()).sum().backward()
    assert of(accumulating, "dp_replicate") == {}
    with count({"dp_replicate": default_group()}) as steady:
        ddp(torch.ones(2, 4).double()).sum().backward()
    assert of(steady, "dp_replicate") == {"all_reduce": (1, size)}


@on_ranks(2)
def test_ddp_sends_buffers_before_each_forward(world: World) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
    with count({"dp_replicate": default_group()}) as traffic:
        ddp(torch.ones(2, 4)).sum().backward()
    parameters, statistics, num_batches = 4 * (20 + 5 + 5 + 5), 4 * (5 + 5), 8  # one broadcast for each dtype
    assert of(traffic, "dp_replicate") == {"all_reduce": (1, parameters), "broadcast": (2, statistics + num_batches)}


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


def padded_numel(shapes: Sequence[Sequence[int]], degree: int) -> int:
    """FSDP2's rule: dim 0 of each parameter is filled up to a multiple of the shard degree, and a unit's parameters are
    gathered, and their gradients reduced and scattered, as one message: sum of ceil(n/N)·N·(the other dims)."""
    return sum(math.ceil(first / degree) * degree * math.prod(others) for first, *others in shapes)


def shapes_of(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


def sharded(
    widths: Sequence[int], mesh: DeviceMesh, *, reshard: bool | None, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, list[int]]:
    """Linears that are a unit each, the last one the root's own; and the padded numel of each unit."""
    net = nn.Sequential(*(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)))
    degree = mesh.size(mesh.ndim - 1)
    numels = [padded_numel(shapes_of(layer), degree) for layer in net]
    for layer in list(net)[:-1]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **options)
    assert isinstance(fully_shard(net, mesh=mesh, reshard_after_forward=reshard, **options), FSDPModule)
    return net, numels


def world_mesh(world: World) -> tuple[DeviceMesh, dict[str, dist.ProcessGroup]]:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))
    return mesh, {"dp_shard": mesh.get_group()}


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("widths", [(4, 8, 16, 4), (4, 5, 3, 7), (6, 1, 9, 2)])
def test_fsdp_gathers_and_scatters_padded_parameters(
    world: World, reshard: bool | None, widths: tuple[int, ...]
) -> None:
    mesh, groups = world_mesh(world)
    net, numels = sharded(widths, mesh, reshard=reshard)
    everything, root = 8 * sum(numels), 8 * numels[-1]
    again = {True: (3, everything), None: (2, everything - root), False: (0, 0)}[reshard]  # by default the root stays
    for _ in range(2):
        with count(groups) as forward:
            loss = net(torch.ones(2, widths[0]).double()).sum()
        assert of(forward, "dp_shard") == {"all_gather": (3, everything)}
        with count(groups) as backward:
            loss.backward()
        assert of(backward, "dp_shard") == nonzero(all_gather=again, reduce_scatter=(3, everything))


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_that_accumulates(world: World, reshard: bool) -> None:
    mesh, groups = world_mesh(world)
    net, numels = sharded((4, 5, 3), mesh, reshard=reshard)
    everything = 8 * sum(numels)
    gathers = 2 if reshard else 1  # forward, and backward again
    for is_last in (False, False, True):
        net.set_requires_gradient_sync(is_last)
        with count(groups) as traffic:
            net(torch.ones(2, 4).double()).sum().backward()
        scattered = (2, everything) if is_last else (0, 0)
        gathered = (2 * gathers, gathers * everything)  # also where not resharded after forward: backward reshards
        assert of(traffic, "dp_shard") == nonzero(all_gather=gathered, reduce_scatter=scattered)


@on_ranks(2)
def test_fsdp_that_stays_gathered_between_microbatches(world: World) -> None:
    mesh, groups = world_mesh(world)
    net, numels = sharded((4, 5, 3), mesh, reshard=False)
    everything = 8 * sum(numels)
    for is_first, is_last in ((True, False), (False, False), (False, True), (True, True)):
        net.set_requires_gradient_sync(is_last)
        net.set_reshard_after_backward(is_last)
        with count(groups) as traffic:
            net(torch.ones(2, 4).double()).sum().backward()
        gathered, scattered = ((2, everything) if now else (0, 0) for now in (is_first, is_last))
        assert of(traffic, "dp_shard") == nonzero(all_gather=gathered, reduce_scatter=scattered)


@on_ranks(4)
def test_hsdp_reduces_its_own_shard_across_replicas(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    groups = {axis: mesh.get_group(axis) for axis in ("dp_replicate", "dp_shard")}
    net, numels = sharded((4, 5, 3), mesh, reshard=True)
    everything = 8 * sum(numels)
    for reduces in (False, True):
        net.set_requires_all_reduce(reduces)
        with count(groups) as traffic:
            net(torch.ones(2, 4).double()).sum().backward()
        shard = traffic.to_mapping()["dp_shard"]
        assert shard["all_gather"] == {"calls": 4, "bytes": 2 * everything}
        assert shard["reduce_scatter"] == {"calls": 2, "bytes": everything}
        assert traffic.of_axis("dp_replicate") == ((2, everything // 2) if reduces else (0, 0))
        assert traffic.calls["dp_replicate", "all_reduce"] == traffic.of_axis("dp_replicate").calls
        assert set(traffic.to_mapping()) <= set(groups)


@on_ranks(2)
def test_fsdp_gathers_in_the_precision_of_compute_and_reduces_in_its_own(world: World) -> None:
    mesh, groups = world_mesh(world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net, numels = sharded((4, 5, 3), mesh, reshard=True, dtype=torch.float32, mp_policy=policy)
    with count(groups) as traffic:
        net(torch.ones(2, 4)).sum().backward()
    assert of(traffic, "dp_shard") == {
        "all_gather": (4, 2 * 2 * sum(numels)),
        "reduce_scatter": (2, 4 * sum(numels)),
    }


@on_ranks(2)
def test_fsdp_gathers_frozen_parameters_but_reduces_no_gradient_of_theirs(world: World) -> None:
    mesh, groups = world_mesh(world)
    layer = nn.Linear(4, 5)
    layer.weight.requires_grad_(False)
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    with count(groups) as traffic:
        layer(torch.ones(2, 4)).sum().backward()
    assert of(traffic, "dp_shard") == {
        "all_gather": (2, 2 * 4 * padded_numel([(5, 4), (5,)], 2)),
        "reduce_scatter": (1, 4 * padded_numel([(5,)], 2)),
    }


@on_ranks(2)
def test_as_many_collectives_as_torch_counts(world: World) -> None:
    mesh, groups = world_mesh(world)
    net, _ = sharded((4, 5, 3), mesh, reshard=True)
    with warnings.catch_warnings(), CommDebugMode() as reference, count(groups) as traffic:
        warnings.simplefilter("ignore")  # the hooks of CommDebugMode make FSDP2 fear for its own
        net(torch.ones(2, 4).double()).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert sum(traffic.calls.values()) == reference.get_total_counts() == 4 + 2 + 1
    # A partial norm for each parameter; torch 2.11 sends it over a group of DTensor's own.
    assert traffic.bytes["dp_shard", "all_reduce"] + traffic.bytes["other", "all_reduce"] == 4 * 8


# ---- DTensor --------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("rows", [8, 5])
def test_dtensor(world: World, rows: int) -> None:
    n, padded = world.size, math.ceil(rows / world.size) * world.size
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    groups = {"tp": mesh.get_group()}
    by_rows = distribute_tensor(torch.ones(rows, 6), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(rows, 6), mesh, [Partial()])
    with count(groups) as gathered:
        assert by_rows.full_tensor().shape == (rows, 6)
    assert of(gathered, "tp") == {"all_gather": (1, 4 * padded * 6)}
    with count(groups) as scattered:
        partial.redistribute(placements=[Shard(0)]).to_local()
    assert of(scattered, "tp") == {"reduce_scatter": (1, 4 * padded * 6)}
    with count(groups) as reduced:
        partial.redistribute(placements=[Replicate()]).to_local()
    assert of(reduced, "tp") == {"all_reduce": (1, 4 * rows * 6)}
    with count(groups) as implied:  # not linear, so that DTensor has to reduce first, of its own accord
        torch.relu(partial)
    assert implied.of_axis("tp").calls == 1


@on_ranks(2)
def test_dtensor_backward(world: World) -> None:
    mesh, groups = world_mesh(world)
    local = torch.ones(2, 6, requires_grad=True)
    with count(groups) as forward:
        full = DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        out = full.to_local(grad_placements=[Partial()]) * 3
    with count(groups) as backward:
        out.sum().backward()
    assert of(forward, "dp_shard") == {"all_gather": (1, 4 * 4 * 6)}
    assert of(backward, "dp_shard") == {"reduce_scatter": (1, 4 * 4 * 6)}


# ---- pipelining -----------------------------------------------------------------------------------------------------

NUM_MICROBATCHES = 4
WIDTHS = (4, 5, 3)
MICROBATCH = 2


def pipeline(group: dist.ProcessGroup, *, is_static: bool) -> tuple[Schedule1F1B, int]:
    """Two linears on two stages; with `is_static` shapes are given, without they are found out by running a stage."""
    stage = dist.get_rank(group)
    shapes: dict[str, Any] = {}
    if is_static:  # they say whether a gradient comes back, too
        example = [torch.empty(MICROBATCH, width, dtype=torch.float64, requires_grad=True) for width in WIDTHS]
        shapes = {"input_args": (example[stage],), "output_args": (example[stage + 1],)}
    layer = nn.Linear(WIDTHS[stage], WIDTHS[stage + 1], dtype=torch.float64)
    part = PipelineStage(layer, stage, 2, torch.device("cpu"), group=group, **shapes)
    return Schedule1F1B(part, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss), stage


def step(schedule: Schedule1F1B, stage: int) -> None:
    batch = NUM_MICROBATCHES * MICROBATCH
    if stage == 0:
        schedule.step(torch.ones(batch, WIDTHS[0], dtype=torch.float64))
    else:
        schedule.step(target=torch.ones(batch, WIDTHS[2], dtype=torch.float64), losses=[])


@on_ranks(2, 4)
@pytest.mark.parametrize("is_static", [True, False])
def test_pipeline_sends_each_boundary_once_per_microbatch(world: World, is_static: bool) -> None:
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "pp"))
    groups = {"pp": mesh.get_group("pp")}
    schedule, stage = pipeline(groups["pp"], is_static=is_static)
    with count(groups) as first:
        step(schedule, stage)
    boundary = (NUM_MICROBATCHES, NUM_MICROBATCHES * MICROBATCH * WIDTHS[1] * 8)  # the same way forth and back
    for _ in range(2):
        with count(groups) as steady:
            step(schedule, stage)
        assert of(steady, "pp") == {"send": boundary, "recv": boundary}
        assert steady.of_axis("pp") == boundary
    calls, num_bytes = (a - b for a, b in zip(first.of_axis("pp"), boundary, strict=True))
    if is_static:
        assert (calls, num_bytes) == (1, 4)  # neighbours greet each other with one int32
    else:  # and tell each other shapes as a length (8 bytes) and a pickle; before torch 2.13 only towards the next
        assert (calls == 3 and num_bytes > 4 + 8) or (stage == 1 and (calls, num_bytes) == (1, 4))
