"""Read the full tensors of a step by rows, whatever layout wrote them; every byte that is read is checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.formats.lazy_tensor import Box, LazyTensor, by_rows
from shoal.checkpoint.storage.locate import SavedStep
from shoal.checkpoint.storage.shard_file import DTYPES, Reader, Reading

MOST_OPEN = 64
"""Open files at a time: a thousand ranks write a thousand files."""


class FullTensors:
    """A step, open for reading."""

    def __init__(self, step: SavedStep) -> None:
        self.step, self.manifest = step, step.manifest
        self._open: OrderedDict[str, Reader] = OrderedDict()
        # Rows of a tensor that is cut by columns are in all files: keep a chunk of each for the next rows.
        self._reading = Reading(
            most_chunks=min(MOST_OPEN, len(step.manifest.files) + 2), at_once=step.disk.reads_at_once
        )

    def __enter__(self) -> FullTensors:
        return self

    def __exit__(self, *_: Any) -> None:
        self._reading.close()
        while self._open:
            self._open.popitem()[1].close()

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows of a tensor, or all of one without dims (which has the row 0 to 1)."""
        entry = self.manifest.tensors[name]
        if not entry.shape:
            [piece] = entry.pieces
            return self._reader(piece.file).rows(piece.key, entry.dtype, (), 0, 1)
        out = torch.empty((end - begin, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
        for piece in entry.pieces:
            first, last = max(begin, piece.begin[0]), min(end, piece.begin[0] + piece.shape[0])
            if first < last:
                at = piece.begin[0]
                part = self._reader(piece.file).rows(piece.key, entry.dtype, piece.shape, first - at, last - at)
                if part.shape == out.shape:
                    return part
                columns = (slice(b, b + s) for b, s in zip(piece.begin[1:], piece.shape[1:], strict=True))
                out[(slice(first - begin, last - begin), *columns)] = part
        return out

    def tensor(self, name: str) -> LazyTensor:
        """Return one tensor, to be read by rows."""
        entry = self.manifest.tensors[name]
        return by_rows(entry.dtype, entry.shape, partial(self.rows, name))

    def model(self) -> dict[str, LazyTensor]:
        """Map names of parameters, and of what else a model learns, to their values."""
        names = [name for name in self.manifest.tensors if name.startswith("model/")]
        return {name.partition("/")[2]: self.tensor(name) for name in names}

    def optimizer(self) -> dict[tuple[str, str], LazyTensor]:
        """Map (state, name of a parameter) to the optimizer's state; counters are tensors without dims."""
        found = {}
        for name in self.manifest.tensors:
            if name.startswith("optimizer/"):
                _, kind, parameter = name.split("/", 2)
                found[kind, parameter] = self.tensor(name)
        for parameter, numbers in _mapping(self.manifest.state.get("scalars")).items():
            for kind, number in _mapping(numbers).items():
                found[kind, parameter] = LazyTensor("F32", (), (Box((), (), partial(torch.tensor, float(number))),))
        return found

    def _reader(self, file: str) -> Reader:
        reader = self._open.pop(file, None)
        if reader is None:
            if len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            reader = Reader(
                self.step.path / file, self.manifest.files[file], disk=self.step.disk, reading=self._reading
            )
        self._open[file] = reader
        return reader


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}
