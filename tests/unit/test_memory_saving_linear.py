"""Memory-saving layers, compared with plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.ops import memory_saving_linear
from shoal.numerics.ops.memory_saving_linear import RMSNorm, rms_norm_linear, swiglu_linear
from shoal.numerics.ops.rotary import rotate_heads


def drawn(*shape: int, seed: int) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(drawn(outputs, inputs, seed=seed).detach())
    return layer


def norm_of(features: int) -> RMSNorm:
    norm = RMSNorm(features, eps=1e-5, dtype=torch.float64)
    norm.weight = nn.Parameter(1 + 0.3 * drawn(features, seed=9).detach())
    return norm


def assert_same_gradients(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    grad = drawn(*found.shape, seed=8).detach()
    mine, theirs = (torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_projections_of_a_norm() -> None:
    x, norm = drawn(3, 5, 16, seed=0), norm_of(16)
    layers = [linear(16, width, seed) for seed, width in enumerate((24, 8, 8))]
    passed, products = rms_norm_linear(x, norm, *layers)
    found = torch.cat([passed, *products], dim=-1)
    expected = torch.cat([x, *(layer(nn.RMSNorm.forward(norm, x)) for layer in layers)], dim=-1)
    assert_same_gradients(found, expected, x, norm.weight, *(layer.weight for layer in layers))


def test_a_product() -> None:
    x, layer = drawn(3, 5, 24, seed=0), linear(24, 16, 2)
    assert_same_gradients(memory_saving_linear.linear(x, layer), layer(x), x, layer.weight)


@pytest.mark.parametrize("batch_of_angles", [1, 3])
def test_heads_of_one_product(batch_of_angles: int) -> None:
    num_heads, num_kv_heads, features = 4, 2, 6
    joint = drawn(3, 5, (num_heads + 2 * num_kv_heads) * features, seed=0)
    angles = drawn(batch_of_angles, 5, features // 2, seed=1).detach()
    found = rotate_heads(joint, angles.cos(), angles.sin(), num_heads=num_heads, num_kv_heads=num_kv_heads)
    parts = joint.split([num_heads * features, num_kv_heads * features, num_kv_heads * features], dim=-1)
    pairs = [
        torch.view_as_complex(x.unflatten(-1, (-1, 2, features // 2)).transpose(-1, -2).contiguous()) for x in parts
    ]
    turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    turned = [torch.view_as_real(x).transpose(-1, -2).flatten(-2) for x in (pairs[0] * turn, pairs[1] * turn, pairs[2])]
    assert [x.shape[2] for x in found] == [4, 2, 2]
    assert_same_gradients(torch.cat(found, dim=2), torch.cat(turned, dim=2), joint)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("is_joint", [True, False])
def test_a_gated_product(recompute: bool, is_joint: bool) -> None:
    joint, layer = drawn(3, 5, 48, seed=0), linear(24, 16, 2)
    gate, up = joint.chunk(2, -1)
    parts = (joint,) if is_joint else (gate, up)
    found = swiglu_linear(parts, layer, recompute=recompute)
    assert_same_gradients(found, layer(F.silu(gate) * up), joint, layer.weight)


def saved_bytes(y_of: object) -> int:
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y_of()  # type: ignore[operator]
    return sum(sizes.values())


def test_what_they_keep() -> None:
    rows, inner, features = 15, 24, 16
    gate, up, down = drawn(3, 5, inner, seed=0), drawn(3, 5, inner, seed=1), linear(inner, features, 2)
    assert saved_bytes(lambda: swiglu_linear((gate, up), down)) == 8 * rows * 2 * inner
    assert saved_bytes(lambda: down(F.silu(gate) * up)) >= 8 * rows * 4 * inner
    x, norm = drawn(3, 5, features, seed=3), norm_of(features)
    assert saved_bytes(
        lambda: rms_norm_linear(x, norm, down.__class__(features, 4, bias=False, dtype=x.dtype))
    ) == 8 * rows * (features + 1)


@pytest.mark.parametrize("what", ["hook", "bias", "class"])
def test_who_has_to_be_called_is_called(what: str) -> None:
    calls: list[str] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("class")
            return super().forward(x)

    layer = linear(16, 8, 0)
    if what == "hook":
        layer.register_forward_hook(lambda *_: calls.append("hook"))
    elif what == "bias":
        layer = nn.Linear(16, 8, dtype=torch.float64)
    else:
        layer = Watched(16, 8, bias=False, dtype=torch.float64)
    x, norm = drawn(3, 5, 16, seed=0), norm_of(16)
    _, (found,) = rms_norm_linear(x, norm, layer)
    torch.testing.assert_close(found, layer(norm(x)))
    torch.testing.assert_close(swiglu_linear((x, x), layer), layer(F.silu(x) * x))
    assert calls == ([what] * 4 if what != "bias" else [])


def test_a_norm_of_another_kind_is_called() -> None:
    class Shifted(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    x, layer, norm = drawn(3, 5, 16, seed=0), linear(16, 8, 0), Shifted(16, dtype=torch.float64)
    _, (found,) = rms_norm_linear(x, norm, layer)
    torch.testing.assert_close(found, layer(norm(x)))


def test_a_norm_of_lower_precision_than_its_scale_is_computed_in_that_of_the_scale() -> None:
    norm, x = RMSNorm(16), torch.randn(4, 16, dtype=torch.bfloat16)
    assert norm(x).dtype == torch.float32


def test_a_model_without_values_has_shapes() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig())
        assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 264)
