"""A model that does not fit: replicated on four ranks it runs out of memory, sharded over the same four it trains.

    python examples/03_fsdp.py

A rank may allocate 128 MiB beyond Python and torch; Linux enforces the limit. The model has 10 million
parameters: 38 MiB in float32, as much for its gradients and twice that for Adam, 150 MiB in all. Under `zero=3` each
of four ranks keeps a quarter of everything, and gathers a block at a time, just before it computes.

One command shows both, so this file starts its ranks itself. Your own script uses `shoal.Run("zero=3")` and is
started by torchrun or srun, as example 01 is.
"""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

os.environ["MIMALLOC_ARENA_RESERVE"] = "0"  # on ARM torch sets a whole GiB aside, and no limit below that would be felt

import torch
from torch import Tensor, nn

import shoal
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.parallel.inspect.live_memory import live_memory

MIB, LIMIT = 2**20, 128 * 2**20
FEATURES, HIDDEN, CLASSES, NUM_BLOCKS, BATCH, STEPS = 320, 1280, 10, 12, 32, 5


class Network(nn.Module):
    """Residual blocks and a classifier, written for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))
            for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def describe(self) -> shoal.Description:
        """The units that are gathered together. Without it, shoal would choose submodules by their size."""
        return shoal.Description(blocks=tuple(f"blocks.{i}" for i in range(NUM_BLOCKS)), after_blocks=("head",))


def train(placement, store, plan: str) -> None:
    """Train on one rank."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back, or the limit would count it, too
    taken = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + LIMIT, taken + LIMIT))
    with shoal.Run(plan, world=World.start(placement, device="cpu", store=store)) as run:
        with torch.device("meta"):  # shapes without memory: `prepare` fills one block, keeps its part, fills the next
            model = Network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        model, optimizer = run.prepare(model, optimizer)
        inputs = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(0))
        mine = (inputs[run.coordinate :: run.degree], (torch.arange(BATCH) % CLASSES)[run.coordinate :: run.degree])
        counted = []
        run.on_gradients = lambda: counted.append(live_memory(run.composed, optimizer))
        losses = [run.step(mine).item() for _ in range(STEPS)]
        if run.is_main:
            held = {cause: getattr(counted[-1], cause) / MIB for cause in ("parameters", "gradients", "optimizer")}
            print("  counted on rank 0:", ", ".join(f"{cause} {size:.1f} MiB" for cause, size in held.items()))
            print("  trains: loss", " ".join(f"{loss:.4f}" for loss in losses), flush=True)


if __name__ == "__main__":
    for plan in ("dp_replicate=4", "dp_shard=4 zero=3"):
        print(f"{plan}: 4 ranks with {LIMIT // MIB} MiB each", flush=True)
        try:
            launch(train, (plan,), nproc=4)
        except shoal.ShoalError as error:
            print("  does not fit:", str(error).splitlines()[0])
