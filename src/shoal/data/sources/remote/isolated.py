"""Run a function in a child process, if its protocol would start threads here.

Asynchronous file systems of fsspec start a thread that never ends. The launcher forks its workers, and a process with
threads cannot be forked safely.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from shoal.errors import RunFailed, ShoalError


def in_child(protocol: str, function: Callable[..., None], *arguments: Any) -> None:
    """Call the function in a fork, or here if that is as good; raises its `ShoalError`."""
    if not starts_threads(protocol):
        function(*arguments)
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; the child uses none of them
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        child = context.Process(target=_run, args=(sender, function, arguments))
        child.start()
    sender.close()
    try:
        error = receiver.recv()
    except EOFError:
        child.join()
        error = RunFailed(
            f"the process that downloads {protocol}:// ended with code {child.exitcode}",
            fix="run the same command again",
            code="D095",
        )
    child.join()
    if error is not None:
        raise error


def starts_threads(protocol: str) -> bool:
    """Whether file systems of this protocol are asynchronous."""
    import fsspec  # type: ignore[import-untyped]

    try:
        return bool(fsspec.get_filesystem_class(protocol.split("::")[-1]).async_impl)
    except (ImportError, ValueError):  # reported where the file system is made
        return False


def _run(sender: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        function(*arguments)
        sender.send(None)
    except ShoalError as error:
        sender.send(error)
