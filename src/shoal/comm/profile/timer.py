"""Time the parts of a step: a stack of open parts, of which the innermost one gets the time.

    step      |▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁|
    parts      data  forward   backward ─────── optimizer
    inside            wait tp       wait tp  recompute

The time of a part is its own: without the parts inside it. So the parts of a step add to the step, and what no part
names is `other`. A step begins where the one before it ends. Times are of CLOCK_MONOTONIC, which the processes of one
host share, so that ranks can be compared.

Only the thread that has started the timer is timed. Without a timer a part costs one look at an attribute. On a GPU,
`stream_timer` puts marks into the stream in place of looks at a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

T = TypeVar("T")

OTHER = "other"
"""The time of a step that no part names."""
SAVE = "save"
"""The part in which ranks save; waits inside of it are part of it."""
EVALUATION = "evaluation"
"""An evaluation between two steps, with all parts and waits inside of it: it is left out of the step."""


@dataclass(slots=True, eq=False)
class Span:
    """One part of one step."""

    name: str
    """The part; of a wait, the axis of the layout."""
    begin: int
    """In nanoseconds."""
    key: str | None = None
    """The collective or message that is waited for."""
    is_wait: bool = False
    end: int = 0
    inner: int = 0
    """Nanoseconds in the parts inside it."""

    @property
    def own(self) -> int:
        """Nanoseconds without the parts inside it."""
        return self.end - self.begin - self.inner


@dataclass(slots=True)
class Step:
    """The parts of one step, in the order in which they ended; the last one is the step itself."""

    spans: list[Span]
    delay: int | None
    """Nanoseconds in which the thread could have run and had no core; None: the kernel does not say."""


@dataclass
class PartTimer:
    """The timer of one thread."""

    is_of_host: ClassVar[bool] = True
    """Whether times are those of the host, as they are taken."""

    clock: Callable[[], int] = time.monotonic_ns
    steps: list[Step] = field(default_factory=list)
    entered: dict[str, int] = field(default_factory=dict)
    """Collective or message → when this rank entered it. Other threads enter collectives, too."""
    ended: dict[str, int] = field(default_factory=dict)
    """Collective → when it was over, where that is known."""
    is_sample: bool = False
    """Whether it times one step of many, and no profile is being made."""
    on_close: Callable[[str], None] | None = None
    """Called with the name of every part that ends, before its time is taken."""

    def __post_init__(self) -> None:
        self.thread = threading.get_ident()
        self._counts: dict[str, int] = {}
        self._stack: list[Span] = []
        self._spans: list[Span] = []
        self._delay: int | None = None

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin the first step."""
        self._stack, self._spans, self._delay = [Span(OTHER, self.clock())], [], run_delay()

    def end_step(self) -> None:
        """End the step, and begin the next one at the same moment. Parts that are still open end with it."""
        now, delay = self.clock(), run_delay()
        while self._stack:
            self._close(now)
        waited = None if delay is None or self._delay is None else delay - self._delay
        self.steps.append(Step(self._spans, waited))
        self._stack, self._spans, self._delay = [Span(OTHER, now)], [], delay

    # ---- parts -------------------------------------------------------------------------------------------------------

    def is_timed_here(self) -> bool:
        """Whether the parts of this thread are timed."""
        return threading.get_ident() == self.thread

    def open(self, span: Span) -> None:
        """Begin a part inside the one that is open."""
        self._stack.append(span)

    def close(self, span: Span) -> None:
        """End a part, and those inside it that an exception or a generator has left open."""
        if span.end:  # its step has ended
            return
        if self.on_close is not None and not span.is_wait:
            self.on_close(span.name)
        now = self.clock()
        while self._stack and not span.end:
            self._close(now)

    def is_inside(self, name: str) -> bool:
        """Whether a part of this name is open."""
        return any(span.name == name for span in self._stack)

    def insert(self, inside: str, wait: Span) -> None:
        """Add a wait that ended before now, and was timed elsewhere, to the last part of a name in this step."""
        for span in reversed(self._spans):
            if span.name == inside and not span.is_wait:
                wait.begin, wait.end = max(wait.begin, span.begin), min(wait.end, span.end)
                if wait.end > wait.begin and span.own >= wait.end - wait.begin:
                    span.inner += wait.end - wait.begin
                    self._spans.append(wait)
                return

    def enter(self, channel: str) -> str:
        """Note that this rank enters the next collective of a channel; returns its key, the same on every rank."""
        key = self._next_key(channel)
        self.entered[key] = self.clock()
        return key

    def enter_on_host(self, channel: str) -> str:
        """The same of an exchange that the host makes, whatever a GPU does meanwhile."""
        key = self._next_key(channel)
        self.entered[key] = self.clock()
        return key

    def resolve(self) -> None:
        """Make all times nanoseconds, after the last step. On a CPU they are."""

    def _next_key(self, channel: str) -> str:
        number = self._counts[channel] = self._counts.get(channel, 0) + 1
        return f"{channel}|{number}"

    def _close(self, now: int) -> None:
        span = self._stack.pop()
        span.end = now
        if self._stack:
            self._stack[-1].inner += now - span.begin
        self._spans.append(span)


class _Timed:
    """A context that times a part."""

    __slots__ = ("_key", "_name", "_span", "_timer")

    def __init__(self, timer: PartTimer, name: str, key: str | None = None) -> None:
        self._timer, self._name, self._key = timer, name, key

    def __enter__(self) -> None:
        self._span = Span(self._name, self._timer.clock())
        self._timer.open(self._span)

    def __exit__(self, *_: object) -> None:
        self._timer.close(self._span)


class _TimedWait(_Timed):
    """A context that times a wait for other ranks."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._span = Span(self._name, self._timer.clock(), self._key, is_wait=True)
        self._timer.open(self._span)


class _Off:
    """The timer of this process; None: nothing is timed."""

    timer: PartTimer | None = None


current = _Off()
NOTHING: AbstractContextManager[None] = nullcontext()


def part(name: str) -> AbstractContextManager[None]:
    """Time a part of the step, if a timer runs in this thread."""
    timer = current.timer
    if timer is None or timer.is_inside(EVALUATION):
        return NOTHING
    return _Timed(timer, name) if timer.is_timed_here() else NOTHING


def waiting(axis: str, key: str | None) -> AbstractContextManager[None]:
    """Time a wait for other ranks, if a timer runs in this thread. Ranks that save together wait for a disk."""
    timer = current.timer
    if timer is None or timer.is_inside(SAVE) or timer.is_inside(EVALUATION):
        return NOTHING
    return _TimedWait(timer, axis, key) if timer.is_timed_here() else NOTHING


def enter(channel: str) -> str | None:
    """Note that the host enters the next exchange of a channel, in any thread; returns its key."""
    timer = current.timer
    return None if timer is None else timer.enter_on_host(channel)


def timed_items(name: str, items: Iterable[T]) -> Iterator[T]:
    """The items, with the time to get each of them as a part."""
    source = iter(items)
    while True:
        with part(name):
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


def recomputing() -> AbstractContextManager[None]:
    """Time the forward of a block as `recompute` if a backward has called it."""
    timer = current.timer
    return NOTHING if timer is None or not timer.is_inside("backward") else part("recompute")


def run_delay() -> int | None:
    """Nanoseconds for which this thread has waited for a core; None: the kernel does not say."""
    with suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1])
    return None
