"""How much of its time does a rank wait in each pipeline schedule, and does the simulation know?

python benchmarks/bubble/run.py [--ranks 2 3 4] [--steps 2] [--ms 200 240 160]

The blocks of the model do not compute: they sleep, for a known time in the forward, in the gradient of their input and
in the gradient of their weight. Asleep, a rank needs no core, so four ranks fit on two; and whatever is measured beside
the sleep is the schedule's waiting, or the runtime's own time.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.blueprint.description import Description
from shoal.blueprint.plan import VIRTUAL_STAGES, Schedule
from shoal.blueprint.schedules.schedule_orders import make_schedule
from shoal.blueprint.schedules.simulate import StageCost, Timeline, simulate
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.train.run import Run

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "looped", "zb", "zbv", "dualpipev")
TOKENS, DIM, VOCABULARY = 4, 8, 16
NOTHING = StageCost(forward=0, input_grad=0, weight_grad=0)


# ---- a model that sleeps --------------------------------------------------------------------------------------------


class Delay(torch.autograd.Function):
    """Hands a tensor on, asleep for a while on the way there and for a while on the way back."""

    @staticmethod
    def forward(context: Any, x: Tensor, there: float, back: float) -> Tensor:
        context.back = back
        time.sleep(there)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(context.back)
        return gradient, None, None


class SleepyBlock(nn.Module):
    """x @ w. The two sleeps of the backward hang on the two arguments of the product:

    x ── Delay (input_grad) ──┐
                              @ ── y        torch's split backward stops at the product: it first follows the
    w ── Delay (weight_grad) ─┘             branch of x alone, and later the branch of w alone
    """

    cost = NOTHING
    """Of every block of this process: a stage is a copy of a part of the model, and no other rank can reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM))

    def forward(self, x: Tensor) -> Tensor:
        weight = Delay.apply(self.weight, 0.0, self.cost.weight_grad)
        product: Tensor = Delay.apply(x, self.cost.forward, self.cost.input_grad) @ weight
        return product


class SleepyModel(nn.Module):
    """An embedding, one block for each stage and a head."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(SleepyBlock() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def describe(self) -> Description:
        blocks = tuple(f"blocks.{i}" for i in range(len(self.blocks)))
        return Description(blocks=blocks, before_blocks=("embed",), after_blocks=("head",))


# ---- on paper and on the ranks --------------------------------------------------------------------------------------


def predicted(word: Schedule, num_ranks: int, cost: StageCost) -> Timeline:
    """The schedule, played with the sleeps.

    The first stage differs: torch leaves its whole backward to W, since no stage waits for the gradient of its
    input (`backward_weight_one_chunk` of torch.distributed.pipelining).
    """
    v = VIRTUAL_STAGES.get(word, 2)
    first = StageCost(forward=cost.forward, input_grad=0, weight_grad=cost.input_grad + cost.weight_grad)
    schedule = make_schedule(word, num_ranks=num_ranks, v=v, num_microbatches=2 * num_ranks)
    return simulate(schedule, [first, *[cost] * (num_ranks * v - 1)])


class Moments(NamedTuple):
    """Of one rank and one step, on the clock that all processes share."""

    began: float
    ended: float
    """When its last backward was done."""
    seconds: tuple[float, ...]
    """Of each of its forwards and backwards, in its order, with what the runtime does there."""


@contextmanager
def counted_seconds() -> Iterator[list[float]]:
    """The seconds of every forward and backward of this process's stages, one after the other."""
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    before = {name: getattr(PipelineStage, name) for name in names}
    seconds: list[float] = []

    def timed(action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            result = action(*arguments, **options)
            seconds.append(time.monotonic() - began)
            return result

        return run

    for name, action in before.items():
        setattr(PipelineStage, name, timed(action))
    try:
        yield seconds
    finally:
        for name, action in before.items():
            setattr(PipelineStage, name, action)


def asleep_and_awake(world: World, word: Schedule, cost: StageCost, num_steps: int) -> tuple[list[Moments], ...]:
    """One rank's part in steps of a run with this schedule, two microbatches for each rank of the pipeline.

    First with nothing to sleep, which also warms up: the first step connects the ranks.
    """
    v = VIRTUAL_STAGES.get(word, 2)
    run = Run(f"pp={world.size} {word} v={v} mb=1", world=world)
    torch.manual_seed(0)  # the same model on every rank
    model = SleepyModel(world.size * v)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    SleepyBlock.cost = NOTHING
    awake = steps(run, num_steps + 1)[1:]
    SleepyBlock.cost = cost
    return steps(run, num_steps), awake


def steps(run: Run, number: int) -> list[Moments]:
    """Steps of a run, each begun by all ranks together."""
    tokens = torch.zeros(2 * run.world.size, TOKENS, dtype=torch.long)
    made: list[Moments] = []
    began = 0.0
    with counted_seconds() as seconds:
        # When the gradients are whole: the last backward is done, and the optimizer has not begun.
        run.on_gradients = lambda: made.append(Moments(began, time.monotonic(), tuple(seconds)))
        for _ in range(number):
            seconds.clear()
            run.world.barrier()
            began = time.monotonic()
            run.step({"tokens": tokens, "labels": tokens})
    return made


class Measured(NamedTuple):
    """Of one step on all ranks."""

    wall: float
    """Seconds from the first rank's beginning to the last rank's end."""
    bubble: float
    """The fraction of all ranks' time in which they were in no forward and no backward."""


def measured(ranks: list[list[Moments]]) -> Measured:
    """The step of median length (of two, the slower), from each rank's part in all of them."""
    made = []
    for parts in zip(*ranks, strict=True):
        wall = max(part.ended for part in parts) - min(part.began for part in parts)
        busy = math.fsum(seconds for part in parts for seconds in part.seconds)
        made.append(Measured(wall, 1 - busy / (len(parts) * wall)))
    return sorted(made)[len(made) // 2]


# ---- the table ------------------------------------------------------------------------------------------------------


def measure(
    placement: Placement, store: dist.Store, cost: StageCost, num_steps: int
) -> list[tuple[list[Moments], ...]]:
    with World.start(placement, store=store, device="cpu", threads=1) as world:
        return [asleep_and_awake(world, word, cost, num_steps) for word in SCHEDULES]


def row(timeline: Timeline, asleep: Measured, awake: Measured) -> dict[str, str]:
    num_actions = max(sum(len(slot.parts) for slot in timeline.table.order(r)) for r in range(timeline.table.num_ranks))
    return {
        "schedule": timeline.table.word,
        "ranks": str(timeline.table.num_ranks),
        "stages": str(timeline.table.num_stages),
        "microbatches": str(timeline.table.num_microbatches),
        "step, predicted": f"{timeline.total * 1e3:.1f} ms",
        "step, measured": f"{asleep.wall * 1e3:.1f} ms",
        "ratio of steps": f"{asleep.wall / timeline.total:.3f}",
        "bubble, predicted": f"{timeline.bubble:.4f}",
        "bubble, measured": f"{asleep.bubble:.4f}",
        "ratio of bubbles": f"{asleep.bubble / timeline.bubble:.3f}",
        "step without sleep, measured": f"{awake.wall * 1e3:.1f} ms",
        "actions a rank": str(num_actions),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--ms", type=float, nargs=3, default=[200.0, 240.0, 160.0], help="forward, input grad, weight grad"
    )
    args = arguments(parser, ranks=[2], steps=1, ms=[2.0, 2.0, 2.0])
    forward, input_grad, weight_grad = (ms / 1e3 for ms in args.ms)
    cost = StageCost(forward=forward, input_grad=input_grad, weight_grad=weight_grad)
    load = os.getloadavg()[0]
    rows = []
    for num_ranks in args.ranks:
        ranks = launch(measure, (cost, args.steps), nproc=num_ranks)
        for index, word in enumerate(SCHEDULES):
            asleep, awake = (measured([rank[index][which] for rank in ranks]) for which in (0, 1))
            rows.append(row(predicted(word, num_ranks, cost), asleep, awake))
    question = (
        f"Blocks that sleep {args.ms[0]:g} ms in the forward, {args.ms[1]:g} ms for the gradient of the input"
        f" and {args.ms[2]:g} ms for that of the weight, one block a stage; the median"
        f" of {args.steps} steps, of two the slower."
        f" Load average of the machine before the run: {load:.1f}."
    )
    text = "\n".join([heading("Bubble", question), table(rows)])
    print(text)
    print("written to", write("bubble", text))


if __name__ == "__main__":
    main()
