"""`shoal launch`: render files for job schedulers, submit them, and follow the jobs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from shoal.errors import ShoalError, nearest

ABOUT = {
    "slurm": "an sbatch script that saves, requeues and resumes; --submit submits it",
    "k8s": "the objects of a Kubernetes job: Indexed Job, JobSet or TrainJob; --submit submits them",
    "skypilot": "a task file of SkyPilot",
    "dstack": "a task file of dstack",
    "node": "be one machine of a job; started by Kubernetes, SkyPilot or dstack on each of them",
    "status": "the jobs that were submitted, and why they wait",
    "logs": "the output of a job",
    "cancel": "end a job",
}
FILES = {"skypilot": "clouds", "dstack": "clouds", "status": "follow", "logs": "follow", "cancel": "follow"}
"""Actions whose file has another name."""


def main(arguments: Sequence[str]) -> int:
    """Run one action; returns the exit code."""
    action = arguments[0] if arguments else "--help"
    if action in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if action not in ABOUT:
        near = nearest(action, ABOUT)
        raise ShoalError(f"unknown action {action!r}", fix=f"shoal launch {near or ' | '.join(ABOUT)}", code="R001")
    file = import_module(f"shoal.cli.jobs.{FILES.get(action, action)}")
    code: int = getattr(file, f"main_{action}" if action in FILES else "main")(arguments[1:])
    return code


def _help() -> str:
    lines = [f"  {name:<9}  {about}" for name, about in ABOUT.items()]
    usage = "usage: shoal launch ACTION [options]"
    return "\n".join([usage, "", *lines, "", "`shoal launch ACTION --help` lists the options; all take --json.", ""])
