"""A linear layer in fp8 of our own, on a CPU and, where there is one, on a GPU: it computes what the layer in float32
does, and its gradients, but for what 8 bits cannot say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.numerics.fp8 import fp8_linear, products
from shoal.numerics.fp8.fp8_linear import Fp8Linear
from shoal.numerics.fp8.products import ScaledTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # a CPU without products in bfloat16
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch.compile's own parts
]
WAYS = [("cpu", None), ("cpu", "aot_eager"), *([("cuda", None), ("cuda", "inductor")] * torch.cuda.is_available())]


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("device", "backend"), WAYS)
@pytest.mark.parametrize(("tokens", "features", "out"), [(96, 64, 208), (512, 1024, 2048)])
def test_a_layer(device: str, backend: str | None, tokens: int, features: int, out: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(features, out, bias=False).to(device)
    x, d = (torch.randn(2, tokens // 2, size).to(device) for size in (features, out))
    x.requires_grad_()
    expected = layer(x)
    wanted = torch.autograd.grad((expected * d).sum(), (x, layer.weight))
    Fp8Linear.of(layer)
    call = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = call(x)
    assert found.dtype == torch.bfloat16
    assert 1e-3 < error(found, expected) < 0.05  # 3 bits of fraction: up to 1/16 off, at random
    dx, dw = torch.autograd.grad((found.float() * d).sum(), (x, layer.weight))
    assert error(dx, wanted[0]) < 0.08  # 2 bits of fraction
    assert error(dw, wanted[1]) < 0.08
    assert dw.dtype == torch.float32
    assert not torch.equal(dw, dw.bfloat16().float()), "it was rounded to bfloat16 on its way"


@pytest.mark.parametrize("shape", [(32,), (0, 32), (3, 0, 32), (2, 3, 32)])
def test_it_takes_what_a_linear_layer_takes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48), torch.randn(shape)
    expected = layer(x)
    Fp8Linear.of(layer)
    found = layer(x)
    assert found.shape == expected.shape
    found.sum().backward()
    assert layer.weight.grad is not None
    if x.numel():
        assert error(found, expected) < 0.05
    else:
        assert not layer.weight.grad.any()


def test_a_bias_and_what_needs_no_gradient() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    x = torch.randn(16, 32)
    expected = layer(x)
    Fp8Linear.of(layer)
    assert error(layer(x), expected) < 0.05
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sums over multiples of 16 alone, and in the gradient of the weight it sums over tokens."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=False)
    x, d = torch.randn(3, 7, 32, requires_grad=True), torch.randn(3, 7, 48)
    wanted = torch.autograd.grad((layer(x) * d).sum(), (x, layer.weight))
    sums: list[int] = []

    def product(a: ScaledTensor, b: ScaledTensor, *rest: Any, **more: Any) -> Tensor:
        sums.append(a.values.shape[1])
        return products.product(a, b, *rest, **more)

    monkeypatch.setattr(fp8_linear, "product", product)
    fp8_linear.Fp8Linear.of(layer)
    y = layer(x)
    found = torch.autograd.grad((y * d).sum(), (x, layer.weight))
    assert y.shape == d.shape
    assert sums == [32, 48, 32]
    assert all(error(one, other) < 0.08 for one, other in zip(found, wanted, strict=True))


def test_products_are_of_matrices_by_rows_however_their_numbers_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one sequence that a convolution has seen, tokens lie side by side, features apart, in x and in its gradient;
    a GPU multiplies no such matrix, and said so in torch's words."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=False)
    x = torch.randn(1, 32, 64).transpose(1, 2).requires_grad_()
    lies: list[bool] = []

    def product(a: ScaledTensor, b: ScaledTensor, *rest: Any, **more: Any) -> Tensor:
        lies.extend(one.values.is_contiguous() for one in (a, b))
        return products.product(a, b, *rest, **more)

    monkeypatch.setattr(fp8_linear, "product", product)
    fp8_linear.Fp8Linear.of(layer)
    torch.autograd.grad((layer(x).transpose(1, 2) * torch.randn(1, 48, 64)).sum(), (x, layer.weight))
    assert lies == [True] * 6
