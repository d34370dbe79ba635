"""Checks of memory-mapped files: a read beyond the end kills the process (SIGBUS) without a message."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from shoal.errors import RunFailed


def reject_shortened(array: np.ndarray[Any, Any]) -> None:
    """Raise if the file of a mapped array is shorter than it was when it was mapped; one call of fstat."""
    mapping = _mapping_of(array)
    if mapping is not None and mapping.size() < len(mapping):
        raise RunFailed(
            f"{getattr(array, 'filename', None) or 'a data file'} was shortened while it was read: it had"
            f" {len(mapping):,} bytes when the run began, and has {mapping.size():,}",
            fix="restore the file and run the same command, which resumes from the last checkpoint",
            code="D012",
        )


def is_mapped(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array is memory-mapped."""
    return _mapping_of(array) is not None


def _mapping_of(array: np.ndarray[Any, Any]) -> mmap.mmap | None:
    """The mapping behind an array or a slice of one; None: it is in memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None
