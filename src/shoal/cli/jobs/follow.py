"""`shoal launch status`, `logs` and `cancel`: the jobs that were submitted."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shoal.cli.options import parse_options
from shoal.errors import ShoalError
from shoal.jobs.slurm.client import ID, SlurmJob, cancel_job, find_job, list_jobs, logs_of


@dataclass(frozen=True, kw_only=True)
class Status:
    """List the jobs that shoal has submitted, or one of them."""

    job: Annotated[str | None, tyro.conf.Positional] = None
    """The number of a job. None: all."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Print the output of a job."""

    job: Annotated[str, tyro.conf.Positional]
    """The number of a job."""

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
    """The number of a job."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main_status(arguments: Sequence[str]) -> int:
    """List jobs."""
    options = parse_options(Status, arguments, prog="shoal launch status")
    jobs = list_jobs() if options.job is None else find_job(_number(options.job))
    if options.json:
        print(json.dumps({"jobs": [job.to_mapping() for job in jobs]}))
        return 0
    print(_table(jobs) if jobs else "no jobs that shoal has submitted are listed")
    return 0


def main_logs(arguments: Sequence[str]) -> int:
    """Print the output of a job."""
    options = parse_options(Logs, arguments, prog="shoal launch logs")
    paths = logs_of(_number(options.job), options.folder)
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
    cancel_job(_number(options.job))
    print(json.dumps({"cancelled": options.job}) if options.json else f"job {options.job} is cancelled")
    return 0


def _number(text: str) -> str:
    if not ID.fullmatch(text):
        what = f"JOB must be the number of a job, such as 4711 or 4711_2 of an array, got {text[:80]!r}"
        raise ShoalError(what, fix="shoal launch status lists the jobs", code="J016")
    return text


def _last_lines(path: Path, count: int) -> str:
    with path.open(errors="replace") as file:
        return "".join(deque(file, count) if count else file)


def _table(jobs: Sequence[SlurmJob]) -> str:
    rows = [("JOB", "NAME", "STATE", "TIME", "WHERE OR WHY")]
    for job in jobs:
        where = job.nodes or ("" if job.reason == "None" else job.reason)
        rows.append((job.id, job.name, job.state.lower(), job.time, where))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
