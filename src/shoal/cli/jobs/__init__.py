"""`shoal launch`: render files for job schedulers, submit them, and follow the jobs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from shoal.cli.actions import pick

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
    action = pick("launch", arguments, ABOUT)
    if action is None:
        return 0
    file = import_module(f"shoal.cli.jobs.{FILES.get(action, action)}")
    code: int = getattr(file, f"main_{action}" if action in FILES else "main")(arguments[1:])
    return code
