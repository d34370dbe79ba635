"""Attention to a part of the keys: outputs, log-sum-exps, merges and gradients of softmax attention written out."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from shoal.numerics.ops.attention import (
    AttentionOutput,
    additive,
    attend,
    attend_backward,
    is_part_of_attention,
    merge_,
    wide,
)

# Relative to the largest value: sums of some dozen terms in another order.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5}
BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 2, 4, 10, 14, 8
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
SHARED = pytest.mark.parametrize("num_kv_heads", [4, 2, 1])


def drawn(dtype: torch.dtype, num_kv_heads: int, num_keys: int = KEYS, scale: float = 1.0) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, num_kv_heads, num_kv_heads, HEADS)
    tokens = (QUERIES, num_keys, num_keys, QUERIES)
    shapes = [(BATCH, n, t, HEAD_DIM) for n, t in zip(heads, tokens, strict=True)]
    return [torch.randn(shape, generator=generator).mul(scale).to(dtype) for shape in shapes]


def written_out(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and lse in float64, head by head; a query that sees nothing puts out zero."""
    q, k, v = q.double(), k.double(), v.double()
    outs, lses = [], []
    for head in range(q.shape[1]):
        own = head * k.shape[1] // q.shape[1]
        scores = torch.einsum("bth,bsh->bts", q[:, head], k[:, own]) / q.shape[-1] ** 0.5
        weights = scores.exp() if sees is None else scores.exp() * sees.double()
        total = weights.sum(-1)
        outs.append(torch.einsum("bts,bsh->bth", weights, v[:, own]) / total.clamp_min(1e-300)[..., None])
        lses.append(total.log())
    return torch.stack(outs, 1), torch.stack(lses, 1)


def gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sees: Tensor | None = None) -> tuple[Tensor, ...]:
    inputs = [x.double().detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(written_out(*inputs, sees)[0], inputs, grad.double())


def assert_close(ours: Tensor, exact: Tensor, dtype: torch.dtype, what: str = "") -> None:
    error = ((ours.double() - exact).abs().max() / exact.abs().max()).item()
    assert error < TOLERANCES[dtype], f"{what}: {error:.1e}"


def some_mask(num_keys: int = KEYS) -> Tensor:
    """Unlike for each sample. Query 3 sees nothing of the first half; every query sees something."""
    sees = torch.rand(BATCH, 1, QUERIES, num_keys, generator=torch.Generator().manual_seed(1)) < 0.5
    sees[:, :, 3, : num_keys // 2] = False
    sees[..., -1] = True
    return sees


# ---- a whole --------------------------------------------------------------------------------------------------------


@DTYPES
@SHARED
def test_to_all_keys(dtype: torch.dtype, num_kv_heads: int) -> None:
    q, k, v, _ = drawn(dtype, num_kv_heads)
    whole, (out, lse) = attend(q, k, v), written_out(q, k, v)
    assert whole.out.dtype == dtype
    assert whole.lse.dtype == wide(dtype)
    assert_close(whole.out, out, dtype)
    assert_close(whole.lse, lse, dtype)


@DTYPES
@SHARED
def test_causal(dtype: torch.dtype, num_kv_heads: int) -> None:
    q, k, v, grad = drawn(dtype, num_kv_heads, num_keys=QUERIES)
    sees = torch.ones(QUERIES, QUERIES).tril()
    whole, (out, lse) = attend(q, k, v, is_causal=True), written_out(q, k, v, sees)
    assert_close(whole.out, out, dtype)
    assert_close(whole.lse, lse, dtype)
    found = attend_backward(grad, q, k, v, whole, is_causal=True)
    for what, ours, exact in zip("qkv", found, gradients(q, k, v, grad, sees), strict=True):
        assert_close(ours, exact, dtype, what)


@DTYPES
@SHARED
@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "mask"])
def test_gradients(dtype: torch.dtype, num_kv_heads: int, is_masked: bool) -> None:
    q, k, v, grad = drawn(dtype, num_kv_heads)
    mask = some_mask() if is_masked else None
    sees = None if mask is None else mask[:, 0]
    whole, (out, lse) = attend(q, k, v, mask), written_out(q, k, v, sees)
    assert_close(whole.out, out, dtype)
    assert_close(whole.lse, lse, dtype)
    found = attend_backward(grad, q, k, v, whole, mask)
    for what, ours, exact in zip("qkv", found, gradients(q, k, v, grad, sees), strict=True):
        assert_close(ours, exact, dtype, what)


def test_one_mask_for_all_samples() -> None:
    q, k, v, _ = drawn(torch.float64, 2)
    mask = some_mask()[:1]
    out, lse = written_out(q, k, v, mask[:, 0])
    whole = attend(q, k, v, mask)
    assert_close(whole.out, out, torch.float64)
    assert_close(whole.lse, lse, torch.float64)


# ---- parts ----------------------------------------------------------------------------------------------------------

BOUNDS = [(0, 7), (7, 12), (12, 14)]


def merged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: list[tuple[int, int]]) -> AttentionOutput:
    parts = [
        attend(q, k[:, :, start:stop], v[:, :, start:stop], None if mask is None else mask[..., start:stop])
        for start, stop in bounds
    ]
    total = AttentionOutput(parts[0].out.clone(), parts[0].lse.clone())
    for part in parts[1:]:
        merge_(total, part)
    return total


@DTYPES
@SHARED
@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("bounds", [BOUNDS, BOUNDS[::-1]], ids=["in order", "backwards"])
def test_parts_make_the_whole(
    dtype: torch.dtype, num_kv_heads: int, is_masked: bool, bounds: list[tuple[int, int]]
) -> None:
    """With the mask, a query sees nothing of one part: what it has of it weighs nothing, in whatever order."""
    q, k, v, grad = drawn(dtype, num_kv_heads)
    mask = some_mask() if is_masked else None
    sees = None if mask is None else mask[:, 0]
    out, lse = written_out(q, k, v, sees)
    whole = merged(q, k, v, mask, bounds)
    assert_close(whole.out, out, dtype, "out")
    assert_close(whole.lse, lse, dtype, "lse")
    expected = gradients(q, k, v, grad, sees)
    dq = torch.zeros_like(q)
    for start, stop in bounds:
        some = [x[:, :, start:stop] for x in (k, v)]
        part_dq, dk, dv = attend_backward(grad, q, *some, whole, None if mask is None else mask[..., start:stop])
        dq += part_dq
        assert_close(dk, expected[1][:, :, start:stop], dtype, "dk")
        assert_close(dv, expected[2][:, :, start:stop], dtype, "dv")
    assert_close(dq, expected[0], dtype, "dq")


@DTYPES
def test_scores_that_no_exponential_holds(dtype: torch.dtype) -> None:
    """Scores in the thousands: parts are weighted by differences of lses, never by exponentials of them."""
    q, k, v, _ = drawn(dtype, 2, scale=40.0)
    whole = merged(q, k, v, None, BOUNDS)
    scores = torch.einsum("bnth,bnsh->bnts", q.double(), k.double().repeat_interleave(2, 1)) / HEAD_DIM**0.5
    assert scores.abs().max() > 1000
    assert_close(whole.out, scores.softmax(-1) @ v.double().repeat_interleave(2, 1), dtype)
    assert_close(whole.lse, scores.logsumexp(-1), dtype)


@DTYPES
def test_a_query_that_sees_nothing_of_any_part(dtype: torch.dtype) -> None:
    """Its numbers stay finite, and the others' right: such queries are padding, whose loss does not count."""
    q, k, v, grad = drawn(dtype, 2)
    mask = some_mask()
    mask[:, :, 5] = False
    whole = merged(q, k, v, mask, BOUNDS)
    grad[:, :, 5] = 0.0  # as padding has it
    found = attend_backward(grad, q, k, v, whole, mask)
    for what, ours, exact in zip("qkv", found, gradients(q, k, v, grad, mask[:, 0]), strict=True):
        assert ours.isfinite().all(), what
        assert_close(ours, exact, dtype, what)
    out, _ = written_out(q, k, v, mask[:, 0])
    others = [query for query in range(QUERIES) if query != 5]
    assert whole.out.isfinite().all()
    assert_close(whole.out[:, :, others], out[:, :, others], dtype)


def test_a_merge_writes_to_the_total_alone() -> None:
    q, k, v, _ = drawn(torch.float64, 2)
    first, second = (attend(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 7), (7, 14)))
    before = AttentionOutput(second.out.clone(), second.lse.clone())
    total = AttentionOutput(first.out.clone(), first.lse.clone())
    merge_(AttentionOutput(*(x.narrow(2, 5, 5) for x in total)), AttentionOutput(*(x.narrow(2, 5, 5) for x in second)))
    assert torch.equal(total.out[:, :, :5], first.out[:, :, :5])
    assert_close(total.out[:, :, 5:], written_out(q, k, v)[0][:, :, 5:], torch.float64)
    assert all(torch.equal(ours, kept) for ours, kept in zip(second, before, strict=True))


# ---- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_masked_stays_finite_beside_any_score(dtype: torch.dtype) -> None:
    bias = additive(torch.tensor([[True, False]]), dtype)
    assert bias.dtype == dtype
    assert bias[0, 0] == 0
    assert (bias - torch.finfo(dtype).max / 2).isfinite().all()
    assert bias[0, 1] < -1e4


def test_whoever_looks_can_tell_a_part() -> None:
    """Also after one has failed, and in one thread alone."""
    q, k, v, _ = drawn(torch.float32, 2)
    seen: list[bool] = []

    class Look(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "attention" in str(function):
                seen.append(is_part_of_attention())
                thread = threading.Thread(target=lambda: seen.append(is_part_of_attention()))
                thread.start()
                thread.join()
            return function(*args, **(kwargs or {}))

    with Look():
        attend(q, k, v)
    assert seen == [True, False]
    assert not is_part_of_attention()
    with pytest.raises(RuntimeError):
        attend(q, k[..., :3], v)
    assert not is_part_of_attention()
