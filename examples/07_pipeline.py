"""Pipeline parallelism: the model is cut in two stages, one on each rank, and microbatches pass through both.

    python examples/07_pipeline.py

A schedule is the order of the forwards and backwards on a rank. It decides how long a rank waits for the
other rank, and how many activations it keeps, but not the result. So this file draws two schedules, trains
with both, and lets `shoal.verify` compare every gradient and weight with those of one process.

One command shows all of it, so this file starts its ranks itself. Your own script uses `shoal.Run("pp=2 mb=2")`
and is started by torchrun or srun, as example 01 is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shoal
from shoal.blueprint.schedules.draw import draw
from shoal.blueprint.schedules.schedule_orders import make_schedule
from shoal.blueprint.schedules.simulate import StageCost, in_flight, simulate
from shoal.comm.world import World
from shoal.launch.local import launch

FEATURES, CLASSES, NUM_BLOCKS, BATCH, MICROBATCH = 32, 10, 4, 12, 2


class Network(nn.Module):
    """Written for one device. A pipeline needs its `describe` only."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, FEATURES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.enter(inputs)
        for block in self.blocks:  # a stage has only some of them; the others return their input
            x = block(x)
        return self.head(x)

    def describe(self) -> shoal.Description:
        """It may be cut between blocks. Modules before them are on the first stage, modules after them on the last."""
        blocks = tuple(f"blocks.{i}" for i in range(NUM_BLOCKS))
        return shoal.Description(before_blocks=("enter",), blocks=blocks, after_blocks=("head",))


def batch() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(1))
    return inputs, torch.arange(BATCH) % CLASSES


def train(placement, store, plan: str) -> list[float]:
    """Train on one rank. Every rank of a pipeline gets the full batch, and every rank gets the loss."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with shoal.Run(plan, clip=1.0, world=World.start(placement, device="cpu", store=store)) as run:
        model, optimizer = run.prepare(model, optimizer)  # this rank keeps its own stages of the model
        return [run.step(batch()).item() for _ in range(5)]


if __name__ == "__main__":
    for schedule, v in (("1f1b", 1), ("zbv", 2)):  # v: stages on a rank
        plan = f"pp=2 {schedule} mb={MICROBATCH}"
        table = make_schedule(schedule, num_ranks=2, v=v, num_microbatches=BATCH // MICROBATCH)
        timeline = simulate(table, StageCost(forward=1 / v, input_grad=1 / v, weight_grad=1 / v))
        print(f"{plan}: {timeline.bubble:.0%} waiting (predicted), in flight {in_flight(table, [1 / v] * 2 * v)}")
        print(draw(timeline))
        losses = launch(train, (plan,), nproc=2)[0]
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))
        proof = shoal.verify(Network, batch(), plan)
        worst = proof.verdict.worst.grad
        print(f"equal to one process: {proof.verdict.equal}, gradients differ by {worst:.0e} at most\n")
    alone = train(None, None, f"mb={MICROBATCH}")
    print("one process\nlosses", " ".join(f"{loss:.4f}" for loss in alone))
