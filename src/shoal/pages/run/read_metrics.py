"""Read the metrics of a run.

Of a file that is too long to be parsed, lines at even distances are read, and all lines of its end. What no page may
miss between them is found by its text: skipped updates, losses that are not finite, evaluations.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shoal.pages.run.metrics_table import MetricsTable, make_table
from shoal.pages.run.own_files import LONGEST_LINE, MOST_WHOLE, is_record, open_own, parse_lines, read_records

SKIPPED, NOT_FINITE, EVALUATION = b'"skipped": true', b'"loss": "', b'"eval_loss": '
"""As metrics are written. A loss that is not finite is a text. No text holds a mark: its quotes are escaped."""
STEP = re.compile(rb'"step": (\d{1,15})[,}]')
MOST_SEARCHED = 2**31
"""Bytes that are searched."""
BLOCK = 2**24


def read_metrics(path: Path, lost: Counter[str]) -> MetricsTable:
    """The metrics of a run; lines that are left out are counted in `lost`."""
    table = make_table(read_records(path, MOST_WHOLE, lost=lost))
    try:
        with open_own(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_WHOLE:
                table.sampled = _how(size, _search(file, table) / max(1, len(table.steps)))
    except OSError:
        pass
    return table


def _search(file: BinaryIO, table: MetricsTable) -> int:
    """Add to a table of some lines what no page may miss in the others; returns the number of all lines."""
    skipped, not_finite, evaluations = set(table.skipped), set(table.not_finite), dict(table.evaluations)
    lines = 0
    while file.tell() < MOST_SEARCHED and (block := file.read(BLOCK)):
        block += file.readline(LONGEST_LINE)  # the rest of its last line
        lines += block.count(b"\n")
        skipped.update(_steps_with(SKIPPED, block))
        not_finite.update(_steps_with(NOT_FINITE, block))
        found = parse_lines([block[start:end] for start, end in _lines_with(EVALUATION, block)])
        evaluations.update(make_table(filter(is_record, found)).evaluations)
    table.skipped, table.not_finite = sorted(skipped), sorted(not_finite)
    table.evaluations = sorted(evaluations.items())
    return lines


def _steps_with(mark: bytes, block: bytes) -> Iterator[int]:
    """The steps of the lines that hold a mark. A run may skip every step, so lines are not parsed."""
    steps = (STEP.search(block, start, end) for start, end in _lines_with(mark, block))
    return (int(step[1]) for step in steps if step is not None)


def _lines_with(mark: bytes, block: bytes) -> Iterator[tuple[int, int]]:
    """The start and the end of each line that holds a mark."""
    at = block.find(mark)
    while at >= 0:
        start, end = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
        end = end if end >= 0 else len(block)
        yield start, end
        at = block.find(mark, end)


def _how(size: int, every: float) -> str:
    """How a long file was read: one line in `every`, as far as they were counted."""
    every *= max(1.0, size / MOST_SEARCHED)
    where = "every line" if size <= MOST_SEARCHED else f"its first {MOST_SEARCHED / 2**30:.0f} GiB"
    return (
        f"metrics.jsonl is too long to be read whole: 1 line in {every:,.0f} was read, and all of its end. Skipped"
        f" updates, losses that are not finite and evaluations were looked for in {where}."
    )
