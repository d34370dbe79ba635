"""The page of `shoal bench step`: the time of every change against the recipe, and the settings to paste."""

from __future__ import annotations

from shoal.pages.bench.bars import ratio_bars
from shoal.pages.bench.frame import Found, bench_page, machine, not_measured, verdict
from shoal.pages.bench.scale import mib
from shoal.pages.html import section, table, text
from shoal.pages.words import duration, figure

NOTE = (
    "The time of a step over the time of the recipe's, round by round. The thin line is the range over all rounds, the"
    " upright mark the prediction; left of the line at 1 is faster."
)
HEAD = ("change", "step", "time ratio", "range", "predicted", "peak", "memory ratio", "loss", "to paste")


def make_page(found: Found) -> str:
    """The page, from the JSON of the benchmark."""
    rows = [row for row in found["rows"] if "ratio" in row]
    bars = [
        (row["name"], *(row["ratio"][key] for key in ("median", "low", "high")), row.get("predicted_ratio"))
        for row in rows
    ]
    parts = [
        _verdict(found),
        section("Time", ratio_bars(bars, "time ratios"), name="time", note=NOTE),
        section("Figures", table(HEAD, map(_cells, rows), kind="bench"), name="figures"),
        not_measured((row["name"], row["reason"]) for row in found["rows"] if row["reason"]),
        machine(found),
    ]
    return bench_page("step", f"{found['model']}, {found['plan']}", found, parts)


def _verdict(found: Found) -> str:
    best = next((row for row in found["rows"] if row["name"] == found["best"]), None)
    smaller = [row["name"] for row in found["rows"] if row.get("is_smaller")]
    if best is None:
        return verdict("No change was faster in every round", [_saved(smaller)], [])
    of = "times the recipe's"
    facts = [("step", figure(best["ratio"]["median"], 3), of), ("memory", figure(best["peak_ratio"], 3), of)]
    paste = section("Paste", f"<p><code>{text(' '.join(found['paste']))}</code></p>", name="paste")
    return verdict(f"{best['name']} is faster", [_saved(smaller)], facts) + paste


def _saved(names: list[str]) -> str:
    return f"Less memory for little time: {', '.join(names)}" if names else ""


def _cells(row: Found) -> list[str]:
    ratio = row["ratio"]
    return [
        row["name"],
        duration(row["step_seconds"]["median"]),
        f"{ratio['median']:.2f}",
        f"{ratio['low']:.2f} to {ratio['high']:.2f}",
        f"{row['predicted_ratio']:.2f}" if "predicted_ratio" in row else "–",
        mib(row["peak_bytes"]),
        f"{row['peak_ratio']:.2f}",
        figure(row["loss"], 6),
        " ".join(row["overrides"]),
    ]
