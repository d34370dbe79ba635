"""Read the files of a run directory: regular files of it alone, within bounds, whatever a crash or a user left there.

A link is not followed: it may lead out of the directory. Damaged or missing files give nothing, and never an exception.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from shoal.files import open_regular

MOST_WHOLE = 2**28
"""Bytes up to which a file of lines is read whole; of a longer one, lines at even distances and those of its end."""
LONGEST_LINE = 2**14
"""Bytes; a longer line is left out."""
TOGETHER = 1_000
"""Lines that are parsed at once."""
TAIL = 2**16
"""Bytes that are read from the end of a file whose last records alone matter."""

Record = dict[str, Any]


def open_own(path: Path) -> BinaryIO:
    """Open a regular file that is no link; else `OSError`."""
    return os.fdopen(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def why_not_a_folder(path: Path) -> str:
    """Why no file in a folder can be reached, such as `Permission denied`; empty: there is a folder that lets us in."""
    try:
        os.stat(f"{path}/.")
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def read_own(path: Path, most: int) -> bytes:
    """The content of a file, at most `most` bytes of it; empty if it cannot be read."""
    try:
        with open_own(path) as file:
            return file.read(min(most, os.fstat(file.fileno()).st_size))
    except OSError:
        return b""


def read_object(path: Path, most: int = 2**20) -> Record:
    """The JSON object in a file; empty if there is none."""
    found = parse(read_own(path, most))
    return found if isinstance(found, dict) else {}


def read_records(path: Path, most: int = MOST_WHOLE, *, lost: Counter[str] | None = None) -> Iterator[Record]:
    """The records of a file with one JSON object per line, each with a whole number `step`; a torn line is left out,
    and counted in `lost` under the file's name."""
    try:
        with open_own(path) as file:
            size = os.fstat(file.fileno()).st_size
            lines = iter(file) if size <= most else _sampled(file, size, most // 2**12)
            while chunk := list(islice(lines, TOGETHER)):
                found = list(filter(is_record, parse_lines(chunk)))
                if lost is not None and len(found) < len(chunk):
                    lost[path.name] += sum(not line.isspace() for line in chunk) - len(found)
                yield from found
    except OSError:
        return


def sample_records(path: Path, number: int) -> list[Record]:
    """At most `number` records of a file, evenly spaced by position, the last one among them."""
    try:
        with open_own(path) as file:
            size = os.fstat(file.fileno()).st_size
            lines = list(sampled_lines(file, size, number - 1))
            file.seek(max(0, size - LONGEST_LINE))
            ends = file.read(LONGEST_LINE).split(b"\n")
    except OSError:
        return []
    found = [record for line in lines if is_record(record := parse(line))]
    last = next((record for line in reversed(ends) if is_record(record := parse(line))), None)
    return found if last is None or last in found[-1:] else [*found, last]


def tail_records(path: Path) -> list[Record]:
    """The last records of a file; a torn one is left out."""
    try:
        with open_own(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = [line for line in file.read(TAIL).split(b"\n") if len(line) <= LONGEST_LINE]
    except OSError:
        return []
    return [record for line in lines if is_record(record := parse(line))]


def _sampled(file: BinaryIO, size: int, number: int) -> Iterator[bytes]:
    """Lines at even distances, then all lines of the end, each once."""
    end = max(0, size - TAIL)
    return chain(sampled_lines(file, end, number), _lines_after(file, end))


def _lines_after(file: BinaryIO, place: int) -> Iterator[bytes]:
    """The lines that begin at a place or after it, and have not been read."""
    if file.tell() < place:
        file.seek(place - 1)
        file.readline(LONGEST_LINE)  # the rest of the line before
    yield from file


def sampled_lines(file: BinaryIO, size: int, number: int) -> Iterator[bytes]:
    """The lines that follow evenly spaced positions, each once; of a small file, all of them."""
    seen = -1
    for index in range(number):
        start = size * index // number
        file.seek(max(0, start - 1))
        if start:
            file.readline(LONGEST_LINE)  # the rest of the line before
        if (place := file.tell()) > seen:
            seen = place
            yield file.readline(LONGEST_LINE)


def is_record(value: Any) -> bool:
    """Whether a line is a record of a step."""
    step = value.get("step") if type(value) is dict else None
    return type(step) is int and 0 <= step < 2**53


def parse_lines(lines: list[bytes]) -> list[Any]:
    """The values of lines. They are parsed as one list, which takes half the time; if one is damaged, each alone."""
    kept = [line for line in lines if len(line) <= LONGEST_LINE and not line.isspace()]
    values = parse(b"[%b]" % b",".join(kept))
    return values if isinstance(values, list) and len(values) == len(kept) else [parse(line) for line in kept]


def parse(text: bytes) -> Any:
    """The value of a JSON text; None: it is damaged."""
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return None
