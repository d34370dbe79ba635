"""Context parallelism: a sequence that does not fit into one process trains on four that share its tokens.

    python examples/10_long_context.py

The memory for the backward grows with the tokens of a process. Under `cp=4` each of four ranks has a quarter
of every sequence; keys and values are passed in a ring, so that each token still attends to all tokens before it.

First both are measured without a limit, one step each. Then the limit of a process is half-way between the
two needs, enforced by Linux. One command shows both, so this file starts its ranks itself. Your own script
uses `shoal.Run("cp=4")` and is started by torchrun or srun, as example 01 is.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path

os.environ["MIMALLOC_ARENA_RESERVE"] = "0"  # on ARM torch sets a whole GiB aside, and no limit below that would be felt

import torch
from torch import Tensor, nn

import shoal
from shoal.comm.world import World
from shoal.launch.local import launch

MIB = 2**20
TOKENS, VOCABULARY, FEATURES, HIDDEN, NUM_HEADS, NUM_BLOCKS = 4096, 64, 64, 2048, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hidden_norm = nn.RMSNorm(FEATURES), nn.RMSNorm(FEATURES)
        self.qkv, self.out = (nn.Linear(FEATURES, n * FEATURES, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(FEATURES, HIDDEN, bias=False), nn.Linear(HIDDEN, FEATURES, bias=False)
        self.attention = shoal.Attention()  # causal: in place of scaled_dot_product_attention

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = self.attention(turned(q, angles), turned(k, angles), v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.hidden_norm(x))))


class NextToken(nn.Module):
    """Written for one device. `positions` are the places of its tokens in the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        half = FEATURES // NUM_HEADS // 2
        angles = positions[:, None, :, None] / 10_000 ** (torch.arange(half, device=tokens.device) / half)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(x)

    def describe(self) -> shoal.Description:
        """cp needs the name of the argument of `forward` for the positions of its tokens."""
        blocks = tuple(f"blocks.{i}" for i in range(NUM_BLOCKS))
        return shoal.Description(
            before_blocks=("embedding",), blocks=blocks, after_blocks=("head",), positions="positions"
        )


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: pairs of features rotated by an angle that grows with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def taken() -> int:
    """Bytes of this process that count for its limit."""
    return int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024


class Peak(threading.Thread):
    """The most bytes of this process, sampled a few hundred times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.is_over = taken(), threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.003):
            self.bytes = max(self.bytes, taken())


def train(placement, store, plan: str, steps: int, limit: int | None) -> tuple[list[float], int]:
    """Train on one rank; returns the losses and the bytes that it needed beyond those at the start."""
    before, peak = taken(), Peak()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
    peak.start()
    tokens = torch.randint(VOCABULARY, (1, TOKENS // 8), generator=torch.Generator().manual_seed(1)).repeat(1, 8)
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}  # whole on every rank: shoal takes each one's tokens
    torch.manual_seed(0)
    model = NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with shoal.Run(plan, world=World.start(placement, device="cpu", store=store)) as run:
        model, optimizer = run.prepare(model, optimizer)
        losses = [run.step(batch).item() for _ in range(steps)]
    peak.is_over.set()
    return losses, peak.bytes - before


def attempt(plan: str, nproc: int, steps: int, limit: int | None) -> tuple[list[float], float]:
    """Losses, and MiB of the rank that needed most."""
    ranks = launch(train, (plan, steps, limit), nproc=nproc)
    return ranks[0][0], max(needed for _, needed in ranks) / MIB


if __name__ == "__main__":
    print(f"one sequence of {TOKENS:,} tokens; memory beyond what a process with torch has", flush=True)
    needs = {}
    for name, plan, nproc in (("one process", "auto", 1), ("cp=4 on four", "cp=4", 4)):
        losses, needs[name] = attempt(plan, nproc, steps=1, limit=None)
        print(f"{name:13} no limit   needs {needs[name]:4.0f} MiB (measured)   loss {losses[0]:.4f}", flush=True)
    limit = int(sum(needs.values()) / 2)
    try:
        losses, _ = attempt("auto", 1, steps=1, limit=limit * MIB)
        said, is_refused = f"it fits after all: loss {losses[0]:.4f}", False
    except shoal.ShoalError as error:
        first_line = str(error).splitlines()[0]
        said, is_refused = first_line.partition("Allocator: ")[2] or first_line, "tried to allocate" in first_line
    print(f"one process   {limit:4} MiB   {said}", flush=True)
    losses, _ = attempt("cp=4", 4, steps=3, limit=limit * MIB)
    print(f"cp=4 on four  {limit:4} MiB   trains: loss", *(f"{loss:.4f}" for loss in losses))
    sys.exit(0 if is_refused and losses[-1] < losses[0] else 1)
