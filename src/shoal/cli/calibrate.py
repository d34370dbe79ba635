"""`shoal calibrate`: measure this machine in about a minute, and save it as a cluster for the planner."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.cli.options import parse_options
from shoal.comm.rendezvous.launcher_environment import read_environment
from shoal.errors import Problem, ShoalError, raise_if
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import here_file, is_measured_here

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.bench.fit_cluster import Readings


LONGER = 1.3
"""A factor of `--seconds` beyond which the report says why it took longer."""


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this machine: matrix products, attention, memory, kernel launches, a transformer block, and messages
    between ranks. Use the result with `shoal plan --cluster here`, or --cluster FILE.

    shoal calibrate --nproc 2
    """

    out: Path | None = None
    """The YAML file to write. None: ~/.config/shoal/here.yaml, which `--cluster here` reads."""

    nproc: int | None = None
    """Ranks that measure at the same time. None: one for each GPU; on the CPU two, to measure messages."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs, if there are any."""

    seconds: float = 60.0
    """How long to measure. Shorter is less exact; everything is measured at least once."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Measure, write the file and print the results. The time counts from here: to import torch takes seconds."""
    began = time.monotonic()
    options = parse_options(Calibrate, arguments, prog="shoal calibrate")
    raise_if(_problems(options))
    path = _writable(options.out)
    out = sys.stdout
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        from shoal.bench.calibrate import calibrate
        from shoal.bench.fit_cluster import cluster_of

        if not sys.stderr.isatty() and not options.json:
            print(f"measuring this machine for about {options.seconds:.0f} s", file=sys.stderr)
        found = calibrate(
            nproc=options.nproc, device=options.device, seconds=options.seconds, quiet=options.json, began=began
        )
        cluster = cluster_of(found)
    path.write_text(file_text(found, cluster))
    if options.json:
        print(json.dumps(_mapping(found, cluster, path)), file=out)
    else:
        _show(found, cluster, path, options.seconds)
    return 0


def _problems(options: Calibrate) -> list[Problem]:
    problems = []
    place = read_environment(os.environ)
    if place is not None and place.world_size > 1:
        what = f"calibrate must be started as one process, got {place.world_size} from {place.source}"
        problems.append(
            Problem("R033", what, f"shoal calibrate --nproc {place.local_world_size}, without {place.source}")
        )
    if options.nproc is not None and options.nproc < 1:
        problems.append(Problem("R034", f"--nproc must be 1 or more, got {options.nproc}", "--nproc 1"))
    if not 0 < options.seconds < float("inf"):
        problems.append(Problem("R035", f"--seconds must be above 0, got {options.seconds}", "--seconds 60"))
    return problems


def _writable(out: Path | None) -> Path:
    """The file to write; raises if that is impossible, before the measurement takes a minute."""
    path = out or here_file()
    try:
        if out is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        is_writable = (
            path.parent.is_dir()
            and (path.is_file() or not path.exists())
            and os.access(path if path.exists() else path.parent, os.W_OK)
        )
    except OSError:
        is_writable = False
    if not is_writable:
        raise ShoalError(f"{path} cannot be written", fix="--out cluster.yaml, in an existing folder", code="R037")
    if path.suffix not in (".yaml", ".yml"):
        raise ShoalError(f"--out must end in .yaml, got {path}", fix=f"--out {path.with_suffix('.yaml')}", code="R037")
    return path


# ---- the file -------------------------------------------------------------------------------------------------------


def file_text(found: Readings, cluster: Cluster) -> str:
    """The cluster as YAML, with the measurements above it as comments."""
    lines = [f"{found.sentence()}, {found.date}. Fitted to these measurements:", ""]
    for each in found.readings:
        size = " x ".join(map(str, each.size))
        rate = f"{_figure(each.rate)}{'FLOP/s' if each.flops else 'B/s'}" if each.flops or each.traffic else ""
        lines.append(f"{each.what:<14} {size:<20} {each.precision:<5} {each.seconds * 1e3:10.3f} ms  {rate}".rstrip())
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + cluster.to_yaml()


def _mapping(found: Readings, cluster: Cluster, path: Path) -> dict[str, Any]:
    return {
        "file": str(path),
        "cluster": cluster.to_mapping(),
        "measured": found.to_mapping(),
        "errors": _errors(found, cluster),
    }


def _errors(found: Readings, cluster: Cluster) -> dict[str, float]:
    """The mean error of the fits."""
    from shoal.bench.fit_cluster import error_of_messages, error_of_products

    errors = {word: error_of_products(found, cluster.device, word) for word in found.precisions}
    return errors | ({"messages": error_of_messages(found, cluster.inside)} if found.of_messages() else {})


# ---- the tables -----------------------------------------------------------------------------------------------------


def _show(found: Readings, cluster: Cluster, path: Path, seconds: float) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout)
    with console.capture() as drawn:
        console.print(products_table(found, cluster))
        if found.of_messages():
            console.print(messages_table(found))
        console.print(other_table(found, cluster))
    print(drawn.get(), end="")
    print(f"measured in {found.took:.0f} s and written to {path}; use it with --cluster {_cluster_option(path)}")
    if note := _why_longer(found.took, seconds):
        print(note)


def _why_longer(took: float, seconds: float) -> str:
    """Why the measurement took longer than `--seconds`, if it did."""
    if took <= LONGER * seconds:
        return ""
    return f"--seconds {seconds:g} is too short for this machine: measuring everything once took {took:.0f} s"


def products_table(found: Readings, cluster: Cluster) -> Table:
    """A row for each shape, a column for each precision."""
    from rich.table import Table

    products, device, errors = found.of("product"), cluster.device, _errors(found, cluster)
    prefix, unit = ("T", 1e12) if max(each.rate for each in products) >= 1e12 else ("G", 1e9)
    title = f"{found.num_ranks} x {found.device}: matrix products, {prefix}FLOP/s, measured"
    table = Table(title=title, title_justify="left")
    table.add_column("M x N x K", no_wrap=True)
    for word in found.precisions:
        table.add_column(word, justify="right")
    rates = {(each.size, each.precision): f"{each.rate / unit:,.1f}" for each in products}
    sizes = list(dict.fromkeys(each.size for each in products))
    for size in sizes:
        row = [rates.get((size, word), "") for word in found.precisions]
        table.add_row(" x ".join(map(str, size)), *row, end_section=size == sizes[-1])
    table.add_row("fitted", *(f"{device.achievable[word] / unit:,.1f}" for word in found.precisions))
    table.add_row("mean error", *(f"{errors[word]:.1%}" for word in found.precisions))
    return table


def other_table(found: Readings, cluster: Cluster) -> Table:
    """Attention, blocks, memory and the link."""
    from rich.table import Table

    table = Table(title="attention, blocks, memory and link", title_justify="left", show_header=False)
    for name, value in _rows(found, cluster):
        table.add_row(name, value)
    return table


def _rows(found: Readings, cluster: Cluster) -> list[tuple[str, str]]:
    device = cluster.device
    rows = []
    for each in found.of("attention"):
        rows.append(
            (f"attention over {each.size[0]:,} tokens, {each.precision}", f"{_figure(each.rate)}FLOP/s, measured")
        )
    for each in found.of("block"):
        name = f"a block of {each.size[1]} features, {each.size[0]:,} tokens"
        rows.append((name, f"{each.seconds * 1e3:.2f} ms forward and backward, {_figure(each.rate)}FLOP/s, measured"))
    rows += [
        ("kernel launches of a block", f"{found.of('launch')[0].seconds * 1e3:.2f} ms forward and backward, measured"),
        ("memory copy", f"{_figure(device.bandwidth)}B/s, measured"),
        ("element-wise operations", f"{_figure(device.bandwidth * device.streaming)}B/s, measured"),
        (
            "memory of a rank",
            f"{device.memory / 2**30:.1f} GiB, of which {device.context / 2**30:.2f} GiB are not available for tensors",
        ),
    ]
    link = cluster.inside
    numbers = f"{link.base * 1e6:.0f} µs, {link.latency * 1e6:.0f} µs a step, {_figure(link.bandwidth)}B/s"
    numbers += f", of which gathers reach {link.gathering:.0%}" if found.of_messages() else ""
    if not found.of_messages():
        return [*rows, ("link between ranks", f"{numbers}; from a preset, not measured")]
    return [*rows, ("link between ranks, fitted", f"{numbers}; mean error {_errors(found, cluster)['messages']:.0%}")]


def messages_table(found: Readings) -> Table:
    """A row for each collective, a column for each size."""
    from rich.table import Table

    sizes = list(dict.fromkeys(each.size[0] for each in found.of_messages()))
    table = Table(title=f"messages between {found.num_ranks} ranks, measured", title_justify="left")
    table.add_column("collective")
    for size in sizes:
        table.add_column(f"{_figure(size, 1024)}iB", justify="right")
    times = {(each.what, each.size[0]): f"{each.seconds * 1e3:.3f} ms" for each in found.of_messages()}
    for what in dict.fromkeys(each.what for each in found.of_messages()):
        table.add_row(what, *(times[what, size] for size in sizes))
    return table


def _figure(number: float, thousand: int = 1000) -> str:
    """A number with a prefix, `31.2 G`, without its unit."""
    prefixes = ["", "k" if thousand == 1000 else "K", "M", "G", "T", "P"]
    while number >= thousand and len(prefixes) > 1:
        number, prefixes = number / thousand, prefixes[1:]
    return f"{number:.3g} {prefixes[0]}"


def _cluster_option(path: Path) -> str:
    return "here" if is_measured_here() and path == here_file() else str(path)
