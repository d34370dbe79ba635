"""Time the parts of a step on a GPU: marks in the stream that computes, in place of looks at a clock.

The main thread queues kernels and runs ahead of them. At each border of a part it queues an event, too, and the GPU
notes when it passes it. Nothing waits for the GPU until the last step is timed.

    main thread   forward backward optimizer│
    stream        ●─ forward ─●──── backward ────●─ optimizer ─●     ● an event
                     kernels      kernels ▒▒▒ kernels               ▒ the stream waits for another, or for the host

So a part is a piece of the stream's own time, with the idle time in it, and the parts of a step add to the step.
Waiting for data is the time for which the stream has nothing to do: none, if the main thread is far enough ahead.
Times are moved to CLOCK_MONOTONIC by one event whose time the host has seen: ranks of one host can be compared to some
20 microseconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shoal.comm.profile.timer import PartTimer, Span, Step


@dataclass
class StreamTimer(PartTimer):
    """The timer of the current stream of this thread. A time is the number of an event until `resolve`."""

    is_of_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stream = torch.cuda.current_stream()
        self.clock = self._mark
        self._events: list[Any] = []
        self._inside: list[tuple[Span, Span]] = []
        """Parts, and the parts around them."""
        self._entered_on_host: dict[str, int] = {}
        self._zero, self._zero_ns = _event_at_known_time(self.stream)

    def is_timed_here(self) -> bool:
        """Whether this thread is the main thread, or one of autograd's that works for it: those make the backwards."""
        return super().is_timed_here() or is_in_backward()

    def enter(self, channel: str) -> str:
        """Note when the stream at hand, which may be one for communication alone, reaches a collective."""
        key = self._next_key(channel)
        self.entered[key] = self._mark(torch.cuda.current_stream())
        return key

    def enter_on_host(self, channel: str) -> str:
        """Note when the host enters an exchange."""
        key = self._next_key(channel)
        self._entered_on_host[key] = time.monotonic_ns()
        return key

    def insert(self, inside: str, wait: Span) -> None:
        """Waits that were timed on the host are no time of the stream."""

    def resolve(self) -> None:
        """Wait for the GPU, and replace events by their times."""
        torch.cuda.synchronize()
        zero, base = self._zero, self._zero_ns
        times = [base + round(zero.elapsed_time(event) * 1e6) for event in self._events]
        resolve_spans(self.steps, self._inside, times)
        self.entered = {key: times[number - 1] for key, number in self.entered.items()} | self._entered_on_host
        self._events.clear()
        self._inside.clear()

    def _mark(self, stream: Any = None) -> int:
        """Queue an event; returns its number, from 1."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream if stream is None else stream)
        self._events.append(event)
        return len(self._events)

    def _close(self, now: int) -> None:
        span = self._stack.pop()
        span.end = now
        if self._stack:
            self._inside.append((span, self._stack[-1]))
        self._spans.append(span)


def resolve_spans(steps: list[Step], inside: list[tuple[Span, Span]], times: list[int]) -> None:
    """Replace the numbers of events, from 1, by their times; then count the time of parts inside of others."""
    for step in steps:
        for span in step.spans:
            span.begin, span.end = times[span.begin - 1], times[span.end - 1]
    timed = {id(span) for step in steps for span in step.spans}
    for inner, outer in inside:
        if id(inner) in timed and id(outer) in timed:  # else their step was not finished
            outer.inner += inner.end - inner.begin


def is_in_backward() -> bool:
    """Whether autograd runs this thread. Private in torch; `tests/unit/test_stream_timer.py` notices a change."""
    return torch._C._current_graph_task_id() != -1


def _event_at_known_time(stream: Any) -> tuple[Any, int]:
    """An event, and when it happened by the clock of the host."""
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    before = time.monotonic_ns()
    event.record(stream)
    event.synchronize()
    return event, (before + time.monotonic_ns()) // 2
