"""The operations that `shoal calibrate` measures: matrix products, attention, memory, a block and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.collectives import all_gather, reduce_scatter
from shoal.comm.world import World
from shoal.config.recipe import ModelSection
from shoal.numerics.init import initialise
from shoal.train.build_model import build_model, describe

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def product(rows: int, columns: int, inner: int, precision: str, device: torch.device) -> Callable[[], Tensor]:
    """A matrix product x @ W.T."""
    dtype = DTYPES.get(precision, torch.bfloat16)
    x, weight = (torch.randn(size, inner, device=device).to(dtype) for size in (rows, columns))
    if precision != "fp8":
        return lambda: F.linear(x, weight)
    x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(x8, weight8.T, one, one, out_dtype=torch.bfloat16)


def copy(num_bytes: int, device: torch.device) -> Callable[[], Tensor]:
    """A copy of `num_bytes`."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def elementwise(num_bytes: int, precision: str, device: torch.device) -> Callable[[], object]:
    """Four kernels that read or write a tensor ten times, as in a gate, the scale of a norm and a residual."""
    dtype = DTYPES[precision]
    gate, up = torch.randn(2, num_bytes // dtype.itemsize, device=device, dtype=dtype)
    return lambda: (F.silu(gate).mul_(up), gate.mul(0.5), gate.add(up))


def attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], object]:
    """Causal attention, forward and backward."""
    inputs = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, grad)


def block_step(
    dims: dict[str, int], num_tokens: int, precision: str, device: torch.device
) -> tuple[Callable[[], object], float]:
    """Forward and backward of the block of a one-block model, and their FLOPs, counted by the model."""
    model, tokens = one_block_model(dims, num_tokens, device)
    description = describe(model)
    block = model.get_submodule(description.blocks[0])
    autocast = torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision in ("bf16", "fp16"))
    arguments = _arguments_of(block, lambda: model(tokens), autocast)
    x, rest = arguments[0].detach().requires_grad_(), arguments[1:]
    grad = torch.randn_like(x)

    def step() -> None:
        with autocast:
            output = block(x, *rest)
        output.backward(grad)

    assert description.training_flops is not None
    return step, description.training_flops((1, num_tokens)) - 6.0 * 8 * dims["hidden"] * num_tokens


def one_block_model(dims: dict[str, int], num_tokens: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A model with one block, and a sample for it."""
    with torch.device(device):
        model = build_model(ModelSection.model_validate({"name": "llama", "num_layers": 1, "vocabulary": 8, **dims}))
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
    initialise(model, seed=0)
    return model, tokens


def _arguments_of(module: nn.Module, run: Callable[[], object], autocast: Any) -> tuple[Any, ...]:
    """The arguments that a submodule is called with."""
    seen: list[tuple[Any, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    with torch.no_grad(), autocast:
        run()
    hook.remove()
    return seen[0]


def collectives(world: World, num_bytes: int) -> dict[str, Callable[[], object]]:
    """A send to the next rank, and three collectives, over `num_bytes` in all."""
    whole = torch.zeros(num_bytes // 4, device=world.device)
    received = torch.empty_like(whole)
    part = whole[: whole.numel() // world.size].clone()
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def pass_on() -> None:
        swaps = [dist.P2POp(dist.isend, whole, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()

    return {
        "send": pass_on,
        "all_gather": lambda: all_gather(part, 0, dist.group.WORLD),
        "reduce_scatter": lambda: reduce_scatter(whole[: part.numel() * world.size], 0, dist.group.WORLD),
        "all_reduce": lambda: dist.all_reduce(whole),
    }
