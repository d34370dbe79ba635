"""A rank's place among all ranks, and the group through which it exchanges control data.

torch has one global process group. It needs rank, size, address and backend, it needs a port even for one process, and
its creator must destroy it. A `World` is one value that holds all of this. It picks the device, creates the group (or
adopts an existing one), and offers the few collectives that carry control data. These always use CPU tensors over
gloo, so they never wait behind a GPU's stream. One rank runs the same lines: its group needs no port, and its
collectives are the identity.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from shoal.affinity import num_cores
from shoal.comm.close_at_exit import close_at_exit, forget
from shoal.comm.collectives import all_gather_plain
from shoal.comm.group_lifetime import keep_after_closing, noting_connections
from shoal.comm.heartbeat.heart import heart
from shoal.comm.rendezvous.authenticated_store import SealedStore
from shoal.comm.rendezvous.handshake import agree
from shoal.comm.rendezvous.key import key_of
from shoal.comm.rendezvous.launcher_environment import Placement, thread_limit
from shoal.comm.rendezvous.listener_guard import expect_peers, ranks_here
from shoal.comm.rendezvous.mac import mac
from shoal.comm.rendezvous.network_interface import interface_towards, listening_socket, loopback
from shoal.comm.rendezvous.session import Session
from shoal.comm.shared_board import MOST_VALUES, Board
from shoal.config.checks.arguments import check_device
from shoal.errors import ShoalError, raise_if

T = TypeVar("T")
Op = Literal["sum", "max", "min"]

ALONE = Placement(rank=0, world_size=1, local_rank=0, local_world_size=1)
BOTH_BACKENDS = "cpu:gloo,cuda:nccl"
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class HostReduction:
    """An asynchronous reduction; `wait` returns the reduced values, the same on every rank."""

    def __init__(self, finish: Callable[[], list[float]]) -> None:
        self._finish = finish
        self._values: list[float] | None = None

    @classmethod
    def known(cls, values: Sequence[float]) -> HostReduction:
        """Wrap sums that every rank knows without communication."""
        return cls(lambda: [float(value) for value in values])

    def wait(self) -> list[float]:
        """Return the reduced values as soon as every rank has contributed."""
        if self._values is None:
            self._values = self._finish()
        return self._values


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks of a run, seen from one of them. Create it with `World.start`; as a context manager it closes
    itself."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control_group: dist.ProcessGroup
    """A group of all ranks that takes CPU tensors."""
    is_owner: bool
    """True: this world created the process group, and destroys it."""
    timeout: float = 600.0
    """Seconds until a collective times out."""
    session: Session | None = None
    """The key with which ranks authenticate; None in a group that another program created."""
    board: Board | None = None
    """Shared memory through which the ranks of one machine exchange numbers; None: they send messages."""

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
        """Join the run as `placement` says (None: alone), through `store` or through rank 0's address.

        `timeout` is in seconds and holds for each collective. `threads` None: an even share of the cores, or fewer if
        OMP_NUM_THREADS says so. `backend`
        None: gloo for CPU tensors and NCCL for CUDA tensors; `gloo` serves both without NCCL.
        """
        is_owner = not dist.is_initialized()
        if is_owner and placement is None:
            reject_spawned_alone()
        place = (placement or ALONE) if is_owner else _adopted_place(placement)
        num_cuda = 0 if device == "cpu" else torch.cuda.device_count()  # counting may initialize CUDA
        chosen = pick_device(device, place, backend=backend, num_cuda=num_cuda)
        backend = backend or (BOTH_BACKENDS if chosen.type == "cuda" else "gloo")
        use_device(chosen)
        share = max(1, num_cores() // place.local_world_size)
        torch.set_num_threads(threads or min(share, thread_limit(os.environ) or share))
        session: Session | None = None
        if is_owner:
            _choose_interface(place)
            known = place.peers if place.local_world_size < place.world_size else ranks_here()
            expect_peers(known, reports=place.local_rank == 0)
            session = _make_group(place, backend=backend, timeout=timedelta(seconds=timeout), store=store)
        if (beating := heart()) is not None:
            beating.rank = place.rank
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
            world.barrier()  # else a rank that finishes early could exit while others still connect to it
        if is_owner and world.size > 1:
            close_at_exit(world.close)
        return world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes what is written once per run."""
        return self.rank == 0

    def all_reduce_host(self, values: Sequence[float], op: Op = "sum") -> HostReduction:
        """Start to reduce a few numbers over all ranks, in float64 and on the CPU. Counts are exact up to 2**53."""
        if self.size == 1:
            return HostReduction.known(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, _OPS[op], group=self.control_group, async_op=True)

        def finish() -> list[float]:
            work.wait()
            return tensor.tolist()

        return HostReduction(finish)

    def sum_of_step(self, values: Sequence[float]) -> HostReduction:
        """Start to sum numbers that every rank gives once a step: through shared memory, where ranks have one."""
        if self.board is None or len(values) > MOST_VALUES:
            return self.all_reduce_host(values)
        return HostReduction(partial(self.board.sum, self.board.post(values), len(values)))

    def all_gather_object(self, value: T, kinds: Sequence[type] = ()) -> list[T]:
        """Gather one value per rank, in rank order. Values are numbers, text, containers, CPU tensors, and dataclasses
        of `kinds`. They are sent as JSON, never as a pickle."""
        return all_gather_plain(value, self.control_group, kinds)

    def with_own_connections(self) -> World:
        """Return the same ranks over separate connections, for a thread that communicates while training does. Every
        rank must call this."""
        if self.size == 1:
            return self
        group = self.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout), group_desc="background")
        keep_after_closing(group)
        return replace(self, control_group=group, is_owner=False, board=None)

    def new_group(self, ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """Create a group as `torch.distributed.new_group` does, and authenticate its ranks."""
        return new_group(self.session, ranks, **options)

    def barrier(self) -> None:
        """Return when every rank has called this. It does not wait for a GPU."""
        self.all_reduce_host([0.0]).wait()

    def close(self) -> None:
        """Destroy the group that `start` created; leave one that it adopted. A second call does nothing."""
        if self.is_owner and dist.is_initialized():
            forget()
            if self.size > 1:
                # gloo's threads take the GIL to release the last collective's tensors. A thread that does so during
                # Python's shutdown ends the process ("terminate called without an active exception").
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
        # failure is recorded, and NCCL would wait for peers that do not arrive.
        if kind is None or self.size == 1:
            self.close()


def _board_of(place: Placement, timeout: float) -> Board | None:
    if place.board is None or place.world_size == 1 or not place.board.exists():
        return None
    board = Board(place.board, rank=place.rank, size=place.world_size, timeout=timeout)
    if (beating := heart()) is not None:
        beating.exchanges = board
    return board


def _destroy_within(seconds: float, device: torch.device) -> None:
    """Destroy all groups, or give up after `seconds`: NCCL waits for the device without a limit."""

    def destroy() -> None:
        try:
            use_device(device)
            dist.destroy_process_group()
        except Exception as error:  # the run has ended, and the exit of the process closes all connections
            text = (str(error).splitlines() or [""])[0]
            what = f"{type(error).__name__}: {text}" if text else type(error).__name__
            print(f"shoal: the process group was not destroyed: {what}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=destroy, name="shoal-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process ends: from Python 3.12 on, no thread begins any more
        if device.type == "cpu":
            destroy()
        return
    thread.join(seconds)


def reject_spawned_alone() -> None:
    """Reject a process of `torch.multiprocessing.spawn` that would train alone, as would each of its siblings.

    Every child of `spawn` runs torch's `_wrap(function, number, ...)`. Number 0 may be an only child. Number 1 has a
    sibling; when it raises, `spawn` ends them all. Other child processes (a pool of trials, a loader's worker) are
    accepted, since nothing shows that they belong together.
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
            code="N013",
        )


def pick_device(name: str, place: Placement, *, backend: str | None, num_cuda: int) -> torch.device:
    """Return this rank's GPU, or the CPU if the machine has none."""
    raise_if(check_device(name))
    if name == "cpu" or (name == "auto" and num_cuda == 0):
        return torch.device("cpu")
    if num_cuda == 0:
        raise ShoalError(
            "device is cuda, but this machine has no CUDA device",
            fix="--launch.device cpu",
            code="N014",
        )
    if place.local_world_size > num_cuda and backend != "gloo":
        raise ShoalError(
            f"{place.local_world_size} ranks on this machine, but {num_cuda} CUDA devices, and NCCL needs one for each",
            fix=f"--launch.nproc {num_cuda}, or --launch.device cpu",
            code="N015",
        )
    return torch.device("cuda", place.local_rank % num_cuda)


def use_device(device: torch.device) -> None:
    """Make a device the current one of this thread; CUDA stores it per thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _adopted_place(placement: Placement | None) -> Placement:
    """Return our place in an existing group. Without a placement, assume that all ranks are on one machine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if placement is None:
        return Placement(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    if (placement.rank, placement.world_size) != (rank, size):
        raise ShoalError(
            f"the existing process group says rank {rank} of {size},"
            f" but {placement.source} says rank {placement.rank} of {placement.world_size}",
            fix="torch.distributed.destroy_process_group() before shoal starts, or let shoal create the group",
            code="N016",
        )
    return placement


def _choose_interface(place: Placement) -> None:
    """Choose where gloo listens, unless GLOO_SOCKET_IFNAME is set: the loopback on one host, else towards rank 0."""
    if place.world_size == 1 or place.master_addr is None:
        return
    is_one_host = place.local_world_size == place.world_size
    interface = loopback() if is_one_host else interface_towards(place.master_addr)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _make_group(place: Placement, *, backend: str, timeout: timedelta, store: dist.Store | None) -> Session | None:
    """Create torch's group of all ranks. None: no authentication, for one rank and in a store without a key."""
    # Other ranks cannot count the worlds that this rank had alone, nor those before they replaced a lost one.
    generation = 0 if place.has_new_store else place.generation
    number = next(_WORLDS[generation]) if place.world_size > 1 else 0
    run = f"{place.world_size} ranks, generation {generation}, world {number}"
    key: bytes | None = None
    if place.world_size == 1:
        store = dist.HashStore()  # in memory: no port, no peer to wait for
    elif store is not None:  # of our launcher: in a directory that only this user can access, with a key per launch
        key = None if place.key is None else mac(place.key, "session", run)
    else:
        try:
            shared = _rendezvous_store(place, timeout)
            # One prefix per world, so that a second world never reads values of the first. One per generation, too:
            # torchrun's store outlives the workers, with the addresses of those that are dead.
            prefixed, full = dist.PrefixStore(run, shared), _with_job(run, place)
            key = agree(prefixed, place, key_of(place), run=full, timeout=timeout.total_seconds())
            shared.set_timeout(timeout)  # the handshake used a short one
            store = SealedStore(dist.PrefixStore(f"{run} {mac(key, 'name').hex()[:16]}", shared), key)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise _rendezvous_failed(place, str(error)) from error
        _SEALED.append(store)
        # NCCL's watchdog would read the store every second from a C++ thread, for a signal to write its log. This store
        # is a Python object, and such a thread cannot enter Python while the interpreter shuts down.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    store.set_timeout(timeout)  # the default is five minutes
    with noting_connections():
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout, store=store)
    if key is None:
        return None
    session = Session(key)
    assert dist.group.WORLD is not None
    session.admit(dist.group.WORLD, timeout)
    return session


_WORLDS: defaultdict[int, count[int]] = defaultdict(count)
"""Generation → the numbers of its worlds."""
_SEALED: list[dist.Store] = []
"""Stores in use. torch keeps the C++ part of a store alive, but not the Python object that it calls."""
_STORES: dict[tuple[str, int], dist.Store] = {}
"""Address → its store. Rank 0 can listen only once, and later worlds use the same store."""


def _rendezvous_store(place: Placement, timeout: timedelta) -> dist.Store:
    """Return the store at rank 0's address."""
    if place.master_addr is None or place.master_port is None:
        raise ShoalError(
            f"{place.world_size} ranks need a rendezvous, got neither a store nor the address of rank 0",
            fix="start with `shoal train`, torchrun, srun or mpirun; or export MASTER_ADDR and MASTER_PORT",
            code="N017",
        )
    where = (place.master_addr, place.master_port)
    if where not in _STORES:
        _STORES[where] = _opened(place, *where, timeout)
    return _STORES[where]


def _opened(place: Placement, host: str, port: int, timeout: timedelta) -> dist.Store:
    """Open torch's store: rank 0 listens on one interface, unless torchrun's agent does; the others connect."""
    if place.rank == 0 and not place.has_store:
        try:
            listening = listening_socket(host, port, is_one_host=place.local_world_size == place.world_size)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _rendezvous_failed(place, str(error)) from error
        else:
            return dist.TCPStore(
                *(host, port, place.world_size, True, timeout),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
    # torch reads from its own variables whether torchrun's agent already serves this address. Rank 0 gets here if the
    # port is taken: this process may serve it already, for a group that the user has created and destroyed.
    url = f"tcp://{_bracketed(host)}:{port}"
    found: tuple[dist.Store, int, int] = next(
        dist.rendezvous(url, rank=place.rank, world_size=place.world_size, timeout=timeout)
    )
    return found[0]


def _rendezvous_failed(place: Placement, text: str) -> ShoalError:
    if "EADDRINUSE" in text:
        return ShoalError(
            f"port {place.master_port} on this host is taken, and rank 0 has to listen there",
            fix="export MASTER_PORT=<a free port> on every rank; or torchrun --standalone",
            code="N018",
        )
    return ShoalError(
        f"rank {place.rank} of {place.world_size} could not connect to rank 0 at"
        f" {place.master_addr}:{place.master_port}: {text.splitlines()[0]}",
        fix="start all ranks, and export MASTER_ADDR=<an address of rank 0's host that every rank can reach>",
        code="N007",
    )


def new_group(session: Session | None, ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """Create a group and, in a session, authenticate its ranks; every rank of the world calls it."""
    if session is not None:
        return session.new_group(ranks, **options)
    with noting_connections():
        group: dist.ProcessGroup = dist.new_group(None if ranks is None else list(ranks), **options)
    return group


def _cpu_group(session: Session | None, timeout: timedelta) -> dist.ProcessGroup:
    """Return the group of all ranks if it takes CPU tensors; else, beside an NCCL-only group, a new gloo group."""
    world = dist.group.WORLD
    assert world is not None
    group: dist.ProcessGroup = world
    if "cpu:" not in dist.get_backend_config():  # it says `cpu:gloo,cuda:nccl`
        group = new_group(session, backend="gloo", timeout=timeout, group_desc="control")
    return group


def _with_job(run: str, place: Placement) -> str:
    """Name what the ranks authenticate for. The store's prefix has neither port nor job: so rank 0 sees a rank of
    another job there and rejects it, and does not wait for it until the timeout."""
    return f"{run}, port {place.master_port}, job {place.job}"


def _bracketed(address: str) -> str:
    """IPv6 addresses need brackets in a URL."""
    return f"[{address}]" if ":" in address else address
