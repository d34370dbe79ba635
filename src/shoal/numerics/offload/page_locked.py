"""Host memory that a GPU reads and writes by itself, of exactly the size that is needed.

torch's own pinned memory (`pin_memory=True`) is rounded up to a power of two, and is kept for later when it is freed.
For the weights of a large model that is too much.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


class PageLocked:
    """Tensors in host memory; for a GPU, locked until this object is gone."""

    def __init__(self) -> None:
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked)  # holds the tensors: their memory must not be freed before

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, for_device: torch.device) -> Tensor:
        """A tensor without values."""
        if for_device.type != "cuda":
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        size = math.prod(shape) * dtype.itemsize
        pages = self._pages(size)
        return pages[:size].view(dtype).view(tuple(shape))

    def _pages(self, size: int) -> Tensor:
        """Whole pages, which no other tensor has a part of: a page can be locked only once."""
        room = torch.empty(-(-size // PAGE) * PAGE + PAGE, dtype=torch.uint8, device="cpu")
        begin = -room.data_ptr() % PAGE
        pages = room[begin : begin + -(-size // PAGE) * PAGE]
        if size:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), 0))
            self._locked.append(pages)
        return pages


def _unlock(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
