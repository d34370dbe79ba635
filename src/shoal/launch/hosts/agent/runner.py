"""The workers of one host in one generation, with ranks among those of all hosts.

The `WorkerGroup` is that of a launch on one host. Its function sets each worker's place among all ranks, and its cause
of a failure is reported as soon as it is decided, while the other workers still end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pickle
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.rendezvous.listener_guard import Peers
from shoal.comm.rendezvous.mac import mac
from shoal.comm.rendezvous.network_interface import loopback
from shoal.launch.failure import Failure, first_failure, raised_error
from shoal.launch.hosts.messages import MOST, Message
from shoal.launch.hosts.reports import plain_error, plain_failure
from shoal.launch.hosts.store.client import open_store
from shoal.launch.hosts.store.server import prefix_of, store_key
from shoal.launch.local import fork_is_safe
from shoal.launch.scratch import scratch_folder
from shoal.launch.stop_signals import STOP_SIGNALS
from shoal.launch.watch.host_report import StallReporter
from shoal.launch.watch.verdict import verdict_from
from shoal.launch.worker import saved_path, value_path
from shoal.launch.worker_group import WorkerGroup

GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for workers whose sibling has failed: all hosts wait for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A function for the workers, its arguments, and how long they may take to end."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    grace_period: float
    timeout: float
    finish: Callable[[Any], Any]
    """Called with the value of rank 0, on its host; returns plain values for the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """The place of a host's workers among all ranks."""

    first_rank: int
    num_local: int
    world_size: int
    node: int
    generation: int
    store: tuple[str, int]
    """Address and port of the store."""
    store_key: bytes = field(repr=False)
    key: bytes = field(repr=False)
    job: str
    timeout: float
    """Seconds that a rank waits for others in the store."""
    interface: str | None
    """GLOO_SOCKET_IFNAME as the user has set it."""
    peers: Peers | None
    """From where ranks of other hosts connect; None: unknown."""

    @classmethod
    def of(cls, order: Message, secret: bytes, timeout: float) -> HostPlace:
        """The place in an order to start. `secret`: the key of the run, from which workers get two others."""
        names = ("first_rank", "num_local", "world_size", "node", "generation")
        return cls(
            **{name: int(order[name]) for name in names},
            store=(str(order["store"][0]), int(order["store"][1])),
            store_key=store_key(secret),
            key=mac(secret, "workers", str(order["job"]), int(order["generation"])),
            job=str(order["job"]),
            timeout=timeout,
            interface=os.environ.get("GLOO_SOCKET_IFNAME"),
            peers=None if order["peers"] is None else Peers(tuple(order["peers"]["addresses"]), order["peers"]["own"]),
        )


@dataclass(slots=True, kw_only=True)
class HostGroup(WorkerGroup):
    """The workers of one host. It reports the cause of a failure at once."""

    report: Callable[[Failure], None]
    report_saved: Callable[[int], None]
    report_stall: Callable[[Message], None]
    orders: socket.socket
    """The coordinator's verdicts on ranks of this host. Reading never blocks."""
    has_reported: bool = False
    newest: int = -1
    """The newest saved step that was reported. If this host is lost, the coordinator knows of it."""

    def _begin_generation(self, nproc: int) -> None:
        WorkerGroup._begin_generation(self, nproc)
        if self.watcher is not None and self.world_size > nproc:
            self.watcher.reporter = StallReporter(self.report_stall)

    def _fence_hung(self) -> None:
        with contextlib.suppress(OSError):  # there is none, or the socket is closed
            while self.watcher is not None and (order := self.orders.recv(MOST)):
                self.watcher.accused = verdict_from(json.loads(order)["verdict"])
        WorkerGroup._fence_hung(self)

    def _decide_cause(self, *, since: float) -> None:
        WorkerGroup._decide_cause(self, since=since)
        self._report_cause()

    def _check_running(self) -> None:
        self._report_cause()
        saved = _saved_step(self.directory)
        if saved is not None and saved > self.newest:
            self.newest = saved
            self.report_saved(saved)
        WorkerGroup._check_running(self)

    def _report_killed(self) -> None:
        """Report workers that did not stop in time; those that a failure has ended had `GRACE` seconds only."""
        if self.cause is None:
            WorkerGroup._report_killed(self)

    def _report_cause(self) -> None:
        if self.cause is not None and not self.has_reported:
            self.has_reported = True
            self.report(self.cause)


def run_workers(
    place: HostPlace, work: Work, send: Callable[[Message], None], orders: socket.socket, *, can_fork: bool
) -> int:
    """Start the workers, watch them, and send what becomes of them; the exit code of a runner.

    `orders`: of the coordinator to this runner. `can_fork`: whether forks of the process that has loaded the job can
    compute. This one is such a fork, in which the threads of a used pool are gone, and the pool is broken.
    """
    with scratch_folder() as directory:

        def report(failure: Failure) -> None:
            send({"say": "failed", "generation": place.generation, **_report(failure, place, group)})

        def report_saved(step: int) -> None:
            send({"say": "saved", "generation": place.generation, "saved_step": step})

        def report_stall(stall: Message) -> None:
            send({"generation": place.generation, **stall})

        group = HostGroup(
            directory=directory,
            grace=GRACE,
            grace_period=work.grace_period,
            timeout=work.timeout,
            first_rank=place.first_rank,
            world_size=place.world_size,
            report=report,
            report_saved=report_saved,
            report_stall=report_stall,
            orders=orders,
        )
        try:
            with group.receiving_signals():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
                method = "fork" if can_fork and fork_is_safe() else "forkserver"
                group.start(method, place.num_local, at_global_rank, (place, work.function, *work.args))
                group.watch()
            send({"say": "ended", "generation": place.generation, **_outcome(group, place, work)})
        finally:
            group.kill()
    return 0


def at_global_rank(local: Placement, _: object, place: HostPlace, function: Callable[..., Any], *args: Any) -> Any:
    """The function of a worker: call another one with the place among all ranks, and the store of all hosts."""
    # NCCL's watchdog would read the store from a C++ thread, which cannot enter Python while the interpreter ends.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    address, port = place.store
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # of a launch on one host: the loopback
    interface = loopback() if ipaddress.ip_address(address).is_loopback else place.interface
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    placement = Placement(
        rank=place.first_rank + local.rank,
        world_size=place.world_size,
        local_rank=local.rank,
        local_world_size=place.num_local,
        node=place.node,
        master_addr=address,
        master_port=port,
        source="shoal",
        generation=place.generation,
        key=place.key,
        job=place.job,
        peers=place.peers,
    )
    name = prefix_of(place.job, place.generation)
    return function(placement, open_store(place.store, place.store_key, name, place.timeout), *args)


def _report(failure: Failure, place: HostPlace, group: HostGroup) -> Message:
    error = raised_error(group.directory, failure.rank)
    return {
        "failure": plain_failure(failure, first_rank=place.first_rank),
        "error": plain_error(error) if error is not None else None,
        "saved_step": _saved_step(group.directory),
        **_left(group),
    }


def _left(group: HostGroup) -> Message:
    """The last calls of the ranks here, which may explain the failure of a rank on another host."""
    return {} if group.watcher is None else {"left": group.watcher.left()}


def _saved_step(directory: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(saved_path(directory).read_text())
    return None


def _outcome(group: HostGroup, place: HostPlace, work: Work) -> Message:
    failures = [failure for failure in group.ended.values() if failure is not None]
    if not failures:
        value = pickle.loads(value_path(group.directory, 0).read_bytes())  # written by this host's own worker
        return {"outcome": "done", "value": work.finish(value) if place.first_rank == 0 else None}
    if group.cause is None and group.passed_on is not None:
        return {"outcome": "killed", "signal": int(group.passed_on), **_left(group)}
    cause = group.cause or first_failure(failures)
    return {"outcome": "failed", **_report(cause, place, group)}
