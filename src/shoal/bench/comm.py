"""Every collective by every algorithm at every size, measured between ranks of one host and of several.

All ranks do the same at the same time, and the slowest counts. The algorithms of a collective take turns, round after
round, so that what disturbs a machine disturbs them alike; the fastest round counts. Time is given out by size: what
would take more than its share is left out, and said to be.

    size ─▶ within a host, across hosts ─▶ wire, all_reduce, ... ─▶ round 1: naive ring tree ... round 2: naive ring ...
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from shoal.bench.timings import BUILTIN, FLOAT, PAIR, SEGMENTS, SEND, TOGETHER, Tier, Timing, list_of
from shoal.blueprint.collective_algorithms import KINDS, Kind
from shoal.comm.collectives import all_gather, reduce_scatter
from shoal.comm.environment import Placement
from shoal.comm.stepped import Stepped
from shoal.comm.world import World, keep_after_closing
from shoal.errors import ShoalError
from shoal.launch.local import launch

ROUNDS = 5
SHORT = 8 * 2**20
"""Bytes: what is shorter than this gets the same time, since it takes about as long."""
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What is to be measured."""

    kinds: tuple[Kind, ...]
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes, the shortest first."""
    node: int | None
    """Ranks of a node, for the hierarchical one. None: those of a host, if there are several hosts."""
    seconds: float
    """For everything that is measured."""
    backend: Literal["gloo", "nccl"]
    quiet: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """What would have taken too long."""

    tier: Tier
    kind: str
    algorithm: str
    size: int
    seconds: float
    """Predicted, from the next smaller size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """All that was measured, and where."""

    timings: tuple[Timing, ...]
    left_out: tuple[LeftOut, ...]
    ranks: int
    per_host: int
    backend: str
    kind: str
    """cpu or cuda."""
    host: str
    torch: str
    date: str
    took: float
    """Seconds, measured."""
    is_main: bool
    """Whether this is the rank that speaks for all."""

    @property
    def num_hosts(self) -> int:
        """Counted."""
        return self.ranks // self.per_host

    def sentence(self) -> str:
        """Where and when, in a line."""
        return (
            f"shoal bench comm on {self.host}: {self.num_hosts} x {self.per_host} ranks, {self.backend}, torch"
            f" {self.torch}"
        )


def bench(ask: Ask, *, nproc: int) -> Found:
    """Start so many ranks on this machine, and measure."""
    return launch(measure, (ask,), nproc=nproc)[0]


def measure(placement: Placement | None, store: dist.Store | None, ask: Ask) -> Found:
    """What one rank does; every rank returns the same."""
    began = time.perf_counter()
    _let_peers_finish()
    device = "cuda" if ask.backend == "nccl" else "cpu"
    with World.start(placement, device=device, store=store, threads=1) as world:
        bench = Bench(world, placement.node if placement else 0, ask, deadline=began + ask.seconds)
        with _progress(world, ask) as progress:
            bench.run(progress)
        return Found(
            timings=tuple(bench.timings),
            left_out=tuple(bench.left_out),
            ranks=world.size,
            per_host=world.local_size,
            backend=ask.backend,
            kind=world.device.type,
            host=socket.gethostname(),
            torch=torch.__version__,
            date=date.today().isoformat(),
            took=time.perf_counter() - began,
            is_main=world.is_main,
        )


def _let_peers_finish() -> None:
    """Have threads of this process wait for their turn when they wake up, as batch jobs do.

    Where ranks share cores, gloo's own thread wakes up when a message comes, often in the middle of the call by which
    the rank hands it the next one. It then finds the connection locked, and asks again and again until the scheduler
    takes the core away from it: some milliseconds, at random, for a message of one. Threads that do not interrupt
    others seldom meet.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Ranks that talk to each other: those of a host, or all."""

    tier: Tier
    group: dist.ProcessGroup
    node: int | None
    hop: int
    """From a rank to its neighbour: the next one, or across hosts the one in the same place of the next."""

    @property
    def size(self) -> int:
        """Ranks."""
        return self.group.size()


@dataclass
class Bench:
    """Takes timings, one after the other, in step with all ranks."""

    world: World
    node: int
    """The number of this rank's host."""
    ask: Ask
    deadline: float
    timings: list[Timing] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    last: dict[tuple[Tier, str, str], Timing] = field(default_factory=dict)

    def run(self, progress: Progress) -> None:
        """Measure everything, the shortest sizes first."""
        places = _places(self.world, self.node, self.ask)
        given, taken = (_written(max(self.ask.sizes) // FLOAT, self.world.device) for _ in range(2))
        todo = [(size, place, kind) for size in self.ask.sizes for place in places for kind in (SEND, *self.ask.kinds)]
        task = progress.add_task("", total=len(todo))
        for number, (size, place, kind) in enumerate(todo):
            progress.update(task, description=f"{kind} {place.tier} hosts, {size:,} bytes")
            part = max(size, SHORT) / sum(max(each, SHORT) for each, _, _ in todo[number:])
            whole = size // FLOAT // place.size * place.size or place.size
            self.take_turns(place, kind, given[:whole], taken[:whole], self.remaining() * part)
            progress.advance(task)

    def remaining(self) -> float:
        """Seconds, as rank 0 counts them."""
        left = self.deadline - time.perf_counter() if self.world.is_main else float("-inf")
        return max(0.0, self.slowest(left))

    def take_turns(self, place: Place, kind: str, x: Tensor, y: Tensor, seconds: float) -> None:
        """Measure all algorithms of a collective at one size, in so many seconds."""
        works = self.works(place, kind, x, y)
        size, share = x.numel() * FLOAT, seconds / max(1, len(works))
        times: dict[str, list[float]] = {}
        sent: dict[str, int | None] = {}
        for algorithm, (work, over) in works.items():
            before = self.last.get((place.tier, kind, algorithm))
            guess = _guess(before, size)
            if guess > share:
                left = LeftOut(tier=place.tier, kind=kind, algorithm=algorithm, size=size, seconds=guess)
                self.left_out.append(left)
                continue
            if before is None:
                self.timed(work, 1)  # connects
            already = over.counted.bytes if over else 0
            times[algorithm] = [self.timed(work, 1)]  # in memory that is new to this process, and slow
            sent[algorithm] = over.counted.bytes - already if over else None
        spent = dict.fromkeys(times, 0.0)
        for number in range(ROUNDS):
            for algorithm, found in times.items():
                count = max(1, int(share / ROUNDS / min(found)))
                if number == 0 or spent[algorithm] + count * min(found) <= share:
                    found.append(self.timed(works[algorithm][0], count))
                    spent[algorithm] += count * found[-1]
        for algorithm, found in times.items():
            self.note(place, kind, algorithm, size, min(found), sent[algorithm])

    def note(self, place: Place, kind: str, algorithm: str, size: int, seconds: float, sent: int | None) -> None:
        """Keep a timing, beside what its list says."""
        rounds, critical, counted, listed = (2 if algorithm == PAIR else 1), size, None, None
        if kind in KINDS:
            steps = list_of(kind, algorithm, place.size, size, node=place.node)
            rounds, elements = steps.critical()
            critical = elements * FLOAT
            if sent is not None:
                counted = int(self.slowest(sent))
                listed = FLOAT * max(steps.sent(rank) for rank in range(place.size))
        timing = Timing(
            tier=place.tier,
            kind=kind,
            algorithm=algorithm,
            ranks=place.size,
            size=size,
            seconds=seconds,
            rounds=rounds,
            critical=critical,
            node=place.node,
            counted=counted,
            listed=listed,
        )
        self.last[place.tier, kind, algorithm] = timing
        self.timings.append(timing)

    def timed(self, work: Work, number: int) -> float:
        """Seconds of one of so many, one after the other, on the slowest rank."""
        self.world.barrier()
        start = time.perf_counter()
        for _ in range(number):
            work()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return self.slowest((time.perf_counter() - start) / number)

    def slowest(self, seconds: float) -> float:
        """Of all ranks."""
        return self.world.all_reduce_host([seconds], "max").wait()[0]

    def works(self, place: Place, kind: str, x: Tensor, y: Tensor) -> dict[str, tuple[Work, Stepped | None]]:
        """Algorithm → what carries it out, and what counts."""
        if kind == SEND:
            return {PAIR: (_pair(place, x, y), None), TOGETHER: (_together(place, x, y), None)}
        found: dict[str, tuple[Work, Stepped | None]] = {}
        for algorithm in self.ask.algorithms:
            if algorithm == BUILTIN:
                found[algorithm] = _builtin(kind, place.group, x, y), None
            elif algorithm != "hierarchical" or place.node:
                over = Stepped(place.group, algorithm, segments=SEGMENTS, node=place.node)  # type: ignore[arg-type]
                found[algorithm] = _stepped(kind, over, x), over
        return found


# ---- who talks to whom ----------------------------------------------------------------------------------------------


def _places(world: World, node: int, ask: Ask) -> list[Place]:
    """All ranks; and those of each host, where hosts have several."""
    whole = dist.group.WORLD
    assert whole is not None
    if world.local_size == world.size:
        return [Place(tier="within", group=whole, node=ask.node, hop=1)]
    hosts = _hosts(world.all_gather_object(node))
    sizes = sorted({len(ranks) for ranks in hosts})
    if len(sizes) > 1:
        what = f"hosts have {sizes[0]} and {sizes[-1]} ranks, and are compared with each other"
        raise ShoalError(what, fix=f"start {sizes[0]} ranks on every host")
    is_in_order = all(ranks == list(range(ranks[0], ranks[0] + sizes[0])) for ranks in hosts)
    across = Place(tier="across", group=whole, node=ask.node or (sizes[0] if is_in_order else None), hop=sizes[0])
    if sizes[0] == 1:
        return [across]
    timeout = timedelta(seconds=world.timeout)
    groups = [dist.new_group(ranks, backend=ask.backend, timeout=timeout) for ranks in hosts]
    mine = next(group for group, ranks in zip(groups, hosts, strict=True) if world.rank in ranks)
    keep_after_closing(mine)
    return [Place(tier="within", group=mine, node=None, hop=1), across]


def _hosts(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, from the number of every rank's host.

    >>> _hosts([0, 1, 0, 1])
    [[0, 2], [1, 3]]
    """
    return [[rank for rank, node in enumerate(nodes) if node == host] for host in dict.fromkeys(nodes)]


def _guess(before: Timing | None, size: int) -> float:
    """Seconds that a larger size may take: more by its bytes, once bytes are what takes time."""
    if before is None:
        return 0.0
    return before.seconds * (max(1.0, size / before.size) if before.size >= 2**20 else 1.0)


# ---- the work -------------------------------------------------------------------------------------------------------


def _written(elements: int, device: torch.device) -> Tensor:
    """Memory that is really there: what was never written to costs nothing to read."""
    return torch.empty(max(elements, 4096), device=device).fill_(0.0)


def _exchange(group: dist.ProcessGroup, *, give: tuple[Tensor, int] | None, take: tuple[Tensor, int] | None) -> None:
    """One message out, one in, or both at once."""
    works = [dist.irecv(take[0], group=group, group_src=take[1])] if take else []
    works += [dist.isend(give[0], group=group, group_dst=give[1])] if give else []
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def _pair(place: Place, x: Tensor, y: Tensor) -> Work:
    """Half of there and back, between the first rank and its neighbour, while the others wait. Half a tensor goes each
    way, so that the whole of it takes the time of a message."""
    rank, group = dist.get_rank(place.group), place.group
    there, back = x[: x.numel() // 2], y[: x.numel() - x.numel() // 2]

    def swap() -> None:
        if rank == 0:
            _exchange(group, give=(there, place.hop), take=None)
            _exchange(group, give=None, take=(back, place.hop))
        elif rank == place.hop:
            _exchange(group, give=None, take=(there, 0))
            _exchange(group, give=(back, 0), take=None)

    return swap


def _together(place: Place, x: Tensor, y: Tensor) -> Work:
    """Every rank sends to its neighbour."""
    rank, group, size = dist.get_rank(place.group), place.group, place.size
    after, before = (rank + place.hop) % size, (rank - place.hop) % size

    return lambda: _exchange(group, give=(x, after), take=(y, before))


def _stepped(kind: str, over: Stepped, x: Tensor) -> Work:
    part = x[: x.numel() // over.size]
    return {
        "all_reduce": lambda: over.all_reduce(x),
        "reduce_scatter": lambda: over.reduce_scatter(x),
        "all_gather": lambda: over.all_gather(part),
        "broadcast": lambda: over.broadcast(x),
        "all_to_all": lambda: over.all_to_all(x),
    }[kind]


def _builtin(kind: str, group: dist.ProcessGroup, x: Tensor, y: Tensor) -> Work:
    part = x[: x.numel() // group.size()]
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda: reduce_scatter(x, 0, group),
        "all_gather": lambda: all_gather(part, 0, group),
        "broadcast": lambda: dist.broadcast(x, group=group, group_src=0),
        "all_to_all": lambda: dist.all_to_all_single(y, x, group=group),
    }[kind]


@contextlib.contextmanager
def _progress(world: World, ask: Ask) -> Iterator[Progress]:
    columns = (BarColumn(bar_width=24), TextColumn("measuring {task.description}"), TimeElapsedColumn())
    is_silent = ask.quiet or not world.is_main
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_silent) as progress:
        yield progress
