"""Runs `shoal` commands, each in a fork of a process that has torch loaded: its seconds are spent once, not each time.

As a script it reads a JSON list of commands (each a list of words after `shoal`) and writes what became of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.warm import warm_python

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ran:
    """What became of one command."""

    code: int
    stdout: str
    stderr: str


def run_commands(commands: Sequence[Sequence[str]], *, timeout: float = 100.0) -> list[Ran]:
    """Run them one after the other in the root of the repository, as on a machine without a GPU."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    host = subprocess.run(
        [warm_python(), "-m", "tests.readme.fork_host"], input=json.dumps([list(words) for words in commands]),
        capture_output=True, text=True, cwd=ROOT, env=environ, timeout=timeout, check=False,
    )  # fmt: skip
    assert host.returncode == 0, host.stderr
    return [Ran(**ran) for ran in json.loads(host.stdout)]


def main() -> None:
    """Be the host."""
    commands = json.load(sys.stdin)
    import tests.preload  # noqa: F401

    print(json.dumps([asdict(in_a_fork(words)) for words in commands]))


def in_a_fork(words: list[str], act: Callable[[list[str]], int] | None = None) -> Ran:
    """What became of a command. `act` is called with its words, and returns its exit code; None: `shoal` itself."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit((act or exit_code_of)(words))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return Ran(code, *texts)


def exit_code_of(words: list[str]) -> int:
    from shoal.cli import main

    code: int | str | None = 99
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
