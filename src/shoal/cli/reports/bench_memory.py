"""The table of `shoal bench memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.cli.reports.bench_scale import machine, mib, percent, signed

if TYPE_CHECKING:
    from rich.console import Console

CAUSES = ("parameters", "gradients", "optimizer", "other", "process", "total")


def render(console: Console, found: Mapping[str, Any]) -> None:
    """Print a line of measured and a line of predicted bytes for each plan."""
    from rich.table import Table

    table = Table(title=f"{found['model']}: peak memory of the fullest rank", title_justify="left")
    for name in ("plan", "ranks", "", *CAUSES, "error"):
        table.add_column(name, justify="left" if name in ("plan", "") else "right")
    for row in found["rows"]:
        if "measured" not in row:
            continue
        measured, predicted = row["measured"], row["predicted"]
        table.add_row(row["plan"], str(row["ranks"]), "measured", *(mib(measured[cause]) for cause in CAUSES))
        if predicted is not None:
            cells = (mib(predicted[cause]) for cause in CAUSES)
            table.add_row("", "", "predicted", *cells, signed(row["error"]), end_section=True)
    console.print(table)
    for row in found["rows"]:
        if row["reason"]:
            console.print(f"{row['plan']} on {row['ranks']} ranks: {row['reason']}", soft_wrap=True, markup=False)
    console.print("parameters, gradients and optimizer are counted from tensors; other is the rest of the peak")
    if found["worst_error"] is not None:
        console.print(f"predicted peaks are off by {percent(found['worst_error'])} at worst", highlight=False)
    console.print(machine(found), soft_wrap=True, highlight=False, markup=False)
