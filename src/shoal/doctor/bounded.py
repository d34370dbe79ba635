"""Run checks at the same time, each in a forked child with a time limit.

A sick network file system, a name server that does not answer, or a hanging driver blocks a process, sometimes so that
no signal ends it. So no check runs in the process that reports. A child that exceeds its limit is killed and not
waited for; the kernel hands it to init when the doctor ends.

    parent ──fork──┬─ check 1 ──── findings as JSON ──► pipe ─┐
                   ├─ check 2 ──── findings as JSON ──► pipe ─┼─► findings, in the order of the checks
                   └─ check 3 ──── (hangs)          ─ SIGKILL ┘
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.doctor.finding import Finding, warning

MOST_SAID = 2**20
"""Bytes that one check may report."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its time limit."""

    name: str
    function: Callable[[], Iterable[Finding]]
    seconds: float = 2.0
    on_timeout: Callable[[float], Finding] | None = None
    """The finding if it exceeds the limit; None: a warning that names the check."""

    def timed_out(self) -> Finding:
        """The finding of a check that was killed."""
        if self.on_timeout is not None:
            return self.on_timeout(self.seconds)
        evidence = f"the check gave no answer for {self.seconds:g} s"
        return warning(self.name, evidence, "shoal doctor, once more; then look for a hanging disk, driver or server")


@dataclass(slots=True)
class _Child:
    check: Check
    pid: int
    pipe: int
    deadline: float
    said: bytearray = field(default_factory=bytearray)
    extensions: int = 0


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """The findings of all checks, in their order. It takes as long as the slowest check, at most its limit."""
    sys.stdout.flush()
    sys.stderr.flush()
    children = [_start(check) for check in checks]
    found = {id(child): [child.check.timed_out()] for child in children}
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        while selector.get_map():
            running = [key.data for key in selector.get_map().values()]
            for key, _ in selector.select(max(0.0, min(each.deadline for each in running) - time.monotonic())):
                if not _read(key.data):
                    selector.unregister(key.fd)
                    found[id(key.data)] = _findings(key.data)
            for child in [each for each in running if time.monotonic() > each.deadline and not _waits_for_a_core(each)]:
                with contextlib.suppress(KeyError):
                    selector.unregister(child.pipe)
    for child in children:
        _end(child)
    return [finding for child in children for finding in found[id(child)]]


def _start(check: Check) -> _Child:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_child(check, writing)
    os.close(writing)
    os.set_blocking(reading, False)
    return _Child(check, pid, reading, time.monotonic() + check.seconds)


def _be_child(check: Check, pipe: int) -> None:
    """Write the findings and end at once, without the exit handlers of the parent."""
    try:
        os.setpgid(0, 0)  # programs that it starts are killed with it
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        try:
            said = [finding.as_mapping() for finding in check.function()]
        except Exception as error:  # one broken check must not hide the others
            said = [_crashed(check, error).as_mapping()]
        with open(pipe, "wb") as file:
            file.write(json.dumps(said).encode())
    finally:
        os._exit(0)


def _crashed(check: Check, error: Exception) -> Finding:
    evidence = f"the check itself failed: {type(error).__name__}: {str(error)[:200]}"
    return warning(check.name, evidence, "report it, with the output of shoal doctor --json")


def _read(child: _Child) -> bool:
    """Read what a child has written; False: it has written all."""
    data = os.read(child.pipe, 2**16)
    child.said += data
    return bool(data) and len(child.said) <= MOST_SAID


def _waits_for_a_core(child: _Child) -> bool:
    """Whether a child is late because other programs have the cores; then it gets up to three times its limit."""
    try:
        letter = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    if letter != "R" or child.extensions == 2:
        return False
    child.extensions += 1
    child.deadline = time.monotonic() + child.check.seconds
    return True


def _findings(child: _Child) -> list[Finding]:
    try:
        return [Finding.parse(each) for each in json.loads(child.said)]
    except (ValueError, TypeError, KeyError):  # a library ended the child: a crash of a driver
        crashed = RuntimeError("its process ended early")
        return [_crashed(child.check, crashed)]


def _end(child: _Child) -> None:
    os.close(child.pipe)
    for end in (os.killpg, os.kill):  # its group may not exist yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(child.pid, signal.SIGKILL)
    for _ in range(20):  # a process in the kernel cannot be killed: it is left to init
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(child.pid, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
                continue
        return
