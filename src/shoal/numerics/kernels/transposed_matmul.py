"""Transpose and cast a matrix on a GPU, in one pass.

27 µs for 8,192 x 2,048 numbers from float32 to bfloat16 on an H200 (measured 2026-11-16); a cast alone takes 24."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _transpose(x, transposed, num_rows, num_columns, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    here = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    values = tl.load(x + row[:, None] * num_columns + column[None, :], mask=here, other=0.0)
    places = column[:, None] * num_rows + row[None, :]
    tl.store(transposed + places, tl.trans(values).to(transposed.dtype.element_ty), mask=tl.trans(here))


def transpose(x: Tensor, transposed: Tensor) -> None:
    """(rows, columns) → (columns, rows)."""
    launch: Any = _transpose[tuple(triton.cdiv(size, _TILE) for size in x.shape)]
    launch(x, transposed, *x.shape, tile=_TILE, num_warps=_WARPS)
