"""fp8 on a CPU, where its products are computed as if: which layers, how exact, and what is refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from shoal import Run
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.fp8.convert import Scaling, is_fit_for_fp8, to_fp8
from tests.cover import wide
from tests.rejects import rejects

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@cache
def losses(plan: str, **options: object) -> tuple[list[float], Llama]:
    model = Llama(LlamaConfig(hidden=64, ffn=128, num_layers=2, vocabulary=97))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter.data, generator)
    names = [name for name, _ in model.named_parameters()]
    tokens = torch.randint(0, 97, (2, 17), generator=generator)
    with Run(plan, device="cpu", fp8_min_features=16, **options) as run:  # type: ignore[arg-type]
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True))
        found = [float(run.step({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})) for _ in range(6)]
    assert [name for name, _ in model.named_parameters()] == names
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return found, model


@pytest.mark.parametrize("scaling", ["tensorwise", wide("rowwise")])
def test_it_follows_bf16(scaling: str) -> None:
    (found, model), (expected, _) = losses("fp8", fp8=scaling), losses("bf16")
    assert found == pytest.approx(expected, rel=0.01)
    assert found != expected, "nothing was computed in fp8"
    inner = type(model.model.layers[0].mlp.up_proj)  # type: ignore[union-attr]
    assert inner is not nn.Linear
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_layer_stays_the_one_that_it_is(scaling: Scaling, is_alone: bool) -> None:
    """torchao puts another layer in its place: hooks were lost, and a block that is a layer itself stayed in bf16."""
    torch.manual_seed(0)
    layer, seen = nn.Linear(32, 48), []
    x = torch.randn(16, 32)
    expected = layer(x)
    layer.register_forward_hook(lambda *call: seen.append(call))
    to_fp8(layer if is_alone else nn.Sequential(layer), scaling, torch.device("cpu"), min_features=16)
    found = layer(x)
    found.sum().backward()
    assert len(seen) == 1
    assert layer.weight.grad is not None
    assert 1e-4 < float(((found - expected).norm() / expected.norm()).detach()) < 0.05


@pytest.mark.parametrize(
    ("layer", "is_fit"),
    [
        (nn.Linear(2048, 8192, bias=False, device="meta"), True),
        (nn.Linear(2048, 256, bias=False, device="meta"), False),  # narrow
        (nn.Linear(2048, 2056, bias=False, device="meta"), False),  # no multiple of 16
        (nn.Embedding(2048, 2048, device="meta"), False),
    ],
)
def test_which_layers(layer: nn.Module, is_fit: bool) -> None:
    assert is_fit_for_fp8(layer) == is_fit


def test_a_model_without_blocks_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2048, 2048)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y

    with Run("fp8", device="cpu") as run, rejects("P041", match="but the model describes none"):
        run.prepare(Plain())


def test_a_model_that_is_too_small_is_refused() -> None:
    with Run("fp8", device="cpu") as run, rejects("P060", "512"):
        run.prepare(Llama(LlamaConfig(hidden=64, ffn=128, num_layers=1)))


def test_a_model_of_odd_sizes_is_refused_whatever_is_narrow() -> None:
    with Run("fp8", device="cpu", fp8_min_features=16) as run, rejects("P060", "of 16"):
        run.prepare(Llama(LlamaConfig(hidden=40, ffn=72, num_heads=4, num_kv_heads=4, num_layers=1)))
