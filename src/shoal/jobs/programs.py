"""Run the programs of a site, such as sbatch and kubectl, and report their failures in one message."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import ShoalError

SECONDS = 90.0
"""Slurm's own programs end after MessageTimeout, which is 10 s unless the site has changed it."""


@dataclass(frozen=True)
class Answer:
    """The exit code and the output of a program. A program that did not end in time has the exit code 124."""

    code: int
    out: str
    err: str

    @property
    def reason(self) -> str:
        """The last words of a failed program, on one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return " / ".join(lines[-3:])[:500] or f"exit code {self.code}"


def require(program: str, *, instead: str) -> None:
    """Raise if a program is not on the path. `instead`: what works without it."""
    if shutil.which(program) is None:
        raise ShoalError(
            f"there is no {program} on the path of this host",
            fix=f"give the command on a host that has {program} (a login node, `module load`), or {instead}",
            code="J010",
        )


def run(*words: str, stdin: str | None = None) -> Answer:
    """Run a program that is on the path."""
    try:
        ended = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{words[0]} did not end in {SECONDS:g} s")
    except OSError as error:
        return Answer(127, "", f"{words[0]}: {error.strerror or error}")
    return Answer(ended.returncode, ended.stdout, ended.stderr)


def checked(words: Sequence[str], *, fix: str) -> str:
    """The output of a program that must succeed."""
    answer = run(*words)
    if answer.code != 0:
        raise ShoalError(f"{words[0]} failed: {answer.reason}", fix=fix, code="J011")
    return answer.out
