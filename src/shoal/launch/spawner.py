"""Start the process of a worker: the first one of a rank, or its replacement.

A process that is no fork of this one imports modules again. The main module may be a notebook, which cannot be
imported, or a script, which would start over. So functions and classes of the main module are sent to it by value, with
all that they use; those of other modules are imported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from shoal.errors import ShoalError
from shoal.launch.replacement import Replacement
from shoal.launch.stop_signals import STOP_SIGNALS
from shoal.launch.worker import Assignment, work


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawner:
    """What all workers of a launch have in common."""

    context: Any
    """Of `multiprocessing`."""
    num_workers: int
    directory: Path
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float
    lifeline: tuple[Connection, Connection]
    """Both ends of the pipe by which workers notice the end of this process."""
    key: bytes = field(repr=False)

    @classmethod
    def of(
        cls,
        method: str,
        num_workers: int,
        directory: Path,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        timeout: float,
    ) -> Spawner:
        """The spawner of workers that are started by `method`: fork, forkserver or spawn."""
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch.distributed"])
        return cls(
            context=context,
            num_workers=num_workers,
            directory=directory,
            function=function,
            args=args,
            timeout=timeout,
            lifeline=context.Pipe(duplex=False),
            key=secrets.token_bytes(32),
        )

    def start(self, rank: int, generation: int, replacement: Replacement | None) -> BaseProcess:
        """Start the process of a rank."""
        method = self.context.get_start_method()
        orders = None if replacement is None else replacement.connect(rank, self.context)
        links = () if replacement is None else tuple(replacement.links.values())
        assignment = Assignment(
            rank=rank,
            num_workers=self.num_workers,
            directory=self.directory,
            lifeline=self.lifeline[0],
            to_close=(self.lifeline[1], *links) if method == "fork" else (),
            parent=os.getpid() if method == "fork" else None,
            environ=dict(os.environ) if method == "forkserver" else {},  # the server's own may be out of date
            key=self.key,
            timeout=self.timeout,
            generation=generation,
            orders=orders,
        )
        process: BaseProcess = self.context.Process(
            target=work, args=(assignment, self.function, self.args), name=f"rank {rank}"
        )
        apart = contextlib.nullcontext() if method == "fork" else without_main()
        with _signals_blocked(), apart:  # blocked until a forked worker has installed its own handlers
            process.start()
        if orders is not None:
            orders.close()
        return process

    def close(self) -> None:
        """Close the pipe."""
        for connection in self.lifeline:
            connection.close()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- processes that are no forks -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallByValue:
    """A function and its last arguments."""

    payload: bytes = field(repr=False)

    def __call__(self, *first: Any) -> Any:
        """Call the function."""
        function, args = pickle.loads(self.payload)
        return function(*first, *args)


def by_value(function: Callable[..., Any], args: tuple[Any, ...]) -> CallByValue:
    """Prepare a call for another process of this program."""
    try:
        return CallByValue(cloudpickle.dumps((function, args)))
    except Exception as error:  # objects raise what they like
        raise ShoalError(
            f"the model, the loss and the batch must be sent to the process of each rank, got {error}",
            fix="a function that builds the model in each process: def build(): return Model(...)",
            code="N124",
        ) from error


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Processes that `multiprocessing` starts inside do not import the main module of this one."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
