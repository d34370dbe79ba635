"""Commands of `shoal`, each in a fork of one process that has torch loaded, to be watched, signalled and killed.

As a script it is that process: it reads a command a line, starts it in a session of its own, and tells its number.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.readme.fork_host import exit_code_of
from tests.warm import warm_python


@dataclass
class Started:
    """A command that runs, or has ended."""

    host: Host
    pid: int
    out: Path
    err: Path
    code: int | None = None

    @property
    def workers(self) -> list[int]:
        """The processes that it has started, by rank."""
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except FileNotFoundError:
            return []
        return [int(word) for word in text.split()]

    def wait(self, seconds: float = 90) -> int:
        """Its exit code, when it has ended; nothing that it started may be left then."""
        if self.code is None:
            wait_until(lambda: not self.is_alive, seconds)
            self.code = self.host.ask({"wait": self.pid})
            wait_until(lambda: in_session(self.pid) == [], 5)
        return self.code

    @property
    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def kill_all(self) -> None:
        """As a machine does that loses its power."""
        for pid in in_session(self.pid):
            os.kill(pid, 9)
        self.wait()

    @property
    def said(self) -> str:
        return self.err.read_text() if self.err.exists() else ""

    @property
    def told(self) -> str:
        return self.out.read_text()

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found


class Host:
    """The process that has torch loaded."""

    def __init__(self) -> None:
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
        self.process = subprocess.Popen(
            [warm_python(), "-m", "tests.cli.host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2], env=environ,
        )  # fmt: skip
        self.files = tempfile.TemporaryDirectory()
        self.number = 0
        self.started: list[Started] = []

    def ask(self, what: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *words: str, cwd: Path, env: dict[str, str] | None = None, network: str = "") -> Started:
        self.number += 1
        out, err = (Path(self.files.name, f"{what}-{self.number}") for what in ("out", "err"))
        asked = {"words": words, "cwd": str(cwd), "env": env or {}, "out": str(out), "err": str(err)}
        asked["network"] = network
        self.started.append(Started(self, self.ask(asked), out, err))
        return self.started[-1]

    def kill_what_runs(self) -> None:
        """What a test that has failed has left."""
        for started in self.started:
            if started.code is None:
                started.kill_all()
        self.started.clear()

    def run(self, *words: str, cwd: Path, env: dict[str, str] | None = None) -> Started:
        started = self.start(*words, cwd=cwd, env=env)
        started.wait()
        return started

    def close(self) -> None:
        self.process.communicate(timeout=30)
        self.files.cleanup()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def in_session(session: int) -> list[int]:
    """The live processes of a session, which a process leaves only on purpose."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def until(condition: Callable[[], bool], started: Started, seconds: float = 60) -> None:
    """Wait for something to happen while a command runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain\n{started.said}"
        assert started.is_alive, f"it has ended\n{started.said}"
        time.sleep(0.005)


def enter_network(name: str) -> None:
    """Move this process to a network namespace that `ip netns` has made; an empty name: stay."""
    if name:
        handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(handle)


def main() -> None:
    """Be the host."""
    import tests.preload  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background have it ignored
                os.chdir(asked["cwd"])
                enter_network(asked["network"])
                os.environ.update(asked["env"])
                for number, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(asked[name], os.O_CREAT | os.O_WRONLY, 0o600), number)
                os.close(0)
                os._exit(exit_code_of(asked["words"]) % 256)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
