"""Read rank, size and address from a launcher's environment: RANK, SLURM_PROCID and their like.

torch reads torchrun's variables only, one at a time, and raises KeyError when one is missing. Here every known launcher
is read from a plain mapping into one `Placement`, or rejected with all problems at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from shoal.comm.rendezvous.listener_guard import Peers
from shoal.comm.rendezvous.slurm_nodelist import expand_counts, expand_hosts
from shoal.errors import Problem, raise_if

Source = Literal["torchrun", "slurm", "openmpi", "shoal"]

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Rank, size, local rank and local size of Open MPI, MVAPICH, and Hydra (MPICH, Intel MPI). srun also sets PMI_RANK,
and not MPI_LOCALNRANKS."""
SHELL_STEPS = range(0xFFFFFFF0, 0x100000000)  # Slurm numbers steps that are only a shell (sbatch, salloc) from the top


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The position of one process among all processes of a run."""

    rank: int
    world_size: int
    local_rank: int
    """Its index among the processes of its machine."""
    local_world_size: int
    node: int = 0
    """The index of its machine."""
    master_addr: str | None = None
    """The address at which rank 0 listens. None: the processes are given a store."""
    master_port: int | None = None
    source: Source = "shoal"
    generation: int = 0
    """How often the processes of this run were restarted."""
    has_new_store: bool = False
    """Whether each generation has a store of its own. Then ranks need no number for it: each agent of torchrun counts
    its own restarts, and one that has joined later counts fewer."""
    key: bytes | None = field(default=None, repr=False)
    """The secret that all ranks share. None: read it from a file."""
    key_file: str | None = None
    """The file with the secret. None: the one in the user's home directory."""
    job: str = ""
    """The launcher's name of this run, the same on every rank; empty if it has none."""
    board: Path | None = None
    """A file through which ranks exchange numbers, if all of them are on one machine."""
    has_store: bool = False
    """Whether the launcher itself serves the store at rank 0's address."""
    peers: Peers | None = None
    """From where ranks of other hosts connect; None: unknown."""


def read_environment(environ: Mapping[str, str]) -> Placement | None:
    """Return the placement that a launcher wrote into the environment; None if no launcher did.

    torchrun and mpirun take precedence over Slurm, because inside a Slurm job they start the processes.
    """
    placement = _placement(environ)
    if placement is None:
        return None
    key = environ.get("SHOAL_KEY")
    return replace(
        placement,
        key=key.encode() if key else None,
        key_file=environ.get("SHOAL_KEY_FILE") or None,
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _placement(environ: Mapping[str, str]) -> Placement | None:
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(_Reader(environ, "torchrun"))
    for names in MPI:
        is_hydra = names[0] == "PMI_RANK"
        if names[-1] in environ if is_hydra else (names[0] in environ or names[1] in environ):
            return _from_mpi(_Reader(environ, "mpirun"), *names)
    if _is_slurm_task(environ):
        return _from_slurm(_Reader(environ, "srun"))
    return None


def _from_torchrun(read: _Reader) -> Placement:
    """Read the variables of torchrun, which accelerate and Ray use too, and deepspeed with names of its own."""
    rank, size = read.position("RANK", "WORLD_SIZE")
    local_rank, local_size = _local_position(rank, size, read)
    alone = read.environ.get("WORLD_SIZE") == "1"  # one process needs no address
    placement = Placement(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node=read.integer(read.first_set("CROSS_RANK", "GROUP_RANK"), default=rank // local_size),
        master_addr=read.text("MASTER_ADDR", default=LOOPBACK if alone else None),
        master_port=read.port("MASTER_PORT", default=DEFAULT_PORT if alone else None),
        source="torchrun",
        # In a requeued job of Slurm, torchrun counts from 0 again.
        generation=read.integer("TORCHELASTIC_RESTART_COUNT", default=0)
        + read.integer("SLURM_RESTART_COUNT", default=0),
        has_new_store=read.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False",
        job=read.environ.get("TORCHELASTIC_RUN_ID", ""),
    )
    read.finish()
    return placement


def _local_position(rank: int, size: int, read: _Reader) -> tuple[int, int]:
    """The local rank and size. deepspeed calls the size LOCAL_SIZE. A launcher that does not give it must say how many
    hosts there are, or that all ranks are on this one: rank 0 is at the loopback."""
    if read.has("LOCAL_WORLD_SIZE") or not read.is_good:
        return read.position("LOCAL_RANK", "LOCAL_WORLD_SIZE", within=size)
    if read.has("LOCAL_SIZE"):
        return read.position("LOCAL_RANK", "LOCAL_SIZE", within=size)
    master = read.environ.get("MASTER_ADDR", "")
    if master == "localhost" or master.startswith("127."):
        return read.integer("LOCAL_RANK", default=rank), size
    hosts = read.integer(read.first_set("CROSS_SIZE", "PET_NNODES", "NNODES"), default=0)
    if hosts and size % hosts == 0:
        local_size = size // hosts
        return read.integer("LOCAL_RANK", default=rank % local_size), local_size
    return read.position("LOCAL_RANK", "LOCAL_WORLD_SIZE", within=size)


def _from_mpi(read: _Reader, *names: str) -> Placement:
    rank, size = read.position(*names[:2])
    local_rank, local_size = read.position(*names[2:], within=size)
    if local_size < size and not read.has("MASTER_ADDR"):
        read.problems.append(
            Problem(
                "N001",
                f"MASTER_ADDR is not set, and of {size} ranks only {local_size} are on this host:"
                " mpirun does not say where rank 0 runs",
                "export MASTER_ADDR=<host of rank 0> and start with mpirun -x MASTER_ADDR",
            )
        )
    job = read.first_set("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    placement = Placement(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node=rank // local_size,  # MPI does not number its hosts; by default it fills them one by one
        master_addr=read.text("MASTER_ADDR", default=LOOPBACK),
        master_port=read.port("MASTER_PORT", default=_port_of(read.text(job)) if read.has(job) else DEFAULT_PORT),
        source="openmpi",
    )
    read.finish()
    return placement


def _from_slurm(read: _Reader) -> Placement:
    rank, size = read.position("SLURM_PROCID", read.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    node, local_rank = read.integer("SLURM_NODEID"), read.integer("SLURM_LOCALID")
    local_size = _slurm_tasks_on(node, read)
    if local_rank >= local_size and read.is_good:
        read.problems.append(
            Problem("N003", f"SLURM_LOCALID={local_rank}, but Slurm gives this node {local_size} tasks", read.fix)
        )
    hosts_name = read.first_set("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    hosts = [read.text("MASTER_ADDR")] if read.has("MASTER_ADDR") else _slurm_hosts(hosts_name, read)
    job = f"{read.environ.get('SLURM_JOB_ID', '')}.{read.environ.get('SLURM_STEP_ID', '')}"
    placement = Placement(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node=node,
        master_addr=hosts[0] if hosts else None,
        master_port=read.port("MASTER_PORT", default=_port_of(job)),
        source="slurm",
        generation=read.integer("SLURM_RESTART_COUNT", default=0),
        job=read.environ.get(read.first_set("SLURM_HET_JOB_ID", "SLURM_JOB_ID"), ""),  # each part has its own JOB_ID
    )
    read.finish()
    return placement


def _slurm_hosts(name: str, read: _Reader) -> list[str]:
    try:
        return expand_hosts(read.text(name)) if read.has(name) else [read.text(name)]
    except ValueError as error:
        fix = "export MASTER_ADDR=<host of rank 0>"
        read.problems.append(Problem("N004", f"{name} must be a list of hosts, got {read.text(name)!r}: {error}", fix))
        return []


def _slurm_tasks_on(node: int, read: _Reader) -> int:
    """Return the tasks on this node. The step's layout (`4(x2),3`) is exact; --ntasks-per-node is only a request."""
    name = read.first_set("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    text = read.text(name)
    if name == "SLURM_NTASKS_PER_NODE" or not text:
        return read.integer(name) if text else 0
    try:
        return expand_counts(text)[node]
    except ValueError as error:
        read.problems.append(
            Problem("N004", f"{name} must be a list of tasks per node, got {text!r}: {error}", read.fix)
        )
    except IndexError:
        read.problems.append(
            Problem("N003", f"SLURM_NODEID={node}, but {name}={text!r} describes fewer nodes", read.fix)
        )
    return 0


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several; the shell of sbatch or salloc also has SLURM_PROCID=0."""
    step = environ.get("SLURM_STEP_ID", "")
    is_shell = not step.isdecimal() or int(step) in SHELL_STEPS
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    return "SLURM_PROCID" in environ and not is_shell and num_tasks != "1"


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads variables one by one and collects the problems, so that all are reported at once."""

    environ: Mapping[str, str]
    launcher: str
    problems: list[Problem] = field(default_factory=list)

    @property
    def fix(self) -> str:
        return f"start the run with {self.launcher}, and leave the variables as it sets them"

    @property
    def is_good(self) -> bool:
        return not self.problems

    def has(self, name: str) -> bool:
        return bool(self.environ.get(name))

    def first_set(self, *names: str) -> str:
        """Return the first of these variables that is set; if none is, the last one, which is the best known."""
        return next((name for name in names if self.has(name)), names[-1])

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self.environ.get(name) or default
        if value is None:
            others = [f"{other}={self.environ[other]}" for other in ("RANK", "WORLD_SIZE") if self.has(other)]
            beside = f", though {' and '.join(others)} is" if others else ""
            self.problems.append(Problem("N001", f"{name} is not set{beside}", f"{self.fix}; or export {name}=..."))
        return value or ""

    def integer(self, name: str, *, default: int | None = None) -> int:
        text = self.text(name, default=None if default is None else str(default))
        if text and not text.isdecimal():
            self.problems.append(Problem("N002", f"{name} must be an integer of 0 or more, got {text!r}", self.fix))
        return int(text) if text.isdecimal() else 0

    def port(self, name: str, *, default: int | None) -> int:
        port = self.integer(name, default=default)
        if port > 65535:
            self.problems.append(
                Problem("N002", f"{name} must be a port up to 65535, got {port}", f"export {name}={DEFAULT_PORT}")
            )
        return port

    def position(self, rank_name: str, size_name: str, *, within: int | None = None) -> tuple[int, int]:
        """Return a rank and the number of ranks. The number is at least 1, so that it is a valid divisor."""
        problems_before = len(self.problems)
        rank, size = self.integer(rank_name), self.integer(size_name)
        if len(self.problems) == problems_before and rank >= size:
            self.problems.append(Problem("N003", f"{rank_name} must be below {size_name}={size}, got {rank}", self.fix))
        if within is not None and self.is_good and size > within:
            self.problems.append(
                Problem("N003", f"{size_name} must be at most the {within} ranks in all, got {size}", self.fix)
            )
        return rank, max(size, 1)

    def finish(self) -> None:
        raise_if(self.problems, title=f"the environment that {self.launcher} should have set")


def _port_of(job: str) -> int:
    """Return a port that is the same on every rank of a job, and below the kernel's range of ports for clients.

    >>> 15000 <= _port_of("4711.0") < 30000
    True
    """
    return 15000 + zlib.crc32(job.encode()) % 15000


def thread_limit(environ: Mapping[str, str]) -> int | None:
    """The threads of a process that OMP_NUM_THREADS allows; None: any. torchrun sets it to 1 for several ranks if it is
    not set, which is no one's choice."""
    text = environ.get("OMP_NUM_THREADS", "")
    is_default = text == "1" and "TORCHELASTIC_RUN_ID" in environ
    return int(text) if text.isdecimal() and int(text) and not is_default else None
