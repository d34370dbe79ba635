"""The Python stacks of a worker, and the rank whose stack differs from the others'.

The worker itself writes its stacks on a signal, by a handler in C that needs no GIL. A process that does not answer is
read from outside by py-spy, where it is installed (the extra `debug`); so is a stopped one. Without py-spy, a stopped
process, which is about to be ended, is continued for the moment of that handler.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath

from shoal.comm.heartbeat.heart import STACK_SIGNAL

PATIENCE = 2.0
"""Seconds for a worker to write its stacks, which takes it some milliseconds on a machine that is not overloaded."""
_DEBUGGER_FILES = {"pdb.py", "bdb.py", "pydevd.py", "remote_pdb.py"}
_DEBUGGER_FOLDERS = {"debugpy", "_pydevd_bundle", "_pydevd_frame_eval", "pydevd", "pudb", "ipdb", "web_pdb"}
_OWN_THREADS = ("heartbeat/heart.py", "wait_for_the_end")
_FRAME = re.compile(r'^\s*(?:File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)|(?P<spy>\S.*\(.+:\d+\)))$')


def stack_of(pid: int, path: Path, *, is_stopped: bool = False) -> str:
    """The stacks of all threads of a process, the main thread's first; empty: they could not be read."""
    if is_stopped:
        return _by_spy(pid) or _by_signal(pid, path, is_stopped=True)
    return _by_signal(pid, path, is_stopped=False) or _by_spy(pid)


def _by_spy(pid: int) -> str:
    spy = shutil.which("py-spy")
    if spy is None:
        return ""
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=2.0, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def _by_signal(pid: int, path: Path, *, is_stopped: bool) -> str:
    try:
        before = path.stat().st_size
        os.kill(pid, STACK_SIGNAL)
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
        return _written(path, before)
    except (OSError, ValueError):
        return ""
    finally:
        if is_stopped:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)


def _written(path: Path, before: int) -> str:
    """What was appended to a file, once it has stopped growing."""
    deadline, size = time.monotonic() + PATIENCE, before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = path.stat().st_size
        if now > before and now == size:
            break
        size = now
    return path.read_bytes()[before:].decode(errors="replace").strip()


def main_frames(stack: str) -> list[str]:
    """The frames of the main thread, innermost first, as `name (file:line)`.

    >>> main_frames('Thread 0x1 (most recent call first):\\n  File "/a/b.py", line 3 in read\\n')
    ['read (/a/b.py:3)']
    """
    best: list[str] = []
    for block in re.split(r"\n(?=(?:Current )?[Tt]hread )", stack):
        if any(name in block for name in _OWN_THREADS):
            continue
        frames = [frame for line in block.splitlines() if (frame := _frame(line))]
        if "MainThread" in block:
            return frames
        best = frames or best  # faulthandler writes the main thread last
    return best


def _frame(line: str) -> str:
    found = _FRAME.match(line)
    if not found:
        return ""
    return found["spy"] or f"{found['name']} ({found['file']}:{found['line']})"


def excerpt(stack: str, most: int = 12) -> str:
    """The innermost frames of the main thread above the launcher's, ready for a message; empty without a stack."""
    frames = main_frames(stack)
    own = next((place for place, frame in enumerate(frames) if "launch/worker.py:" in frame), len(frames))
    frames = frames[:own] or frames
    rest = f"\n    ... {len(frames) - most} more" if len(frames) > most else ""
    return "".join(f"\n    {frame}" for frame in frames[:most]) + rest


def stack_of_traceback(text: str) -> str:
    """The stack in the traceback of an exception, in the form that a worker writes: innermost first.

    >>> main_frames(stack_of_traceback('  File "a.py", line 3, in step\\n    x\\n  File "b.py", line 7, in read\\n'))
    ['read (b.py:7)', 'step (a.py:3)']
    """
    last = text.rpartition("Traceback (most recent call last):")[2]
    frames = re.findall(r'File "([^"]+)", line (\d+), in (.+)', last)
    return "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in reversed(frames))


def is_debugged(stack: str) -> bool:
    """Whether the main thread is in a debugger, whose user must not lose the process."""
    paths = [PurePath(frame.rpartition("(")[2].rpartition(":")[0]) for frame in main_frames(stack)]
    return any(path.name in _DEBUGGER_FILES or path.parent.name in _DEBUGGER_FOLDERS for path in paths)


def outliers(stacks: Mapping[int, str]) -> list[int]:
    """The ranks whose main thread is elsewhere than that of most ranks; empty if there is no majority.

    Ranks of a hung run mostly wait in the same line for the one that is somewhere else (the rule of ByteRobust).
    """
    places = {rank: tuple(main_frames(stack)) for rank, stack in stacks.items() if stack}
    counted = Counter(places.values()).most_common(2)
    if not counted or counted[0][1] <= len(places) / 2:
        return []
    return sorted(rank for rank, place in places.items() if place != counted[0][0])
