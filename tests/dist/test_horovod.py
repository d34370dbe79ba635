"""`shoal.horovod` on gloo ranks against plain torch: every collective, names in any order, optimizers, process sets."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.horovod as hvd
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.horovod import context
from shoal.horovod.engine.adasum import combine
from shoal.horovod.errors import MismatchError
from tests.dist.pool import on_ranks


@contextmanager
def started() -> Iterator[tuple[int, int]]:
    """Rank and size, between `init` and `shutdown`."""
    hvd.init()
    try:
        yield hvd.rank(), hvd.size()
        hvd.barrier()
    finally:
        hvd.shutdown()


def value_of(rank: int, *shape: int) -> Tensor:
    """What a rank has, known on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def same(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@on_ranks(2, 3)
def test_reductions_equal_those_of_one_process(world: World) -> None:
    with started() as (rank, size):
        every = torch.stack([value_of(each, 3, 2) for each in range(size)])
        mine = every[rank].clone()
        same(hvd.allreduce(mine), every.mean(0))
        same(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), every.sum(0) * 1.5)
        same(hvd.allreduce(mine, op=hvd.Min), every.amin(0))
        same(hvd.allreduce(mine, op=hvd.Max), every.amax(0))
        same(hvd.allreduce(mine, op=hvd.Product), every.prod(0))
        same(mine, every[rank])  # the input is as it was
        columns = every.transpose(1, 2)[rank]  # not contiguous
        same(hvd.allreduce_(columns.clone(memory_format=torch.preserve_format)), every.mean(0).T)
        both = hvd.grouped_allreduce([mine, mine.float()], op=hvd.Sum)
        same(both[0], every.sum(0))
        assert both[1].dtype == torch.float32
        assert hvd.allreduce(torch.tensor([7 + rank]), op=hvd.Average).item() == (7 * size + sum(range(size))) // size
        halves = hvd.allreduce(mine, compression=hvd.Compression.fp16)
        torch.testing.assert_close(halves, every.mean(0), rtol=1e-2, atol=1e-2)
        rows = torch.stack([value_of(each, size + 1, 2) for each in range(size)])
        whole = rows.sum(0)
        parts = hvd.allgather(hvd.reducescatter(rows[rank], op=hvd.Sum))
        same(parts, whole)


@on_ranks(3)
def test_data_moves_as_it_is(world: World) -> None:
    with started() as (rank, size):
        ragged = [torch.full((each, 2), each, dtype=torch.int16) for each in range(size)]  # rank 0 has no rows
        assert torch.equal(hvd.allgather(ragged[rank]), torch.cat(ragged))
        flags = torch.tensor([rank == 1, True])
        assert hvd.broadcast(flags, root_rank=1).tolist() == [True, True]
        target = value_of(rank, 4)
        assert hvd.broadcast_(target, 2) is target
        same(target, value_of(2, 4))
        splits = [rank + each for each in range(size)]
        sent = torch.arange(sum(splits)) + 100 * rank
        arrived, counts = hvd.alltoall(sent, splits=splits)
        assert counts.tolist() == [each + rank for each in range(size)]
        expected = [
            torch.arange(sum(each + other for other in range(size)))[sum(each + other for other in range(rank)) :][
                : each + rank
            ]
            + 100 * each
            for each in range(size)
        ]
        assert torch.equal(arrived, torch.cat(expected))
        sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,), check_invariants=True)
        reduced = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()
        assert reduced.tolist() == [1.0, 1.0, 1.0, 2.0 * size]


@on_ranks(3)
def test_ranks_may_call_in_any_order(world: World) -> None:
    with started() as (rank, size):
        names = [f"layer.{index}" for index in range(20)]
        order = names[rank:] + names[:rank] if rank < 2 else names[::-1]
        handles = {
            name: hvd.allreduce_async(torch.full((2,), float(names.index(name) + rank)), name=name, op=hvd.Sum)
            for name in order
        }
        for name in names:
            assert hvd.synchronize(handles[name]).tolist() == [size * names.index(name) + 3.0] * 2
        assert hvd.synchronize(handles["layer.0"]) is None  # a handle is used once


@on_ranks(2)
def test_a_mismatch_is_raised_on_every_rank_and_training_goes_on(world: World) -> None:
    with started() as (rank, _):
        calls: dict[str, Any] = {
            "the shape": lambda: hvd.allreduce(torch.ones(3 + rank), name="x"),
            "the dtype": lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32 if rank else torch.float32), name="x"),
            "op": lambda: hvd.allreduce(torch.ones(3), op=hvd.Max if rank else hvd.Sum, name="x"),
            "root_rank": lambda: hvd.broadcast(torch.ones(3), root_rank=rank, name="x"),
            "the shape after the first dim": lambda: hvd.allgather(torch.ones(2, 3 + rank), name="x"),
            "the number of tensors": lambda: hvd.grouped_allreduce([torch.ones(2)] * (1 + rank), name="x"),
        }
        for what, call in calls.items():
            with pytest.raises(MismatchError, match=rf"{what} must be the same on every rank.*H002"):
                call()
        assert hvd.allreduce(torch.ones(1), name="x").item() == 1.0


@on_ranks(2)
def test_rejections_of_one_rank(world: World) -> None:
    with started() as (rank, size):
        if rank == 0:  # before the other rank has called it, so it is under way for certain
            handle = hvd.allreduce_async(torch.ones(1), name="twice")
            with pytest.raises(ShoalError, match="H003"):
                hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.barrier()
        if rank == 1:
            handle = hvd.allreduce_async(torch.ones(1), name="twice")
        assert hvd.synchronize(handle).item() == 1.0
        for code, call in {
            "H007": lambda: hvd.alltoall(torch.ones(2 * size + 1)),
            "H008": lambda: hvd.allgather(torch.tensor(1.0)),
            "H009": lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
            "H010": lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])),
            "H017": lambda: hvd.allreduce(torch.ones(2).to_sparse()),
            "H018": lambda: hvd.broadcast(torch.ones(1), root_rank=size),
        }.items():
            with pytest.raises(ShoalError, match=code):
                call()


@on_ranks(3)
def test_joined_ranks_contribute_zeros(world: World) -> None:
    with started() as (rank, size):
        for step in range(rank + 1):  # rank 0 has one batch, rank 2 has three
            total = hvd.allreduce(torch.ones(2, dtype=torch.float64), name=f"step.{step}")
            same(total, torch.full((2,), (size - step) / size, dtype=torch.float64))
        assert hvd.join() == 2
        assert hvd.allreduce(torch.ones(1)).item() == 1.0  # unnamed ones match again
        if rank:
            with pytest.raises(MismatchError, match="H004"):
                hvd.allgather(torch.ones(1), name="late")
        hvd.join()


@on_ranks(4)
def test_adasum_equals_its_formula(world: World) -> None:
    with started() as (rank, size):
        every = [value_of(each, 5, 3) for each in range(size)]
        expected = combine(combine(every[0], every[1]), combine(every[2], every[3]))
        same(hvd.allreduce(every[rank], op=hvd.Adasum), expected)
        a, b = every[0].flatten(), every[1].flatten()
        first = a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b))
        same(combine(every[0], every[1]).flatten(), first)
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            same(hvd.allreduce(every[rank], op=hvd.Adasum, process_set=pair).flatten(), first)


@on_ranks(3)
def test_process_sets_work_beside_each_other(world: World) -> None:
    with started() as (rank, _size):
        ends, rest = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1]))
        assert (ends.process_set_id, ends.ranks, ends.size()) == (1, [0, 2], 2)
        mine = ends if rank != 1 else rest
        total = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, name="same", process_set=mine)
        assert total.item() == (2.0 if rank != 1 else 1.0)
        if ends.included():
            assert hvd.broadcast(torch.tensor([rank]), root_rank=2, process_set=ends).item() == 2
            assert hvd.allgather_object(rank, process_set=ends) == [0, 2]
            hvd.barrier(ends)
        else:
            with pytest.raises(ShoalError, match="H010"):
                hvd.allreduce(torch.ones(1), process_set=ends)
        with pytest.raises(ShoalError, match="exists already"):
            hvd.add_process_set([0, 2])
        with pytest.raises(MismatchError, match="H002"):
            hvd.add_process_set([rank])
        assert hvd.remove_process_set(ends)
        assert (ends.size(), hvd.remove_process_set(ends)) == (None, False)
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert hvd.add_process_set([0, 2]).process_set_id == 3


@on_ranks(2)
def test_objects_travel_as_plain_data(world: World) -> None:
    with started() as (rank, size):
        value = {"epoch": 3, 0: [1.5, None, True], "names": {"a", "b"}, "raw": b"xyz", "weights": torch.ones(2)}
        arrived = hvd.broadcast_object(value if rank == 1 else None, root_rank=1)
        assert torch.equal(arrived.pop("weights"), torch.ones(2))
        assert arrived == {"epoch": 3, 0: [1.5, None, True], "names": {"a", "b"}, "raw": b"xyz"}
        assert hvd.allgather_object((rank, "x" * rank)) == [(each, "x" * each) for each in range(size)]
        with pytest.raises(ShoalError, match="H011"):  # on both ranks, though one of them has the object
            hvd.broadcast_object(print if rank == 0 else None)


@on_ranks(2)
def test_gradients_pass_through_collectives(world: World) -> None:
    with started() as (rank, size):
        weights = [value_of(10 + each, 3) for each in range(size)]
        x = value_of(rank, 3).requires_grad_()
        (hvd.allreduce(x, op=hvd.Sum) * weights[rank]).sum().backward()
        assert x.grad is not None
        same(x.grad, weights[0] + weights[1])
        rows = value_of(rank, rank + 1, 2).requires_grad_()
        factor = value_of(20, 3, 2)
        (hvd.allgather(rows) * factor).sum().backward()
        assert rows.grad is not None
        same(rows.grad, factor[[0]] if rank == 0 else factor[1:])
        sent = value_of(rank, 4).requires_grad_()
        (hvd.alltoall(sent) * (rank + 1)).sum().backward()
        assert sent.grad is not None
        assert sent.grad.tolist() == [1.0, 1.0, 2.0, 2.0]
        with pytest.raises(NotImplementedError, match="H022"):
            hvd.allreduce(x, op=hvd.Max).sum().backward()


@on_ranks(3)
def test_a_lost_rank_fails_the_others_at_once(world: World) -> None:
    """Rank 2 loses its connection, as if it had been killed; ranks 0 and 1 are waiting for it."""
    hvd.init()
    rank = hvd.rank()
    try:
        if rank == 2:
            control: Any = context.engine().control
            control.link.close()
        with pytest.raises(hvd.HorovodInternalError, match=r"has ended without hvd\.shutdown"):
            hvd.allreduce(torch.ones(1), name="x")
        with pytest.raises(hvd.HorovodInternalError, match=r"H00[56]"):  # and at once from then on
            hvd.allreduce(torch.ones(1), name="y")
    finally:
        hvd.shutdown()
    world.barrier()


# ---- optimizers -----------------------------------------------------------------------------------------------------


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained_alone(kind: Any, batches: list[Tensor], labels: list[Tensor], **options: Any) -> nn.Module:
    model = model_of(0)
    optimizer = kind(model.parameters(), **options)
    for x, y in zip(batches, labels, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {}),
    (torch.optim.AdamW, {"lr": 0.01}, {"groups": 2}),
    (torch.optim.SGD, {"lr": 0.1}, {"gradient_predivide_factor": 2.0}),
]


@on_ranks(2)
def test_distributed_optimizer_equals_one_process(world: World) -> None:
    batches, labels = [value_of(step, 8, 4) for step in range(3)], [value_of(50 + step, 8, 3) for step in range(3)]
    with started() as (rank, size):
        for kind, options, distributed in CASES:
            reference = trained_alone(kind, batches, labels, **options)
            model = model_of(rank)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            inner = kind(model.parameters(), **options)
            optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), **distributed)
            assert isinstance(optimizer, kind)
            for x, y in zip(batches, labels, strict=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x[rank::size]), y[rank::size]).backward()
                if kind is torch.optim.AdamW:
                    optimizer.synchronize()
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
            for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10, msg=f"{kind.__name__} {name}")


class WaitForReductions(torch.autograd.Function):
    """The identity. Its backward returns when all reductions that were begun are done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, optimizer: Any) -> Tensor:
        ctx.optimizer = optimizer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        handles = [handle for handle, _ in ctx.optimizer._handles.values()]
        assert len(handles) == 2  # of the last layer, whose gradients are complete
        deadline = time.monotonic() + 30
        while not all(map(hvd.poll, handles)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return grads[0], None


@on_ranks(2)
def test_gradients_are_reduced_during_the_backward_pass(world: World) -> None:
    with started():
        model = model_of(0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        inner: Any = WaitForReductions
        model[2](inner.apply(model[:2](value_of(0, 2, 4)), optimizer)).sum().backward()
        optimizer.step()


@on_ranks(2)
def test_passes_are_summed_and_wrong_use_is_rejected(world: World) -> None:
    with started() as (rank, size):
        model = model_of(0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
        )
        for part in range(2):
            model(value_of(10 * part + rank, 2, 4)).sum().backward()
        with pytest.raises(AssertionError, match="H026"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="H013"):
            model(value_of(0, 2, 4)).sum().backward()
        optimizer.synchronize()
        alone = model_of(0)
        for part in range(2):
            for each in range(size):
                (alone(value_of(10 * part + each, 2, 4)).sum() / size).backward()
        grad, expected = model[0].weight.grad, alone[0].weight.grad
        assert isinstance(grad, Tensor)
        assert isinstance(expected, Tensor)
        # The third pass of the rejected call was added on every rank before its hook raised, for the last layer alone.
        same(grad, expected)
        with pytest.raises(ShoalError, match="H012"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters())[:1])
        with pytest.raises(ShoalError, match="H013"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=0)


@on_ranks(2)
def test_a_parameter_without_gradient_takes_part(world: World) -> None:
    with started() as (rank, _):
        model = model_of(0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        before = copy.deepcopy(model)
        x = value_of(1, 2, 4)
        (model(x) if rank == 0 else model[0](x)).sum().backward()  # the last layer has no gradient on rank 1
        optimizer.step()
        before(x).sum().backward()
        expected = before[2].weight - before[2].weight.grad / 2
        same(model[2].weight.detach(), expected.detach())


@on_ranks(2)
def test_adasum_combines_steps(world: World) -> None:
    with started() as (rank, size):
        model, start = model_of(0), model_of(0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), op=hvd.Adasum
        )
        model(value_of(rank, 2, 4)).square().sum().backward()
        optimizer.step()
        steps = []
        for each in range(size):
            alone = model_of(0)
            inner = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
            alone(value_of(each, 2, 4)).square().sum().backward()
            inner.step()
            steps.append(
                [(new - old).detach() for new, old in zip(alone.parameters(), start.parameters(), strict=True)]
            )
        for index, (mine, old) in enumerate(zip(model.parameters(), start.parameters(), strict=True)):
            same(mine.detach(), old.detach() + combine(steps[0][index], steps[1][index]))


@on_ranks(2)
def test_optimizer_state_reaches_a_rank_that_has_none(world: World) -> None:
    with started() as (rank, _):
        model = model_of(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if rank == 0 else 0.5, betas=(0.8, 0.9))
        if rank == 0:
            model(value_of(0, 2, 4)).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        momentum = optimizer.state[model[0].weight]["exp_avg"]
        same(hvd.broadcast(momentum, root_rank=0, name="check"), momentum)
        assert momentum.abs().sum() > 0


@on_ranks(2)
def test_sync_batch_norm_equals_one_process(world: World) -> None:
    with started() as (rank, size):
        every = torch.cat([value_of(each, 4, 3, 5) + 100 for each in range(size)]).requires_grad_()
        mine = every.detach()[4 * rank : 4 * rank + 4].clone().requires_grad_()
        one, ours = nn.BatchNorm1d(3).double(), hvd.SyncBatchNorm(3).double()
        weight = value_of(9, 4 * size, 3, 5)
        (one(every) * weight).sum().backward()
        (ours(mine) * weight[4 * rank : 4 * rank + 4]).sum().backward()
        assert mine.grad is not None
        assert every.grad is not None
        torch.testing.assert_close(mine.grad, every.grad[4 * rank : 4 * rank + 4], rtol=1e-9, atol=1e-9)
        same(ours.running_mean, one.running_mean)
        same(ours.running_var, one.running_var)


# ---- elastic --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_elastic_run_restores_the_last_commit(world: World) -> None:
    with started() as (rank, _):
        model = model_of(rank)
        state = hvd.elastic.TorchState(model=model, epoch=0)
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(1)])

        @hvd.elastic.run
        def train(state: Any) -> list[int]:
            seen = []
            while state.epoch < 3:
                seen.append(state.epoch)
                with torch.no_grad():
                    model[0].weight.add_(1.0)
                if state.epoch == 2 and not resets:
                    raise hvd.HorovodInternalError("a transfer failed")
                state.epoch += 1
                state.commit()
            return seen

        assert train(state) == [2]  # after the failure in epoch 2, from the commit before it
        assert resets == [1]
        same(model[0].weight.detach(), model_of(0)[0].weight.detach() + 3.0)
        assert (state.epoch, hvd.allreduce(torch.ones(1)).item()) == (3, 1.0)
