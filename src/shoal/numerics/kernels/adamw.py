"""AdamW of one tensor on a GPU, in one pass: every number is read once and written once.

For weights of P numbers in float32 that is 28 P bytes with states in float32, 20 P with states in bfloat16, and 14 P
if weights and gradients are in bfloat16 as well. Numbers in bfloat16 are rounded stochastically, so that their mean is
the float32 value. Rounded to nearest, a number that changes by less than half a step each time would never change.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.numerics.optim.adamw_update import Update

_BLOCK = 1024
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _noise(seed, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Draw 32 random bits per element of this program's block: 16 per moment. Four elements share one draw of 128 bits;
    one draw per element would dominate the time. A weight's 16 bits are mixed from those 32: uniform, but not
    independent of both."""
    quarter: tl.constexpr = block // 4
    a, b, c, d = tl.randint4x(seed, tl.program_id(0) * quarter + tl.arange(0, quarter))
    return tl.join(tl.join(a, b), tl.join(c, d)).reshape(block)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rounded(x, noise):  # type: ignore[no-untyped-def]
    """Round to bfloat16, the upper half of a float32; the lower half is the probability of rounding up."""
    raised = x.to(tl.int32, bitcast=True) + (noise & 0xFFFF).to(tl.int32)
    rounded = (raised & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x).to(tl.bfloat16)  # NaN stays NaN


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator, unused-ignore]
def _update(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, step, divisor, dropped,
    size, lr, beta1, beta2, eps, decay, seed,
    is_divided: tl.constexpr, may_drop: tl.constexpr, is_rounded: tl.constexpr, is_narrow: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    number = tl.load(step)
    correction1 = 1.0 - tl.exp2(number * tl.log2(beta1))
    correction2 = 1.0 - tl.exp2(number * tl.log2(beta2))
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    if may_drop:
        size = tl.where(tl.load(dropped) == 0.0, size, 0)
    here = places < size
    w = tl.load(weight + places, mask=here).to(tl.float32)
    g = tl.load(gradient + places, mask=here).to(tl.float32)
    m = tl.load(first + places, mask=here).to(tl.float32)
    v = tl.load(second + places, mask=here).to(tl.float32)
    if is_divided:
        g = g / tl.load(divisor)
    m = m + (g - m) * (1.0 - beta1)
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w * (1.0 - lr * decay)
    w = w - lr / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    noise = _noise(seed, block)  # removed by the compiler if nothing reads it
    if is_narrow:
        tl.store(weight + places, _rounded(w, ((noise ^ (noise >> 15)) * 0x2C1B3C6D) >> 16), mask=here)
    else:
        tl.store(weight + places, w, mask=here)
    if is_rounded:
        tl.store(first + places, _rounded(m, noise), mask=here)
        tl.store(second + places, _rounded(v, noise >> 16), mask=here)
    else:
        tl.store(first + places, m, mask=here)
        tl.store(second + places, v, mask=here)


def update_in_one_pass(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, update: Update) -> None:
    """Update a weight and its two moments in place; all four have the same memory layout."""
    launch: Any = _update[(triton.cdiv(weight.numel(), _BLOCK),)]
    divisor, dropped, nothing = update.divisor, update.dropped, update.step  # nothing: a pointer that is not read
    launch(
        weight, gradient, first, second, update.step,
        nothing if divisor is None else divisor, nothing if dropped is None else dropped,
        weight.numel(), update.lr, *update.betas, update.eps, update.decay, update.seed,
        is_divided=divisor is not None, may_drop=dropped is not None,
        is_rounded=first.dtype == torch.bfloat16, is_narrow=weight.dtype == torch.bfloat16,
        block=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
