"""Transpose and cast to 8-bit floats on a GPU, in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _transpose(x, transposed, factor, num_rows, num_columns, stride, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    here = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=here, other=0.0).to(tl.float32)
    narrow = tl.trans(values * tl.load(factor)).to(tl.float8e4nv)
    tl.store(transposed + column[:, None] * num_rows + row[None, :], narrow, mask=tl.trans(here))


def transpose(x: Tensor, factor: Tensor) -> Tensor:
    """(rows, columns) times a number → (columns, rows)."""
    assert x.stride(1) == 1
    num_rows, num_columns = x.shape
    transposed = torch.empty((num_columns, num_rows), dtype=torch.float8_e4m3fn, device=x.device)
    launch: Any = _transpose[(triton.cdiv(num_columns, _TILE), triton.cdiv(num_rows, _TILE))]
    launch(x, transposed, factor, num_rows, num_columns, x.stride(0), tile=_TILE, num_warps=_WARPS)
    return transposed
