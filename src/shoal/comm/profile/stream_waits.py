"""See where the stream that computes waits for a stream that communicates: the exposed communication of FSDP2 on a GPU.

FSDP2 does not wait for a collective itself. It records an event behind the collective, in a stream of its own, and lets
the stream that computes wait for the event. So for the steps of a profile `record_event` notes which collective an
event stands behind, and `wait_event` is timed as a wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from shoal.comm.profile.stream_timer import StreamTimer
from shoal.comm.profile.timer import current, waiting

BEHIND = "_shoal_behind"
"""The attribute of an event that names the collective behind which it was recorded: its axis and key. Not a weak
reference: a process that drops those crashes (signal 11; torch 2.11, H200)."""


class StreamWaits:
    """The last collective of every stream, noted at the events behind them."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[str, str]] = {}

    def note(self, axis: str, key: str) -> None:
        """Note that a collective was queued in the stream at hand."""
        if isinstance(current.timer, StreamTimer):
            self._last[torch.cuda.current_stream().cuda_stream] = axis, key

    def watch(self, kind: Any = torch.cuda.Stream) -> Callable[[], None]:
        """Replace two methods of streams; returns a function that restores them."""
        record, wait = kind.record_event, kind.wait_event

        @functools.wraps(record)
        def noting(stream: Any, *arguments: Any, **options: Any) -> Any:
            event = record(stream, *arguments, **options)
            with suppress(AttributeError):  # an event of C++ alone
                setattr(event, BEHIND, self._last.get(stream.cuda_stream))
            return event

        @functools.wraps(wait)
        def timed(stream: Any, event: Any) -> None:
            timer, found = current.timer, getattr(event, BEHIND, None)
            is_exposed = isinstance(timer, StreamTimer) and stream.cuda_stream == timer.stream.cuda_stream
            if found is None or not is_exposed:
                wait(stream, event)
                return
            with waiting(*found):
                wait(stream, event)

        kind.record_event, kind.wait_event = noting, timed

        def restore() -> None:
            kind.record_event, kind.wait_event = record, wait

        return restore
