"""Render an sbatch script.

    sbatch ── the script, on the first node ── srun ── one process for each rank, on all nodes
                     │                                     │ USR1 (time is nearly over), TERM (preempted):
                     │                                     │ save, and end with exit code 130
                     └── exit code 130: scontrol requeue ──┘

Slurm itself requeues a job whose node does not answer. Ranks that notice a lost peer before that end with another exit
code, and the script requeues the job, too. All of these count as restarts, of which there is a budget; failures have a
smaller one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal.errors import Problem
from shoal.jobs.spec import JobSpec, fingerprint
from shoal.jobs.time_limit import spell_time

SECONDS_TO_END = 60
"""Seconds that ranks have to end after the first one has ended."""
MARK = "shoal:"
"""The comment of a job begins with this word; its fingerprint follows."""
STOPPED = (130, 138, 143)
"""Exit codes of ranks that a signal has stopped: after they have saved, and before there was anything to save (USR1 and
TERM of a process that is still loading)."""
_WORD = re.compile(r"[\w.,:@+=/\[\]-]+")
_MEMORY = re.compile(r"[0-9]+([KMGT]B?)?", re.IGNORECASE)
_ARRAY = re.compile(r"(?<!\S)(--ar\w*|-a)")


@dataclass(frozen=True, kw_only=True)
class SlurmSite:
    """Options of this scheduler alone."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    runtime: Literal["pyxis", "apptainer"] | None = None
    """The program that runs containers. None: apptainer for a .sif file, else pyxis."""
    at_once: int | None = None
    """Jobs of an array that run at one time. None: all."""
    extra: tuple[str, ...] = ()
    """Further options of sbatch."""
    folder: str = "jobs"
    """The folder of logs, below the working directory."""

    def check(self, memory: str | None = None) -> Iterator[Problem]:
        """Find options that would break the lines of the script. `memory`: that of a node."""
        if memory is not None and not _MEMORY.fullmatch(memory):
            yield Problem("J021", f"--memory must be a size such as 200G, got {memory[:80]!r}", "--memory 200G")
        if self.at_once is not None and self.at_once < 1:
            yield Problem("J001", f"--at-once must be at least 1, got {self.at_once}", "--at-once 1, or leave it out")
        for flag in ("partition", "account", "qos", "folder"):
            value = getattr(self, flag)
            if value is not None and not _WORD.fullmatch(value):
                yield Problem("J002", f"--{flag} must be one word, got {value[:80]!r}", f"--{flag} NAME")
        for option in self.extra:
            if not option.startswith("--") or not option.isprintable():
                what = f"--sbatch must be an option of sbatch, got {option[:80]!r}"
                yield Problem("J002", what, "--sbatch=--constraint=h100")
            elif _ARRAY.search(option):
                what = f"--sbatch must not make an array, whose jobs would all write to one run, got {option[:80]!r}"
                yield Problem("J002", what, "--array optim.lr=1e-4,3e-4")


def render(spec: JobSpec, site: SlurmSite, *, directory: str, command: str, mark: str) -> str:
    """The script of a job. `directory`: where it runs. `command`: the words that it was made by. `mark`: its comment,
    by which the job is found."""
    made_by = f"# Written by: {command}" if command.isprintable() else "# Written by: shoal launch slurm"
    lines = ["#!/bin/bash", made_by, *_directives(spec, site, directory), f"#SBATCH --comment={mark}"]
    return "\n".join([*lines, "", "\n\n".join(_body(spec, site)), ""])


def mark_of(spec: JobSpec, site: SlurmSite, *, directory: str, recipe: str) -> str:
    """What identifies a job in the queue: its script, and the content of its recipe."""
    lines = [*_directives(spec, site, directory), *_body(spec, site), recipe]
    return MARK + fingerprint("\n".join(lines))


def check_directory(directory: str) -> Iterator[Problem]:
    """Find a directory that sbatch would read as another one: it drops backslashes, and replaces %j and the like."""
    if "\\" in directory or "%" in directory or not directory.isprintable():
        what = f"the working directory must have no backslash, percent sign or line break, got {directory[-80:]!r}"
        yield Problem("J033", what, "cd to a directory with another name; then the same command")


def runtime_of(spec: JobSpec, site: SlurmSite) -> str | None:
    """The program that runs the container; None: there is no container."""
    if spec.image is None:
        return None
    return site.runtime or ("apptainer" if spec.image.endswith(".sif") else "pyxis")


def _directives(spec: JobSpec, site: SlurmSite, directory: str) -> Iterator[str]:
    options = {
        "job-name": spec.name,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "nodes": spec.nodes,
        "ntasks-per-node": spec.ranks_per_node,
        "gpus-per-node": spec.gpus or None,
        "cpus-per-task": spec.cpus,
        "mem": spec.memory,
        "time": None if spec.seconds is None else spell_time(spec.seconds),
        "array": _array(spec, site),
        "chdir": directory if _WORD.fullmatch(directory) else shlex.quote(directory),
        "output": f"{site.folder}/%x-{'%A_%a' if spec.variants else '%j'}.log",
        "open-mode": "append",
    }
    for name, value in options.items():
        if value is not None:
            yield f"#SBATCH --{name}={value}"
    if spec.stop_before:
        yield "# To the ranks, so that they save before the time is over:"
        yield f"#SBATCH --signal=USR1@{spec.stop_before}"
    yield "# Also after a node has failed:"
    yield "#SBATCH --requeue"
    for option in site.extra:
        yield f"#SBATCH {option}"


def _array(spec: JobSpec, site: SlurmSite) -> str | None:
    if not spec.variants:
        return None
    return f"0-{len(spec.variants) - 1}" + (f"%{site.at_once}" if site.at_once else "")


def _body(spec: JobSpec, site: SlurmSite) -> Iterator[str]:
    yield "set -e"
    if spec.setup:
        yield "\n".join(spec.setup)
    if spec.env:
        # An image that sets a variable itself would win over the job's.
        prefixes = ("", "APPTAINERENV_") if runtime_of(spec, site) == "apptainer" else ("",)
        variables = [(prefix + name, value) for prefix in prefixes for name, value in spec.env.items()]
        yield "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables)
    yield (
        "# The key of this run: other processes on the network cannot join it.\n"
        "SHOAL_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\n"
        "export SHOAL_KEY"
    )
    yield (
        "restarts=${SLURM_RESTART_COUNT:-0}\n"
        f"if (( restarts > {spec.max_requeues} )); then\n"
        f'    echo "shoal: the job was started $restarts times again, of at most {spec.max_requeues}" >&2\n'
        "    exit 1\n"
        "fi"
    )
    if spec.variants:
        yield _cases(spec)
    yield f"code=0\n{_srun(spec, site)} || code=$?"
    yield (
        "# The time is nearly over, or the job is preempted. 130: the run has saved and stopped;\n"
        "# 138 and 143: USR1 or TERM came before its first step.\n"
        "# 2 is a mistake in the recipe. Anything else is a failure, such as a lost node or a killed rank.\n"
        'case "$code" in\n'
        "    0 | 2) again=0 ;;\n"
        f"    {' | '.join(map(str, STOPPED))}) again=1 ;;\n"
        f"    *)\n"
        f"        failures={_file(site, 'failures')}\n"
        '        echo "exit code $code" >> "$failures"\n'
        f'        (( again = $(wc -l < "$failures") <= {spec.max_failures} )) || true ;;\n'
        "esac\n"
        f"if (( again && restarts < {spec.max_requeues} )); then\n"
        f"    scontrol requeue {_number(spec)}\n"
        "fi\n"
        'exit "$code"'
    )


def _number(spec: JobSpec) -> str:
    """The number of this job, for scontrol. One job of an array has the number of the whole array, too, and by that
    number Slurm would requeue all of them."""
    return '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if spec.variants else '"$SLURM_JOB_ID"'


def _file(site: SlurmSite, ending: str) -> str:
    """A file of this job beside its log."""
    return f'{site.folder}/"$SLURM_JOB_NAME-$SLURM_JOB_ID.{ending}"'


def _cases(spec: JobSpec) -> str:
    lines = [f"    {number}) chosen=({shlex.join(words)}) ;;" for number, words in enumerate(spec.variants)]
    return "\n".join(["# The settings of each job of the array.", 'case "$SLURM_ARRAY_TASK_ID" in', *lines, "esac"])


def _srun(spec: JobSpec, site: SlurmSite) -> str:
    """One process for each rank. All of them see all GPUs of their node, which NCCL needs."""
    # Ranks that stop together end within seconds. srun must not kill those that are still saving.
    # Sites submit with --export=NONE, which srun would repeat: ranks would have neither the key nor --env.
    words = ["srun", "--export=ALL", "--kill-on-bad-exit=0", f"--wait={SECONDS_TO_END}"]
    if spec.cpus is not None:
        words.append(f"--cpus-per-task={spec.cpus}")  # sbatch's own is not inherited since 22.05
    runtime = runtime_of(spec, site)
    if runtime == "pyxis":
        words.append(f"--container-image={shlex.quote(spec.image or '')}")
        words += ['--container-mounts="$PWD:$PWD"', '--container-workdir="$PWD"']
        words += [f"--container-env={','.join(spec.env)}"] if spec.env else []
    elif runtime == "apptainer":
        words += ["apptainer exec", *(["--nv"] if spec.gpus else []), '--bind "$PWD" --pwd "$PWD"']
        words.append(shlex.quote(spec.image or ""))
    words += [shlex.join([*spec.program, "train", *spec.words])]
    if spec.variants:
        words.append('"${chosen[@]}"')
    return _wrapped(words)


def _wrapped(words: list[str]) -> str:
    """A command on several lines, if it is long."""
    line = " ".join(words)
    if len(line) <= 110:
        return line
    command = next(number for number, word in enumerate(words) if " train" in word)
    parts = [" ".join(words[:command]), " ".join(words[command:])]
    return " \\\n    ".join(parts)
