"""The head's gradients by products of 8-bit floats: the same loss, and gradients as close as such floats are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.fp8.products import PRECISE, ScaledTensor, product, transposed
from shoal.numerics.ops import fused_linear_cross_entropy as fused

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without products in bfloat16
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def drawn(tokens: int, features: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, features, generator=generator)
    weight = torch.randn(vocabulary, features, generator=generator) * 0.05
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::7] = -100
    return h.to(device), weight.to(device), labels.to(device)


def gradients(fp8: bool, h: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, Tensor, Tensor]:
    h, weight = h.bfloat16().requires_grad_(), weight.clone().requires_grad_()
    loss = fused.linear_cross_entropy(h, weight, labels, ignore=-100, fp8=fp8)
    (loss / 100).backward()
    assert h.grad is not None
    assert weight.grad is not None
    return float(loss.detach()), h.grad.float(), weight.grad


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_chunks", [1, 4])
def test_the_loss_is_the_same_and_gradients_are_near(
    device: str, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, weight, labels = drawn(512, 32, 512, device)
    if num_chunks > 1:
        monkeypatch.setattr(fused, "CHUNK_BYTES", 128 * 512 * 2)
    assert -(-512 // fused.tokens_of_chunk(512, 512, 2)) == num_chunks
    loss, dh, dw = gradients(True, h, weight, labels)
    in_bf16, _, _ = gradients(False, h, weight, labels)
    assert loss == pytest.approx(in_bf16, rel=1e-6)
    exact_h, exact_w = h.bfloat16().double().requires_grad_(), weight.bfloat16().double().requires_grad_()
    exact = F.cross_entropy(exact_h @ exact_w.T, labels, ignore_index=-100, reduction="sum") / 100
    exact.backward()
    assert exact_h.grad is not None
    assert exact_w.grad is not None
    assert 1e-4 < error(dh, exact_h.grad) < 0.06  # 2 bits of fraction: up to 1/8 off, at random
    assert 1e-4 < error(dw, exact_w.grad) < 0.06


def test_a_label_that_is_no_word_poisons_the_gradient() -> None:
    for device in DEVICES[1:]:  # on a CPU torch refuses such a label
        h, weight, labels = drawn(512, 64, 1024, device)
        labels[3] = 1024
        loss, dh, dw = gradients(True, h, weight, labels)
        assert loss != loss
        assert not dh.isfinite().all()
        assert not dw.isfinite().all()


def test_sizes_that_8_bit_products_do_not_take_are_computed_in_bf16() -> None:
    h, weight, labels = drawn(100, 64, 1001, "cpu")
    for found, expected in zip(gradients(True, h, weight, labels), gradients(False, h, weight, labels), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_products_of_narrow_matrices(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(device) for shape in ((256, 48), (256, 80)))
    x = transposed(a)
    assert x.values.shape == (48, 256)
    assert x.values.dtype == PRECISE
    assert float(x.values.float().abs().max()) == torch.finfo(PRECISE).max
    found = product(x, transposed(b), torch.float32)
    assert error(found, a.T @ b) < 0.05
    nothing = transposed(torch.zeros_like(a))
    assert float(product(nothing, transposed(b), torch.float32).abs().max()) == 0.0
    assert isinstance(nothing, ScaledTensor)
