"""Gradient accumulation: your own loop over microbatches, which saves memory for activations.

    python examples/02_gradient_accumulation.py
    torchrun --nproc-per-node 2 examples/02_gradient_accumulation.py

Some labels are -100 and are ignored, so microbatches have different numbers of labels. The mean of the
microbatches' means would then not be the mean over the batch. `run.backward` weighs each microbatch by its labels, so
the losses below are equal for both sizes, and for any number of ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

TOKENS, CLASSES = 6, 5


def sequences(count: int) -> TensorDataset:
    """Tokens whose label is a linear function of them; three of ten labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, TOKENS, 8, generator=generator)
    labels = (inputs @ torch.randn(8, CLASSES, generator=generator)).argmax(-1)
    labels[torch.rand(count, TOKENS, generator=generator) < 0.3] = -100
    return TensorDataset(inputs, labels)


def train(run: shoal.Run) -> list[float]:
    """The loss of every step of one epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(sequences(256), batch_size=32, shuffle=True))
    losses = []
    for batch in run.batches(loader):
        for inputs, labels in run.microbatches(batch):  # gradients are synchronised in the last one only
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())  # a mean, as usual
            run.backward(loss)
        losses.append(run.update().loss.item())  # clips by the global norm, steps, clears the gradients
    if run.is_main:
        print(f"mb={run.plan.mb}  losses {' '.join(f'{loss:.4f}' for loss in losses)}")
    return losses


with shoal.Run("mb=2", clip=1.0) as run:
    small = train(run)
with shoal.Run("mb=8", clip=1.0) as run:
    large = train(run)
assert torch.allclose(torch.tensor(small), torch.tensor(large), rtol=1e-4)
