"""Batch norm over several ranks: running statistics are equal everywhere, and `sync_batch_norm` computes what one
process with the whole batch does.

Running statistics used to be averaged inside `run.evaluate` and `run.save` alone: in a validation loop of a script's
own, `running_mean` was -0.1149 on one rank and -0.1203 on the other, and so were the logits of the same sample.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.blueprint.description import Description
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks


class Block(nn.Module):
    """A convolution with batch norm."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.convolution(x)))


class Net(nn.Module):
    """Samples of 3 channels and 4 places to 5 logits."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.BatchNorm1d(3, affine=False)
        self.blocks = nn.ModuleList(Block(momentum) for _ in range(2))
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x.flatten(1))
        return out

    def describe(self) -> Description:
        return Description(blocks=("blocks.0", "blocks.1"), before_blocks=("first",), after_blocks=("last",))


def data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(size, 3, 4, generator=generator, dtype=torch.float64) * 2 + 1
    return TensorDataset(inputs, torch.randint(0, 5, (size,), generator=generator))


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def own_run(world: World, plan: str, **options: Any) -> Run:
    run = Run(f"fp64 {plan}", world=world, **options)
    model = Net().double()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    return run


# ---- running statistics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["", "mb=2", "zero=3", "zero=1 recompute=full"])
@on_ranks(2)
def test_an_evaluation_of_ones_own_has_the_same_statistics_on_every_rank(world: World, plan: str) -> None:
    run = own_run(world, plan)
    loader = run.prepare(DataLoader(data(9), batch_size=6))
    for batch in run.batches(loader):
        run.step(batch)
    run.model.eval()
    every = world.all_gather_object(statistics(run.module))
    assert all(torch.equal(every[0][name], every[1][name]) for name in every[0])
    assert every[0]["first.running_mean"].abs().min() > 0.05  # they have learnt something
    x = data(4).tensors[0]
    if not plan.startswith("zero"):
        if run.is_main:  # alone: the others never come here
            run.model(x)
        outputs = world.all_gather_object(run.module(x).detach())
        assert torch.equal(outputs[0], outputs[1])
    weights = run.weights()
    if run.is_main:
        assert all(torch.equal(weights[name], buffer) for name, buffer in every[0].items())


@on_ranks(2)
def test_they_are_the_mean_over_ranks_and_training_does_not_change(world: World) -> None:
    """Each rank normalises with its own samples, as before; only the running statistics are averaged."""
    run, alone = own_run(world, "mb=2"), Net().double()
    inputs, labels = data(8).tensors
    own = slice(4 * world.rank, 4 * world.rank + 4)
    run.step((inputs[own], labels[own]))
    for start in (0, 2):
        alone(inputs[own][start : start + 2])
    both = world.all_gather_object(statistics(alone))
    for name, buffer in statistics(run.module).items():
        mean = (both[0][name].double() + both[1][name].double()) / 2
        torch.testing.assert_close(buffer.double(), mean, rtol=1e-12, atol=1e-12)


@on_ranks(4)
def test_stages_agree_with_their_replicas_alone(world: World) -> None:
    run = own_run(world, "pp=2 dp_replicate=2 zero=0 mb=2")
    inputs, labels = data(8).tensors
    run.step((inputs[4 * run.coordinate :][:4], labels[4 * run.coordinate :][:4]))
    every = world.all_gather_object((run.mesh.coordinate["pp"], statistics(run.module)))
    for stage in (0, 1):
        first, second = (buffers for place, buffers in every if place == stage)
        assert first
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(run.weights()) == (len(Net().state_dict()) if run.is_main else 0)


@on_ranks(2)
def test_local_sgd_replicas_agree_after_an_exchange(world: World, tmp_path: Path) -> None:
    """Between meetings replicas train apart and send nothing."""
    run = own_run(world, "sync=local:2")
    inputs, labels = data(8).tensors
    own = slice(4 * world.rank, 4 * world.rank + 4)
    run.step((inputs[own], labels[own]))
    before = world.all_gather_object(statistics(run.module))
    assert not torch.equal(before[0]["first.running_mean"], before[1]["first.running_mean"])
    run.sync_replicas()
    after = world.all_gather_object(statistics(run.module))
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


@pytest.mark.parametrize("plan", ["recompute=full", "recompute=selective"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_block_that_is_computed_again_updates_its_statistics_once(plan: str, momentum: float | None) -> None:
    inputs, labels = data(6).tensors
    found = []
    for words in ("recompute=none", plan):
        with Run(f"fp64 {words}") as run:
            model = Net(momentum).double()
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            run.step((inputs, labels))
            run.step((inputs, labels))
            found.append(statistics(run.module))
            assert model.blocks[0].norm.momentum == momentum  # type: ignore[union-attr]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# ---- statistics of the whole batch -----------------------------------------------------------------------------------


def trained(world: World, size: int, plan: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], float]:
    """Losses, gradients of the last step, weights and statistics, and an evaluation, of two epochs."""
    run = own_run(world, plan, sync_batch_norm=True)
    loader, held_out = run.prepare(DataLoader(data(size), batch_size=6), DataLoader(data(size), batch_size=4))
    gradients: dict[str, Tensor] = {}

    def note() -> None:
        whole = dict(run.composed.full_tensors("gradient"))
        gradients.update({name: tensor for name, tensor in whole.items() if tensor is not None})

    run.on_gradients = note
    losses = [float(run.step(batch)) for _ in range(2) for batch in run.batches(loader)]
    return losses, gradients, run.weights(), run.evaluate(held_out)


def plain(size: int, ranks: int, mb: int | None) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], float]:
    """The same on one device, in plain torch: each microbatch is that of all ranks together."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, gradients = [], {}
    for inputs, labels in (batch for _ in range(2) for batch in DataLoader(data(size), batch_size=6)):
        loss = 0.0
        optimizer.zero_grad()
        for rows in microbatches(len(labels), ranks, mb):
            part = F.cross_entropy(model(inputs[rows]), labels[rows], reduction="sum") / len(labels)
            part.backward()
            loss += part.item()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
        optimizer.step()
        losses.append(loss)
    inputs, labels = data(size).tensors
    model.eval()
    return losses, gradients, model.state_dict(), F.cross_entropy(model(inputs), labels).item()


def microbatches(size: int, ranks: int, mb: int | None) -> list[list[int]]:
    bounds = [size * rank // ranks for rank in range(ranks + 1)]
    shares = [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]
    width = mb or size
    largest = max(map(len, shares))
    return [[i for share in shares for i in share[k : k + width]] for k in range(0, largest, width)]


@pytest.mark.parametrize(
    ("size", "ranks", "plan"),
    [
        wide(12, 2, ""),  # even shares
        (11, 2, ""),  # the last batch has 3 and 2 samples
        (8, 4, "zero=0"),  # the last batch has 2 samples for 4 ranks: two ranks have a stand-in
        wide(12, 2, "mb=2"),
        (11, 2, "mb=1"),  # 3 and 2 microbatches: one rank repeats one for nothing
        (11, 2, "zero=3"),
        (11, 2, "zero=1 recompute=full"),
        wide(12, 4, "dp_replicate=2 dp_shard=2 zero=2"),
    ],
)
def test_the_whole_batch_is_normalised_as_one_process_does(pool: Pool, size: int, ranks: int, plan: str) -> None:
    mb = next((int(word[3:]) for word in plan.split() if word.startswith("mb=")), None)
    losses, gradients, weights, evaluation = plain(size, ranks, mb)
    found = pool.run(trained, ranks, size, plan)
    for ours, _, _, our_evaluation in found:
        assert ours == pytest.approx(losses, rel=1e-10)
        assert our_evaluation == pytest.approx(evaluation, rel=1e-10)
    _, our_gradients, our_weights, _ = found[0]
    assert our_weights.keys() == weights.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-10, atol=1e-10)
    for name, weight in weights.items():
        torch.testing.assert_close(our_weights[name].double(), weight.double(), rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_a_loop_and_a_copy_of_ones_own_work_too(world: World) -> None:
    run = own_run(world, "mb=2", sync_batch_norm=True)
    loader = run.prepare(DataLoader(data(11), batch_size=6))
    for batch in run.batches(loader):
        for inputs, labels in run.microbatches(batch):
            run.backward(F.cross_entropy(run.model(inputs), labels))
        run.update()
    every = world.all_gather_object(statistics(run.module))
    assert all(torch.equal(every[0][name], every[1][name]) for name in every[0])
    run.model.eval()
    if run.is_main:
        run.module(data(4).tensors[0])  # alone: nothing is shared in an evaluation
        copied = copy.deepcopy(run.module)  # a moving average of the weights, say
        assert torch.equal(copied(data(4).tensors[0]), run.module(data(4).tensors[0]))


class OwnNorm(nn.BatchNorm1d):
    """Somebody's own."""


@on_ranks(2)
def test_it_is_rejected_where_it_makes_no_sense(world: World) -> None:
    def refused(plan: str, model: nn.Module, what: str, on: World | None = world) -> None:
        run = Run(f"fp64 {plan}", world=on, sync_batch_norm=True)
        with pytest.raises(ShoalError, match=what) as caught:
            run.prepare(model.double())
        assert "sync_batch_norm=False" in str(caught.value)

    refused("", nn.Linear(3, 4), "needs a batch norm in the model")
    refused("pp=2 mb=1", Net(), "pp=2")
    refused("sync=local:2", Net(), "sync=local:2")
    refused("", nn.Sequential(OwnNorm(3)), "0 is a OwnNorm")
    with pytest.raises(ShoalError, match="sync_batch_norm must be True or False, got 'yes'"):
        Run("fp64", world=world, sync_batch_norm="yes")  # type: ignore[arg-type]
    run = own_run(world, "", sync_batch_norm=True)
    assert isinstance(run.module.first, nn.BatchNorm1d)  # type: ignore[union-attr]


@on_ranks(2)
def test_one_value_of_a_channel_is_no_batch(world: World) -> None:
    run = Run("fp64", world=world, sync_batch_norm=True)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = run.prepare(DataLoader(TensorDataset(torch.randn(1, 3), torch.tensor([1])), batch_size=2))
    batch = next(run.batches(loader))
    with pytest.raises(ShoalError, match="more than one value per channel"):
        run.step(batch)
