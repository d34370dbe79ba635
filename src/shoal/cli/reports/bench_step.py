"""The table of `shoal bench step`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shoal.cli.reports.bench_scale import machine, mib, ms

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("change", "step", "time ratio", "range", "predicted", "peak", "memory ratio", "loss", "worth it")


def render(console: Console, found: Mapping[str, Any]) -> None:
    """Print a row for each change, and the settings to paste."""
    from rich.table import Table

    table = Table(title=f"{found['model']}, {found['plan']}: each change against the recipe", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("change", "worth it") else "right")
    for row in found["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    for line in sentences(found):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a row; dashes where there is no figure."""
    if "ratio" not in row:
        return [row["name"], *["–"] * (len(COLUMNS) - 2), "not measured"]
    ratio = row["ratio"]
    return [
        row["name"],
        ms(row["step_seconds"]["median"]),
        f"{ratio['median']:.2f}",
        f"{ratio['low']:.2f} to {ratio['high']:.2f}",
        f"{row['predicted_ratio']:.2f}" if "predicted_ratio" in row else "–",
        mib(row["peak_bytes"]),
        f"{row['peak_ratio']:.2f}",
        f"{row['loss']:.5f}",
        worth(row),
    ]


def worth(row: Mapping[str, Any]) -> str:
    """Why a change is worth it; empty: it is not."""
    return ", ".join([*["faster"] * bool(row["is_faster"]), *["less memory"] * bool(row["is_smaller"])])


def sentences(found: Mapping[str, Any]) -> Iterator[str]:
    """Reasons, notes, and the settings to paste."""
    for row in found["rows"]:
        if row["reason"]:
            yield f"{row['name']}: {row['reason']}"
        elif row["note"]:
            yield f"{row['name']}: {row['note']}"
    if found["paste"]:
        yield f"fastest: {found['best']}. Paste: {' '.join(found['paste'])}"
    else:
        yield "no change was faster in every round: the recipe is fine as it is"
    for row in found["rows"]:
        if row.get("is_smaller"):
            yield f"less memory: {row['name']}. Paste: {' '.join(row['overrides'])}"
    yield machine(found)
