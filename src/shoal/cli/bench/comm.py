"""`shoal bench comm`: measure collectives on one or several machines, with tables and plots."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from shoal.bench.timings import BUILTIN, CHOICES
from shoal.blueprint.collectives.algorithms import KINDS, Kind
from shoal.cli.bench.common import check_file
from shoal.cli.options import parse_options
from shoal.cli.reports import bench as report
from shoal.cli.reports.console import WIDTH, show
from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.config.parse_units import sizes_between
from shoal.errors import Problem, ShoalError, listed, nearest, raise_if
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import is_measured_here, parse_cluster

if TYPE_CHECKING:
    from shoal.bench.comm import BenchRequest, CommTimings

DEFAULT_NPROC = 4
SHORT_SIZE = 2**10
"""Bytes of a message whose time is latency alone."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Measure collectives between ranks: each algorithm at each size. Fit α (latency) and β (time per byte), and report
    the error at sizes that were not fitted. Starts its own ranks; or is one, under torchrun, srun or mpirun on several
    hosts.

    shoal bench comm --nproc 4 --kinds all_reduce --algorithms ring halving builtin
    """

    nproc: int | None = None
    """Number of ranks on this machine. None: 4, or the launcher's number of ranks."""

    sizes: tuple[str, ...] = ("1KB..256MB",)
    """Sizes of the tensor, or ranges in which each size is four times the one before. KB is 1024 bytes."""

    kinds: tuple[str, ...] = KINDS
    """The collectives to measure."""

    algorithms: tuple[str, ...] = CHOICES
    """The algorithms to measure. builtin: torch's own. hierarchical: only with several hosts, or with --node."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: on the CPU. nccl: between GPUs, torch's own collectives only."""

    node: int | None = None
    """Ranks per node for the hierarchical algorithm. None: the ranks of a host, if there are several hosts."""

    seconds: float = 80.0
    """The most seconds to measure. A timing that would take more than its share is skipped."""

    cluster: str | None = None
    """The cluster whose devices --out writes with the measured links: a preset, a file, or here. None: here, if this
    machine is calibrated, else cpu."""

    out: Path | None = None
    """A YAML file to write the cluster with measured links to, for `shoal plan --cluster FILE`."""

    plot: Path | None = None
    """An SVG file to write a plot of bandwidth over size to."""

    html: Path | None = None
    """An HTML file to write: one page with the bandwidth over size and the messages of every collective."""

    draw: bool = False
    """Draw the messages of each collective and algorithm."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Measure; returns 0."""
    return _comm(parse_options(Comm, arguments, prog="shoal bench comm"))


def _comm(options: Comm) -> int:
    place = read_environment(os.environ)
    ranks = place.world_size if place is not None else (DEFAULT_NPROC if options.nproc is None else options.nproc)
    sizes = _checked(options, place, ranks)
    known = _known_cluster(options, ranks)
    out = sys.stdout
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        found = _measured(options, sizes, place, ranks)
        if not found.is_main:
            return 0
        cluster = _with_links(known, found)
        if options.out is not None:
            options.out.write_text(report.file_text(found, cluster))
        if options.plot is not None:
            options.plot.write_text(report.plot(found))
        if options.html is not None:
            from shoal.pages.bench.comm import make_page
            from shoal.pages.report import write_page

            write_page(options.html, make_page(report.to_mapping(found, cluster, out=options.out, plot=options.plot)))
    if options.json:
        result = report.to_mapping(found, cluster, out=options.out, plot=options.plot)
        if options.draw:
            result["pictures"] = report.pictures(found)
        print(json.dumps(result), file=out)
    else:
        show(lambda console: report.render(console, found, cluster, draw=options.draw), out, width=WIDTH)
        files = ((options.out, f"--cluster {options.out}"), (options.plot, "a plot"), (options.html, "a page"))
        for path, what in files:
            if path is not None:
                print(f"wrote {path}: {what}", file=out)
    return 0


def _checked(options: Comm, place: Placement | None, ranks: int) -> tuple[int, ...]:
    """The sizes; raises if any option is invalid."""
    problems: list[Problem] = []
    sizes: list[int] = []
    for word in options.sizes:
        for text in word.split(","):
            try:
                sizes += sizes_between(text)
            except ShoalError as error:
                problems += error.problems
    problems += _check_empty(options) or _check_sizes(options, set(sizes), problems)
    problems += [_unknown("collective", word, KINDS) for word in options.kinds if word not in KINDS]
    problems += [_unknown("algorithm", word, CHOICES) for word in options.algorithms if word not in CHOICES]
    problems += _check_ranks(options, place, ranks)
    if not 0 < options.seconds < float("inf"):
        problems.append(Problem("R035", f"--seconds must be above 0, got {options.seconds}", "--seconds 80"))
    if options.out is not None and BUILTIN not in options.algorithms:
        what = f"--algorithms must include {BUILTIN} for --out: the planner uses torch's own collectives"
        problems.append(Problem("R040", what, f"--algorithms {' '.join((*options.algorithms, BUILTIN))}"))
    if options.backend == "nccl" and options.algorithms != (BUILTIN,):
        problems.append(Problem("R040", "--algorithms must be builtin with --backend nccl", "--algorithms builtin"))
    for path, ending in ((options.out, ".yaml"), (options.plot, ".svg"), (options.html, ".html")):
        problems += check_file(path, ending)
    raise_if(problems)
    return tuple(sorted(set(sizes)))


def _check_empty(options: Comm) -> list[Problem]:
    """Find empty lists."""
    defaults = {"sizes": ("1KB..256MB",), "kinds": KINDS, "algorithms": CHOICES}
    empty = [name for name in defaults if not getattr(options, name)]
    return [Problem("R038", f"--{name} must not be empty", f"--{name} {' '.join(defaults[name])}") for name in empty]


def _check_sizes(options: Comm, sizes: set[int], others: Sequence[Problem]) -> list[Problem]:
    """Find lists of one size: α and β of an algorithm need two."""
    if others or len(sizes) > 1:
        return []
    what = f"--sizes must be at least two, to fit latency and bandwidth, got {' '.join(options.sizes)}"
    return [Problem("R038", what, f"--sizes 1KB {options.sizes[0]}" if max(sizes) > SHORT_SIZE else "--sizes 1KB 4MB")]


def _unknown(what: str, word: str, known: Sequence[str]) -> Problem:
    return Problem("R012", f"unknown {what} {word!r}", nearest(word, known) or listed(known))


def _check_ranks(options: Comm, place: Placement | None, ranks: int) -> list[Problem]:
    problems = []
    if place is not None and options.nproc not in (None, ranks):
        what = f"--nproc must be the {ranks} ranks of {place.source}, got {options.nproc}"
        problems.append(Problem("R034", what, f"--nproc {ranks}, or no --nproc"))
    elif ranks < 2:
        problems.append(Problem("R034", f"--nproc must be 2 or more, got {ranks}", "--nproc 2"))
    if options.node is not None and (options.node < 1 or ranks % options.node):
        divisors = listed(number for number in range(1, ranks + 1) if ranks % number == 0)
        problems.append(Problem("P057", f"--node must divide {ranks} ranks, got {options.node}", f"--node {divisors}"))
    is_one_host = place is None or place.local_world_size == ranks
    is_named = "hierarchical" in options.algorithms and options.algorithms != CHOICES
    if is_named and is_one_host and options.node is None and ranks > 1:
        halves = next(number for number in range(ranks // 2, 0, -1) if ranks % number == 0)
        what = f"hierarchical needs several nodes, got {ranks} ranks on one host"
        problems.append(Problem("R039", what, f"--node {halves}, or --algorithms without hierarchical"))
    return problems


def _known_cluster(options: Comm, ranks: int) -> Cluster:
    """The cluster whose devices are combined with the measured links."""
    return parse_cluster(options.cluster or ("here" if is_measured_here() else f"cpu:{ranks}"))


def _measured(options: Comm, sizes: tuple[int, ...], place: Placement | None, ranks: int) -> CommTimings:
    from shoal.bench.comm import BenchRequest, bench, measure

    request: BenchRequest = BenchRequest(
        kinds=cast("tuple[Kind, ...]", tuple(dict.fromkeys(options.kinds))),
        algorithms=tuple(dict.fromkeys(options.algorithms)),
        sizes=sizes,
        node=options.node,
        seconds=options.seconds,
        backend=options.backend,
        quiet=not sys.stderr.isatty(),
    )
    if request.quiet and (place is None or place.rank == 0):
        print(f"measuring collectives of {ranks} ranks for {options.seconds:.0f} s or less", file=sys.stderr)
    return bench(request, nproc=ranks) if place is None else measure(place, None, request)


def _with_links(known: Cluster, found: CommTimings) -> Cluster:
    from shoal.bench.links import with_links

    return with_links(
        known,
        found.timings,
        per_host=found.per_host,
        num_hosts=found.num_hosts,
        source=found.sentence(),
        date=found.date,
    )
