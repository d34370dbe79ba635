"""Predict what a recipe needs: `shoal train --dry-run --json` in a process of its own, since it imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.doctor.finding import Finding, ok, warning, will_fail

SECONDS = 120.0
"""torch loads within 3 to 30 s; a user's model may take longer to build."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the dry run says of a recipe."""

    ranks: int = 0
    """0: unknown."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class DryRun:
    """A dry run that works while other checks do."""

    process: subprocess.Popen[bytes]
    began: float

    @classmethod
    def start(cls, words: Sequence[str]) -> DryRun:
        """Start it with the words of `shoal train`."""
        command = [sys.executable, "-m", "shoal", "train", *words, "--dry-run", "--json"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return cls(subprocess.Popen(command, process_group=0, **quiet), time.monotonic())  # type: ignore[call-overload]

    def answer(self) -> Answer:
        """Wait for the end, at most for the limit."""
        try:
            said, _ = self.process.communicate(timeout=max(0.1, self.began + SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            found = will_fail("recipe", f"--dry-run did not end within {SECONDS:g} s", "shoal train RECIPE --dry-run")
            return Answer(findings=(found,))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return parse_answer(said.decode(errors="replace"))


def parse_answer(text: str) -> Answer:
    """Read the one JSON object that it prints."""
    line = next((line for line in reversed(text.splitlines()) if line.startswith("{")), "")
    try:
        said = json.loads(line)
    except ValueError:
        evidence = "--dry-run ended without an answer"
        return Answer(findings=(will_fail("recipe", evidence, "shoal train RECIPE --dry-run"),))
    return Answer(said.get("ranks", 0), said.get("predicted", {}), tuple(_findings(said)))


def _findings(said: Mapping[str, Any]) -> Iterator[Finding]:
    for problem in said.get("error", {}).get("problems", ()):
        yield will_fail("recipe", f"{problem['what'].splitlines()[0]} [{problem['code']}]", problem["fix"])
    if "error" in said:
        return
    predicted = said["predicted"]
    if "not_predicted" in predicted:
        evidence = f"memory is not predicted: {predicted['not_predicted']}"
        yield warning("recipe", evidence, "--run.fast_dev_run true   # makes one step")
    else:
        yield ok("recipe", f"{predicted['parameters']:,} parameters on {said['ranks']} ranks; all settings are valid")
