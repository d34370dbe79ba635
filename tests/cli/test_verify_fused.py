"""One matrix for queries, keys and values that tp cuts into blocks of rows is named as the cause."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal import Description, Split


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 37, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = self.head(x + self.out(attended.transpose(1, 2).flatten(2)))
        return logits

    def describe(self) -> Description:
        splits = {"embedding": Split.VOCABULARY, "qkv": Split.COLUMN, "out": Split.ROW, "head": Split.VOCABULARY}
        return Description(splits=splits, num_heads=4)


def test_a_fused_projection_that_tp_cuts_is_the_cause() -> None:
    tokens = torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    proof = shoal.verify(Fused, batch, "tp=2 sp=off")
    assert not proof.equal
    assert proof.cause is not None
    assert "tp cuts qkv.weight, of shape (48, 16)" in proof.cause, proof.cause
