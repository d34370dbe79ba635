"""What does a step of `shoal.Run` cost, compared with the same layout in plain torch?

python benchmarks/layouts/run.py [--steps 80]

Two layouts on two CPU processes: `zero=3` against a loop over `fully_shard`, and `1f1b` against a loop over torch's
`Schedule1F1B`. Both loops run in the same processes and alternate step by step, so that both have the same conditions.
They start from the same weights and use the same batches, and their losses must be equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.models import llama
from shoal.models.llama import Llama
from shoal.models.rope_scaling import rope_angles
from shoal.numerics.init import initialise
from shoal.train.run import Run

LAYERS, HIDDEN, VOCABULARY, TOKENS = 4, 256, 2048, 64
NUM_RANKS, CLIP, SEED, WARMUP = 2, 1.0, 0, 5
Batch = dict[str, Tensor]


def build() -> Llama:
    return llama.build(
        num_layers=LAYERS, hidden=HIDDEN, ffn=688, num_heads=8, num_kv_heads=4, vocabulary=VOCABULARY, tied=False,
        max_sequence=TOKENS, preset="tiny",
    )  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


def num_elements(optimizer: torch.optim.Optimizer) -> int:
    """What a rank trains."""
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


# ---- by hand --------------------------------------------------------------------------------------------------------


class ShardedByHand:
    """FSDP2 as its documentation has it: every block a unit, the head kept gathered for the backward.

    A step returns the loss that this rank knows.
    """

    def __init__(self, world: World) -> None:
        model = build()
        initialise(model, SEED)
        mesh = init_device_mesh("cpu", (world.size,))
        fully_shard(model.model.embed_tokens, mesh=mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        self.model, self.optimizer = model, adamw(model)

    def step(self, batch: Batch) -> float:
        logits = self.model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class HalfByHand(nn.Module):
    """Half of a llama, cut as torch's tutorial on pipelining cuts a transformer."""

    def __init__(self, whole: Llama, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.config = whole.config
        self.embed = whole.model.embed_tokens if is_first else nn.Identity()
        self.layers = nn.ModuleList(whole.model.layers[i] for i in layers)
        self.head = nn.Sequential(whole.model.norm, whole.lm_head) if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        angles = rope_angles(torch.arange(x.shape[1])[None], self.config.rope, self.config.dim_of_head, torch.float32)
        x, rotary = self.embed(x), (angles.cos(), angles.sin())
        for layer in self.layers:
            x = layer(x, rotary, None)
        return self.head(x)  # type: ignore[no-any-return]


class PipelinedByHand:
    """torch's own 1F1B, and the norm over both stages. A step returns the loss, or NaN where it is not known."""

    def __init__(self, world: World, num_microbatches: int) -> None:
        whole = build()
        initialise(whole, SEED)
        self.is_last = world.rank == world.size - 1
        share = LAYERS // world.size  # which is where shoal cuts this model, too
        layers = range(world.rank * share, (world.rank + 1) * share)
        half = HalfByHand(whole, layers, is_first=world.rank == 0, is_last=self.is_last)
        stage = PipelineStage(half, world.rank, world.size, world.device)
        self.schedule = Schedule1F1B(stage, num_microbatches, loss_fn=_mean_loss)
        self.parameters, self.optimizer = list(half.parameters()), adamw(half)

    def step(self, batch: Batch) -> float:
        losses: list[Tensor] = []
        if self.is_last:
            self.schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        else:
            self.schedule.step(batch["tokens"], return_outputs=False)
        square = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP, square.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else float("nan")


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# ---- with shoal -----------------------------------------------------------------------------------------------------


class WithShoal:
    """The same, from a plan."""

    def __init__(self, world: World, plan: str) -> None:
        model = build()
        initialise(model, SEED)
        self.run = Run(plan, seed=SEED, clip=CLIP, world=world)
        _, self.optimizer = self.run.prepare(model, adamw(model))

    def step(self, batch: Batch) -> float:
        return self.run.step(batch).item()


# ---- in turns -------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One layout, and how many sequences a step has on all ranks together."""

    plan: str
    by_hand: str
    batch: int
    num_microbatches: int = 1


CASES = (
    Case("zero=3", "fully_shard", batch=4),
    Case("pp=2 1f1b mb=1", "Schedule1F1B", batch=4, num_microbatches=4),
)


class Timed(NamedTuple):
    """The steps of one loop on one rank."""

    seconds: list[float]
    cpu_seconds: list[float]
    """Of this process, all threads: what is left of the question when the machine has other things to do."""
    losses: list[float]

    def step(self, loop: WithShoal | ShardedByHand | PipelinedByHand, batch: Batch) -> None:
        began, cpu_began = time.perf_counter(), time.process_time()
        self.losses.append(loop.step(batch))
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(time.process_time() - cpu_began)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds[WARMUP:])

    @property
    def cpu_median(self) -> float:
        return statistics.median(self.cpu_seconds[WARMUP:])


class Times(NamedTuple):
    """Of one rank."""

    ours: Timed
    theirs: Timed


def take_turns(placement: Placement, store: dist.Store, case: Case, num_steps: int) -> Times:
    with World.start(placement, store=store, device="cpu") as world:
        ours = WithShoal(world, case.plan)
        is_sharded = case.num_microbatches == 1
        theirs = ShardedByHand(world) if is_sharded else PipelinedByHand(world, case.num_microbatches)
        assert num_elements(ours.optimizer) == num_elements(theirs.optimizer), "the two are not cut alike"
        share = case.batch // world.size if is_sharded else case.batch
        start = world.rank * share if is_sharded else 0
        times = Times(Timed([], [], []), Timed([], [], []))
        turns = list(zip((ours, theirs), times, strict=True))
        for batch in _batches(WARMUP + num_steps, case.batch):
            mine = {name: whole[start:][:share] for name, whole in batch.items()}
            for loop, timed in turns:
                world.barrier()
                timed.step(loop, mine)
            turns.reverse()  # so that neither always follows the other
        return times


def _batches(number: int, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(VOCABULARY, (number, size, TOKENS + 1), generator=generator)
    return [{"tokens": one[:, :-1].contiguous(), "labels": one[:, 1:].contiguous()} for one in drawn]


def loss_difference(ranks: list[Times]) -> float:
    """The largest relative one of any step. What a rank knows by hand is its own share, or nothing."""
    largest = 0.0
    for step, ours in enumerate(ranks[0].ours.losses):
        known = [rank.theirs.losses[step] for rank in ranks]
        theirs = statistics.fmean(loss for loss in known if loss == loss)
        largest = max(largest, abs(ours - theirs) / theirs)
    return largest


def row(case: Case, num_steps: int) -> dict[str, str]:
    ranks = launch(take_turns, (case, num_steps), nproc=NUM_RANKS)
    ours, theirs = ranks[0]
    pairs = [mine / other for mine, other in zip(ours.seconds, theirs.seconds, strict=True)][WARMUP:]
    our_cpu, their_cpu = (sum(rank[which].cpu_median for rank in ranks) for which in (0, 1))
    return {
        "plan": f"`{case.plan}`",
        "by hand": f"`{case.by_hand}`",
        "a step of": f"{case.batch} x {TOKENS} tokens",
        "by hand, median": f"{theirs.median * 1e3:.1f} ms",
        "shoal, median": f"{ours.median * 1e3:.1f} ms",
        "ratio of medians": f"{ours.median / theirs.median:.3f}",
        "median of ratios": f"{statistics.median(pairs):.3f}",
        "CPU time by hand": f"{their_cpu * 1e3:.1f} ms",
        "CPU time, shoal": f"{our_cpu * 1e3:.1f} ms",
        "ratio of CPU times": f"{our_cpu / their_cpu:.3f}",
        "losses apart by": f"{loss_difference(ranks):.0e}",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    asked = arguments(parser, steps=1)
    load = os.getloadavg()[0]
    rows = [row(case, asked.steps) for case in CASES]
    parameters = sum(p.numel() for p in build().parameters())
    question = (
        f"A llama of {parameters:,} parameters in float32 on {NUM_RANKS} processes, fused AdamW, clipping;"
        f" {asked.steps} steps of each loop, in turns."
        f" Load average of the machine before the run: {load:.1f}."
    )
    text = "\n".join([heading("Layouts", question), table(rows)])
    print(text)
    print("written to", write("layouts", text))


if __name__ == "__main__":
    main()
