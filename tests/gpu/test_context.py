"""On a GPU: attention to a part of the keys in every precision against float64 written out, and rings of ranks that
share the GPU against one device's flash attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.numerics.ops.attention import AttentionOutput, attend, attend_backward, merge_
from shoal.numerics.precision import wide
from shoal.parallel.context.attention import Attention, ContextParallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # in the first backward of a process
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device; CI has none, run by hand with one"),
]

# The norm of the difference over the norm. bfloat16 keeps 8 bits, float16 11: inputs are rounded before both sides see
# them, so what remains are roundings of weights and outputs. float32 kernels may multiply in tf32, which keeps 11.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-3, torch.float64: 1e-12}
BATCH, HEADS, HEAD_DIM = 2, 8, 64


def relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


# ---- float64, written out -------------------------------------------------------------------------------------------


def written_out(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse. `sees` (..., T, S) is true where a query looks; a query that sees nothing puts out zero."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~sees, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ v, scores.logsumexp(-1)


def causal_sight(num_queries: int, num_keys: int) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device="cuda").tril()


def random_sight(num_queries: int, num_keys: int) -> Tensor:
    """For each sample; the third query of all sees nothing in the first half of the keys, but something later."""
    generator = torch.Generator("cuda").manual_seed(5)
    sees = torch.rand(BATCH, 1, num_queries, num_keys, device="cuda", generator=generator) < 0.5
    sees[:, :, 2, : num_keys // 2] = False
    sees[:, :, :, -1] = True
    return sees


def drawn(dtype: torch.dtype, num_kv_heads: int, num_queries: int, num_keys: int) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, rounded to a precision."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(HEADS, num_queries), (num_kv_heads, num_keys), (num_kv_heads, num_keys), (HEADS, num_queries)]
    every = [torch.randn(BATCH, *shape, HEAD_DIM, device="cuda", generator=generator) for shape in shapes]
    return [x.to(dtype) for x in every]


class Exact(NamedTuple):
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]


def exact_of(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sees: Tensor) -> Exact:
    inputs = [x.double().detach().requires_grad_() for x in (q, k, v)]
    out, lse = written_out(*inputs, sees)
    dq, dk, dv = torch.autograd.grad(out, inputs, grad.double())
    return Exact(out.detach(), lse.detach(), (dq, dk, dv))


# ---- one device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_kv_heads", [8, 2], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("sight", ["all", "causal", "mask"])
@pytest.mark.parametrize("tokens", [256, 200])
def test_attention_and_its_backward(dtype: torch.dtype, num_kv_heads: int, sight: str, tokens: int) -> None:
    q, k, v, grad = drawn(dtype, num_kv_heads, tokens, tokens)
    mask = random_sight(tokens, tokens) if sight == "mask" else None
    everything = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda")
    sees = causal_sight(tokens, tokens) if sight == "causal" else everything if mask is None else mask
    exact = exact_of(q, k, v, grad, sees)
    whole = attend(q, k, v, mask, is_causal=sight == "causal")
    assert whole.lse.dtype == wide(dtype)
    assert whole.lse.shape == exact.lse.shape
    found = attend_backward(grad, q, k, v, whole, mask, is_causal=sight == "causal")
    pairs = [(whole.out, exact.out), (whole.lse, exact.lse), *zip(found, exact.gradients, strict=True)]
    errors = [relative(ours, expected) for ours, expected in pairs]
    print(f"{dtype} {sight} kv={num_kv_heads} T={tokens}: " + " ".join(f"{error:.1e}" for error in errors))
    for name, error in zip(("out", "lse", "dq", "dk", "dv"), errors, strict=True):
        assert error < TOLERANCES[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_kv_heads", [8, 2], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "mask"])
def test_parts_make_the_whole(dtype: torch.dtype, num_kv_heads: int, is_masked: bool) -> None:
    """Keys in three parts of unlike length, merged; and the backward of each part, of which the whole's is the sum.
    With the mask, a query sees nothing of the first part."""
    tokens, bounds = 192, [(0, 96), (96, 160), (160, 192)]
    q, k, v, grad = drawn(dtype, num_kv_heads, tokens, tokens)
    mask = random_sight(tokens, tokens) if is_masked else None
    exact = exact_of(q, k, v, grad, torch.ones((), dtype=torch.bool, device="cuda") if mask is None else mask)
    total: AttentionOutput | None = None
    for start, stop in bounds:
        part = attend(q, k[:, :, start:stop], v[:, :, start:stop], None if mask is None else mask[..., start:stop])
        if total is None:
            total = AttentionOutput(part.out.to(wide(dtype)).clone(), part.lse.clone())
        else:
            merge_(total, part)
    assert total is not None
    whole = AttentionOutput(total.out.to(dtype), total.lse)
    assert relative(whole.out, exact.out) < TOLERANCES[dtype]
    assert relative(whole.lse, exact.lse) < TOLERANCES[dtype]
    sums = [torch.zeros_like(x, dtype=wide(dtype)) for x in (q, k, v)]
    for start, stop in bounds:
        some_mask = None if mask is None else mask[..., start:stop]
        dq, dk, dv = attend_backward(grad, q, k[:, :, start:stop], v[:, :, start:stop], whole, some_mask)
        sums[0] += dq
        sums[1][:, :, start:stop] += dk
        sums[2][:, :, start:stop] += dv
    for name, ours, expected in zip(("dq", "dk", "dv"), sums, exact.gradients, strict=True):
        assert relative(ours, expected) < TOLERANCES[dtype], name


# ---- ranks that share it --------------------------------------------------------------------------------------------

TOKENS, DTYPE = 1024, torch.bfloat16


def on_rank(placement: Placement, store: dist.Store, kind: str, documents: Any) -> list[Any]:
    """Output and gradients of my tokens, put together with everybody's, in host memory."""
    with World.start(placement, device="cuda", backend="gloo", store=store) as world:
        context = ContextParallel(dist.group.WORLD, kind=kind, comm_device=torch.device("cpu"))  # type: ignore[arg-type]
        attention = Attention()
        attention.context = context
        q, k, v, grad = (context.part(x, 2) for x in drawn(DTYPE, 2, TOKENS, TOKENS))
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        mask = documents
        if documents is not None:
            mask = documents.to(world.device)
            same = mask[:, :, None] == mask[:, None, :]
            mask = mask if kind == "ring" else same.tril()
        out = attention(*inputs, mask)
        gradients = torch.autograd.grad(out, inputs, grad)
        return [context.join(x.detach().cpu(), 2) for x in (out, *gradients)]


def on_one(sees: Tensor, is_causal: bool) -> list[Tensor]:
    """What one device makes of it: torch's flash attention, or with a mask its kernel for masks."""
    q, k, v, grad = drawn(DTYPE, 2, TOKENS, TOKENS)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    mask = None if is_causal else sees
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "packed"])
def test_ranks_round_no_worse_than_one_device(kind: str, nproc: int, is_packed: bool) -> None:
    """Both differ from float64 by rounding to bfloat16; many ranks at most twice as much as one."""
    documents, sees = None, causal_sight(TOKENS, TOKENS)
    if is_packed:
        begins = torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(9)) < 0.02
        documents = begins.cumsum(1)
        on_gpu = documents.cuda()
        sees = sees & (on_gpu[:, None, :, None] == on_gpu[:, None, None, :])
    q, k, v, grad = drawn(DTYPE, 2, TOKENS, TOKENS)
    exact = exact_of(q, k, v, grad, sees)
    alone = on_one(sees, is_causal=not is_packed)
    for rank in launch(on_rank, (kind, documents), nproc=nproc):
        for name, ours, single, expected in zip(
            ("out", "dq", "dk", "dv"), rank, alone, (exact.out, *exact.gradients), strict=True
        ):
            error, limit = relative(ours.cuda(), expected), relative(single, expected)
            print(f"{kind} on {nproc}, {name}: {error:.2e}, one device {limit:.2e}")
            assert error <= 2 * limit, name
