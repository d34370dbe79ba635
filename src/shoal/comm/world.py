"""A rank's place in the world and its way to talk to the others.

torch has one global process group: it must be told rank, size, address and backend, it needs a port even for one
process, and whoever made it must destroy it. A `World` is that knowledge as one value that is passed on. It picks the
device, makes the group (or adopts the one that is there), and offers the few exchanges that are about control, not
tensors. Those always travel as CPU tensors over gloo, so that they never wait behind a GPU's stream. One rank runs the
same lines: it has a group without a port, and its exchanges are the identity.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from shoal.comm.collectives import all_gather_plain
from shoal.comm.rendezvous.authenticated_store import SealedStore
from shoal.comm.rendezvous.environment import Placement
from shoal.comm.rendezvous.handshake import agree, mac
from shoal.comm.rendezvous.key import key_of
from shoal.comm.rendezvous.network_interface import interface_towards, listening_socket, loopback
from shoal.comm.rendezvous.session import Session
from shoal.comm.shared_board import Board
from shoal.errors import ShoalError, listed

T = TypeVar("T")
Op = Literal["sum", "max", "min"]

ALONE = Placement(rank=0, world_size=1, local_rank=0, local_world_size=1)
DEVICES = ("auto", "cpu", "cuda")
BOTH_BACKENDS = "cpu:gloo,cuda:nccl"
_CLOSED: list[dist.ProcessGroup] = []
"""Groups that were destroyed, kept from being deallocated. Whoever drops the last reference to a gloo group joins its
threads. When that is DDP's reducer, it does so holding Python's lock, for which a thread that has just finished a
collective may be waiting: a deadlock (torch 2.13, at the end of a run). With this reference, it never is the last."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class HostReduction:
    """A reduction on its way; `wait` returns the reduced values, the same on every rank."""

    values: torch.Tensor
    work: dist.Work | None

    @classmethod
    def known(cls, values: Sequence[float]) -> HostReduction:
        """Of sums that every rank knows without asking the others."""
        return cls(torch.tensor(values, dtype=torch.float64), None)

    def wait(self) -> list[float]:
        """The reduced values, as soon as every rank has handed in its own."""
        if self.work is not None:
            self.work.wait()
        return self.values.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks of a run, seen from one of them. Made by `World.start`; as a context manager it closes itself."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control_group: dist.ProcessGroup
    """A group over all ranks that takes CPU tensors."""
    is_owner: bool
    """True: this world made the process group, and destroys it."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others in one collective."""
    session: Session | None = None
    """What the ranks have proven to each other; None in a group that another program made."""
    board: Board | None = None
    """By which ranks on one machine exchange numbers without a message; None: there is none."""

    @classmethod
    def start(
        cls,
        placement: Placement | None,
        *,
        device: str = "auto",
        backend: str | None = None,
        timeout: float = 600.0,
        store: dist.Store | None = None,
        threads: int | None = None,
    ) -> World:
        """Take this process's place (None: alone), with the others reached through `store` or through rank 0's address.

        `timeout` is how many seconds a rank waits for the others in one collective. `threads` None: an even share of
        the cores. `backend` None: gloo for CPU tensors and NCCL for CUDA tensors; `gloo` serves both without NCCL.
        """
        is_owner = not dist.is_initialized()
        if is_owner and placement is None:
            reject_spawned_alone()
        place = (placement or ALONE) if is_owner else _adopted_place(placement)
        num_cuda = 0 if device == "cpu" else torch.cuda.device_count()  # to count them may start CUDA
        chosen = pick_device(device, place, backend=backend, num_cuda=num_cuda)
        backend = backend or (BOTH_BACKENDS if chosen.type == "cuda" else "gloo")
        use_device(chosen)
        torch.set_num_threads(threads or max(1, _num_cores() // place.local_world_size))
        session: Session | None = None
        if is_owner:
            _choose_interface(place)
            session = _make_group(place, backend=backend, timeout=timedelta(seconds=timeout), store=store)
        world = cls(
            rank=place.rank,
            size=place.world_size,
            local_rank=place.local_rank,
            local_size=place.local_world_size,
            device=chosen,
            control_group=_cpu_group(session, timedelta(seconds=timeout)),
            is_owner=is_owner,
            timeout=timeout,
            session=session,
            board=_board_of(place, timeout),
        )
        if is_owner:
            world.barrier()  # else a rank that is done early could leave while others are still connecting to it
        return world

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all: prints, and writes what is written once."""
        return self.rank == 0

    def all_reduce_host(self, values: Sequence[float], op: Op = "sum") -> HostReduction:
        """Begin to reduce a few numbers over all ranks, in float64 and on the CPU. Counts are exact up to 2**53."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return HostReduction(tensor, None)
        return HostReduction(tensor, dist.all_reduce(tensor, _OPS[op], group=self.control_group, async_op=True))

    def all_gather_object(self, value: T, kinds: Sequence[type] = ()) -> list[T]:
        """One value of every rank, by rank: numbers, text, containers, CPU tensors, and dataclasses of `kinds`. It
        travels as JSON, never as a pickle."""
        return all_gather_plain(value, self.control_group, kinds)

    def beside(self) -> World:
        """The same ranks over connections of their own, for a thread that talks to its peers while training does. Every
        rank must call this together."""
        if self.size == 1:
            return self
        group = self.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        keep_after_closing(group)
        return replace(self, control_group=group, is_owner=False, board=None)

    def new_group(self, ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """`torch.distributed.new_group`, whose ranks have proven to each other that they are part of this run."""
        return new_group(self.session, ranks, **options)

    def barrier(self) -> None:
        """Return when every rank has come here. On the CPU only: it does not wait for a GPU."""
        self.all_reduce_host([0.0]).wait()

    def close(self) -> None:
        """Destroy what `start` made; leave what it found. A second call does nothing."""
        if self.is_owner and dist.is_initialized():
            if self.size > 1:
                # gloo's threads take Python's lock to let go of the last collective's tensors. One that does so while
                # Python is shutting down takes the process with it ("terminate called without an active exception").
                time.sleep(0.05)
                keep_after_closing(self.control_group)
            if self.device.type == "cpu":
                dist.destroy_process_group()  # gloo waits for nothing
            else:
                _destroy_within(self.timeout, self.device)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A rank that fails leaves its group to the end of the process: closing would cut the connections before the
        # failure is written down, and NCCL would wait for peers that do not come.
        if kind is None or self.size == 1:
            self.close()


def _board_of(place: Placement, timeout: float) -> Board | None:
    if place.board is None or place.world_size == 1 or not place.board.exists():
        return None
    return Board(place.board, rank=place.rank, size=place.world_size, timeout=timeout)


def _destroy_within(seconds: float, device: torch.device) -> None:
    """Destroy all groups, or leave them after so many seconds: NCCL waits for the device without a limit."""

    def destroy() -> None:
        try:
            use_device(device)
            dist.destroy_process_group()
        except Exception as error:  # the run is done, and the end of the process closes all connections
            text = (str(error).splitlines() or [""])[0]
            what = f"{type(error).__name__}: {text}" if text else type(error).__name__
            print(f"shoal: the process group was not destroyed: {what}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=destroy, name="shoal-close", daemon=True)
    thread.start()
    thread.join(seconds)


def keep_after_closing(group: dist.ProcessGroup) -> None:
    """Never let whoever drops this group be the last one to hold it; see `_CLOSED`."""
    _CLOSED.append(group)


def reject_spawned_alone() -> None:
    """Reject a process of `torch.multiprocessing.spawn` that would train alone, as would each of its siblings.

    Every child of `spawn` runs torch's `_wrap(function, number, ...)`. Number 0 may be an only child. Number 1 has a
    sibling; when it raises, `spawn` ends them all. Children of other kinds (a pool of trials, a loader's worker) are
    left alone: nothing tells whether they belong together.
    """
    process: Any = multiprocessing.current_process()
    target: Any = getattr(process, "_target", None)
    arguments: tuple[Any, ...] = getattr(process, "_args", ())
    if getattr(target, "__module__", "") != "torch.multiprocessing.spawn" or len(arguments) < 2:
        return
    number = arguments[1]
    if isinstance(number, int) and number > 0:
        raise ShoalError(
            f"this is process {number} of torch.multiprocessing.spawn, and there is no process group: each of its"
            " processes would train alone, and each would be the main one",
            fix="dist.init_process_group('gloo', init_method='tcp://127.0.0.1:29500', rank=rank, world_size=nprocs)"
            " before Run(...); or `torchrun --nproc-per-node N script.py` in place of spawn; or, to train apart on"
            " purpose, os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', LOCAL_WORLD_SIZE='1')",
        )


def pick_device(name: str, place: Placement, *, backend: str | None, num_cuda: int) -> torch.device:
    """The device of this rank: its own GPU if there are any, else the CPU."""
    if name not in DEVICES:
        raise ShoalError(f"device {name!r} is not known", fix=f"--launch.device {listed(DEVICES)}")
    if name == "cpu" or (name == "auto" and num_cuda == 0):
        return torch.device("cpu")
    if num_cuda == 0:
        raise ShoalError(
            "device cuda was asked for, but this machine has no CUDA device",
            fix="--launch.device cpu; in a script, device='cpu'",
        )
    if place.local_world_size > num_cuda and backend != "gloo":
        raise ShoalError(
            f"{place.local_world_size} ranks on this machine, but {num_cuda} CUDA devices, and NCCL needs one for each",
            fix=f"--launch.nproc {num_cuda}, or --launch.device cpu",
        )
    return torch.device("cuda", place.local_rank % num_cuda)


def use_device(device: torch.device) -> None:
    """In this thread: which device is the current one, of which kernels are asked, belongs to a thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _adopted_place(placement: Placement | None) -> Placement:
    """Our place in a group that someone else made. Without a placement all ranks are taken to be on one machine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if placement is None:
        return Placement(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    if (placement.rank, placement.world_size) != (rank, size):
        raise ShoalError(
            f"the process group that is there says rank {rank} of {size},"
            f" but {placement.source} says rank {placement.rank} of {placement.world_size}",
            fix="call torch.distributed.destroy_process_group() first, or let shoal make the group",
        )
    return placement


def _choose_interface(place: Placement) -> None:
    """Choose where gloo listens, unless a person has: on one host on the loopback, else towards rank 0."""
    if place.world_size == 1 or place.master_addr is None:
        return
    is_one_host = place.local_world_size == place.world_size
    interface = loopback() if is_one_host else interface_towards(place.master_addr)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _make_group(place: Placement, *, backend: str, timeout: timedelta, store: dist.Store | None) -> Session | None:
    """Make torch's group of all ranks. None: there is nothing to prove, for one rank and in a store without a key."""
    number = next(_WORLDS) if place.world_size > 1 else 0  # the others do not know how many this rank had alone
    run = f"{place.world_size} ranks, generation {place.generation}, world {number}"
    key: bytes | None = None
    if place.world_size == 1:
        store = dist.HashStore()  # in memory: no port, nobody to wait for
    elif store is not None:  # of our launcher, in a directory of this user alone, with a key for this launch alone
        key = None if place.key is None else mac(place.key, "session", run)
    else:
        try:
            meeting = _meeting_place(place, timeout)
            # A prefix of its own for each world, so that a second one never reads what the first one wrote; and for
            # each generation: torchrun's store outlives the workers, with the addresses of those that are dead.
            prefixed, full = dist.PrefixStore(run, meeting), _with_job(run, place)
            key = agree(prefixed, place, key_of(place), run=full, timeout=timeout.total_seconds())
            meeting.set_timeout(timeout)  # it was short while ranks proved themselves
            store = SealedStore(dist.PrefixStore(f"{run} {mac(key, 'name').hex()[:16]}", meeting), key)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise _meeting_failed(place, str(error)) from error
        _SEALED.append(store)
        # NCCL's watchdog would look into the store every second from a thread of C++, for a signal to write its log.
        # This store is Python, which such a thread cannot enter while Python ends.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    store.set_timeout(timeout)  # its own is five minutes
    dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout, store=store)
    if key is None:
        return None
    session = Session(key)
    assert dist.group.WORLD is not None
    session.admit(dist.group.WORLD, timeout)
    return session


_WORLDS = count()
_SEALED: list[dist.Store] = []
"""Stores in use. torch keeps the C++ part of a store alive, but not the Python object that it calls."""
_MEETINGS: dict[tuple[str, int], dist.Store] = {}
"""Address → its store. Rank 0 can listen only once, and later worlds meet there again."""


def _meeting_place(place: Placement, timeout: timedelta) -> dist.Store:
    """The store at rank 0's address."""
    if place.master_addr is None or place.master_port is None:
        raise ShoalError(
            f"{place.world_size} ranks have no way to meet: neither a store nor the address of rank 0 was given",
            fix="start with `shoal train`, torchrun, srun or mpirun; or export MASTER_ADDR and MASTER_PORT",
        )
    where = (place.master_addr, place.master_port)
    if where not in _MEETINGS:
        _MEETINGS[where] = _opened(place, *where, timeout)
    return _MEETINGS[where]


def _opened(place: Placement, host: str, port: int, timeout: timedelta) -> dist.Store:
    """torch's store: rank 0 listens, on one interface, unless torchrun's agent does; the others connect."""
    if place.rank == 0 and not place.has_store:
        try:
            listening = listening_socket(host, port, is_one_host=place.local_world_size == place.world_size)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _meeting_failed(place, str(error)) from error
        else:
            return dist.TCPStore(
                *(host, port, place.world_size, True, timeout),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
    # torch knows from variables of its own whether torchrun's agent already serves this address. Rank 0 comes here if
    # the port is taken: this process may serve it already, for a group that the user has made and destroyed.
    url = f"tcp://{_bracketed(host)}:{port}"
    meeting: tuple[dist.Store, int, int] = next(
        dist.rendezvous(url, rank=place.rank, world_size=place.world_size, timeout=timeout)
    )
    return meeting[0]


def _meeting_failed(place: Placement, text: str) -> ShoalError:
    if "EADDRINUSE" in text:
        return ShoalError(
            f"port {place.master_port} on this host is taken, and rank 0 has to listen there",
            fix="export MASTER_PORT=<a free port> on every rank; or torchrun --standalone",
        )
    return ShoalError(
        f"rank {place.rank} of {place.world_size} did not meet the others at {place.master_addr}:{place.master_port},"
        f" where rank 0 should listen: {text.splitlines()[0]}",
        fix="see that all ranks were started, and that MASTER_ADDR is an address of rank 0's host that all can reach",
    )


def new_group(session: Session | None, ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """A group whose ranks have proven themselves, where there is a session; every rank of the world calls it."""
    if session is not None:
        return session.new_group(ranks, **options)
    group: dist.ProcessGroup = dist.new_group(None if ranks is None else list(ranks), **options)
    return group


def _cpu_group(session: Session | None, timeout: timedelta) -> dist.ProcessGroup:
    """The group of all ranks if it takes CPU tensors; else, beside a group of NCCL alone, one of gloo."""
    world = dist.group.WORLD
    assert world is not None
    group: dist.ProcessGroup = world
    if "cpu:" not in dist.get_backend_config():  # it says `cpu:gloo,cuda:nccl`
        group = new_group(session, backend="gloo", timeout=timeout)
    return group


def _with_job(run: str, place: Placement) -> str:
    """What the ranks prove to be part of. Port and job are no part of the store's prefix: so a rank of another job is
    found there and refused, and rank 0 does not wait for it in vain."""
    return f"{run}, port {place.master_port}, job {place.job}"


def _bracketed(address: str) -> str:
    """IPv6 addresses need brackets in a URL."""
    return f"[{address}]" if ":" in address else address


def _num_cores() -> int:
    """The cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
