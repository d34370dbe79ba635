"""Rows of an embedding on a GPU: gathered into bfloat16, and their gradients summed by token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024
"""Columns of a row per program."""
_ROWS = 8
"""Gradients that a program reads at a time."""
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gather(tokens, weight, rows, num_rows, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + place).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    here = (columns < width) & (token >= 0) & (token < num_rows)
    values = tl.load(weight + token * width + columns, mask=here, other=float("nan"))
    tl.store(rows + place * width + columns, values.to(rows.dtype.element_ty), mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scatter(  # type: ignore[no-untyped-def]
    order, bounds, grads, gradient, width, rows: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(bounds + token), tl.load(bounds + token + 1)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], dtype=tl.float32)
    for first in range(begin, end, rows):
        numbers = first + tl.arange(0, rows)
        places = tl.load(order + numbers, mask=numbers < end, other=0)
        here = (numbers < end)[:, None] & (columns < width)[None, :]
        values = tl.load(grads + places[:, None] * width + columns[None, :], mask=here, other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
    tl.store(gradient + token * width + columns, total.to(gradient.dtype.element_ty), mask=columns < width)


def gathered(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the row of each token, in bfloat16; NaN for a token without a row."""
    width = weight.shape[1]
    rows = torch.empty((*tokens.shape, width), dtype=torch.bfloat16, device=weight.device)
    launch: Any = _gather[(tokens.numel(), triton.cdiv(width, _COLUMNS))]
    launch(tokens.contiguous(), weight.contiguous(), rows, len(weight), width, block=_COLUMNS, num_warps=_WARPS)
    return rows


def scattered(tokens: Tensor, grads: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the full embedding: for each row the sum of its tokens' gradients, in float32."""
    gradient = torch.empty(shape, dtype=dtype, device=grads.device)
    by_token, order = tokens.flatten().sort(stable=True)
    bounds = torch.searchsorted(by_token, torch.arange(shape[0] + 1, dtype=by_token.dtype, device=by_token.device))
    launch: Any = _scatter[(shape[0], triton.cdiv(shape[1], _COLUMNS))]
    launch(order, bounds, grads.contiguous(), gradient, shape[1], rows=_ROWS, block=_COLUMNS, num_warps=_WARPS)
    return gradient
