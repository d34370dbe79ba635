"""A process with torch and the checked job, from which the workers of each generation are forked.

Imports and checks take seconds, in which a process sends no heartbeats. So they happen here, and the agent stays
responsive. They also happen once: a restart forks a new runner, whose workers start in milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.errors import RunFailed, ShoalError
from shoal.launch.hosts.agent import token_file
from shoal.launch.hosts.lifetime import forked
from shoal.launch.hosts.messages import MOST, Message
from shoal.launch.hosts.reports import encoded, plain_error
from shoal.launch.stop_signals import STOP_SIGNALS

if TYPE_CHECKING:
    from shoal.launch.hosts.agent.runner import Work

Prepare = Callable[[Message], tuple[Message, Callable[[Message], "Work"]]]
"""Checks the job of an order; returns facts about it, and a function that makes the work of an order to start."""


def serve_orders(link: socket.socket, prepare: Prepare, key: bytes) -> int:
    """Prepare jobs and fork runners as the agent orders, until it closes the link."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the agent passes them to the runner
    make_work: Callable[[Message], Work] | None = None
    runner: socket.socket | None = None
    while data := link.recv(MOST):
        order = json.loads(data)
        _reap()
        if order["do"] == "prepare":
            answer, make_work = _prepared(order, prepare)
            _send(link, answer)
        elif order["do"] in token_file.ORDERS:
            _send(link, {"generation": order["generation"], **token_file.handle(order)})
        elif order["do"] == "judge":
            if runner is not None:
                with suppress(OSError):  # it has ended, or reads nothing: another verdict will come
                    runner.send(data)
        else:
            from shoal.launch.local import fork_is_safe

            assert make_work is not None
            work = make_work(order)
            can_fork = fork_is_safe()  # in the runner, a fork, no thread of this process could be seen
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the runner can pass them on
            if runner is not None:
                runner.close()
            runner, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for each in (runner, theirs):
                each.setblocking(False)
            pid = forked(partial(_run, order, work, key, link, theirs, can_fork=can_fork))
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _send(link, {"say": "started", "generation": order["generation"], "pid": pid})
    return 0


def _prepared(order: Message, prepare: Prepare) -> tuple[Message, Callable[[Message], Work] | None]:
    about = {"generation": order["generation"]}
    try:
        from shoal.launch.local import one_thread

        with one_thread():  # a model may be built: with threads, workers could not be forked from this process
            facts, make_work = prepare(order)
    except ShoalError as error:
        return {"say": "rejected", **about, "error": plain_error(error)}, None
    except BaseException as error:
        trace = "\n" + traceback.format_exc()[-10_000:]
        what = f"the job cannot be loaded: {type(error).__name__}: {error}{trace}"
        return {"say": "rejected", **about, "error": plain_error(RunFailed(what, code="N063"))}, None
    finally:
        _flush()
    return {"say": "prepared", **about, **facts}, make_work


def _run(order: Message, work: Work, key: bytes, link: socket.socket, orders: socket.socket, *, can_fork: bool) -> int:
    from shoal.launch.hosts.agent.runner import HostPlace, run_workers

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    place = HostPlace.of(order, key, work.timeout)
    code = run_workers(place, work, partial(_send, link), orders, can_fork=can_fork)
    _flush()
    return code


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send one packet. Packets of template and runner arrive whole, and never mixed."""
    link.send(encoded(message))


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
