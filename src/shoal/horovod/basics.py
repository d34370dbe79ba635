"""Start and end, ranks and sizes, and what this build can do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.rendezvous.launcher_environment import read_environment
from shoal.errors import ShoalError
from shoal.horovod import context
from shoal.horovod.context import is_initialized as is_initialized
from shoal.horovod.process_sets import ProcessSet, check_distinct, global_process_set, register_at_start

TIMELINE = "a timeline of collectives is not written"


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the run that the launcher describes. A second call does nothing. `process_sets` are registered at once."""
    if comm is not None:
        what = "init takes no communicator and no ranks: the launcher says which ranks there are"
        raise ShoalError(what, fix="hvd.init()", code="H019")
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    check_distinct(sets, _size_to_come())
    was_initialized = is_initialized()
    engine = context.start()
    global_process_set.ranks = list(range(engine.world.size))
    global_process_set.process_set_id = 0
    if not was_initialized:
        register_at_start(sets)


def _size_to_come() -> int:
    """The number of ranks, before the ranks have met."""
    if dist.is_initialized():
        return dist.get_world_size()
    place = read_environment(os.environ)
    return 1 if place is None else place.world_size


def shutdown() -> None:
    """Leave the run. Collectives of other ranks that need this one fail. `init` may be called again."""
    context.shutdown()


def rank() -> int:
    """This process's number among all."""
    return context.engine().world.rank


def size() -> int:
    """The number of processes."""
    return context.engine().world.size


def local_rank() -> int:
    """This process's number on its host."""
    return context.engine().world.local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return context.engine().world.local_size


def cross_rank() -> int:
    """The number of this host."""
    return (rank() - local_rank()) // local_size()


def cross_size() -> int:
    """The number of hosts, if each has as many processes as this one."""
    return -(-size() // local_size())


def is_homogeneous() -> bool:
    """Whether every host has as many processes."""
    return size() % local_size() == 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Not supported: raises."""
    raise NotImplementedError(f"{TIMELINE}; use torch.profiler, or `shoal profile`")


def stop_timeline() -> None:
    """Not supported: raises."""
    raise NotImplementedError(f"{TIMELINE}; use torch.profiler, or `shoal profile`")


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: there is no MPI."""
    return False


def mpi_enabled() -> bool:
    """Whether MPI is in use: never."""
    return False


def mpi_built() -> bool:
    """Whether MPI can be used: never."""
    return False


def gloo_enabled() -> bool:
    """Whether gloo is in use: always, for CPU tensors."""
    return True


def gloo_built() -> bool:
    """Whether torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version of NCCL as one number, such as 22703; 0 without it."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch has ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Whether IBM's DDL can be used: never."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL can be used: never."""
    return False
