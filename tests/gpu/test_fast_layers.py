"""Swapped layers of transformers on a GPU: as exact as transformers' own in bfloat16, and their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.ops.attention import AttentionRule
from shoal.numerics.ops.attention_kernels import attended
from shoal.numerics.ops.fused_linear_cross_entropy import linear_cross_entropy
from shoal.numerics.ops.rms_norm import _plainly, norm_backward
from shoal.numerics.ops.swiglu import Activation, activated, swiglu_backward
from shoal.train.run import Run
from shoal.verification.exact_casts import keeping_float64

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; CI has none, run by hand with one"),
]


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected.double()).norm() / expected.double().norm()).detach())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float32, 2e-6)])
def test_the_backward_of_gelu_gates(activation: Activation, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    joint, d_gated = (3 * torch.randn(7, 101, 2 * 96, device="cuda")).to(dtype), torch.randn(7, 101, 96, device="cuda")
    d_gated = d_gated.to(dtype)
    (d_joint,), gated = swiglu_backward([joint], d_gated, recompute=True, activation=activation)
    exact = joint.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = activated(gate, activation) * up
    expected.backward(d_gated.double())
    assert exact.grad is not None
    assert gated is not None
    assert relative(d_joint, exact.grad) < bound
    assert relative(gated, expected.detach()) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float32, 1e-6)])
def test_the_backward_of_a_norm_by_itself(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    x, d_normed = torch.randn(2, 7, 101, 1152, device="cuda").to(dtype)
    scale, inverse = torch.randn(1152, device="cuda"), (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    found = norm_backward([d_normed], None, x, scale, inverse, recompute=False)
    expected = _plainly([d_normed.double()], None, x.double(), scale.double(), inverse.double())
    assert found[2] is None
    assert relative(found[0], expected[0]) < bound
    assert relative(found[1], expected[1]) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-3)])
@pytest.mark.parametrize("vocabulary", [5000, 4096])
def test_a_loss_with_a_scale_and_a_cap(dtype: torch.dtype, bound: float, vocabulary: int) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(300, 64, device="cuda"), torch.randn(vocabulary, 64, device="cuda")
    labels = torch.randint(0, vocabulary, (300,), device="cuda")
    labels[::5] = -100
    h, weight = (x.to(dtype).requires_grad_() for x in (h, weight))
    exact = [x.detach().double().requires_grad_() for x in (h, weight)]
    logits = 10 * torch.tanh(0.5 * F.linear(*exact) / 10)
    expected = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    wanted = torch.autograd.grad(expected * 0.3, exact)
    found = linear_cross_entropy(h, weight, labels, ignore=-100, scale=0.5, softcap=10.0, factor=0.3)
    gradients = torch.autograd.grad(found * 0.3, (h, weight))
    assert relative(found, expected) < bound
    assert all(relative(mine, theirs) < bound for mine, theirs in zip(gradients, wanted, strict=True))
    with torch.no_grad():
        alone = linear_cross_entropy(h, weight, labels, ignore=-100, scale=0.5, softcap=10.0)
    assert relative(alone, expected) < bound


@pytest.mark.parametrize(("features", "window"), [(64, 5), (256, 40), (128, 2)])
def test_a_window_is_that_of_a_mask(features: int, window: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 100, features, device="cuda") for heads in (6, 2, 2))
    inputs = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    rule = AttentionRule(scale=0.07, window=window)
    found, expected = attended(*inputs, causal=True, rule=rule), attended(*exact, causal=True, rule=rule)
    grad = torch.randn_like(expected)
    mine, theirs = torch.autograd.grad(found, inputs, grad.bfloat16()), torch.autograd.grad(expected, exact, grad)
    assert relative(found, expected) < 1e-2
    assert all(relative(a, b) < 2e-2 for a, b in zip(mine, theirs, strict=True))


def built(kind: str) -> Any:
    torch.manual_seed(0)
    more = {"Gemma3Text": {"head_dim": 64, "sliding_window": 32}, "Qwen3": {"head_dim": 64}}.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: one.grad.detach().clone() for name, one in model.named_parameters() if one.grad is not None}


def plain_gradients(kind: str, batch: dict[str, Tensor], *, is_exact: bool) -> dict[str, Tensor]:
    model = built(kind).cuda()
    model = model.double() if is_exact else model
    with (
        torch.autocast("cuda", torch.bfloat16, enabled=not is_exact),
        keeping_float64("fp64" if is_exact else "bf16", is_foreign=True),
    ):
        loss = model(**{name: x.cuda() for name, x in batch.items()}, use_cache=False).loss
    loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3Text"])
@pytest.mark.filterwarnings("ignore")
def test_a_swapped_model_in_bf16_is_as_exact_as_the_plain_one(kind: str, compiles: bool) -> None:
    tokens = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][0, 100:] = -100
    exact, plain = (plain_gradients(kind, batch, is_exact=is_exact) for is_exact in (True, False))
    model, found = built(kind), {}
    with Run("bf16 mb=2", device="cuda", compile=compiles, fused_loss=True) as run:
        run.prepare(model)
        run.prepare(torch.optim.SGD(run.parameters, lr=0.0))
        assert run.fused_layers is not None
        run.on_gradients = lambda: found.update(gradients_of(model))
        run.step(batch)
    assert found.keys() == exact.keys()
    told = {name: (relative(found[name], exact[name]), relative(plain[name], exact[name])) for name in exact}
    assert all(ours < max(2.5 * theirs, 1e-2) for ours, theirs in told.values()), told
