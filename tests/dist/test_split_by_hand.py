"""Layers that a model's author has split, with gathered outputs and whole inputs: equal to torch's on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.comm.world import World
from shoal.train.run import Run
from tests.dist.pool import on_ranks
from tests.rejects import rejects


class Net(nn.Module):
    """Three layers read one tensor: two return all their features, the third its part, for a layer that takes it."""

    def __init__(self, column: Any = nn.Linear, row: Any = nn.Linear, **split: Any) -> None:
        super().__init__()
        whole, cut = ({"gather_output": True}, {"input_is_parallel": False}) if split else ({}, {})
        torch.manual_seed(0)
        self.entry = nn.Linear(6, 6)
        self.one, self.two = column(6, 8, **split, **whole), column(6, 8, **split, **whole)
        self.up, self.down = column(6, 8, **split), row(8, 8, **split)
        self.last = row(8, 5, **split, **cut)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x).tanh()
        mixed = self.one(x).softmax(-1) + self.down(self.up(x).sin()) * self.two(x)
        return self.last(mixed)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 5, (4,), generator=generator)


def one_device() -> dict[str, Tensor]:
    model, (inputs, labels) = Net().double(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return dict(model.named_parameters())


@on_ranks(2)
def test_gathered_outputs_and_whole_inputs_train_as_on_one_device(world: World) -> None:
    run = Run("tp=2 fp64", world=world)
    model = Net(shoal.ColumnParallelLinear, shoal.RowParallelLinear, tensor=run.tensor)
    assert model.one.weight.shape == (4, 6)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(2):
        run.step(samples())
    found = {name: tensor for name, tensor in run.composed.full_tensors("weight") if tensor is not None}
    for name, expected in one_device().items() if world.rank == 0 else ():
        torch.testing.assert_close(found[name], expected.detach(), rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_gathered_outputs_where_tokens_are_divided(world: World) -> None:
    class Tokens(nn.Module):
        def __init__(self, run: Run) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.blocks = nn.ModuleList([shoal.ColumnParallelLinear(4, 8, tensor=run.tensor, gather_output=True)])

        def describe(self) -> shoal.Description:
            splits = {"embed": shoal.Split.VOCABULARY, "blocks.*": shoal.Split.COLUMN}
            return shoal.Description(before_blocks=("embed",), blocks=("blocks.0",), splits=splits)

    run = Run("tp=2 sp=on", world=world)
    with rejects("T050", "blocks.0", "gather_output=True", "sp=off"):
        run.prepare(Tokens(run))
