"""The heartbeat of a worker: a thread that writes its counters, phase and step to shared memory, five times a second.

    ─ beat ── beat ── beat ── ... ── beat ── recorder ── tickets ── beat ──
        │ counters move: training        │ nothing moves: read what is pending, and then write it with its sizes

The thread needs Python's lock (the GIL). So a beat that stays out shows that something holds it. A beat costs 0.1
to 0.4 ms of a core (measured, Intel Xeon, torch 2.13): 0.2 % at most. The tickets with sizes cost 2 to 5 ms, and are
read only in a stall, after a failure, and every ten seconds for `arrivals`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shoal.comm.heartbeat import recorder
from shoal.comm.heartbeat.arrivals import Arrivals, Straggler, sample_of
from shoal.comm.heartbeat.board import UNKNOWN, HeartbeatBoard
from shoal.comm.heartbeat.brief import EMPTY, only_pending, without_channels
from shoal.comm.heartbeat.messages import MessageCounter, count_messages
from shoal.comm.heartbeat.ticket import Ticket, group_of

FIRST_STEPS = 3
"""Steps of a worker that may be slow: libraries load, memory is allocated, kernels are chosen."""
PERIOD = 0.2
"""Seconds between two beats; the launcher reads them as often."""
SAMPLE_EVERY = 10.0
"""Seconds between two samples of arrivals."""
LOOK, LOOK_AGAIN = 2, 5
"""Beats without change after which the recorder is read, and from then on between two reads."""
STALL = 3
"""Beats without change after which a rank writes its tickets."""
MOST_TICKETS = 12
"""Newest tickets per channel on the board."""
TRAINING = ("data", "first steps", "step", "compiled step")
"""Phases in which ranks should arrive together. In others one rank may work alone: it saves, or reads a profile."""
STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 8) + 8
"""The signal on which a worker writes the stacks of its threads. No library is known to use it."""


class Heart:
    """The heartbeat of this process."""

    def __init__(self, board: HeartbeatBoard, samples: HeartbeatBoard, *, index: int, stack_file: Path) -> None:
        self.board, self.samples, self.index, self.stack_file = board, samples, index, stack_file
        self.arrivals = Arrivals()
        self._sample = 0
        self.phase, self.step, self.steps_here = "start", 0, 0
        self.rank = index
        """This rank among those of all hosts, once it has joined them."""
        self.exchanges: Any = None
        """The board on which ranks exchange numbers without a message, if there is one; its waits are counted too."""
        self.messages = MessageCounter()
        self._apart: deque[tuple[int, int]] = deque(maxlen=64)
        """Begin and end of the last times in other phases than those of training, in ns of the clock of tickets."""
        self._apart_since = time.time_ns()
        self._step_seconds: deque[float] = deque(maxlen=31)
        self._step_began: float | None = None
        self._known: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._still = 0
        self._recorded: recorder.Counters = {}
        self._tickets: list[Ticket] = []
        self._newest: list[dict[str, Any]] = []
        self._lock = threading.RLock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-heartbeat", daemon=True)
        self._restore: Any = None

    def start(self) -> None:
        """Start to beat. The first beat is written before this returns."""
        recorder.limit_ring()
        self._stacks = self.stack_file.open("w")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        self._restore = count_messages(self.messages)
        self._on_abort = _write_on_abort(self)
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """End the thread: one that runs while the interpreter shuts down would end the process."""
        self._end.set()
        self._thread.join(1.0)
        if self._restore is not None:
            self._restore()

    def stop_after_failure(self) -> None:
        """The same, and write the last collectives: they may explain the failure."""
        with suppress(Exception):
            self.stop()
            self.beat(with_tickets=True)

    def beat(self, *, with_tickets: bool = False) -> None:
        """Write the state of this rank."""
        with self._lock:
            own, entered = self._own_counters(), self._entered()
            moving = {"entered": entered, "own": own, "phase": self.phase, "step": self.step}
            self._still = self._still + 1 if moving == self._last else 0
            if self._still == 0:
                self._tickets, self._newest = [], []
                self._recorded = {channel: (number, number) for channel, number in entered.items()}
            self._last = moving
            if with_tickets or (self._still >= LOOK and (self._still - LOOK) % LOOK_AGAIN == 0):
                self._recorded = recorder.counters(self.messages.by_device())
            counted = {**self._recorded, **own}
            state = {"counters": counted, "phase": self.phase, "step": self.step}
            if with_tickets or self._still == STALL:
                self._tickets = recorder.tickets()
                self._newest = _newest(self._tickets)
            written = {**state, "counters": recorder.exact(counted, self._tickets), **self._about()}
            written |= {"tickets": self._newest, "groups": self._groups(counted)}
            written["total"] = sum(entered + completed for entered, completed in counted.values())
            for each in (written, only_pending(written), without_channels(written)):
                if self.board.write(self.index, each):
                    break

    def _about(self) -> dict[str, Any]:
        uses_gpu = torch.cuda.is_initialized()
        return {"beat": time.monotonic(), "median": self._median(), "uses_gpu": uses_gpu, "is_partial": False}

    def entered(self) -> dict[str, int]:
        """Axis → collectives that this rank has entered; `board` for the exchanges without a message."""
        counted = {channel: (number, number) for channel, number in self._entered().items()} | self._own_counters()
        axes = {name: axis for name, (axis, _) in self._groups(counted).items()} | {"board": "board"}
        # On GPUs an axis has a counter of gloo and then one of NCCL, which counts its tensors.
        channels = {name: entered for name, (entered, _) in counted.items() if ":" not in name}
        return {axes[group_of(name)]: entered for name, entered in channels.items() if group_of(name) in axes}

    def progress(self) -> Any:
        """A value that differs from the one before as long as this rank enters collectives and sends messages."""
        return self._entered(), self._own_counters()

    def begin(self, phase: str) -> str:
        """Enter a phase; returns the one before."""
        before, self.phase = self.phase, phase
        self.board.note_phase(self.index, phase)
        if before in TRAINING and phase not in TRAINING:
            self._apart_since = time.time_ns()
        elif phase in TRAINING and before not in TRAINING:
            self._apart.append((self._apart_since, time.time_ns()))
        if self.steps_here <= FIRST_STEPS:  # a few times; the next beat stays out if the GIL is held at once
            with suppress(Exception):
                self.beat()
        return before

    def begin_step(self, number: int) -> None:
        """Note the start of a training step, and the time since the start of the one before."""
        now = time.monotonic()
        if self._step_began is not None:
            self._step_seconds.append(now - self._step_began)
        self._step_began, self.step = now, number
        self.steps_here += 1

    def _median(self) -> float:
        return statistics.median(list(self._step_seconds) or [0.0])

    def _entered(self) -> dict[str, int]:
        """What moves while a rank makes progress."""
        return recorder.entered(self.messages.by_device())

    def _own_counters(self) -> recorder.Counters:
        """Those that the recorder does not have: messages between two ranks, and exchanges without a message."""
        counted = self.messages.counters()
        if self.exchanges is not None:
            counted["board"] = self.exchanges.posted, self.exchanges.summed
        return counted

    def _groups(self, counted: recorder.Counters) -> dict[str, Any]:
        """The groups of the counters. They are listed again when a new one is used."""
        if any(group_of(name) not in self._known for name in counted if name != "board"):
            self._known = {name: (each.axis, each.ranks) for name, each in recorder.groups().items()}
        return self._known

    def straggler(self) -> Straggler | None:
        """The rank that holds up the others most, as far as rank 0 has seen."""
        return self.arrivals.straggler()

    def _sample_arrivals(self) -> None:
        """Write when this rank entered its last collectives; rank 0 also reads the sample before of all ranks."""
        if self.index == 0 and self._sample:
            written = [self.samples.read(rank) for rank in range(self.samples.size)]
            same = {rank: each for rank, each in enumerate(written) if each and each["number"] == self._sample}
            samples = {rank: {(group, n): ns for group, n, ns in each["arrived"]} for rank, each in same.items()}
            self.arrivals.add(samples, step_seconds=self._median())
        self._sample = int(time.monotonic() / SAMPLE_EVERY)
        self.samples.write(self.index, {"number": self._sample, "arrived": sample_of(self.compared())})

    def compared(self) -> list[Ticket]:
        """The last collectives whose arrivals say which rank is slow: those of training, on this host."""
        apart = [*self._apart, *([] if self.phase in TRAINING else [(self._apart_since, time.time_ns())])]
        local = self._local(recorder.tickets())
        return [each for each in local if not any(begin <= each.nanoseconds <= end for begin, end in apart)]

    def _local(self, tickets: list[Ticket]) -> list[Ticket]:
        """Those of groups whose ranks are all on this host: of others, the last to arrive may be elsewhere."""
        first = self.rank - self.index
        here = range(first, first + self.board.size)
        return [each for each in tickets if all(rank in here for rank in self._known.get(each.group, ("", (-1,)))[1])]

    def _run(self) -> None:
        # At multiples of the period, so that all ranks sample at the same time.
        while not self._end.wait(PERIOD - time.monotonic() % PERIOD):
            try:
                if self.steps_here > FIRST_STEPS and int(time.monotonic() / SAMPLE_EVERY) != self._sample:
                    self._sample_arrivals()
                self.beat()
            except Exception:  # a heartbeat must never end a run, and a missing one would look like a held GIL
                self._beat_without_counters()

    def _beat_without_counters(self) -> None:
        """Show that this rank lives, and nothing else: then it is never blamed for what it has not entered."""
        with suppress(Exception):
            self.board.write(self.index, {**EMPTY, "phase": UNKNOWN, "step": self.step, **self._about()})


def _newest(tickets: list[Ticket]) -> list[dict[str, Any]]:
    """The newest tickets of each channel, oldest first."""
    counted: dict[str, int] = {}
    kept = []
    for ticket in reversed(tickets):
        counted[ticket.channel] = counted.get(ticket.channel, 0) + 1
        if counted[ticket.channel] <= MOST_TICKETS or not ticket.is_done:
            kept.append(asdict(ticket))
    return kept[::-1]


def _write_on_abort(heart: Heart) -> Any:
    """Write tickets and stacks when a library calls abort(), as gloo does when two ranks send different sizes.

    A handler of Python's own runs later, in the main thread, and never after abort(). This one is called by the thread
    that aborts, like a function. Its last call must be kept alive by the caller.
    """

    def write(number: int) -> None:
        with suppress(Exception):
            heart.beat(with_tickets=True)
            faulthandler.dump_traceback(heart._stacks, all_threads=True)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(write)
    libc: Any = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, handler)
    return handler


# ---- the heart of this process --------------------------------------------------------------------------------------

_heart: Heart | None = None


def start_heart(board: Path, *, index: int, size: int, stack_file: Path) -> Heart | None:
    """Start the heartbeat of this worker, in place of that of an earlier generation; None if there is no board."""
    global _heart
    if _heart is not None:
        _heart.stop()
        recorder.forget()
    if not board.exists():
        return None
    boards = HeartbeatBoard(board, size), HeartbeatBoard(board, size, part=1)
    before, _heart = _heart, Heart(*boards, index=index, stack_file=stack_file)
    _heart.start()
    if before is not None:
        before._stacks.close()  # the signal handler writes to the new one
    return _heart


def heart() -> Heart | None:
    """The heart of this process; None: nothing watches it."""
    return _heart


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Report for the duration of the context what this rank does, if something watches it."""
    if _heart is None:
        yield
        return
    before = _heart.begin(name)
    try:
        yield
    finally:
        _heart.begin(before)


def begin_step(number: int, *, compiles: bool = False) -> AbstractContextManager[None]:
    """Report a training step for the duration of the context. `compiles`: any step may compile the model again."""
    if _heart is None:
        return nullcontext()
    _heart.begin_step(number)
    is_first = _heart.steps_here <= FIRST_STEPS
    return phase("first steps" if is_first else "compiled step" if compiles else "step")
