"""Measure every collective with every algorithm at every size, between ranks of one host and of several.

All ranks do the same at the same time, and the slowest counts. The algorithms of a collective alternate, round after
round, so that a disturbance of the machine affects all of them; the fastest round counts. Each size has a share of the
time. A timing that would take more than its share is skipped and reported.

    size ─▶ within a host, across hosts ─▶ send, all_reduce, ... ─▶ round 1: naive ring tree ... round 2: naive ring ...

The remaining time is spent where a fit has a large error at a validation size. Most often a measurement was disturbed
there, and the fastest of more rounds corrects it.
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
from shoal.comm.group_lifetime import keep_after_closing
from shoal.comm.message_collectives import MessageCollectives
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.launch.local import launch

ROUNDS = 5
FIRST = 0.75
"""The part of the time for the first measurement of everything."""
SHORT = 8 * 2**20
"""Bytes. Smaller sizes get the same share of the time as this one."""
Series = tuple[Tier, str, str]
"""Tier, collective and algorithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
    """The collectives, algorithms and sizes to measure."""

    kinds: tuple[Kind, ...]
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes, the shortest first."""
    node: int | None
    """Ranks of a node, for the hierarchical algorithm. None: those of a host, if there are several hosts."""
    seconds: float
    """The time for all measurements."""
    backend: Literal["gloo", "nccl"]
    quiet: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedTiming:
    """A timing that would have taken too long."""

    tier: Tier
    kind: str
    algorithm: str
    size: int
    seconds: float
    """Predicted, from the next smaller size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommTimings:
    """All timings, and the machine."""

    timings: tuple[Timing, ...]
    skipped: tuple[SkippedTiming, ...]
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
    """Whether this is rank 0, which reports."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.per_host

    def sentence(self) -> str:
        """One line about machine, ranks and version."""
        return (
            f"shoal bench comm on {self.host}: {self.num_hosts} x {self.per_host} ranks, {self.backend}, torch"
            f" {self.torch}"
        )


def bench(request: BenchRequest, *, nproc: int) -> CommTimings:
    """Start `nproc` ranks on this machine, and measure."""
    return launch(measure, (request,), nproc=nproc)[0]


def measure(placement: Placement | None, store: dist.Store | None, request: BenchRequest) -> CommTimings:
    """Measure as one rank; every rank returns the same."""
    start = time.perf_counter()
    _use_batch_scheduling()
    device = "cuda" if request.backend == "nccl" else "cpu"
    with World.start(placement, device=device, store=store, threads=1) as world:
        bench = CommBench(world, placement.node if placement else 0, request, deadline=start + request.seconds)
        with _progress(world, request) as progress:
            timings = bench.run(progress)
        return CommTimings(
            timings=tuple(timings),
            skipped=tuple(bench.skipped),
            ranks=world.size,
            per_host=world.local_size,
            backend=request.backend,
            kind=world.device.type,
            host=socket.gethostname(),
            torch=torch.__version__,
            date=date.today().isoformat(),
            took=time.perf_counter() - start,
            is_main=world.is_main,
        )


def _use_batch_scheduling() -> None:
    """Run the threads of this process with SCHED_BATCH, so that a thread that wakes up does not preempt another.

    Where ranks share cores, gloo's own thread wakes up when a message comes, often in the middle of the call by which
    the rank passes it the next one. It then finds the connection locked, and spins until the scheduler takes the core
    away: some milliseconds, at random, for a message of one. Threads that do not preempt each other seldom collide.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedTraffic:
    """Rounds and bytes by the list of messages."""

    rounds: int
    critical: int
    """Bytes on the critical path."""
    sent: int
    """Bytes that the busiest rank sends."""


@dataclass(kw_only=True)
class Cell:
    """One collective with one algorithm at one size, and the times of its rounds."""

    place: Place
    kind: str
    algorithm: str
    size: int
    """Bytes."""
    expected: ExpectedTraffic
    work: Work
    sent: int | None
    """Bytes that the busiest rank sends for one call, counted."""
    turn: float
    """Seconds of a round, approximately."""
    times: list[float]
    """Seconds per call in each round, on the slowest rank; the same on all ranks."""

    @property
    def seconds(self) -> float:
        """Seconds per call in the fastest round."""
        return min(self.times)

    @property
    def count(self) -> int:
        """Calls of a round."""
        return max(1, int(self.turn / self.seconds))

    def timing(self) -> Timing:
        """The result, with the expected traffic."""
        return Timing(
            tier=self.place.tier,
            kind=self.kind,
            algorithm=self.algorithm,
            ranks=self.place.size,
            size=self.size,
            seconds=self.seconds,
            rounds=self.expected.rounds,
            critical=self.expected.critical,
            node=self.place.node,
            counted=self.sent,
            listed=self.expected.sent if self.sent is not None else None,
        )


@dataclass
class CommBench:
    """Measure timings one after the other, in step with all ranks."""

    world: World
    node: int
    """The number of this rank's host."""
    request: BenchRequest
    deadline: float
    cells: dict[Series, list[Cell]] = field(default_factory=dict)
    """Tier, collective and algorithm → a cell for each size, the shortest first."""
    skipped: list[SkippedTiming] = field(default_factory=list)

    def run(self, progress: Progress) -> list[Timing]:
        """Measure everything, the shortest sizes first; then again the sizes that the fit does not explain."""
        places = _places(self.world, self.node, self.request)
        given, taken = (written(max(self.request.sizes) // FLOAT, self.world.device) for _ in range(2))
        todo = [
            (size, place, kind)
            for size in self.request.sizes
            for place in places
            for kind in (SEND, *self.request.kinds)
        ]
        task = progress.add_task("", total=len(todo))
        for number, (size, place, kind) in enumerate(todo):
            progress.update(task, description=f"{kind} {place.tier} hosts, {size:,} bytes")
            part = max(size, SHORT) / sum(max(each, SHORT) for each, _, _ in todo[number:])
            whole = size // FLOAT // place.size * place.size or place.size
            seconds = max(0.0, self.remaining() - (1 - FIRST) * self.request.seconds)
            self.measure_size(place, kind, given[:whole], taken[:whole], seconds * part)
            progress.advance(task)
        progress.update(task, description="again sizes that may have been disturbed")
        self.measure_again()
        return self.timings()

    def remaining(self) -> float:
        """Seconds until the deadline, by rank 0's clock."""
        left = self.deadline - time.perf_counter() if self.world.is_main else float("-inf")
        return max(0.0, self.slowest(left))

    def measure_size(self, place: Place, kind: str, x: Tensor, y: Tensor, seconds: float) -> None:
        """Measure all algorithms of a collective at one size, within `seconds`."""
        works = self.works(place, kind, x, y)
        share = seconds / max(1, len(works))
        cells = [self.measure_first(place, kind, name, x, *work, share=share) for name, work in works.items()]
        found = [cell for cell in cells if cell]
        spent = dict.fromkeys(works, 0.0)
        for number in range(ROUNDS):
            for cell in found:
                if number == 0 or spent[cell.algorithm] + cell.count * cell.seconds <= share:
                    spent[cell.algorithm] += self.measure_round(cell)

    def measure_first(
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
        """Run it once and count its bytes, unless that would take more than its share of the time."""
        known = self.cells.setdefault((place.tier, kind, algorithm), [])
        size = x.numel() * FLOAT
        guess = _guess(known[-1] if known else None, size)
        if guess > share:
            skipped = SkippedTiming(tier=place.tier, kind=kind, algorithm=algorithm, size=size, seconds=guess)
            self.skipped.append(skipped)
            return None
        if not known:
            self.timed(work, 1)  # opens connections
        already = over.counted.bytes if over else 0
        first = self.timed(work, 1)  # slow, in memory that is new to this process
        cell = Cell(
            place=place,
            kind=kind,
            algorithm=algorithm,
            size=size,
            expected=_expected_traffic(place, kind, algorithm, size),
            work=work,
            sent=int(self.slowest(over.counted.bytes - already)) if over else None,
            turn=share / ROUNDS,
            times=[first],
        )
        known.append(cell)
        return cell

    def measure_round(self, cell: Cell) -> float:
        """Measure another round; returns its seconds."""
        count = cell.count
        cell.times.append(self.timed(cell.work, count))
        return count * cell.times[-1]

    def measure_again(self) -> None:
        """While there is time, measure another round of the validation sizes with large errors and of their
        neighbours, the worst fit first."""
        is_time = True
        while is_time:
            is_time = False
            validated = (fit for fit in fits(self.timings()) if fit.validation)
            for fitted in sorted(validated, key=lambda fit: -fit.worst_error):
                cells = self.cells[fitted.tier, fitted.kind, fitted.algorithm]
                sizes = in_doubt([cell.size for cell in cells], fitted)
                for cell in cells:
                    if cell.size in sizes and cell.count * cell.times[-1] < self.remaining():
                        self.measure_round(cell)
                        is_time = True

    def timings(self) -> list[Timing]:
        """All results so far."""
        return [cell.timing() for cells in self.cells.values() for cell in cells]

    def timed(self, work: Work, number: int) -> float:
        """Seconds per call of `number` calls, on the slowest rank."""
        self.world.barrier()
        start = time.perf_counter()
        for _ in range(number):
            work()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return self.slowest((time.perf_counter() - start) / number)

    def slowest(self, seconds: float) -> float:
        """The maximum over all ranks."""
        return self.world.all_reduce_host([seconds], "max").wait()[0]

    def works(self, place: Place, kind: str, x: Tensor, y: Tensor) -> dict[str, tuple[Work, MessageCollectives | None]]:
        """Algorithm → its work, and the collective that counts its bytes."""
        if kind == SEND:
            return {PAIR: (pair(place, x, y), None), TOGETHER: (together(place, x, y), None)}
        found: dict[str, tuple[Work, MessageCollectives | None]] = {}
        for algorithm in self.request.algorithms:
            if algorithm == BUILTIN:
                found[algorithm] = builtin(kind, place.group, x, y), None
            elif algorithm != "hierarchical" or place.node:
                over = MessageCollectives(place.group, algorithm, segments=SEGMENTS, node=place.node)  # type: ignore[arg-type]
                found[algorithm] = stepped(kind, over, x), over
        return found


# ---- groups of ranks ------------------------------------------------------------------------------------------------


def _places(world: World, node: int, request: BenchRequest) -> list[Place]:
    """The group of all ranks; and that of this host, if there are several hosts with several ranks."""
    whole = dist.group.WORLD
    assert whole is not None
    if world.local_size == world.size:
        return [Place(tier="within", group=whole, node=request.node, hop=1)]
    hosts = _hosts(world.all_gather_object(node))
    sizes = sorted({len(ranks) for ranks in hosts})
    if len(sizes) > 1:
        what = f"all hosts must have the same number of ranks, got {sizes[0]} and {sizes[-1]}"
        raise ShoalError(what, fix=f"start {sizes[0]} ranks on every host", code="N028")
    is_in_order = all(ranks == list(range(ranks[0], ranks[0] + sizes[0])) for ranks in hosts)
    across = Place(tier="across", group=whole, node=request.node or (sizes[0] if is_in_order else None), hop=sizes[0])
    if sizes[0] == 1:
        return [across]
    timeout = timedelta(seconds=world.timeout)
    groups = [world.new_group(ranks, backend=request.backend, timeout=timeout) for ranks in hosts]
    mine = next(group for group, ranks in zip(groups, hosts, strict=True) if world.rank in ranks)
    keep_after_closing(mine)
    return [Place(tier="within", group=mine, node=None, hop=1), across]


def _hosts(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, from the number of every rank's host.

    >>> _hosts([0, 1, 0, 1])
    [[0, 2], [1, 3]]
    """
    return [[rank for rank, node in enumerate(nodes) if node == host] for host in dict.fromkeys(nodes)]


def _expected_traffic(place: Place, kind: str, algorithm: str, size: int) -> ExpectedTraffic:
    """Rounds and bytes by the list of a collective. A send is one message; `PAIR` is one in each direction."""
    if kind not in KINDS:
        return ExpectedTraffic(rounds=2 if algorithm == PAIR else 1, critical=size, sent=size)
    steps = list_of(kind, algorithm, place.size, size, node=place.node)
    rounds, elements = steps.critical()
    most = max(steps.sent(rank) for rank in range(place.size))
    return ExpectedTraffic(rounds=rounds, critical=elements * FLOAT, sent=most * FLOAT)


def _guess(before: Cell | None, size: int) -> float:
    """Seconds that a larger size may take: proportional to its bytes above 1 MiB."""
    if before is None:
        return 0.0
    return before.seconds * (max(1.0, size / before.size) if before.size >= 2**20 else 1.0)


@contextlib.contextmanager
def _progress(world: World, request: BenchRequest) -> Iterator[Progress]:
    columns = (BarColumn(bar_width=24), TextColumn("measuring {trequest.description}"), TimeElapsedColumn())
    is_silent = request.quiet or not world.is_main
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_silent) as progress:
        yield progress
