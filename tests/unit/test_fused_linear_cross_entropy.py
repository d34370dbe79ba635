"""The loss that never holds all logits, against `linear` and `cross_entropy`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.ops import fused_linear_cross_entropy as fused
from shoal.numerics.ops.fused_linear_cross_entropy import linear_cross_entropy

IGNORE = -100


def inputs(dtype: torch.dtype, num_tokens: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(num_tokens, 24, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(61, 24, dtype=dtype, generator=generator, requires_grad=True)
    labels = torch.randint(0, 61, (num_tokens,), generator=generator)
    labels[::7] = IGNORE
    return h, weight, labels


def plain(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, weight), labels, ignore_index=IGNORE, reduction="sum")


def relative(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float(((found - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunks", [1, 4])
def test_loss_and_gradients_are_those_of_torch(
    dtype: torch.dtype, bound: float, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, weight, labels = inputs(dtype)
    if chunks > 1:
        monkeypatch.setattr(fused, "CHUNK_BYTES", 61 * dtype.itemsize * 128)
    found = linear_cross_entropy(h, weight, labels, ignore=IGNORE)
    gradients = torch.autograd.grad(found * 0.3, (h, weight))
    expected = plain(h, weight, labels)
    wanted = torch.autograd.grad(expected * 0.3, (h, weight))
    assert relative(found, expected) <= bound
    assert all(relative(mine, theirs) <= bound for mine, theirs in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize(("scale", "softcap"), [(0.5, None), (1.0, 3.0), (2.0, 1.5)])
@pytest.mark.parametrize("chunks", [1, 4])
def test_scaled_and_capped_logits(
    scale: float, softcap: float | None, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, weight, labels = inputs(torch.float64)
    if chunks > 1:
        monkeypatch.setattr(fused, "CHUNK_BYTES", 61 * 8 * 128)
    found = linear_cross_entropy(h, weight, labels, ignore=IGNORE, scale=scale, softcap=softcap)
    logits = F.linear(h, weight) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    mine, theirs = (torch.autograd.grad(loss * 0.3, (h, weight)) for loss in (found, expected))
    assert relative(found, expected) <= 1e-14
    assert all(relative(a, b) <= 1e-13 for a, b in zip(mine, theirs, strict=True))
    with torch.no_grad():
        assert (
            relative(linear_cross_entropy(h, weight, labels, ignore=IGNORE, scale=scale, softcap=softcap), found)
            < 1e-14
        )


@pytest.mark.parametrize("told", [0.3, 7.0])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_whatever_was_said_of_the_gradient_of_the_loss(told: float, autocast: torch.dtype | None) -> None:
    h, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        found = linear_cross_entropy(h, weight, labels, ignore=IGNORE, factor=told)
    gradients = torch.autograd.grad(found * 0.3, (h, weight))
    exact = [x.detach().double().requires_grad_() for x in (h, weight)]
    wanted = torch.autograd.grad(plain(*exact, labels) * 0.3, exact)
    bound = 1e-5 if autocast is None else 1e-2
    assert all(relative(mine.double(), theirs) <= bound for mine, theirs in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("number", [3, 7, 8, 100])
def test_a_backward_that_gets_what_was_said_has_nothing_to_do(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the loss is in float32, in which 1 / 3 is another number."""
    seen: list[float] = []
    times = fused._times_
    monkeypatch.setattr(
        fused, "_times_", lambda x, by: (seen.append(float(by)), times(x, by))[1] if not by.dim() else x
    )
    h, weight, labels = inputs(torch.float32)
    (linear_cross_entropy(h, weight, labels, ignore=IGNORE, factor=1 / number) * (1 / number)).backward()
    assert seen == []


def test_gradients_of_tokens_that_a_model_is_sure_of() -> None:
    """p - 1 is not computed from p, of which a float32 knows seven digits."""
    logits = torch.zeros(1, 3)
    logits[0, 1] = 20.0
    exact = logits.double().requires_grad_()
    F.cross_entropy(exact, torch.tensor([1])).backward()
    total, rows = fused.gradient_(logits, torch.tensor([1]), ignore=IGNORE, factor=1.0)
    assert float(total) < 1e-6
    assert rows is None, "on a CPU the gradient is finished"
    assert relative(logits.double(), exact.grad) < 1e-6


def test_never_holds_the_logits_of_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight, labels = inputs(torch.float64)
    monkeypatch.setattr(fused, "CHUNK_BYTES", 61 * 8 * 128)
    seen: list[int] = []
    once = fused.gradient_
    monkeypatch.setattr(
        fused, "gradient_", lambda logits, *a, **o: (seen.append(len(logits)), once(logits, *a, **o))[1]
    )
    linear_cross_entropy(h, weight, labels, ignore=IGNORE)
    assert seen == [128, 128, 128, 116]


def test_gradients_of_what_needs_one_only() -> None:
    h, weight, labels = inputs(torch.float64)
    with torch.no_grad():
        assert relative(linear_cross_entropy(h, weight, labels, ignore=IGNORE), plain(h, weight, labels)) < 1e-14
    frozen = weight.detach()
    (alone,) = torch.autograd.grad(linear_cross_entropy(h, frozen, labels, ignore=IGNORE), (h,))
    (expected,) = torch.autograd.grad(plain(h, frozen, labels), (h,))
    assert relative(alone, expected) < 1e-14


def test_all_labels_ignored_is_zero_with_zero_gradients() -> None:
    h, weight, labels = inputs(torch.float64)
    loss = linear_cross_entropy(h, weight, torch.full_like(labels, IGNORE), ignore=IGNORE)
    gradients = torch.autograd.grad(loss, (h, weight))
    assert float(loss.detach()) == 0.0
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_under_autocast_products_are_in_its_precision_and_sums_are_not() -> None:
    h, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(h, weight, labels, ignore=IGNORE)
    gradients = torch.autograd.grad(loss, (h, weight))
    exact_h, exact_weight = (x.detach().double().requires_grad_() for x in (h, weight))
    expected = torch.autograd.grad(plain(exact_h, exact_weight, labels), (exact_h, exact_weight))
    assert loss.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32]
    assert all(1e-4 < relative(mine.double(), theirs) < 1e-2 for mine, theirs in zip(gradients, expected, strict=True))


def test_a_second_backward_is_refused() -> None:
    h, weight, labels = inputs(torch.float64)
    loss = linear_cross_entropy(h, weight, labels, ignore=IGNORE)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_a_backward_no_gradient_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight, labels = inputs(torch.float64)
    monkeypatch.setattr(fused, "_add_product", lambda *_, **__: pytest.fail("a gradient that nobody asked for"))
    with torch.no_grad():
        linear_cross_entropy(h, weight, labels, ignore=IGNORE)


def test_no_tokens() -> None:
    h, weight, labels = inputs(torch.float64, 1)
    loss = linear_cross_entropy(h[:0], weight, labels[:0], ignore=IGNORE)
    assert float(loss.detach()) == 0.0
    assert float(torch.autograd.grad(loss, weight)[0].abs().max()) == 0.0
