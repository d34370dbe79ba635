"""Layers of a block that tp may split, found by gradients and proven by numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal import ShoalError
from shoal.models.huggingface.splits.block_copies import BlockCopy
from shoal.models.huggingface.splits.found_splits import regions_of
from shoal.parallel.tensor_parts.attributes import divide_attributes


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.num_heads, self.head_dim = how, 4, 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16 if how == "norm" else 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.how == "norm":  # over all heads
            q = self.norm(q)
        heads = (-1, 4) if self.how == "interleaved" else (self.num_heads, self.head_dim)
        q, k, v = (one.view(*one.shape[:2], *heads) for one in (q, k, v))
        if self.how == "interleaved":  # a head is every fourth feature
            q, k, v = (one.transpose(2, 3) for one in (q, k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.how == "gated":  # a path beside the columns
            out = out * x.mean(-1, keepdim=True)
        return x + self.o(out)


def found(how: str) -> list[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    torch.manual_seed(0)
    block = nn.Sequential(Attention(how)).double()
    copy = BlockCopy(block, (torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True),), {}, ("block",))
    return [(region.columns, region.row, region.divided) for region in regions_of(copy)]


def test_an_attention_is_split_by_heads() -> None:
    assert found("plain") == [(("0.q", "0.k", "0.v"), "0.o", ("num_heads",))]


@pytest.mark.parametrize("how", ["norm", "interleaved", "gated"])
def test_what_cannot_be_split_stays_whole(how: str) -> None:
    assert found(how) == []


def test_a_number_that_tp_does_not_divide_is_rejected() -> None:
    with pytest.raises(ShoalError, match="M130"):
        divide_attributes(Attention("plain"), ["num_heads"], 3)
