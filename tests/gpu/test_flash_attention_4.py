"""FlashAttention 4 compared with attention written out in float64: `pip install -e '.[fa4]'`, on a Hopper GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.numerics.kernels.flash_attention_4 import is_available
from shoal.numerics.ops.attention import PLAIN, AttentionRule
from shoal.numerics.ops.attention_kernels import attended
from shoal.parallel.activation_checkpoint import recompute
from shoal.parallel.context.attention import Attention

with warnings.catch_warnings(action="ignore"):  # of the packages under it
    pytestmark = [
        pytest.mark.skipif(not is_available(), reason="needs flash-attn-4 and a Hopper GPU"),
        pytest.mark.filterwarnings("ignore"),
    ]

TOLERANCE = 1.5e-2
"""Of bfloat16, over the largest value."""


def inputs(num_tokens: int, heads: int, kv_heads: int, features: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = (
        torch.randn(2, num_tokens, n, features, device="cuda", generator=generator) for n in (heads, kv_heads, kv_heads)
    )
    return [x.to(torch.bfloat16).transpose(1, 2).requires_grad_() for x in drawn]


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device="cuda").reshape(out.shape)
    return [out, *torch.autograd.grad((out.double() * weights).sum(), leaves)]


def assert_close(found: list[Tensor], exact: list[Tensor]) -> None:
    for number, (a, b) in enumerate(zip(found, exact, strict=True)):
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert error < TOLERANCE, (number, error.item())


RULES = {
    "plain": PLAIN,
    "scale": AttentionRule(scale=0.3),
    "window": AttentionRule(window=100),
    "softcap": AttentionRule(softcap=2.0),
    "window and softcap": AttentionRule(window=77, softcap=5.0),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("shape", [(256, 4, 2, 64), (333, 4, 1, 128), (512, 2, 2, 96)], ids=str)
def test_outputs_and_gradients(shape: tuple[int, int, int, int], rule: AttentionRule, causal: bool) -> None:
    leaves = inputs(*shape)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = gradients(attended(*leaves, causal=causal, backend="fa4", rule=rule), leaves)
    assert_close(found, gradients(attended(*exact, causal=causal, rule=rule), exact))


@pytest.mark.parametrize("window", [None, 50])
def test_sinks(window: int | None) -> None:
    rule = AttentionRule(window=window)
    leaves = [*inputs(256, 4, 2, 64), torch.linspace(-2, 3, 4, device="cuda").requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = gradients(attended(*leaves[:3], causal=True, backend="fa4", rule=rule, sinks=leaves[3]), leaves)
    assert_close(found, gradients(attended(*exact[:3], causal=True, rule=rule, sinks=exact[3]), exact))


class Block(nn.Module):
    """Attention between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Linear(256, n, bias=False, device="cuda", dtype=torch.bfloat16) for n in (768, 256)
        )
        self.attention = Attention()
        self.attention.backend = "fa4"

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (4, 64)).transpose(1, 2) for x in self.before(x_BTD).chunk(3, dim=-1))
        out: Tensor = self.after(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_compiled_and_recomputed_blocks_compute_the_same(how: Any, is_compiled: bool) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *block.parameters()]
    expected = gradients(block(x), leaves)
    recompute(block, how, is_compiled=is_compiled)
    call = torch.compile(block) if is_compiled else block
    assert_close(gradients(call(x), leaves), expected)


def test_deterministic_gradients_have_the_same_bits() -> None:
    leaves = inputs(512, 4, 2, 64)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (gradients(attended(*leaves, causal=True, backend="fa4"), leaves) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
