"""Where the time of a step goes: five steps are timed by part, and a verdict says what bounds them.

    python examples/06_profiling.py
    torchrun --nproc-per-node 2 examples/06_profiling.py

Reading a batch takes 20 ms here, on purpose: the verdict is "waiting for data". Parts add to the whole step. On several
ranks, waits for each other are parts, too: by axis, and divided into waits for a late rank and time on the wire.
`shoal profile RECIPE` does the same for a recipe.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shoal


class SlowPoints(Dataset[tuple[Tensor, Tensor]]):
    """Points of three classes, each of which takes a while to read."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.02 / 16)
        label = index % 3
        return torch.eye(8)[label] + torch.sin(torch.arange(8.0) + index), torch.tensor(label)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = shoal.Run()
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(SlowPoints(), batch_size=32))

losses = []
with shoal.profile(run) as profile:  # leaves the first step out
    for batch in itertools.islice(run.batches(loader), 6):
        losses.append(run.step(batch).item())

found = profile.result
if run.is_main:
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    found.write_trace(trace)
    shares = {name: seconds / sum(found.parts.values()) for name, seconds in found.parts.items()}
    print("losses  ", " ".join(f"{loss:.4f}" for loss in losses))
    print("parts   ", ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share > 0.005))
    print("verdict ", f"{found.verdict.title}: {found.verdict.evidence}")
    print("next    ", found.verdict.next)
    print("trace   ", f"{trace}, for https://ui.perfetto.dev")

run.close()
