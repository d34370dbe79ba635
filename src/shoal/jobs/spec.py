"""The value that every file for a scheduler is rendered from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal.errors import Problem

MOST_NODES = 10_000
MOST_PER_NODE = 256
MAX_REQUEUES = 20
PORT = 29400
"""The port of the coordinator on machine 0; the next one is used, too."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A training job: its command, the machines it runs on, and how it ends and restarts."""

    name: str
    words: tuple[str, ...]
    """The arguments of `shoal train`."""
    program: tuple[str, ...] = ("shoal",)
    """The command that is shoal where the job runs."""
    nodes: int = 1
    gpus: int = 0
    """GPUs of one node; 0: the ranks compute on CPUs."""
    ranks_per_node: int = 1
    cpus: int | None = None
    """CPU cores of one rank. None: the scheduler's default."""
    memory: str | None = None
    """Memory of one node, such as 200G. None: the scheduler's default."""
    seconds: int | None = None
    """The time limit. None: the scheduler's default."""
    stop_before: int = 300
    """Seconds before the time limit at which the run is signalled to save and stop."""
    max_requeues: int = MAX_REQUEUES
    """How often the job may be started again."""
    max_failures: int = 3
    """How often the job is started again after the run has failed."""
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    """Lines of shell before the run."""
    variants: tuple[tuple[str, ...], ...] = ()
    """Further arguments of each job of a sweep. Empty: one job."""

    @property
    def num_ranks(self) -> int:
        """Processes on all nodes."""
        return self.nodes * self.ranks_per_node

    def check(self) -> Iterator[Problem]:
        """Find numbers and names that no scheduler accepts."""
        for flag, value, least, most in (
            ("nodes", self.nodes, 1, MOST_NODES),
            ("gpus", self.gpus, 0, MOST_PER_NODE),
            ("ranks-per-node", self.ranks_per_node, 1, MOST_PER_NODE),
            ("cpus", self.cpus, 1, 1024),
            ("stop-before", self.stop_before, 0, 65535),
            ("max-requeues", self.max_requeues, 0, 10_000),
        ):
            if value is not None and not least <= value <= most:
                yield Problem("J001", f"--{flag} must be {least} to {most}, got {value}", f"--{flag} {max(least, 1)}")
        if not NAME.fullmatch(self.name):
            what = f"the name of a job must have letters, digits, '.', '_' and '-' alone, got {self.name[:80]!r}"
            yield Problem("J002", what, "--job-name my-run")
        if self.seconds is not None and self.stop_before >= self.seconds:
            what = f"--stop-before must be less than the time limit of {self.seconds} s, got {self.stop_before}"
            yield Problem("J004", what, f"--stop-before {max(self.seconds // 4, 1)}, or a longer --time")


def read_env(lines: str) -> tuple[dict[str, str], list[Problem]]:
    """The variables of `--env K=V`, one a line, and the problems of those that are none."""
    found, problems = {}, []
    for line in lines.split("\n") if lines else ():
        name, equals, value = line.partition("=")
        if equals and _VARIABLE.fullmatch(name) and value.isprintable():
            found[name] = value
        else:
            problems.append(Problem("J005", f"--env must be NAME=VALUE, got {line[:80]!r}", "--env NCCL_DEBUG=WARN"))
    return found, problems


def fingerprint(text: str) -> str:
    """What identifies a job that is submitted: two jobs with the same text are the same job."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
