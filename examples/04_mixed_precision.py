"""Mixed precision: one model in float32, bfloat16 and float16.

    python examples/04_mixed_precision.py
    torchrun --nproc-per-node 2 examples/04_mixed_precision.py

In all three the weights and the optimizer stay in float32; the precision is that of forward and backward.
float16 has a small range, so its loss is multiplied by a scale that halves on overflow (that step is skipped, on every
rank) and doubles again after 2000 steps without one. A loop with `run.step` needs no line for any of this.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


def digits(count: int) -> TensorDataset:
    """Noisy pictures of ten random patterns."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (count,), generator=generator)
    patterns = torch.randn(10, 64, generator=generator)
    return TensorDataset(patterns[labels] + 2 * torch.randn(count, 64, generator=generator), labels)


def train(run: shoal.Run) -> None:
    """Three epochs; prints the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(digits(1024), batch_size=64, shuffle=True))
    num_dropped = 0
    for _ in range(3):
        for batch in run.batches(loader):
            loss = run.step(batch)
            num_dropped += run.report.was_skipped
    if run.is_main:
        scale = f"  loss scale {run.loss_scale.scale:.0f}, {num_dropped} steps dropped"
        print(f"{run.plan.precision}  loss {loss.item():.4f}{scale if run.precision.scales_loss else ''}")


# A CPU without bfloat16 arithmetic uses slower code, and torch warns about it.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")

for precision in ("fp32", "bf16", "fp16"):
    with shoal.Run(precision, clip=1.0) as run:
        train(run)
