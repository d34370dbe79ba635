"""Load a `.pt` file of another system without running it.

Such a file is a pickle, and a pickle calls what it names. torch's weights-only reader builds tensors and plain data,
and rejects every other name. The system's own names are replaced by records that hold values and do nothing. Tensors
stay on the disk until they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.files import opened


class Record:
    """The values of an object of another system. Whatever a file calls it with is kept, and nothing runs."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.values = (state,)


def names_in(path: Path) -> list[str]:
    """The names in a file that are neither torch's own nor plain data. Nothing is loaded."""
    with opened(path):  # a regular file, or an error at once
        pass
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def load_records(path: Path, is_known: Callable[[str], bool]) -> Any:
    """The content of a file: tensors, plain data, and a record for each object with a known name.

    Raises `OSError` as `open` does, and what torch raises for names that are not known or bytes that are no such file.
    """
    known = [name for name in names_in(path) if is_known(name)]
    with torch.serialization.safe_globals([(Record, name) for name in known]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def first_line(error: Exception) -> str:
    """The line of torch's long message that names what was rejected."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), None)
    return (named or (lines or [type(error).__name__])[0])[:200]
