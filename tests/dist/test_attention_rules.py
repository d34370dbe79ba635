"""Scales, softcaps, windows, sinks and padding in `shoal.Attention`: on one device, in a ring and under ulysses, output
and every gradient equal those of attention that is written out here."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal import ShoalError
from shoal.comm.world import World
from shoal.numerics.ops.attention import AttentionRule
from shoal.parallel.context.attention import Attention, ContextParallel
from tests.dist.pool import on_ranks

BATCH, HEADS, KV_HEADS, TOKENS, FEATURES = 2, 4, 2, 16, 8
RULES = {
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 0.8},
    "window": {"window": 5},
    "sinks": {"has_sinks": True},
    "padding": {"pads": True},
    "both ways": {"window": 3, "is_bidirectional": True},
    "all": {"scale": 0.4, "softcap": 1.5, "window": 7, "has_sinks": True, "pads": True},
}
Kind = Literal["ring", "ulysses"]


def drawn() -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys, values and sinks; the gradient of the output; which keys may be seen."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, TOKENS, FEATURES) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (*shapes, (HEADS,))]
    grad = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    keys = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    keys[0, -3:] = False
    keys[1, :4] = False
    return [x.requires_grad_() for x in inputs], grad, keys


def expected(rule: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients, one query after the other."""
    (q, k, v, sinks), grad, keys = drawn()
    rows = []
    for place in range(TOKENS):
        first = max(0, place - rule["window"] + 1) if "window" in rule else 0
        stop = place + (rule["window"] if "is_bidirectional" in rule else 1)
        seen_k, seen_v = (x[:, :, first:stop].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("bnh,bnsh->bns", q[:, :, place], seen_k) * rule.get("scale", FEATURES**-0.5)
        if "softcap" in rule:
            scores = rule["softcap"] * torch.tanh(scores / rule["softcap"])
        if "pads" in rule:
            scores = scores.masked_fill(~keys[:, None, first:stop], -1e30)
        extra = [sinks[None, :, None].expand(BATCH, -1, 1)] if "has_sinks" in rule else []
        weights = torch.cat([scores, *extra], -1).softmax(-1)[..., : scores.shape[-1]]
        sees = keys[:, None, first:stop].any(-1, keepdim=True) if "pads" in rule else 1.0
        rows.append(torch.einsum("bns,bnsh->bnh", weights, seen_v) * sees)  # 0 for a query that sees nothing
    out = torch.stack(rows, 2)
    inputs = [q, k, v, *([sinks] if "has_sinks" in rule else [])]
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def found(rule: dict[str, Any], context: ContextParallel | None) -> list[Tensor]:
    (q, k, v, sinks), grad, keys = drawn()
    attention = Attention(causal="is_bidirectional" not in rule)
    attention.context = context
    mine = (lambda x: x) if context is None else (lambda x: context.part(x, 2))
    given = AttentionRule(**{name: rule[name] for name in ("scale", "softcap", "window") if name in rule})
    out = attention(
        *map(mine, (q, k, v)),
        keys if "pads" in rule else None,
        rule=given,
        sinks=sinks if "has_sinks" in rule else None,
    )
    inputs = [q, k, v, *([sinks] if "has_sinks" in rule else [])]
    gradients = list(torch.autograd.grad(out, inputs, mine(grad)))
    if context is not None:
        out = context.join(out.detach(), 2)
        for gradient in gradients:
            dist.all_reduce(gradient)
    return [out.detach(), *gradients]


def assert_equal(ours: list[Tensor], exact: list[Tensor]) -> None:
    for one, other in zip(ours, exact, strict=True):
        assert float((one - other).abs().max()) < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_on_one_device(name: str) -> None:
    assert_equal(found(RULES[name], None), expected(RULES[name]))


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@on_ranks(2)
def test_over_ranks(world: World, kind: Kind) -> None:
    group = dist.group.WORLD
    assert group is not None
    context = ContextParallel(group, kind=kind, comm_device=torch.device("cpu"))
    for rule in RULES.values():
        assert_equal(found(rule, context), expected(rule))
    attention, q = Attention(), drawn()[0][0]
    attention.context = context
    with pytest.raises(ShoalError, match=r"dropped under cp=2"):
        attention(q, q, q, rule=AttentionRule(dropout=0.1))


def test_more_keys_than_queries() -> None:
    """As of a cache: the queries are the last tokens."""
    (q, k, v, _), _, keys = drawn()
    whole = Attention()(q, k, v, keys)
    last = Attention()(q[:, :, -3:], k, v, keys)
    assert torch.allclose(whole[:, :, -3:], last, rtol=0.0, atol=1e-13)
