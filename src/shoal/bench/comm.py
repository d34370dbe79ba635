"""Every collective by every algorithm at every size, measured between ranks of one host and of several.

All ranks do the same at the same time, and the slowest counts. The algorithms of a collective take turns, round after
round, so that what disturbs a machine disturbs them alike; the fastest round counts. Time is given out by size: what
would take more than its share is left out, and said to be.

    size ─▶ within a host, across hosts ─▶ wire, all_reduce, ... ─▶ round 1: naive ring tree ... round 2: naive ring ...

What time is left goes where a fit does not say what a size that was held out of it took: there something was
disturbed, most often, and the fastest of more rounds tells.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from shoal.bench.comm_workloads import Place, Work, builtin, pair, stepped, together, written
from shoal.bench.timings import BUILTIN, FLOAT, PAIR, SEGMENTS, SEND, TOGETHER, Tier, Timing, fits, in_doubt, list_of
from shoal.blueprint.collectives.algorithms import KINDS, Kind
from shoal.comm.message_collectives import MessageCollectives
from shoal.comm.rendezvous.environment import Placement
from shoal.comm.world import World, keep_after_closing
from shoal.errors import ShoalError
from shoal.launch.local import launch

ROUNDS = 5
FIRST = 0.75
"""Of the time, for the first look at everything."""
SHORT = 8 * 2**20
"""Bytes: what is shorter than this gets the same time, since it takes about as long."""
Series = tuple[Tier, str, str]
"""Tier, collective and algorithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
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
class CommTimings:
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


def bench(ask: BenchRequest, *, nproc: int) -> CommTimings:
    """Start so many ranks on this machine, and measure."""
    return launch(measure, (ask,), nproc=nproc)[0]


def measure(placement: Placement | None, store: dist.Store | None, ask: BenchRequest) -> CommTimings:
    """What one rank does; every rank returns the same."""
    began = time.perf_counter()
    _let_peers_finish()
    device = "cuda" if ask.backend == "nccl" else "cpu"
    with World.start(placement, device=device, store=store, threads=1) as world:
        bench = Bench(world, placement.node if placement else 0, ask, deadline=began + ask.seconds)
        with _progress(world, ask) as progress:
            timings = bench.run(progress)
        return CommTimings(
            timings=tuple(timings),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """What the list of messages says."""

    rounds: int
    critical: int
    """Bytes on the critical path."""
    sent: int
    """Bytes that the busiest rank sends."""


@dataclass(kw_only=True)
class Cell:
    """One collective by one algorithm at one size, and how long it took, round after round."""

    place: Place
    kind: str
    algorithm: str
    size: int
    """Bytes."""
    listed: Listed
    work: Work
    sent: int | None
    """Bytes that the busiest rank has sent for one, counted."""
    turn: float
    """Seconds of a round, about."""
    times: list[float]
    """Seconds of one in each round, on the slowest rank: all ranks have the same."""

    @property
    def seconds(self) -> float:
        """Of the fastest round."""
        return min(self.times)

    @property
    def count(self) -> int:
        """How many make a round."""
        return max(1, int(self.turn / self.seconds))

    def timing(self) -> Timing:
        """What was found, beside what its list says."""
        return Timing(
            tier=self.place.tier,
            kind=self.kind,
            algorithm=self.algorithm,
            ranks=self.place.size,
            size=self.size,
            seconds=self.seconds,
            rounds=self.listed.rounds,
            critical=self.listed.critical,
            node=self.place.node,
            counted=self.sent,
            listed=self.listed.sent if self.sent is not None else None,
        )


@dataclass
class Bench:
    """Takes timings, one after the other, in step with all ranks."""

    world: World
    node: int
    """The number of this rank's host."""
    ask: BenchRequest
    deadline: float
    cells: dict[Series, list[Cell]] = field(default_factory=dict)
    """Tier, collective and algorithm → a cell for each size, the shortest first."""
    left_out: list[LeftOut] = field(default_factory=list)

    def run(self, progress: Progress) -> list[Timing]:
        """Measure everything, the shortest sizes first; then again what its own numbers do not explain."""
        places = _places(self.world, self.node, self.ask)
        given, taken = (written(max(self.ask.sizes) // FLOAT, self.world.device) for _ in range(2))
        todo = [(size, place, kind) for size in self.ask.sizes for place in places for kind in (SEND, *self.ask.kinds)]
        task = progress.add_task("", total=len(todo))
        for number, (size, place, kind) in enumerate(todo):
            progress.update(task, description=f"{kind} {place.tier} hosts, {size:,} bytes")
            part = max(size, SHORT) / sum(max(each, SHORT) for each, _, _ in todo[number:])
            whole = size // FLOAT // place.size * place.size or place.size
            seconds = max(0.0, self.remaining() - (1 - FIRST) * self.ask.seconds)
            self.take_turns(place, kind, given[:whole], taken[:whole], seconds * part)
            progress.advance(task)
        progress.update(task, description="again what may have been disturbed")
        self.look_again()
        return self.timings()

    def remaining(self) -> float:
        """Seconds, as rank 0 counts them."""
        left = self.deadline - time.perf_counter() if self.world.is_main else float("-inf")
        return max(0.0, self.slowest(left))

    def take_turns(self, place: Place, kind: str, x: Tensor, y: Tensor, seconds: float) -> None:
        """Measure all algorithms of a collective at one size, in so many seconds."""
        works = self.works(place, kind, x, y)
        share = seconds / max(1, len(works))
        looks = [self.first_look(place, kind, name, x, *work, share=share) for name, work in works.items()]
        found = [cell for cell in looks if cell]
        spent = dict.fromkeys(works, 0.0)
        for number in range(ROUNDS):
            for cell in found:
                if number == 0 or spent[cell.algorithm] + cell.count * cell.seconds <= share:
                    spent[cell.algorithm] += self.one_more(cell)

    def first_look(
        self,
        place: Place,
        kind: str,
        algorithm: str,
        x: Tensor,
        work: Work,
        over: MessageCollectives | None,
        *,
        share: float,
    ) -> Cell | None:
        """Carry it out once, and count its bytes, if that takes no more than its share of the time."""
        known = self.cells.setdefault((place.tier, kind, algorithm), [])
        size = x.numel() * FLOAT
        guess = _guess(known[-1] if known else None, size)
        if guess > share:
            left = LeftOut(tier=place.tier, kind=kind, algorithm=algorithm, size=size, seconds=guess)
            self.left_out.append(left)
            return None
        if not known:
            self.timed(work, 1)  # connects
        already = over.counted.bytes if over else 0
        first = self.timed(work, 1)  # in memory that is new to this process, and slow
        cell = Cell(
            place=place,
            kind=kind,
            algorithm=algorithm,
            size=size,
            listed=_listed(place, kind, algorithm, size),
            work=work,
            sent=int(self.slowest(over.counted.bytes - already)) if over else None,
            turn=share / ROUNDS,
            times=[first],
        )
        known.append(cell)
        return cell

    def one_more(self, cell: Cell) -> float:
        """Another round of it; returns how long that took."""
        count = cell.count
        cell.times.append(self.timed(cell.work, count))
        return count * cell.times[-1]

    def look_again(self) -> None:
        """While there is time: one more round of the sizes that some fit was held against, and of their neighbours,
        to which it was fitted, the worst first."""
        is_time = True
        while is_time:
            is_time = False
            for fitted in sorted((one for one in fits(self.timings()) if one.held), key=lambda one: -one.worst_held):
                cells = self.cells[fitted.tier, fitted.kind, fitted.algorithm]
                sizes = in_doubt([cell.size for cell in cells], fitted)
                for cell in cells:
                    if cell.size in sizes and cell.count * cell.times[-1] < self.remaining():
                        self.one_more(cell)
                        is_time = True

    def timings(self) -> list[Timing]:
        """What was found, beside what the lists say."""
        return [cell.timing() for cells in self.cells.values() for cell in cells]

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

    def works(self, place: Place, kind: str, x: Tensor, y: Tensor) -> dict[str, tuple[Work, MessageCollectives | None]]:
        """Algorithm → what carries it out, and what counts."""
        if kind == SEND:
            return {PAIR: (pair(place, x, y), None), TOGETHER: (together(place, x, y), None)}
        found: dict[str, tuple[Work, MessageCollectives | None]] = {}
        for algorithm in self.ask.algorithms:
            if algorithm == BUILTIN:
                found[algorithm] = builtin(kind, place.group, x, y), None
            elif algorithm != "hierarchical" or place.node:
                over = MessageCollectives(place.group, algorithm, segments=SEGMENTS, node=place.node)  # type: ignore[arg-type]
                found[algorithm] = stepped(kind, over, x), over
        return found


# ---- who talks to whom ----------------------------------------------------------------------------------------------


def _places(world: World, node: int, ask: BenchRequest) -> list[Place]:
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
    groups = [world.new_group(ranks, backend=ask.backend, timeout=timeout) for ranks in hosts]
    mine = next(group for group, ranks in zip(groups, hosts, strict=True) if world.rank in ranks)
    keep_after_closing(mine)
    return [Place(tier="within", group=mine, node=None, hop=1), across]


def _hosts(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, from the number of every rank's host.

    >>> _hosts([0, 1, 0, 1])
    [[0, 2], [1, 3]]
    """
    return [[rank for rank, node in enumerate(nodes) if node == host] for host in dict.fromkeys(nodes)]


def _listed(place: Place, kind: str, algorithm: str, size: int) -> Listed:
    """By the list of a collective; a send is a message by itself, or one there and one back."""
    if kind not in KINDS:
        return Listed(rounds=2 if algorithm == PAIR else 1, critical=size, sent=size)
    steps = list_of(kind, algorithm, place.size, size, node=place.node)
    rounds, elements = steps.critical()
    most = max(steps.sent(rank) for rank in range(place.size))
    return Listed(rounds=rounds, critical=elements * FLOAT, sent=most * FLOAT)


def _guess(before: Cell | None, size: int) -> float:
    """Seconds that a larger size may take: more by its bytes, once bytes are what takes time."""
    if before is None:
        return 0.0
    return before.seconds * (max(1.0, size / before.size) if before.size >= 2**20 else 1.0)


@contextlib.contextmanager
def _progress(world: World, ask: BenchRequest) -> Iterator[Progress]:
    columns = (BarColumn(bar_width=24), TextColumn("measuring {task.description}"), TimeElapsedColumn())
    is_silent = ask.quiet or not world.is_main
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_silent) as progress:
        yield progress
