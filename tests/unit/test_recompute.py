"""What blocks keep for the backward, counted: compiled or not, full recompute keeps their inputs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from shoal import Run
from shoal.blueprint.plan import Recompute
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.init import initialise
from shoal.numerics.ops.experts.grouped_matmul import _grouped_mm
from shoal.parallel.activation_checkpoint import _policy, recompute
from tests.cover import wide

LAYERS, TOKENS, HIDDEN = 4, 512, 64


def kept(recompute: str, compiler: bool | str) -> float:
    """Bytes that autograd keeps beside parameters, in tensors of the size of the residual stream and layer."""
    torch._dynamo.reset()
    model = Llama(LlamaConfig(hidden=HIDDEN, ffn=256, num_layers=LAYERS, num_kv_heads=2, vocabulary=128))
    initialise(model, 0)
    held: dict[int, int] = {}
    with Run(f"fp32 mb=2 recompute={recompute}", device="cpu", compile=compiler) as run:  # type: ignore[arg-type]
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()
            return x

        tokens = torch.randint(0, 128, (2, TOKENS // 2 + 1))
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run.step(batch)
    return sum(held.values()) / LAYERS / (TOKENS * HIDDEN * 4)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("compiler", [False, wide("aot_eager_decomp_partition")])
def test_full_recompute_keeps_inputs_alone(compiler: bool | str) -> None:
    assert kept("none", compiler) > 10
    assert kept("full", compiler) < 2.5


class Grouped(nn.Module):
    """A product of each part of the rows with a matrix of its own, as experts compute it on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _grouped_mm(x.tanh(), self.weight, offs=torch.tensor([8, 16], dtype=torch.int32))
        return y.relu()


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("how", "num_products", "num_cheap"), [("none", 3, 1), ("selective", 3, 2), ("full", 4, 2)])
def test_products_of_experts_are_kept_and_what_is_cheap_is_made_again(
    how: Recompute, num_products: int, num_cheap: int
) -> None:
    """Forward, both gradients, and what the backward computes again. `selective` had forgotten products of groups and
    of 8-bit floats, and computed them twice."""
    block = Grouped()
    recompute(block, how)
    with Calls() as calls:
        block(torch.randn(16, 16, dtype=torch.bfloat16).requires_grad_()).sum().backward()
    assert calls.names.count("_grouped_mm.default") == num_products
    assert calls.names.count("tanh.default") == num_cheap


def test_products_of_8_bit_floats_are_kept() -> None:
    assert _policy(None, torch.ops.aten._scaled_mm.default) == CheckpointPolicy.MUST_SAVE
