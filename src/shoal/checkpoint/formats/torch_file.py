"""Write a file with torch.save, through the same calls to the disk as every other file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.formats import dcp, safetensors
from shoal.checkpoint.storage.filesystem import Filesystem


def save(path: Path, value: Any, disk: Filesystem) -> None:
    """Write a new file, which is on the disk in the end."""
    with safetensors.new_file(path, disk) as out:
        file_like: Any = _Out(out, disk)
        try:
            torch.save(value, file_like)
        except RuntimeError as error:
            raise dcp.reason(error) from None


class _Out:
    """A file object for torch.save."""

    def __init__(self, file: Any, disk: Filesystem) -> None:
        self.file, self.disk = file, disk

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.disk.write(self.file, view)
        return len(view)

    def flush(self) -> None:
        """Flush to the disk."""
