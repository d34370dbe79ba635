"""`shoal launch status`, `logs` and `cancel`: the jobs that were submitted."""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shoal.cli.options import parse_options
from shoal.errors import ShoalError
from shoal.jobs.kubernetes import client as kubernetes
from shoal.jobs.slurm import client as slurm
from shoal.jobs.spec import NAME


@dataclass(frozen=True, kw_only=True)
class Status:
    """List the jobs that shoal has submitted, or one of them."""

    job: Annotated[str | None, tyro.conf.Positional] = None
    """The number of a job of Slurm, or the name of one of Kubernetes. None: all."""

    namespace: str | None = None
    """The namespace of Kubernetes. None: that of kubectl."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Print the output of a job."""

    job: Annotated[str, tyro.conf.Positional]
    """The number of a job of Slurm, or the name of one of Kubernetes."""

    namespace: str | None = None
    """The namespace of Kubernetes. None: that of kubectl."""

    lines: int = 50
    """The last lines; 0: all."""

    follow: bool = False
    """Print what the job writes from now on, too, until Ctrl-C."""

    folder: Path = Path("jobs")
    """The folder of the logs."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """End a job. Its run saves first, if the scheduler gives it the time."""

    job: Annotated[str, tyro.conf.Positional]
    """The number of a job of Slurm, or the name of one of Kubernetes."""

    namespace: str | None = None
    """The namespace of Kubernetes. None: that of kubectl."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main_status(arguments: Sequence[str]) -> int:
    """List jobs."""
    options = parse_options(Status, arguments, prog="shoal launch status")
    if options.job is None:
        jobs = _all_jobs(options.namespace)
    elif _is_slurm(options.job):
        jobs = [job.to_mapping() for job in slurm.find_job(options.job)]
    else:
        jobs = kubernetes.find_job(options.job, options.namespace)
    if options.json:
        print(json.dumps({"jobs": jobs}))
        return 0
    print(_table(jobs) if jobs else "no jobs that shoal has submitted are listed")
    return 0


def main_logs(arguments: Sequence[str]) -> int:
    """Print the output of a job."""
    options = parse_options(Logs, arguments, prog="shoal launch logs")
    if not _is_slurm(options.job):
        found = {options.job: kubernetes.logs_of(options.job, options.lines, options.namespace)}
    else:
        paths = slurm.logs_of(options.job, options.folder)
        if not paths:
            what = f"job {options.job} has no output yet, and {str(options.folder)!r} has no log of it"
            raise ShoalError(what, fix=f"shoal launch status {options.job}; --folder FOLDER_OF_THE_LOGS", code="J018")
        if options.follow and not options.json:
            os.execvp("tail", ["tail", f"--lines={options.lines}", "--follow=name", *map(str, paths)])
        found = {str(path): _last_lines(path, options.lines) for path in paths}
    if options.json:
        print(json.dumps({"logs": found}))
        return 0
    for name, text in found.items():
        print(f"==> {name} <==\n{text}" if len(found) > 1 else text, end="")
    return 0


def main_cancel(arguments: Sequence[str]) -> int:
    """End a job."""
    options = parse_options(Cancel, arguments, prog="shoal launch cancel")
    if _is_slurm(options.job):
        slurm.cancel_job(options.job)
    else:
        kubernetes.cancel_job(options.job, options.namespace)
    print(json.dumps({"cancelled": options.job}) if options.json else f"job {options.job} is cancelled")
    return 0


def _is_slurm(job: str) -> bool:
    """Whether a job is one of Slurm, by its number; else it must be a name of Kubernetes."""
    if slurm.ID.fullmatch(job):
        return True
    if NAME.fullmatch(job):
        return False
    what = f"JOB must be a number such as 4711 or 4711_2 (Slurm), or a name (Kubernetes), got {job[:80]!r}"
    raise ShoalError(what, fix="shoal launch status lists the jobs", code="J016")


def _all_jobs(namespace: str | None) -> list[dict[str, str]]:
    """The jobs of all schedulers that this host has programs of."""
    has_kubectl, has_slurm = (shutil.which(name) is not None for name in ("kubectl", "squeue"))
    jobs = [job.to_mapping() for job in slurm.list_jobs()] if has_slurm or not has_kubectl else []
    return jobs + (list(kubernetes.list_jobs(namespace)) if has_kubectl else [])


def _last_lines(path: Path, count: int) -> str:
    with path.open(errors="replace") as file:
        return "".join(deque(file, count) if count else file)


def _table(jobs: Sequence[dict[str, str]]) -> str:
    rows = [("JOB", "NAME", "STATE", "TIME", "WHERE OR WHY")]
    for job in jobs:
        where = job.get("nodes") or job.get("reason", "").replace("None", "")
        rows.append((job["id"], job["name"], job["state"].lower(), job.get("time", ""), where))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
