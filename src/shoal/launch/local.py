"""Start workers on this machine in milliseconds, monitor them, and end them before the call returns.

`torch.multiprocessing.spawn` imports torch again in every worker (two seconds each), needs a port, shows whichever
failure it saw first, and leaves workers behind when it is killed itself. `launch` forks this process, in which torch is
loaded. Its workers connect through a file, it shows the failure that came first, and it leaves nothing behind.

The workers themselves: `worker_group`; one of them: `worker`.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

from shoal.launch.replacement import SECONDS_TO_IMPORT, SECONDS_TO_JOIN, Budget, Replacement
from shoal.launch.scratch import scratch_folder
from shoal.launch.spawner import by_value
from shoal.launch.worker import value_path
from shoal.launch.worker_group import WorkerGroup

T = TypeVar("T")
StartMethod = Literal["auto", "fork", "forkserver", "spawn"]


def launch(
    function: Callable[..., T],
    args: tuple[Any, ...] = (),
    *,
    nproc: int,
    start: StartMethod = "auto",
    grace: float = 5.0,
    grace_period: float = 30.0,
    timeout: float = 600.0,
    budget: Budget | None = None,
) -> list[T]:
    """Call `function(placement, store, *args)` in `nproc` workers on this machine; return their values by rank.

    If a worker fails, the others get SIGTERM, and SIGKILL `grace` seconds later. The first failure is raised: a
    ShoalError as it is, anything else as `RunFailed`. Ctrl-C and SIGTERM are forwarded to the workers once. They have
    `grace_period` seconds to return; if they all do, so does `launch`. A second signal, or the end of that period,
    kills them, and KeyboardInterrupt or SystemExit is raised. `start` auto: a fork, unless a fork would break this
    process. A worker also fails if a signal (SIGSTOP) has stopped it for `timeout` seconds, or if it returns more than
    `timeout` seconds after another one. With a `budget`, a worker that is lost while all are `armed` is replaced, and
    the others call `function` again.
    """
    method = ("fork" if fork_is_safe() else "forkserver") if start == "auto" else start
    if method != "fork":
        function, args = by_value(function, args), ()
    with scratch_folder() as directory:
        group = WorkerGroup(directory=directory, grace=grace, grace_period=grace_period, timeout=timeout)
        if budget is not None:
            to_import = 0.0 if method == "fork" else SECONDS_TO_IMPORT
            group.replacement = Replacement(budget, SECONDS_TO_JOIN + to_import)
        try:
            with group.receiving_signals():
                group.start(method, nproc, function, args)
                group.watch()
            group.raise_outcome()
            return [pickle.loads(value_path(directory, rank).read_bytes()) for rank in range(nproc)]
        finally:
            group.kill()


def default_nproc(device: str = "auto") -> int:
    """One worker per GPU, or one without GPUs.

    Without the management library (NVML), torch counts GPUs by starting CUDA, and this process could no longer be
    forked. So a short-lived fork counts them.
    """
    if device == "cpu":
        return 1
    return (_in_a_fork(torch.cuda.device_count) if fork_is_safe() else torch.cuda.device_count()) or 1


def fork_is_safe() -> bool:
    """Whether a forked child of this process can compute.

    A used thread pool of OpenMP is broken in the child: its first parallel loop hangs. Locks of Python's own threads
    are never released there, and CUDA fails. OpenBLAS also has threads, but ends them before a fork. So after a trial
    fork only the threads that matter are left.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or torch.cuda.is_initialized():
        return False
    _in_a_fork(lambda: 0)
    return len(os.listdir("/proc/self/task")) == 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside: no pool of OpenMP is started, and `fork_is_safe` stays as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_a_fork(count: Callable[[], int]) -> int:
    """A number up to 255 that a forked child counts; 0 if it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks; `fork_is_safe` tests one
        child = os.fork()
    if child == 0:
        counted = 0
        try:
            counted = count()
        finally:
            os._exit(counted)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
