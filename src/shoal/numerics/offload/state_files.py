"""`offload=optimizer:FOLDER`: optimizer states in files, which the kernel reads ahead and writes back by itself.

States are mapped into memory. Pages of the next bucket are read while one is updated; changed pages are written when
the kernel finds time, or needs their memory. The files have no name: nothing is left when the process ends, however it
ends. Their room is reserved before it is used, since a write to a mapped file on a full disk kills the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import RunFailed

ARENA = 2**30
"""Bytes of one file. A larger tensor has a file of its own."""


@dataclass(slots=True)
class Arena:
    """A mapped file, filled from its begin."""

    memory: mmap.mmap
    used: int = 0

    def has_room(self, size: int) -> bool:
        """Whether that many bytes are left."""
        return self.used + size <= len(self.memory)


@dataclass(slots=True)
class StateFiles:
    """Tensors in files below a folder."""

    folder: Path
    arena: int = ARENA
    arenas: list[Arena] = field(default_factory=list)
    _places: dict[int, tuple[Arena, int, int]] = field(default_factory=dict)
    """The address of a tensor → where it is, and its bytes."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in a file already."""
        return tensor.data_ptr() in self._places

    def hold(self, tensor: Tensor) -> Tensor:
        """A tensor with the same values, in a file."""
        size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        arena = next((one for one in self.arenas if one.has_room(size)), None) or self._new(size)
        held = torch.frombuffer(arena.memory, dtype=tensor.dtype, count=tensor.numel(), offset=arena.used)
        self._places[held.data_ptr()] = (arena, arena.used, size)
        arena.used += size
        # A fused kernel runs over the memory of a weight and its states in one order.
        return held.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride()).copy_(tensor)

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Let the kernel read tensors ahead."""
        for tensor in tensors:
            if (place := self._places.get(tensor.data_ptr())) is not None:
                arena, begin, size = place
                arena.memory.madvise(mmap.MADV_WILLNEED, begin, size)

    def _new(self, size: int) -> Arena:
        wanted = max(size, self.arena)
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="shoal-states-") as file:
                os.posix_fallocate(file.fileno(), 0, wanted)
                arena = Arena(mmap.mmap(file.fileno(), wanted))
        except OSError as error:
            what = f"{wanted / 2**20:,.0f} MiB of optimizer states cannot be kept in {self.folder}: {error.strerror}"
            raise RunFailed(
                what, fix="offload=optimizer:FOLDER on a disk with more room; or offload=optimizer", code="T092"
            ) from error
        self.arenas.append(arena)
        return arena
