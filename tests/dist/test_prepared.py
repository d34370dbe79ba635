"""A user's DataLoader, model and loop over several ranks: ragged ends, evaluation, buffers, unused parameters."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks
from tests.rejects import rejects


def data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 5, (size,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 5).double()


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def one_epoch(world: World, size: int, way: str, plan: str = "") -> tuple[list[float], Tensor, float]:
    """Losses, weights and evaluation after an epoch of batches of 4; the last one has `size % 4` samples."""
    run = Run(f"fp64 mb=1 {plan}", world=world, loss=mean_loss if way == "own loss" else None)
    model = network()
    model, _, loader, held_out = run.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        DataLoader(data(size), batch_size=4),
        DataLoader(data(size), batch_size=4),
    )
    losses = []
    for batch in run.batches(loader):
        if way == "own loop":
            for inputs, labels in run.microbatches(batch):
                run.backward(F.cross_entropy(model(inputs), labels))
            losses.append(float(run.update().loss))
        elif way == "taken apart":
            inputs, labels = batch
            losses.append(float(run.step((inputs, labels))))
        else:
            losses.append(float(run.step(batch)))
    weight = dict(run.composed.full_tensors("weight"))["weight"]
    return losses, weight if weight is not None else torch.zeros(()), run.evaluate(held_out)


def plain_epoch(size: int) -> tuple[list[float], Tensor, float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for inputs, labels in DataLoader(data(size), batch_size=4):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    inputs, labels = data(size).tensors
    assert isinstance(model.weight, Tensor)
    return losses, model.weight.detach(), F.cross_entropy(model(inputs), labels).item()


@pytest.mark.parametrize("way", ["step", "own loss", "own loop", "taken apart"])
@pytest.mark.parametrize("size", [9, wide(10)])
def test_a_last_batch_smaller_than_the_world_computes_what_one_process_does(pool: Pool, size: int, way: str) -> None:
    """Ranks without a sample take the step with one of another's, which must count for nothing."""
    check(pool.run(one_epoch, 4, size, way), size)


@pytest.mark.parametrize("way", ["step", "own loop"])
@pytest.mark.parametrize("plan", ["zero=1", "zero=3"])
@pytest.mark.parametrize("size", [wide(9), 11])
def test_ranks_with_fewer_samples_meet_the_others_in_every_forward(pool: Pool, size: int, plan: str, way: str) -> None:
    """Three samples on two ranks are one microbatch here and two there, and sharded ranks meet in each forward."""
    check(pool.run(one_epoch, 2, size, way, plan), size)


def check(ranks: list[tuple[list[float], Tensor, float]], size: int) -> None:
    losses, weight, evaluation = plain_epoch(size)
    for ours, _, our_evaluation in ranks:
        assert ours == pytest.approx(losses, rel=1e-12)
        assert our_evaluation == pytest.approx(evaluation, rel=1e-12)
    torch.testing.assert_close(ranks[0][1], weight, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_a_training_loop_over_the_loader_itself_is_refused(world: World) -> None:
    run = Run("fp64", world=world)
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    loader = run.prepare(DataLoader(data(9), batch_size=4))
    for batch in loader:
        with pytest.raises(ShoalError, match=r"for batch in run\.batches"):
            run.step(batch)
        with pytest.raises(ShoalError, match=r"for batch in run\.batches"):
            run.backward(mean_loss(model, batch))


@on_ranks(2)
def test_numbers_of_ones_own_are_summed(world: World) -> None:
    run = Run("fp64", world=world)
    assert run.sum(1, world.rank) == [2.0, 1.0]


class Masked(nn.Module):
    """Batch norm, and a constant of each rank's own, which must not be averaged."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 5)
        self.register_buffer("mask", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(self.norm(inputs))


@on_ranks(2)
def test_a_step_averages_statistics_and_leaves_constants(world: World) -> None:
    run = Run("fp64", world=world)
    model = Masked()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.mask.fill_(world.rank)
    inputs = torch.full((4, 6), float(world.rank), dtype=torch.float64)
    batch = inputs + torch.eye(4, 6, dtype=torch.float64)
    run.step((batch, torch.tensor([0, 1, 2, 3])))
    means = world.all_gather_object(0.1 * batch.mean(0))
    torch.testing.assert_close(model.norm.running_mean, (means[0] + means[1]) / 2)
    run.evaluate([(inputs, torch.tensor([0, 1, 2, 3]))])
    torch.testing.assert_close(model.norm.running_mean, (means[0] + means[1]) / 2)
    assert model.mask == world.rank


class Branching(nn.Module):
    """One of its two halves has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


@on_ranks(2)
def test_unused_parameters_are_explained_and_can_be_allowed(world: World) -> None:
    batch = torch.ones(2, 6, dtype=torch.float64), torch.tensor([0, 1])
    run = Run("fp64", world=world)
    model = Branching()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.step(batch)
    words = "got unused.weight, unused.bias without a gradient in the last step"
    with rejects("T034", words, "--run.find_unused_parameters true"):
        run.step(batch)
    run = Run("fp64", world=world, find_unused_parameters=True)
    model = Branching()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        run.step(batch)


def masks(world: World, size: int) -> list[float]:
    """What dropout would draw for each microbatch of this rank in a ragged batch of `size`."""
    run = Run("fp64 mb=1", world=world)
    run.prepare(network())
    loader = run.prepare(DataLoader(data(size), batch_size=size))
    return [float(torch.rand(())) for batch in run.batches(loader) for _ in run.microbatches(batch)]


def test_every_sample_has_its_own_randomness_on_any_number_of_ranks(pool: Pool) -> None:
    alone = pool.run(masks, 1, 5)[0]
    assert len(set(alone)) == 5
    assert [value for rank in pool.run(masks, 2, 5) for value in rank] == alone


class _Named(NamedTuple):
    inputs: Tensor
    labels: Tensor


@on_ranks(2)
def test_batches_of_a_class_of_the_user_are_evaluated_where_ranks_meet(world: World) -> None:
    """A rank that has no batch left computes its own last one once more: no object of the user travels."""
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    run = Run("zero=3", world=world)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [_Named(torch.full((2, 4), float(i)), torch.tensor([0, 1])) for i in range(2 - world.rank)]
    assert run.evaluate(batches) == pytest.approx(math.log(3), rel=1e-6)
