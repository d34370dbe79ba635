"""The output of `shoal bench comm`: tables, pictures, a plot, and JSON."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.plot import Panel, svg
from shoal.bench.timings import BUILTIN, PAIR, TIERS, TOGETHER, Fit, Tier, Timing, best, fits, link_bandwidth, list_of
from shoal.blueprint.collectives.algorithms import KINDS
from shoal.blueprint.collectives.draw import draw as draw_list
from shoal.predict.cluster import Cluster

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shoal.bench.comm import CommTimings

BOUND = 0.15
"""The report says how many validation sizes have an error within this."""


def to_mapping(found: CommTimings, cluster: Cluster, *, out: Path | None, plot: Path | None) -> dict[str, Any]:
    """The result as JSON. Seconds of timings are measured, α and β fitted, bytes counted or expected."""
    fastest, fitted = best(found.timings), fits(found.timings)
    return {
        "ranks": found.ranks,
        "hosts": found.num_hosts,
        "backend": found.backend,
        "device": found.kind,
        "torch": found.torch,
        "date": found.date,
        "seconds": found.took,
        "link_bandwidth": {
            tier: {how: link_bandwidth(found.timings, tier, how) for how in (PAIR, TOGETHER)} for tier in _tiers(found)
        },
        "timings": [_timing(each, found, is_best=each in fastest) for each in found.timings],
        "fits": [_fit(each) for each in fitted],
        "validation": _summary(fitted),
        "skipped": [asdict(each) for each in found.skipped],
        "cluster": cluster.to_mapping(),
        "file": None if out is None else str(out),
        "plot": None if plot is None else str(plot),
    }


def _timing(each: Timing, found: CommTimings, *, is_best: bool) -> dict[str, Any]:
    return {
        "tier": each.tier,
        "kind": each.kind,
        "algorithm": each.algorithm,
        "ranks": each.ranks,
        "bytes": each.size,
        "seconds": each.seconds,
        "bandwidth": each.bandwidth,
        "bus_bandwidth": each.bus_bandwidth,
        "link_fraction": each.bus_bandwidth / link_bandwidth(found.timings, each.tier),
        "rounds": each.rounds,
        "critical_path_bytes": each.critical,
        "sent_bytes_counted": each.counted,
        "sent_bytes_expected": each.listed,
        "best": is_best,
    }


def _fit(each: Fit) -> dict[str, Any]:
    return {
        "tier": each.tier,
        "kind": each.kind,
        "algorithm": each.algorithm,
        "alpha": each.alpha,
        "beta": each.beta,
        "error": each.error,
        "validation": [
            {"bytes": point.size, "predicted": point.predicted, "measured": point.measured, "error": point.error}
            for point in each.validation
        ],
    }


def _summary(fitted: list[Fit]) -> dict[str, Any]:
    errors = [abs(point.error) for each in fitted for point in each.validation]
    if not errors:
        return {"number": 0, "median": None, "worst": None, "within_15_percent": None}
    return {
        "number": len(errors),
        "median": statistics.median(errors),
        "worst": max(errors),
        "within_15_percent": sum(error <= BOUND for error in errors) / len(errors),
    }


def _tiers(found: CommTimings) -> list[Tier]:
    return [tier for tier in TIERS if any(each.tier == tier for each in found.timings)]


# ---- tables ----------------------------------------------------------------------------------------------------------


def render(console: Console, found: CommTimings, cluster: Cluster, *, draw: bool) -> None:
    """Print the tables; with `draw`, also pictures of the messages."""
    for tier in _tiers(found):
        for kind in KINDS:
            timings = [each for each in found.timings if (each.tier, each.kind) == (tier, kind)]
            if timings:
                console.print(kind_table(found, timings))
        pair, together = (size_of(link_bandwidth(found.timings, tier, how), 1000) for how in (PAIR, TOGETHER))
        text = f"{pair}B/s between two ranks alone; {together}B/s for each rank when all send at once"
        console.print(
            f"link {tier} hosts, measured: {text}. Bus bandwidth is compared with the latter\n",
            soft_wrap=True,
            highlight=False,
        )
    console.print(fits_table(fits(found.timings)))
    _print_summary(console, found)
    if draw:
        for picture in pictures(found):
            console.print(f"\n{picture}", highlight=False, markup=False)
    measured = {"within": cluster.inside, "across": cluster.between}
    for name, link in ((tier, measured[tier]) for tier in _tiers(found)):
        numbers = f"{_time(link.base)}, {_time(link.latency)} a step, {size_of(link.bandwidth, 1000)}B/s"
        console.print(
            f"link {name} hosts, for the planner, fitted: {numbers}; {link.source}", soft_wrap=True, highlight=False
        )
    console.print(f"measured in {found.took:.0f} s: {found.sentence()}, {found.date}", soft_wrap=True, highlight=False)


def kind_table(found: CommTimings, timings: list[Timing]) -> Table:
    """A row for each size, a column for each algorithm."""
    from rich.table import Table

    first, fastest = timings[0], best(timings)
    title = f"{first.kind}, {first.ranks} ranks {first.tier} hosts: time, measured; * the fastest"
    table = Table(title=title, title_justify="left")
    algorithms = list(dict.fromkeys(each.algorithm for each in timings))
    for name in ("size", *algorithms, "bandwidth of *", "bus bandwidth", "% of link"):
        table.add_column(name, justify="right", no_wrap=True)
    of = {(each.size, each.algorithm): each for each in timings}
    for size in sorted({each.size for each in timings}):
        row = [of.get((size, algorithm)) for algorithm in algorithms]
        top = next(each for each in row if each in fastest)
        assert top is not None
        cells = [f"{_time(each.seconds)}{' *' if each is top else '  '}" if each else "–  " for each in row]
        rates = [f"{size_of(each, 1000)}B/s" for each in (top.bandwidth, top.bus_bandwidth)]
        table.add_row(
            f"{size_of(size)}B", *cells, *rates, f"{top.bus_bandwidth / link_bandwidth(found.timings, top.tier):.0%}"
        )
    return table


def fits_table(fitted: list[Fit]) -> Table:
    """α and β of each collective and algorithm, and their errors."""
    from rich.table import Table

    table = Table(title="seconds = rounds x α + bytes on the critical path x β, fitted", title_justify="left")
    for name in ("hosts", "collective", "algorithm"):
        table.add_column(name, no_wrap=True)
    for name in ("α", "1 / β", "error", "validation: predicted, measured, error"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in fitted:
        points = "   ".join(
            f"{size_of(point.size)}B {_time(point.predicted)}, {_time(point.measured)}, {point.error:+.0%}"
            for point in each.validation
        )
        rate = f"{size_of(1 / each.beta, 1000)}B/s" if each.beta else "–"
        table.add_row(each.tier, each.kind, each.algorithm, _time(each.alpha), rate, f"{each.error:.0%}", points)
    return table


def _print_summary(console: Console, found: CommTimings) -> None:
    summary = _summary(fits(found.timings))
    if summary["number"]:
        console.print(
            f"at {summary['number']} validation sizes, predicted times are off by {summary['median']:.0%} (median),"
            f" {summary['worst']:.0%} (worst); {summary['within_15_percent']:.0%} of them have {BOUND:.0%} or less",
            highlight=False,
        )
    if found.skipped:
        names = dict.fromkeys(f"{each.kind} {each.algorithm} {size_of(each.size)}B" for each in found.skipped)
        text = f"skipped, since they would take longer than --seconds: {', '.join(names)}"
        console.print(text, soft_wrap=True, highlight=False)


def pictures(found: CommTimings) -> list[str]:
    """Pictures of the measured collectives, each at its smallest size."""
    measured = [each for each in found.timings if each.listed is not None]
    smallest = {(each.kind, each.algorithm, each.ranks): each for each in reversed(measured)}
    return [
        draw_list(list_of(each.kind, each.algorithm, each.ranks, each.size, node=each.node))  # type: ignore[arg-type]
        for each in reversed(smallest.values())
    ]


def plot(found: CommTimings) -> str:
    """Bandwidth of the tensor over its size: dots are measured, lines are fitted, the dashed line is the link."""
    fitted = {(each.tier, each.kind, each.algorithm): each for each in fits(found.timings)}
    panels = []
    for tier in _tiers(found):
        for kind in KINDS:
            timings = [each for each in found.timings if (each.tier, each.kind) == (tier, kind)]
            lines: dict[str, list[tuple[float, float]]] = {}
            curves: dict[str, list[tuple[float, float]]] = {}
            for each in timings:
                lines.setdefault(each.algorithm, []).append((each.size, each.bandwidth))
                if (fit := fitted.get((tier, kind, each.algorithm))) is not None:
                    curve = curves.setdefault(each.algorithm, [])
                    curve.append((each.size, each.size / fit.seconds(each.rounds, each.critical)))
            if timings:
                level = link_bandwidth(found.timings, tier)
                panels.append(
                    Panel(title=f"{kind} {tier} hosts", lines=lines, curves=curves, level=level, level_name="link")
                )
    hosts = f"{found.num_hosts} host{'s' * (found.num_hosts > 1)}"
    title = f"Bandwidth of collectives, {found.ranks} ranks on {hosts}: dots measured, lines fitted"
    return svg(panels, title=title, x_name=lambda x: f"{size_of(x)}B", y_name=lambda y: f"{size_of(y, 1000)}B/s")


def file_text(found: CommTimings, cluster: Cluster) -> str:
    """The cluster as YAML, with the measurements of its links above it as comments."""
    lines = [f"{found.sentence()}, {found.date}. Links fitted to these measurements:", ""]
    for each in found.timings:
        if each.algorithm in (BUILTIN, TOGETHER):
            rate = f"{size_of(each.bandwidth, 1000)}B/s"
            lines.append(f"{each.tier:<7} {each.kind:<14} {each.size:>12,} bytes {each.seconds * 1e3:10.3f} ms  {rate}")
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + cluster.to_yaml()


def size_of(number: float, thousand: int = 1024) -> str:
    """A number with a prefix, without its unit.

    >>> size_of(65536), size_of(1.234e9, 1000)
    ('64 K', '1.23 G')
    """
    prefixes = ["", "K" if thousand == 1024 else "k", "M", "G", "T"]
    while number >= thousand * 0.9995 and len(prefixes) > 1:
        number, prefixes = number / thousand, prefixes[1:]
    return f"{number:.3g} {prefixes[0]}"


def _time(seconds: float) -> str:
    """Seconds with three digits and a unit, such as `3.21 ms`."""
    if math.isnan(seconds):
        return "–"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit * 0.9995:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"
