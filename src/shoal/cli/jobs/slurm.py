"""`shoal launch slurm RECIPE`: print an sbatch script, or submit it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shoal.cli.jobs.request import JobOptions, Request, checked_request, program_here, read_options
from shoal.errors import Problem, ShoalError, raise_if
from shoal.jobs.programs import run
from shoal.jobs.slurm.client import find_job, submit
from shoal.jobs.slurm.script import MARK, SlurmSite, check_directory, mark_of, render, runtime_of
from shoal.jobs.spec import JobSpec
from shoal.jobs.time_limit import read_time

PROG = "shoal launch slurm"


@dataclass(frozen=True, kw_only=True)
class Slurm(JobOptions):
    """Write an sbatch script that trains a recipe on several machines. Before its time is over, and when it is
    preempted, the run saves and the job is requeued; it resumes where it was. Settings of the recipe may follow.

    shoal launch slurm recipes/tiny.yaml --nodes 4 --gpus 8 --time 24:00:00 --submit
    """

    partition: str | None = None
    """The partition (queue) of the cluster. None: its default."""

    account: str | None = None
    """The account that the time is counted for."""

    qos: str | None = None
    """The quality of service."""

    container: str | None = None
    """An image that the ranks run in: a name for pyxis (enroot), or a .sif file for apptainer. It brings shoal."""

    runtime: Literal["pyxis", "apptainer"] | None = None
    """The program that runs containers. None: apptainer for a .sif file, else pyxis."""

    array: str = ""
    """A sweep: a setting and its values, optim.lr=1e-4,3e-4. Given several times: all combinations, a job each."""

    at_once: int | None = None
    """Jobs of the array that run at one time. None: all."""

    stop_before: int | None = None
    """Seconds before the time limit at which the run saves and stops. None: 300, or a quarter of a short limit."""

    sbatch: str = ""
    """A further option of sbatch, --sbatch=--constraint=h100; may be given several times."""

    folder: str = "jobs"
    """The folder for scripts and logs."""


def main(arguments: Sequence[str]) -> int:
    """Print or submit a job."""
    options, reading = read_options(Slurm, arguments, prog=PROG)
    site = SlurmSite(
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        runtime=options.runtime,
        at_once=options.at_once,
        extra=tuple(options.sbatch.split("\n")) if options.sbatch else (),
        folder=options.folder,
    )
    request = checked_request(
        options,
        reading,
        arguments,
        prog=PROG,
        problems=[*site.check(options.memory), *check_directory(os.getcwd()), *_check(options)],
        image=options.container,
        program=program_here(is_elsewhere=bool(options.container or options.setup)),
        stop_before=_stop_before(options),
    )
    raise_if(_check_runtime(request.spec, site) if options.submit else ())
    is_submitted = options.submit and not options.dry_run
    mark = mark_of(request.spec, site, directory=os.getcwd(), recipe=request.recipe.model_dump_json())
    files = _files(request, site, mark, copies=is_submitted)
    if is_submitted:
        return _submit(request, files, mark)
    (script,) = files.values()
    print(json.dumps({"script": script, "ranks": request.spec.num_ranks}) if options.json else script, end="")
    if not Path(options.folder).is_dir():
        made = shlex.quote(options.folder)
        print(f"shoal: mkdir -p {made}   # before sbatch: Slurm makes no folder for a log", file=sys.stderr)
    return 0


def _files(request: Request, site: SlurmSite, mark: str, *, copies: bool) -> dict[Path, str]:
    """The script and, if it `copies` it, the recipe: a change of the file must not change a job that waits."""
    options: Slurm = request.options
    spec, stem = request.spec, Path(options.folder) / f"{request.spec.name}-{mark.removeprefix(MARK)[:8]}"
    files, recipe = dict[Path, str](), stem.with_name(f"{stem.name}.yaml")
    if copies:
        assert options.recipe is not None
        files[recipe] = options.recipe.read_text()
        spec = replace(spec, words=(str(recipe), *spec.words[1:]))
    script = render(spec, site, directory=os.getcwd(), command=request.command, mark=mark)
    return {stem.with_name(f"{stem.name}.sbatch"): script, **files}


def _stop_before(options: Slurm) -> int:
    if options.stop_before is not None:
        return options.stop_before
    try:
        return 300 if options.time is None else min(300, read_time(options.time) // 4)
    except ShoalError:  # it is reported by the check of --time
        return 0


def _check(options: Slurm) -> Iterator[Problem]:
    if options.runtime and not options.container:
        yield Problem("J009", "--runtime has no effect without --container", "--container IMAGE, or leave it out")
    if options.at_once is not None and not options.array:
        yield Problem("J009", "--at-once has no effect without --array", "--array optim.lr=1e-4,3e-4, or leave it out")


def _check_runtime(spec: JobSpec, site: SlurmSite) -> Iterator[Problem]:
    """Find a cluster whose srun cannot run containers. apptainer may be on compute nodes alone."""
    if (
        runtime_of(spec, site) == "pyxis"
        and shutil.which("srun")
        and "--container-image" not in run("srun", "--help").out
    ):
        what = "srun of this cluster has no --container-image: the plugin pyxis is not installed"
        yield Problem("J017", what, "--runtime apptainer, with --container IMAGE.sif")


def _submit(request: Request, files: dict[Path, str], mark: str) -> int:
    options: Slurm = request.options
    number = submit(files, mark, again=options.again)
    state, reason = _state_of(number)
    script = str(next(iter(files)))
    logs = str(Path(options.folder) / f"{request.spec.name}-{number}{'_*' if request.spec.variants else ''}.log")
    if options.json:
        print(json.dumps({"job": number, "state": state, "reason": reason, "script": script, "logs": logs}))
        return 0
    waits = f" ({reason})" if state == "PENDING" and reason != "None" else ""
    print(f"job {number} is {state.lower()}{waits}; script {script}, output {logs}")
    if reason.startswith("Partition"):  # such as PartitionTimeLimit
        print(f"shoal: {reason}: the job waits until the limits of the partition change (`sinfo`)", file=sys.stderr)
    print(f"follow it: shoal launch logs {number} --follow", file=sys.stderr)
    return 0


def _state_of(number: str) -> tuple[str, str]:
    """The state of a job that was just submitted, and why it waits. The queue may not list it yet."""
    with suppress(ShoalError):
        job = find_job(number)[0]
        return job.state, job.reason
    return "SUBMITTED", "None"
