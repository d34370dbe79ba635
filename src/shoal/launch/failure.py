"""Find the worker that failed first, and describe its failure.

When one rank dies, the others lose their connection to it and fail too, within milliseconds and often with a longer
text. Only the cause is useful. So every worker records its failure and the time. A failure that can only be the
consequence of another (a lost peer, a timeout) never ranks before one with a cause of its own.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.errors import LostPeer, RunFailed, ShoalError
from shoal.launch.host_memory import Memory

HEAD_START = 2.0  # seconds: the parent sees a sudden death later than the peers, whose connections break
_ECHO = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|timed out|application timeout|wait timeout",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"out of memory|(can't|cannot) allocate memory|ALLOC_FAILED", re.IGNORECASE)
MEASURED = "memory_in_use"
"""The attribute of an exception with the bytes by cause that its rank measured."""
LESS_MEMORY = (
    "--plan with a smaller mb, recompute=full, zero=3 or offload=optimizer; `shoal plan` lists plans that fit in memory"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one worker."""

    code: str
    """The code of its error."""
    rank: int
    at: float
    """The time on the monotonic clock of this machine."""
    what: str
    details: str = ""
    """The traceback, if there is one."""
    is_echo: bool = False
    """True: most likely the consequence of another worker's failure."""
    is_sudden: bool = False
    """True: the worker left no record, so `at` is when the parent saw its end."""
    may_pass: bool = False
    """True: a restart may succeed: a process was killed, a connection lost, a device failed. A program error and a lack
    of memory would repeat."""
    fix: str = ""
    lacks_memory: bool = False
    """True: the device or the host had no memory left."""
    memory: dict[str, int] = field(default_factory=dict)
    """Of a rank that had no memory left: bytes by cause, as it or the launcher measured them."""
    phase: str = ""
    """The phase of the run in which a rank ended suddenly."""
    is_lost: bool = False
    """True: nothing but the process is lost, and another one can take its place."""


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The failure that explains the others."""
    return min(failures, key=lambda failure: (failure.is_echo, failure.at - HEAD_START * failure.is_sudden))


def failure_of(rank: int, error: BaseException) -> Failure:
    """The failure of an exception that was just caught in the main function of a worker."""
    at = time.monotonic()
    has_no_memory = is_out_of_memory(error)
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of that main function
    return Failure(
        code="N023" if has_no_memory else "N022",
        rank=rank,
        at=at,
        what=_in_words(error),
        details="".join(traceback.format_exception(type(error), error, trace)).rstrip(),
        is_echo=is_echo(error),
        may_pass=isinstance(error, RuntimeError | OSError | LostPeer) and not has_no_memory,
        fix=LESS_MEMORY if has_no_memory else "",
        lacks_memory=has_no_memory,
        memory=getattr(error, MEASURED, {}),
    )


def is_echo(error: BaseException) -> bool:
    """Whether an exception is most likely the consequence of another rank's failure."""
    return isinstance(error, LostPeer) or (isinstance(error, RuntimeError) and bool(_ECHO.search(str(error))))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a device; torch has several errors for it."""
    is_of_system = isinstance(error, RuntimeError | OSError)
    return isinstance(error, MemoryError) or (is_of_system and bool(_NO_MEMORY.search(str(error))))


def _in_words(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.code in (0, None):
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        return f"sys.exit(0) was called before the end of the run{notes}"
    return "".join(traceback.format_exception_only(error)).strip() or type(error).__name__


def write_failure(directory: Path, failure: Failure, error: BaseException) -> None:
    """Write a worker's failure for `read_failure`, atomically."""
    if isinstance(error, ShoalError):
        with contextlib.suppress(Exception):  # one that cannot be pickled is reported like any other
            _error_path(directory, failure.rank).write_bytes(pickle.dumps(error))
    part = _failure_path(directory, failure.rank).with_suffix(".part")
    part.write_text(json.dumps(asdict(failure)))
    part.replace(_failure_path(directory, failure.rank))


def read_failure(directory: Path, rank: int) -> Failure | None:
    """The failure that a worker wrote; None: it wrote none."""
    try:
        return Failure(**json.loads(_failure_path(directory, rank).read_text()))
    except FileNotFoundError:
        return None


def sudden_end(rank: int, exit_code: int, memory: Memory) -> Failure:
    """The failure of a worker that ended before its function returned and wrote no failure."""
    if exit_code >= 0:
        what = f"ended with exit code {exit_code} before its function returned, while the other ranks were running"
    else:
        what = f"was killed by signal {-exit_code} ({_signal_name(-exit_code)})"
    lacks_memory = exit_code == -signal.SIGKILL and memory.has_run_out()
    if exit_code == -signal.SIGKILL:
        what += memory.explanation()
    return Failure(
        code="N023" if lacks_memory else "N024",
        rank=rank,
        at=time.monotonic(),
        what=what,
        is_sudden=True,
        may_pass=exit_code != 0,  # 0 is a choice of the program (`os._exit(0)`), which it would make again
        # gloo aborts where ranks make different calls, and a file that has become shorter is a bus error.
        is_lost=exit_code not in (0, -signal.SIGABRT, -signal.SIGBUS) and not lacks_memory,
        fix=LESS_MEMORY if lacks_memory else "",
        lacks_memory=lacks_memory,
        memory=memory.of_worker(rank) if lacks_memory else {},
    )


def as_exception(failure: Failure, *, directory: Path, num_workers: int) -> ShoalError:
    """A user's error as the worker raised it; anything else as a `RunFailed` with the worker's traceback."""
    if error := raised_error(directory, failure.rank):
        return error
    rank = f"rank {failure.rank} of {num_workers}"
    details = f"\n{failure.details}" if failure.details else ""
    text = (
        f"{rank} {failure.what}{details}" if failure.is_sudden else f"{rank} failed: {failure.what}\n{failure.details}"
    )
    failed = RunFailed(text, fix=failure.fix, code=failure.code)
    failed.may_pass = failure.may_pass
    failed.memory = {"rank": failure.rank, **failure.memory} if failure.lacks_memory else {}
    return failed


def cause_of(failure: Failure) -> str:
    """The text by which a later failure is recognised as the same one; empty: a kill, which may have any reason."""
    if not failure.is_sudden:
        return failure.what
    return f"out of memory in phase {failure.phase}" if failure.lacks_memory else ""


def raised_error(directory: Path, rank: int) -> ShoalError | None:
    """The `ShoalError` that a worker raised; None: it raised none."""
    with contextlib.suppress(FileNotFoundError):
        error = pickle.loads(_error_path(directory, rank).read_bytes())
        assert isinstance(error, ShoalError)
        return error
    return None


def forget_failure(directory: Path, rank: int) -> None:
    """Remove what a worker has written of its failure: another process takes its place."""
    for path in (_failure_path(directory, rank), _error_path(directory, rank)):
        path.unlink(missing_ok=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "unnamed"


def _failure_path(directory: Path, rank: int) -> Path:
    return directory / f"failure-{rank}.json"


def _error_path(directory: Path, rank: int) -> Path:
    return directory / f"error-{rank}.pickle"
