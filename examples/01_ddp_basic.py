"""Data parallelism with a model, a data set and an optimizer of your own.

    python examples/01_ddp_basic.py                               # one process
    torchrun --nproc-per-node 2 examples/01_ddp_basic.py          # two: the same losses
    srun --ntasks 16 python examples/01_ddp_basic.py              # sixteen, under Slurm

`batch_size` below is the global batch: each rank takes its share, and the printed loss is that of the global batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


class Classifier(nn.Module):
    """A classifier of points into three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def points(count: int) -> TensorDataset:
    """Three clouds around three corners, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(2 * torch.eye(8)[labels] + torch.randn(count, 8, generator=generator), labels)


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(points(1024), batch_size=64, shuffle=True)

run = shoal.Run()  # finds the number of ranks and its own rank
model, optimizer, loader = run.prepare(model, optimizer, loader)

for epoch in range(3):
    losses = []
    for batch in run.batches(loader):
        loss = run.step(batch)  # forward, backward, update; cross-entropy, unless Run(loss=...) is set
        losses.append(loss.item())
    if run.is_main:  # print on one rank
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.4f}  on {run.world.size} rank(s)")

run.close()
