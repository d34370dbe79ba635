"""`shoal presets`: list the models, clusters and recipes that other verbs accept."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.cli.options import parse_options
from shoal.cli.reports.console import WIDTH, show

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Presets:
    """List the models, clusters and recipes that other verbs accept, with their sizes.

    shoal presets
    """

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Print the lists; returns 0."""
    options = parse_options(Presets, arguments, prog="shoal presets")
    from shoal.predict.presets.catalogue import presets

    found = presets()
    if options.json:
        print(json.dumps(found))
    else:
        show(lambda console: render(console, found), sys.stdout, width=WIDTH)
    return 0


def render(console: Console, found: dict[str, list[dict[str, Any]]]) -> None:
    """Print one table for each kind."""
    rows = [[one["name"], f"{one['billions']:,.2f}", one["about"]] for one in found["models"]]
    _table(console, "models, for `shoal plan MODEL`", ["name", "B parameters", "shape"], rows)
    rows = [[f"{one['name']}:{one['per_node']}", f"{one['memory_gib']:g}", one["about"]] for one in found["clusters"]]
    _table(console, "clusters, for `shoal plan --cluster NAME:GPUSxNODES`", ["name", "GiB a device", "links"], rows)
    rows = [[one["name"], ", ".join(one["presets"])] for one in found["trained"]]
    _table(console, "models that train here, for --model.name and --model.preset", ["name", "presets"], rows)
    if found["recipes"]:
        rows = [[one["path"], one["about"]] for one in found["recipes"]]
        _table(console, "recipes, for `shoal train RECIPE`", ["path", ""], rows)


def _table(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        is_number = len(columns) == 3 and number == 1
        table.add_column(column, justify="right" if is_number else "left", no_wrap=number < len(columns) - 1)
    for row in rows:
        table.add_row(*row)
    console.print(f"[bold]{title}[/bold]", highlight=False)
    console.print(table, highlight=False)
    console.print()
