"""Submit a script by sbatch, once, and follow and cancel jobs by squeue, scontrol and scancel."""

from __future__ import annotations

import fcntl
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.errors import ShoalError
from shoal.jobs.programs import Answer, checked, require, run
from shoal.jobs.slurm.script import MARK

ID = re.compile(r"\d+(_\d+)?")
_ACTIVE = {"PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT"}
_ACTIVE |= {"REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "STOPPED", "COMPLETING"}

_FIXES = (
    ("partition", "--partition NAME, one that `sinfo -s` lists"),
    ("account", "--account NAME, one that `sacctmgr show associations user=$USER` lists"),
    ("qos", "--qos NAME, one that `sacctmgr show qos` lists, or fewer jobs at one time"),
    ("time limit", "--time with less than the limit in `sinfo -o '%P %l'`"),
    ("node configuration", "--nodes, --gpus, --cpus and --memory that a partition has (`sinfo -o '%P %D %G %c %m'`)"),
    ("node count", "--nodes that a partition has (`sinfo -s`)"),
    ("generic resource", "--gpus that a partition has (`sinfo -o '%P %G'`)"),
    ("gres", "--gpus that a partition has (`sinfo -o '%P %G'`)"),
    ("job submission limit", "wait until some of your jobs have ended (`squeue --me`), then give the same command"),
    ("contact slurm controller", "scontrol ping; then the same command"),
)
"""Words of sbatch → the fix. The first that matches counts."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as squeue lists it."""

    id: str
    state: str
    reason: str
    mark: str
    name: str
    time: str
    nodes: str

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ACTIVE

    def to_mapping(self) -> dict[str, str]:
        """The fields, for JSON."""
        return asdict(self)


def list_jobs() -> list[SlurmJob]:
    """This user's jobs that shoal has submitted, also those that have just ended."""
    require("squeue", instead="`shoal launch k8s`")
    user = pwd.getpwuid(os.geteuid()).pw_name
    words = ["squeue", f"--user={user}", "--states=all", "--array", "--noheader", "--format=%i|%T|%r|%k|%j|%M|%N"]
    lines = checked(words, fix="scontrol ping; then the same command").splitlines()
    rows = [line.strip().split("|") for line in lines]
    return [SlurmJob(*row) for row in rows if len(row) == 7 and row[3].startswith(MARK)]


def submit(files: Mapping[Path, str], mark: str, *, again: bool = False) -> str:
    """Write the files of a job and submit the first one, its script; returns the number of the job.

    `mark`: the comment of the job. `again`: also if the same job waits or runs already.
    """
    require("sbatch", instead="leave --submit out: the script is printed")
    script = next(iter(files))
    with _alone(script.parent):
        if not again and (same := _same(mark)):
            raise ShoalError(
                f"the same job is submitted already: {same.id} is {same.state.lower()} ({same.reason})",
                fix=f"shoal launch status {same.id}; --again submits it a second time",
                code="J012",
            )
        for path, text in files.items():
            path.write_text(text)
        before = {job.id for job in list_jobs() if job.mark == mark} if again else set[str]()
        answer = run("sbatch", "--parsable", str(script))
        number = answer.out.strip().split(";")[0]
        if answer.code == 0 and ID.fullmatch(number):
            return number
        return _arrived(mark, before, answer)


def _arrived(mark: str, before: set[str], answer: Answer) -> str:
    """The job of an sbatch that failed: the controller may have accepted it, and its answer was lost."""
    if answer.code != 124 and "timed out" not in answer.reason.lower():
        raise _rejected(answer)
    try:
        found = [job.id for job in list_jobs() if job.mark == mark and job.id not in before]
    except ShoalError:
        found = []
    if found:
        return found[0]
    raise ShoalError(
        f"sbatch did not say whether it has submitted the job: {answer.reason}",
        fix="shoal launch status; if the job is not there after a minute, give the same command",
        code="J014",
    )


def _rejected(answer: Answer) -> ShoalError:
    reason = answer.reason.lower()
    fix = next((fix for word, fix in _FIXES if word in reason), "sinfo -s; then the command with other options")
    return ShoalError(f"Slurm rejected the job, and nothing was submitted: {answer.reason}", fix=fix, code="J013")


def _same(mark: str) -> SlurmJob | None:
    return next((job for job in list_jobs() if job.mark == mark and job.is_active), None)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of two commands at one time, the second one sees the job of the first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        what = f"the folder {str(folder)!r} for scripts and logs cannot be written: {error.strerror}"
        raise ShoalError(what, fix="--folder WRITABLE_DIRECTORY", code="J015") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def find_job(number: str) -> list[SlurmJob]:
    """The job with this number, or all jobs of this array; raises if shoal has submitted none."""
    found = [job for job in list_jobs() if number in (job.id, job.id.partition("_")[0])]
    if not found:
        what = f"Slurm lists no job {number} that shoal has submitted; jobs that ended minutes ago are not listed"
        raise ShoalError(what, fix=f"shoal launch status; shoal launch logs {number}", code="J016")
    return found


def cancel_job(number: str) -> None:
    """End a job. Its ranks save first, if Slurm gives them the time (KillWait)."""
    require("scancel", instead="`shoal launch cancel` there")
    if not any(job.is_active for job in find_job(number)):
        raise ShoalError(f"job {number} has ended", fix=f"shoal launch logs {number}", code="J019")
    checked(["scancel", number], fix=f"shoal launch status {number}")


def logs_of(number: str, folder: Path) -> list[Path]:
    """The log files of a job, or of all jobs of an array."""
    answer = run("scontrol", "show", "job", number)
    named = [Path(path) for path in re.findall(r"^\s*StdOut=(.+)$", answer.out, re.MULTILINE)]
    found = [path for path in named if path.exists()]
    return found or sorted([*folder.glob(f"*-{number}.log"), *folder.glob(f"*-{number}_*.log")])
