"""`shoal ls [DIR]`: list the runs below a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shoal.cli.options import parse_options
from shoal.cli.reports.console import WIDTH, show
from shoal.observe.jsonable import jsonable
from shoal.pages.run.find_runs import RunLine, find_runs
from shoal.pages.words import duration, large, loss_figure, printable

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"running": "cyan", "ended": "green", "stopped": "yellow", "silent": "yellow", "dead": "red"}


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List the runs in a folder and below it, the newest first: running (a process holds its lock), ended, stopped by a
    signal, dead, or silent (of another host, where it may still run).

    shoal ls runs
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = Path(".")
    """Where to look."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Print the list; returns 0."""
    options = parse_options(Ls, arguments, prog="shoal ls")
    found = find_runs(options.folder)
    if options.json:
        print(json.dumps({"runs": [jsonable(asdict(line)) for line in found]}, allow_nan=False))
    elif found:
        show(lambda console: _draw(console, found), sys.stdout, width=WIDTH)
    else:
        print(f"no runs in {options.folder} and below", file=sys.stderr)
    return 0


def _draw(console: Console, found: list[RunLine]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("run", "state", "step", "loss", "speed", "last write", "host"):
        table.add_column(name, justify="right" if name in ("step", "loss", "speed") else "left", no_wrap=name != "run")
    for line in found:
        speed = f"{large(line.tokens_per_s)}/s" if line.tokens_per_s is not None else "–"
        cells = (f"{line.step:,}", loss_figure(line.loss), speed, f"{duration(line.age_seconds)} ago", line.host)
        # A name of a folder may have control characters: they must not reach the terminal.
        path, state = Text(printable(line.path)), Text(line.state, STYLES[line.state])
        table.add_row(path, state, *(Text(printable(cell)) for cell in cells))
    console.print(table)
