"""Host memory that a GPU reads and writes by itself, of exactly the size that is needed.

torch's own pinned memory (`pin_memory=True`) is rounded up to a power of two, and is kept for later when it is freed.
For the weights of a large model that is too much: those of a Llama of 13 B parameters take 1.6 times their size.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
LARGE = 2**25
"""Bytes from which a tensor has pages of its own: glibc gets them from the kernel for this tensor alone."""


class PageLocked:
    """Tensors in host memory; for a GPU, locked until this object is gone."""

    def __init__(self) -> None:
        self._locked: dict[int, Tensor] = {}
        weakref.finalize(self, _unlock, self._locked)  # holds the tensors: their memory must not be freed before

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, for_device: torch.device) -> Tensor:
        """A tensor without values."""
        if for_device.type != "cuda":
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        size = math.prod(shape) * dtype.itemsize
        pages = self._pages(size)
        return pages[:size].view(dtype).view(tuple(shape))

    def lock(self, tensor: Tensor) -> None:
        """Lock the memory of a large tensor where it is. A smaller one may share a page with another: it is left."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr() // PAGE * PAGE
        if storage.nbytes() >= LARGE and begin not in self._locked:
            size = -(-(storage.data_ptr() + storage.nbytes() - begin) // PAGE) * PAGE
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(begin, size, 0))
            self._locked[begin] = tensor

    def _pages(self, size: int) -> Tensor:
        """Whole pages, which no other tensor has a part of: a page can be locked only once."""
        room = torch.empty(-(-size // PAGE) * PAGE + PAGE, dtype=torch.uint8, device="cpu")
        begin = -room.data_ptr() % PAGE
        pages = room[begin : begin + -(-size // PAGE) * PAGE]
        if size:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), 0))
            self._locked[pages.data_ptr()] = pages
        return pages


def _unlock(locked: dict[int, Tensor]) -> None:
    for begin in locked:
        torch.cuda.cudart().cudaHostUnregister(begin)
