"""Long commands that nobody has to watch run beside the unit tests, which leave a core idle.

A test module names its jobs: `BESIDE = [run_all]`, functions of its own that take nothing and return what its tests
look at. When pytest has collected unit tests and such modules, one process begins with the jobs, one after the other
and with low priority. With the last unit test it stops before the next job, so that nothing else is disturbed:
the other tests measure time, and use all cores themselves. What was not begun by then is run when it is asked for.

As a script it is that process: it is told a folder and the names of jobs, and leaves there what they returned.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENOUGH = "enough"
"""A file of this name in the folder: do not begin with another job."""

Job = Callable[[], Any]


class Beside:
    """The process, and what it has left so far."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-beside-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.known: dict[str, Any] = {}

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin with the first."""
        command = [sys.executable, "-m", "tests.beside", str(self.folder), *map(name_of, jobs)]
        # A group of its own, to be killed with; but no session of its own, between which Linux may share cores evenly.
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0)

    def stop(self) -> None:
        """Return when the job that runs is over, and nothing follows it."""
        if self.process is not None:
            (self.folder / ENOUGH).touch()
            self.process.wait()
            self.process = None

    def result(self, job: Job) -> Any:
        """What the job has returned, beside the tests or here and now."""
        name = name_of(job)
        path = self.folder / name
        while self.process is not None and self.process.poll() is None and not path.exists():
            time.sleep(0.05)
        if name not in self.known:
            self.known[name] = pickle.loads(path.read_bytes()) if path.exists() else job()
        return self.known[name]

    def close(self) -> None:
        """Whatever still runs is not needed."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.folder)


def name_of(job: Job) -> str:
    return f"{job.__module__}:{job.__qualname__}"


def main(folder: Path, names: list[str]) -> None:
    """Be the process. It and all that it starts give way to the tests."""
    os.nice(10)
    for name in names:
        if (folder / ENOUGH).exists():
            return
        module, _, function = name.partition(":")
        draft = folder / f"{name}.draft"
        draft.write_bytes(pickle.dumps(getattr(importlib.import_module(module), function)()))
        draft.rename(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
