"""Spans of all ranks as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.comm.profile.timer import Span
from shoal.observe.durable_write import write_whole
from shoal.observe.profile.kernels import Kernel, short_name
from shoal.observe.profile.record import RankRecord


def write_trace(path: Path, records: Sequence[RankRecord], kernels: Sequence[Kernel] = ()) -> None:
    """Write one process per rank. Every host begins at zero, since it has a clock of its own.

    `kernels` of rank 0 are of steps after those that were timed: one thread per stream.
    """
    begins = [(record.host, span.begin) for record in records for step in record.steps for span in step.spans[-1:]]
    zero = {host: min(begin for each, begin in begins if each == host) for host, _ in begins}
    events = [event for record in records for event in _events(record, zero.get(record.host, 0))]
    events += _kernel_events(kernels, zero.get(records[0].host, 0)) if kernels else []
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _events(record: RankRecord, zero: int) -> Iterator[dict[str, Any]]:
    named = {"pid": record.rank, "tid": 0, "ph": "M"}
    yield {**named, "name": "process_name", "args": {"name": record.name}}
    yield {**named, "name": "process_sort_index", "args": {"sort_index": record.rank}}
    thread = "main thread" if record.device == "cpu" else "GPU, by part"
    yield {**named, "name": "thread_name", "args": {"name": thread}}
    for number, step in enumerate(record.steps, 1):
        for span in sorted(step.spans, key=lambda span: (span.begin, -span.end)):
            is_step = span is step.spans[-1]
            name = f"step {number}" if is_step else f"wait {span.name}" if span.is_wait else span.name
            yield {"pid": record.rank, "tid": 0, "ph": "X", "name": name, "cat": _kind(span, is_step=is_step),
                   "ts": (span.begin - zero) / 1e3, "dur": (span.end - span.begin) / 1e3,
                   **({"args": {"collective": span.key}} if span.key else {})}  # fmt: skip


def _kernel_events(kernels: Sequence[Kernel], zero: int) -> Iterator[dict[str, Any]]:
    for stream in sorted({kernel.stream for kernel in kernels}):
        yield {"pid": 0, "tid": stream + 1, "ph": "M", "name": "thread_name", "args": {"name": f"stream {stream}"}}
    for kernel in kernels:
        yield {"pid": 0, "tid": kernel.stream + 1, "ph": "X", "name": short_name(kernel.name), "cat": "kernel",
               "ts": (kernel.begin - zero) / 1e3, "dur": (kernel.end - kernel.begin) / 1e3,
               "args": {"kernel": kernel.name}}  # fmt: skip


def _kind(span: Span, *, is_step: bool) -> str:
    return "step" if is_step else "communication" if span.is_wait else "part"
