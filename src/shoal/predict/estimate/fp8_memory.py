"""Bytes that the precision fp8 holds beside what bf16 holds, on a GPU, compiled.

Each term is read off the code that allocates it, and named with it. Two numbers of `shoal.numerics`, which needs torch,
are repeated here; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.predict.workload import Workload

MIN_FEATURES = 512
"""`numerics.fp8.convert.MIN_FEATURES`: layers with fewer features than this, in or out, compute in bf16."""
MULTIPLE = 16
"""`numerics.fp8.products.MULTIPLE`: of which the sizes of a product in fp8 are multiples."""


def is_wide(*sizes: float) -> bool:
    """Whether a layer of these features computes in fp8: `numerics.fp8.is_fit_for_fp8`."""
    return all(size % MULTIPLE == 0 and size >= MIN_FEATURES for size in sizes)


def narrow_casts(workload: Workload, size: float) -> float:
    """Bytes of casts of weights that a layer keeps for the backward. A product in fp8 keeps the weight itself and casts
    it again (`numerics.fp8.fp8_linear._Fp8Product.forward` saves x, weight and two scales); one in bf16 keeps its cast,
    except the last one of a feed-forward."""
    part = workload.sparse_layers / workload.layers
    widths = _attention_widths(workload)
    found = float(sum(workload.hidden * width for width in widths if not is_wide(workload.hidden, width)))
    if not is_wide(workload.hidden, workload.ffn):
        found += (1 - part) * (workload.matrices - 1) * workload.hidden * workload.ffn
    if workload.shared_ffn and not is_wide(workload.hidden, workload.shared_ffn):
        found += part * (workload.matrices - 1) * workload.hidden * workload.shared_ffn
    return size * found


def kept_beside_narrow(workload: Workload, size: float) -> float:
    """Bytes of a token that a layer keeps where queries are computed in fp8 and keys and values, which are narrow, in
    bf16. Of one input the compiler then keeps both what the products in bf16 read and, transposed, what the one in fp8
    reads; where all are in fp8, or none is, it makes the input of the backward again from that of the norm."""
    queries, *others = [is_wide(workload.hidden, width) for width in _attention_widths(workload)[:3]]
    return (size + 1) * workload.hidden if queries and not all(others) else 0.0


def _attention_widths(workload: Workload) -> list[int]:
    """Features of queries, keys, values and what comes out of attention, that is not the residual stream."""
    if workload.latent:
        return [MIN_FEATURES] * 4  # which no model of shoal has
    wide, narrow = workload.heads * workload.head_dim, workload.kv_heads * workload.head_dim
    return [wide, narrow, narrow, wide]


def head_bytes(workload: Workload, *, tokens: float, chunk_tokens: float, size: float, weight: float) -> float:
    """Bytes of a fused head whose gradients are computed in fp8 (`fused_linear_cross_entropy`), in the chunk in
    which it adds to the gradient of its weight: all of its `_LinearCrossEntropy.forward`, and what the compiled norm
    before it holds."""
    return sum(_parts_of_head(workload, tokens, chunk_tokens, size, weight))


def _parts_of_head(workload: Workload, tokens: float, chunk: float, size: float, weight: float) -> Iterator[float]:
    words, numel = workload.vocabulary, workload.head_parameters
    yield size * numel * (size < weight)  # w, where it is another tensor than the weight
    yield 1.0 * numel  # w_transposed
    yield 2 * 4.0 * numel  # dw, and the share of it of this chunk
    yield size * chunk * words  # logits
    yield 2 * 1.0 * chunk * words  # gradient, and gradient_transposed
    yield 1.0 * chunk * workload.hidden  # transposed(h[part])
    yield 2 * size * tokens * workload.hidden  # h and dh
    yield max(4.0, size) * tokens * workload.hidden  # of the norm


def has_narrow_head(workload: Workload, tokens: float) -> bool:
    """Whether the sizes let the head compute its gradients in fp8."""
    return not any(size % MULTIPLE for size in (workload.hidden, workload.vocabulary, tokens))
