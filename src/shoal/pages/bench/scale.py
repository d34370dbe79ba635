"""The page of `shoal bench scale`: efficiency over ranks, predicted as dashed lines, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.pages.bench.chart import Axis, Line, chart, linear_axis
from shoal.pages.bench.frame import Found, bench_page, keys, machine, not_measured, verdict
from shoal.pages.html import section, table
from shoal.pages.words import duration, figure, percent

TITLES = {
    "strong": ("Strong scaling", "The same batch on every number of ranks. A perfect step takes 1/n of the time."),
    "weak": ("Weak scaling", "Every rank has the same number of samples. A perfect step takes as long as on one rank."),
}
HEAD = ("plan", "ranks", "batch", "step", "range", "predicted", "error", "efficiency", "predicted", "peak", "predicted",
        "loss")  # fmt: skip


def make_page(found: Found) -> str:
    """The page, from the JSON of the benchmark."""
    parts = [_verdict(found)]
    for mode, (title, note) in TITLES.items():
        rows = [row for row in found["rows"] if row["mode"] == mode]
        if rows:
            drawn = _efficiency(rows) + table(HEAD, map(_cells, rows), kind="bench")
            parts.append(section(title, drawn, name=mode, note=note))
    parts += [_alone(found), _losses(found), not_measured(_reasons(found)), machine(found)]
    return bench_page("scale", found["model"], found, parts)


def _verdict(found: Found) -> str:
    rows = [row for row in found["rows"] if "efficiency" in row]
    strong = [row for row in rows if row["mode"] == "strong"] or rows
    best = max(strong, key=lambda row: row["efficiency"]["median"] * row["ranks"], default=None)
    equal = all(each["are_equal"] for each in found["losses"])
    facts = []
    if best is not None:
        low, high = best["efficiency"]["low"], best["efficiency"]["high"]
        name = f"{best['plan']} on {best['ranks']} ranks, {best['mode']}"
        facts.append(("its efficiency", percent(best["efficiency"]["median"]), name))
        facts.append(("its range", f"{percent(low)} to {percent(high)}", f"over {found['rounds']} rounds"))
    for key, name in (("step_error", "step predicted within"), ("peak_error", "memory predicted within")):
        if (error := found["prediction"].get(key)) is not None:
            facts.append((name, percent(error["worst"]), f"median {percent(error['median'])}, {error['rows']} rows"))
    is_loss = any(not each["largest"] <= each["tolerance"] for each in found["losses"])
    apart = "Plans have different losses" if is_loss else "Plans have different gradients"
    headline = "Every plan computes the same losses" if equal else apart
    if best is not None and equal:
        headline = f"{best['plan']} makes a step {figure(best['speedup'], 3)} times as fast on {best['ranks']} ranks"
        headline = headline if best["mode"] == "strong" else f"{best['plan']} keeps {facts[0][1]} of one rank's speed"
    return verdict(
        headline, list(dict.fromkeys(row["note"] for row in found["rows"] if row["note"])), facts, is_good=equal
    )


def _efficiency(rows: Sequence[Found]) -> str:
    plans = list(dict.fromkeys(row["plan"] for row in rows if "efficiency" in row))
    if not plans:
        return ""
    lines = []
    for plan in plans:
        own = [row for row in rows if row["plan"] == plan and "efficiency" in row]
        points = [(float(row["ranks"]), *(row["efficiency"][key] for key in ("median", "low", "high"))) for row in own]
        dashed = [(float(row["ranks"]), row["predicted_efficiency"]) for row in own if "predicted_efficiency" in row]
        lines.append(Line(plan, [(1.0, 1.0, 1.0, 1.0), *points], [(1.0, 1.0), *dashed]))
    numbers = sorted({point[0] for line in lines for point in line.points})
    high = max(max(point[3] for point in line.points) for line in lines)
    x = Axis(1.0, max(numbers), numbers, lambda value: f"{value:g} rank{'s' * (value > 1)}")
    return chart(lines, x, linear_axis(max(1.0, high), percent), "efficiency over ranks") + keys(plans)


def _cells(row: Found) -> list[str]:
    name = "one rank, the base" if row["is_base"] else row["plan"]
    first = [name, row["ranks"], row["global_batch"]]
    if "step_seconds" not in row:
        return [*first, *["–"] * (len(HEAD) - 3)]
    step, predicted = row["step_seconds"], row.get("predicted") or {}
    return [
        *first,
        duration(step["median"]),
        f"{duration(step['low'])} to {duration(step['high'])}",
        duration(predicted.get("seconds")),
        _signed(row.get("step_error")),
        percent(row["efficiency"]["median"]) if "efficiency" in row else "–",
        percent(row.get("predicted_efficiency")),
        mib(row["peak_bytes"]),
        mib(predicted.get("peak")),
        figure(row["loss"], 6),
    ]


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.0f} %"


def mib(size: float | None) -> str:
    """Bytes in MiB.

    >>> mib(300 * 2**20), mib(2**18), mib(None)
    ('300 MiB', '0.25 MiB', '–')
    """
    if size is None:
        return "–"
    return f"{size / 2**20:,.0f} MiB" if size >= 10 * 2**20 or not size else f"{size / 2**20:.2f} MiB"


def _alone(found: Found) -> str:
    rows = [
        (each["ranks"], each.get("reason") or duration(each["step_seconds"]["median"]))
        for each in found.get("alone", ())
    ]
    note = (
        "Ranks that compute at once and send nothing. Predictions begin with these steps and with the base; rows"
        " without such a step are not predicted."
    )
    return section("Computation alone", table(("ranks", "step"), rows), name="alone", note=note) if rows else ""


def _losses(found: Found) -> str:
    rows = []
    for each in found["losses"]:
        for name, value in each["differences"].items():
            of_norm = each.get("norm_differences", {}).get(name)  # older results have none
            rows.append((name, each["compared_with"], *(figure(x, 2) for x in (value, of_norm, each["tolerance"]))))
    head = ("plan", "compared with", "largest relative difference", "of the gradients' norm", "rounding explains")
    note = "The same batch gives the same losses and gradients under every plan, up to rounding."
    return section("Losses", table(head, rows), name="losses", note=note)


def _reasons(found: Found) -> Iterator[tuple[str, str]]:
    seen = dict.fromkeys((row["plan"], row["ranks"], row["reason"]) for row in found["rows"] if row["reason"])
    for plan, ranks, reason in seen:
        yield f"{plan} on {ranks} ranks", reason
