"""The page of `shoal bench memory`: bars by cause, measured above predicted, for every plan."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.pages.bar_rows import BarRow, bar_rows
from shoal.pages.bench.frame import Found, bench_page, machine, not_measured, verdict
from shoal.pages.bench.scale import mib
from shoal.pages.html import section, table
from shoal.pages.words import percent

CAUSES = ("parameters", "gradients", "optimizer", "other", "process")
NOTE = (
    "Bytes of the fullest rank at its fullest moment. Parameters, gradients and optimizer state are counted from"
    " tensors; other is the rest of the peak."
)


def make_page(found: Found) -> str:
    """The page, from the JSON of the benchmark."""
    rows = [row for row in found["rows"] if "measured" in row]
    bars: list[BarRow] = []
    for row in rows:
        for what, name in (("measured", f"{row['plan']}, {row['ranks']} ranks"), ("predicted", "predicted")):
            if row[what] is not None:
                bars.append(BarRow(name, [row[what][cause] for cause in CAUSES], (mib(row[what]["total"]),)))
    drawn = bar_rows(("plan", "by cause", "total"), CAUSES, bars)
    head = ("plan", "ranks", "", *CAUSES, "total", "error")
    shown = [
        _verdict(found, rows),
        section("Memory by cause", drawn, name="memory", note=NOTE),
        section("Figures", table(head, _lines(rows), kind="bench"), name="figures"),
        not_measured(
            (f"{row['plan']} on {row['ranks']} ranks", row["reason"]) for row in found["rows"] if row["reason"]
        ),
        machine(found),
    ]
    return bench_page("memory", found["model"], found, shown)


def _verdict(found: Found, rows: list[Found]) -> str:
    least = min(rows, key=lambda row: row["measured"]["total"])
    most = max(rows, key=lambda row: row["measured"]["total"])
    facts = [
        ("least", mib(least["measured"]["total"]), f"{least['plan']} on {least['ranks']} ranks"),
        ("most", mib(most["measured"]["total"]), f"{most['plan']} on {most['ranks']} ranks"),
    ]
    if found["worst_error"] is not None:
        facts.append(("predicted within", percent(found["worst_error"]), "of every measured peak"))
    return verdict(f"{least['plan']} needs the least memory", [], facts)


def _lines(rows: list[Found]) -> Iterator[list[str]]:
    for row in rows:
        for what in ("measured", "predicted"):
            if row[what] is not None:
                cells = [mib(row[what][cause]) for cause in (*CAUSES, "total")]
                error = f"{100 * row['error']:+.0f} %" if what == "predicted" else ""
                yield [row["plan"] if what == "measured" else "", str(row["ranks"]), what, *cells, error]
