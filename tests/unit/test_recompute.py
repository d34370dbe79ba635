"""What blocks keep for the backward, counted: compiled or not, full recompute keeps their inputs alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal import Run
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.init import initialise

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
@pytest.mark.parametrize("compiler", [False, "aot_eager_decomp_partition"])
def test_full_recompute_keeps_inputs_alone(compiler: bool | str) -> None:
    assert kept("none", compiler) > 10
    assert kept("full", compiler) < 2.5
