"""Layers of a block that tp may split, found by gradients and proven by numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal import ShoalError, Split
from shoal.models.huggingface.splits.block_copies import BlockCopy
from shoal.models.huggingface.splits.found_splits import regions_of
from shoal.models.huggingface.splits.tokens import Division, why_not_divided
from shoal.parallel.tensor_parts.attributes import divide_attributes
from shoal.parallel.tensor_parts.linear_dims import PLAIN, TRANSPOSED, linear_dims


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.num_heads, self.head_dim = how, 4, 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16 if how == "norm" else 4)
        self.sinks = nn.Parameter(torch.ones(4)) if how == "sinks" else None
        self.low = nn.Linear(16, 6) if how == "latent" else None
        if how == "latent":
            self.k = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        low = x if self.low is None else self.low(x)
        q, k, v = self.q(x), self.k(low), self.v(x)
        if self.how == "norm":  # over all heads
            q = self.norm(q)
        heads = (-1, 4) if self.how == "interleaved" else (self.num_heads, self.head_dim)
        q, k, v = (one.view(*one.shape[:2], *heads) for one in (q, k, v))
        if self.how == "heads":
            q = self.norm(q)
        if self.how == "latent":  # a feature that all heads share
            k = k + low[..., None, :1]
        if self.how == "interleaved":  # a head is every fourth feature
            q, k, v = (one.transpose(2, 3) for one in (q, k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.sinks is not None:
            out = (out.unflatten(2, (self.num_heads, 4)) * self.sinks[:, None]).flatten(2)
        if self.how == "gated":  # a path beside the columns, which is no parameter's
            out = out * x.mean(-1, keepdim=True)
        return x + self.o(out) if self.how == "residual" else self.o(out)


def copy_of(how: str) -> BlockCopy:
    torch.manual_seed(0)
    block = nn.Sequential(Attention(how)).double()
    nn.init.normal_(block[0].norm.weight)
    return BlockCopy(block, (torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True),), {}, ("block",))


def found(how: str) -> list[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    return [(region.columns, region.row, region.divided) for region in regions_of(copy_of(how))]


def test_an_attention_is_split_by_heads() -> None:
    assert found("plain") == [(("0.q", "0.k", "0.v"), "0.o", ("num_heads",))]


def test_a_gate_of_the_input_may_be_beside_the_columns() -> None:
    (region,) = regions_of(copy_of("gated"))
    assert (region.columns, region.reads_home) == (("0.q", "0.k", "0.v"), True)


@pytest.mark.parametrize("how", ["norm", "interleaved"])
def test_what_cannot_be_split_stays_whole(how: str) -> None:
    assert found(how) == []


def test_a_number_for_each_head_is_cut() -> None:
    (region,) = regions_of(copy_of("sinks"))
    assert region.cuts == (("0.sinks", 0),)


def test_norms_of_each_head_stay_whole() -> None:
    (region,) = regions_of(copy_of("heads"))
    assert (region.cuts, region.others) == ((), ("0.norm.weight", "0.norm.bias"))


def test_a_residual_inside_of_a_region_does_not_enter_with_it() -> None:
    """Its gradient is whole on every rank, and must not be summed."""
    assert [region.reads_home for how in ("plain", "residual") for region in regions_of(copy_of(how))] == [True, False]


def test_layers_before_the_columns_stay_whole() -> None:
    (region,) = regions_of(copy_of("latent"))
    assert (region.columns, region.latent, region.reads_home) == (("0.q", "0.k", "0.v"), ("0.low",), True)


@pytest.mark.parametrize(("how", "splits"), [("plain", {"0": Split.ALL_TOKENS}), ("plain", {}), ("gated", {})])
def test_a_block_computes_each_token_alone(how: str, splits: dict[str, Split]) -> None:
    """An attention does not, unless all tokens are gathered before it."""
    assert (why_not_divided(copy_of(how), Division(splits)) is None) == bool(splits)


def test_regions_see_all_tokens() -> None:
    splits = {"0": Split.REGION, "0.o": Split.ROW}
    assert why_not_divided(copy_of("gated"), Division(splits)) is None


class Product(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.bias, self.how = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6)), how

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight + self.bias
        return product.relu() if self.how == "relu" else product


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def test_a_linear_layer_is_known_by_what_it_computes() -> None:
    assert linear_dims(Product("plain")) == TRANSPOSED
    assert linear_dims(OwnLinear(4, 6)) == linear_dims(nn.Linear(4, 6)) == PLAIN
    assert linear_dims(Product("relu")) is linear_dims(nn.Embedding(4, 6)) is linear_dims(nn.LayerNorm(4)) is None
    assert linear_dims(Product("plain").to("meta")) == TRANSPOSED


def test_a_number_that_tp_does_not_divide_is_rejected() -> None:
    with pytest.raises(ShoalError, match="M130"):
        divide_attributes(Attention("plain"), ["num_heads"], 3)
