"""The process of a command, and all that it has started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.launch.hosts.lifetime import die_with_parent

Main = Callable[[Sequence[str]], int]
"""The command line in this process: words → exit code."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class Process:
    """A started command."""

    pid: int
    code: int | None = None
    """Its exit code; None: it runs."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.code is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def end(self) -> None:
        """Kill it and all that it has started."""
        for pid in [self.pid, *descendants(self.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.01)


def start_process(
    words: Sequence[str], *, prefix: Sequence[str], environ: Mapping[str, str], out: Path, err: Path, main: Main | None
) -> Process:
    """Start `shoal WORDS`; its output is appended to files.

    A process in which torch is loaded forks (`main`), since another import would take seconds. Either ends with this
    process.
    """
    with out.open("ab") as to_out, err.open("ab") as to_err:
        if main is None or prefix:
            command = [*prefix, sys.executable, "-m", "shoal", *words]
            full = {**os.environ, **environ}
            started = subprocess.Popen(
                command, env=full, stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err, start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip
            started.returncode = 0  # it is waited for here, not by its destructor
            return Process(started.pid)
        drill = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks
            child = os.fork()
        if child == 0:
            die_with_parent(drill)
            _be(main, words, environ, (to_out.fileno(), to_err.fileno()))
        return Process(child)


def _be(main: Main, words: Sequence[str], environ: Mapping[str, str], outputs: tuple[int, int]) -> None:
    code = 1
    try:
        os.setsid()
        os.environ.update(environ)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for descriptor, target in enumerate(outputs, 1):
            os.dup2(target, descriptor)
        code = main(words)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code % 256)


def become_subreaper() -> None:
    """Become the parent of all that the processes started here leave behind, so that it can be ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all() -> None:
    """Kill all descendants of this process, and wait for their end."""
    deadline = time.monotonic() + 5.0
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """All living processes that a process has started, and theirs."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found
