"""`shoal bench comm`: tables and plots of what this machine, or these machines, can do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import tyro

from shoal.bench.timings import BUILTIN, CHOICES
from shoal.blueprint.collectives.algorithms import KINDS, Kind
from shoal.cli import bench_compress
from shoal.cli.parse_units import sizes_between
from shoal.cli.reports import bench as report
from shoal.cli.reports.console import WIDTH, show
from shoal.comm.rendezvous.environment import Placement, read_environment
from shoal.errors import Problem, ShoalError, listed, nearest, raise_if
from shoal.predict.cluster import Cluster, is_measured_here

if TYPE_CHECKING:
    from shoal.bench.comm import BenchRequest, CommTimings

DEFAULT_NPROC = 4
SHORT_SIZE = 2**10
"""Bytes, whose time is latency alone."""
ABOUT = {
    "comm": "latency and bandwidth of every collective by every algorithm, over sizes from 1 KB to 256 MB",
    "compress": "ways for replicas to meet (compressed, every so many steps): bytes, time and loss of a recipe by each",
}


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Measure collectives between ranks: each algorithm at each size, what two numbers (α and β) say of it, and how far
    they are off at sizes that they were not fitted to. Starts its own ranks; or is one, under torchrun, srun or mpirun
    on several hosts.

    shoal bench comm --nproc 4 --kinds all_reduce --algorithms ring halving builtin
    """

    nproc: int | None = None
    """Ranks to start on this machine. None: 4; under a launcher, those that it has started."""

    sizes: tuple[str, ...] = ("1KB..256MB",)
    """Of the tensor: some of them, or the first and the last, each four times the one before. KB is 1024 bytes."""

    kinds: tuple[str, ...] = KINDS
    """Which collectives."""

    algorithms: tuple[str, ...] = CHOICES
    """Which algorithms. builtin: torch's own. hierarchical: where there are several hosts, or with --node."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: on the CPU. nccl: between GPUs, torch's own collectives only."""

    node: int | None = None
    """Ranks that hierarchical takes for a node. None: those of a host, if there are several hosts."""

    seconds: float = 80.0
    """How long to measure, at most. What would take more than its share is left out."""

    cluster: str | None = None
    """Whose devices --out writes beside the links: a preset, a file, or here. None: here, if this machine was
    calibrated, else a CPU."""

    out: Path | None = None
    """A YAML file to write: the cluster with links as measured, for `shoal plan --cluster FILE`."""

    plot: Path | None = None
    """An SVG file to write: bandwidth over size."""

    draw: bool = False
    """Show who sends what to whom, for each collective and algorithm."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code."""
    action = arguments[0] if arguments else "--help"
    if action in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if action == "compress":  # it takes a recipe, and has its settings for options
        return bench_compress.main(arguments[1:])
    if action not in ACTIONS:
        near = nearest(action, ABOUT)
        fix = f"shoal bench {near or ' | '.join(ABOUT)}"
        raise ShoalError(f"there is no shoal bench {action!r}", fix=fix)
    kind, act = ACTIONS[action]
    prog = f"shoal bench {action}"
    options, rest = tyro.cli(
        kind,
        args=list(arguments[1:]),
        prog=prog,
        return_unknown_args=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    raise_if(Problem(f"what is {word!r}?", f"`{prog} --help` lists all options") for word in rest)
    return act(options)


def _help() -> str:
    lines = [f"  {name:<8}  {about}" for name, about in ABOUT.items()]
    usage = "usage: shoal bench WHAT [options]"
    return "\n".join([usage, "", *lines, "", "`shoal bench WHAT --help` lists the options; all take --json.", ""])


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
    if options.json:
        said = report.to_mapping(found, cluster, out=options.out, plot=options.plot)
        if options.draw:
            said["pictures"] = report.pictures(found)
        print(json.dumps(said), file=out)
    else:
        show(lambda console: report.render(console, found, cluster, draw=options.draw), out, width=WIDTH)
        for path, what in ((options.out, f"--cluster {options.out}"), (options.plot, "a plot")):
            if path is not None:
                print(f"written to {path}: {what}", file=out)
    return 0


def _checked(options: Comm, place: Placement | None, ranks: int) -> tuple[int, ...]:
    """The sizes, when all else is right too."""
    problems: list[Problem] = []
    sizes: list[int] = []
    for word in options.sizes:
        for text in word.split(","):
            try:
                sizes += sizes_between(text)
            except ShoalError as error:
                problems += error.problems
    problems += _problems_of_none(options) or _problems_of_sizes(options, set(sizes), problems)
    problems += [_unknown("collective", word, KINDS) for word in options.kinds if word not in KINDS]
    problems += [_unknown("algorithm", word, CHOICES) for word in options.algorithms if word not in CHOICES]
    problems += _problems_of_ranks(options, place, ranks)
    if not 0 < options.seconds < float("inf"):
        problems.append(Problem(f"--seconds {options.seconds} is no time to measure in", "--seconds 80"))
    if options.out is not None and BUILTIN not in options.algorithms:
        what = "--out is for a planner of runs that use torch's own collectives, and builtin is not measured"
        problems.append(Problem(what, f"--algorithms {' '.join((*options.algorithms, BUILTIN))}"))
    if options.backend == "nccl" and options.algorithms != (BUILTIN,):
        problems.append(Problem("over nccl only torch's own collectives are measured", "--algorithms builtin"))
    for path, ending in ((options.out, ".yaml"), (options.plot, ".svg")):
        problems += _problems_of_file(path, ending)
    raise_if(problems)
    return tuple(sorted(set(sizes)))


def _problems_of_none(options: Comm) -> list[Problem]:
    """Lists that name nothing."""
    usual = {"sizes": ("1KB..256MB",), "kinds": KINDS, "algorithms": CHOICES}
    none = [name for name in usual if not getattr(options, name)]
    return [Problem(f"--{name} names none", f"--{name} {' '.join(usual[name])}") for name in none]


def _problems_of_sizes(options: Comm, sizes: set[int], others: Sequence[Problem]) -> list[Problem]:
    """Two numbers are fitted to each algorithm: one size would leave one of them open."""
    if others or len(sizes) > 1:
        return []
    what = f"--sizes {' '.join(options.sizes)}: α and β, latency and bandwidth, are fitted to at least two sizes"
    return [Problem(what, f"--sizes 1KB {options.sizes[0]}" if max(sizes) > SHORT_SIZE else "--sizes 1KB 4MB")]


def _unknown(what: str, word: str, known: Sequence[str]) -> Problem:
    return Problem(f"there is no {what} {word!r}", nearest(word, known) or listed(known))


def _problems_of_ranks(options: Comm, place: Placement | None, ranks: int) -> list[Problem]:
    problems = []
    if place is not None and options.nproc not in (None, ranks):
        what = f"--nproc {options.nproc}, but {place.source} has started {ranks} ranks"
        problems.append(Problem(what, "leave --nproc out"))
    elif ranks < 2:
        problems.append(Problem(f"--nproc {ranks}: there is nobody to send to", "--nproc 2 or more"))
    if options.node is not None and (options.node < 1 or ranks % options.node):
        divisors = listed(number for number in range(1, ranks + 1) if ranks % number == 0)
        problems.append(Problem(f"{ranks} ranks cannot be divided into nodes of {options.node}", f"--node {divisors}"))
    is_one_host = place is None or place.local_world_size == ranks
    is_named = "hierarchical" in options.algorithms and options.algorithms != CHOICES
    if is_named and is_one_host and options.node is None and ranks > 1:
        halves = next(number for number in range(ranks // 2, 0, -1) if ranks % number == 0)
        what = f"hierarchical goes by nodes, and all {ranks} ranks are on one host"
        problems.append(Problem(what, f"--node {halves} to take so many ranks for a node, or leave hierarchical out"))
    return problems


def _problems_of_file(path: Path | None, ending: str) -> list[Problem]:
    """Found out before a minute is spent on it."""
    if path is None:
        return []
    if path.suffix != ending:
        return [Problem(f"{path} would not be read as {ending[1:]}", str(path.with_suffix(ending)))]
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return [Problem(f"{path} cannot be written", f"a name ending in {ending}, in a folder that exists")]
    return []


def _known_cluster(options: Comm, ranks: int) -> Cluster:
    """Whose devices the measured links are put between."""
    return Cluster.parse(options.cluster or ("here" if is_measured_here() else f"cpu:{ranks}"))


def _measured(options: Comm, sizes: tuple[int, ...], place: Placement | None, ranks: int) -> CommTimings:
    from shoal.bench.comm import BenchRequest, bench, measure

    ask: BenchRequest = BenchRequest(
        kinds=cast("tuple[Kind, ...]", tuple(dict.fromkeys(options.kinds))),
        algorithms=tuple(dict.fromkeys(options.algorithms)),
        sizes=sizes,
        node=options.node,
        seconds=options.seconds,
        backend=options.backend,
        quiet=not sys.stderr.isatty(),
    )
    if ask.quiet and (place is None or place.rank == 0):
        print(f"measuring collectives of {ranks} ranks for {options.seconds:.0f} s or less", file=sys.stderr)
    return bench(ask, nproc=ranks) if place is None else measure(place, None, ask)


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


ACTIONS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {"comm": (Comm, _comm)}
