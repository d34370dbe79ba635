"""Tensor parallelism: every layer is cut in two, and both halves compute the same samples. Two ways to write it.

    python examples/08_tensor_parallel.py                               # one process: whole layers
    torchrun --nproc-per-node 2 examples/08_tensor_parallel.py          # two ranks, half of each layer: the same losses

described   the model is written for one device, and its `describe` says how layers may be split; shoal splits them
by hand     the model uses ColumnParallelLinear and RowParallelLinear; everything else is replicated

A column-parallel layer has some of the output features on each rank, and the row-parallel one after it takes just
those: nothing is sent between the two. The outputs of row-parallel layers are summed over the ranks.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

VOCABULARY, FEATURES, HIDDEN = 29, 32, 128
DEGREE = int(os.environ.get("WORLD_SIZE", 1))  # all ranks that torchrun has started share each layer


class Block(nn.Module):
    def __init__(self, tensor=None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        if tensor is None:
            self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)
        else:  # by hand
            self.up = shoal.ColumnParallelLinear(FEATURES, HIDDEN, tensor=tensor)
            self.down = shoal.RowParallelLinear(HIDDEN, FEATURES, tensor=tensor)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class NextToken(nn.Module):
    def __init__(self, tensor=None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList([Block(tensor), Block(tensor)])
        self.head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Described(NextToken):
    def describe(self) -> shoal.Description:
        splits = {
            "embedding": shoal.Split.VOCABULARY,  # each rank has the rows of some tokens
            "blocks.*.norm": shoal.Split.SEQUENCE,  # replicated; each rank norms its own positions only
            "blocks.*.up": shoal.Split.COLUMN,
            "blocks.*.down": shoal.Split.ROW,
            "head": shoal.Split.VOCABULARY,  # each rank has the logits of some tokens
        }
        blocks = ("blocks.0", "blocks.1")
        return shoal.Description(before_blocks=("embedding",), blocks=blocks, after_blocks=("head",), splits=splits)


tokens = torch.randint(VOCABULARY, (256, 8), generator=torch.Generator().manual_seed(1))
data = TensorDataset(tokens, (3 * tokens + 1) % VOCABULARY)  # the next token depends on the token alone
for way in ("described", "by hand"):
    with shoal.Run(f"tp={DEGREE} mb=16", clip=1.0) as run:
        torch.manual_seed(0)  # a split layer draws all of its values on every rank, and keeps its part
        model = Described() if way == "described" else NextToken(run.tensor)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
        losses = [run.step(batch).item() for batch in run.batches(loader)]
        if run.is_main:
            names = ("embedding", "blocks.0.up", "blocks.0.down", "head")
            print(f"{way}: rank 0 holds", *(f"{n} {tuple(run.module.get_submodule(n).weight.shape)}" for n in names))
            print("  losses", *(f"{loss:.4f}" for loss in losses), f"last gradient norm {run.report.grad_norm:.4f}")
