"""The page of `shoal bench comm`: bandwidth over size, and every collective as a drawing of its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.blueprint.collectives.algorithms import ALGORITHMS, KINDS
from shoal.blueprint.collectives.steps import steps
from shoal.errors import ShoalError
from shoal.pages.bench.chart import Line, chart, log_axis
from shoal.pages.bench.frame import Found, bench_page, keys, verdict
from shoal.pages.bench.messages import drawing
from shoal.pages.html import details, section, table
from shoal.pages.words import figure, percent

NOTE = "Bytes of the tensor over the time of the slowest rank: dots are measured, dashed lines fitted (α and β)."
BUS = "The bus bandwidth is that of the bytes on the link, and so what is compared with the link."
MESSAGES = (
    "Each row is a round, each arrow a message. A rank adds what an orange arrow brings, and keeps what a blue one"
    " brings. gloo's own collectives have no such list."
)
ELEMENTS = 840
"""Of the drawn tensor: divisible by up to 8 ranks."""


def make_page(found: Found) -> str:
    """The page, from the JSON of the benchmark."""
    parts = [_verdict(found)]
    for tier in dict.fromkeys(row["tier"] for row in found["timings"]):
        for kind in KINDS:
            rows = [row for row in found["timings"] if (row["tier"], row["kind"]) == (tier, kind)]
            if rows:
                parts.append(_collective(found, rows, f"{kind} {tier} hosts"))
    parts.append(_messages(found))
    title = f"{found['ranks']} ranks, {found['backend']}"
    return bench_page("comm", title, found, parts)


def _verdict(found: Found) -> str:
    facts = [
        (f"link {tier} hosts", f"{size_of(rates['together'])}B/s", f"alone {size_of(rates['pair'])}B/s")
        for tier, rates in found["link_bandwidth"].items()
    ]
    check = found["validation"]
    if check["number"]:
        facts.append(("predicted within", percent(check["median"]), f"median of {check['number']} sizes not fitted"))
    headline = f"{len(found['timings'])} timings of {found['ranks']} ranks on {found['hosts']} host(s)"
    return verdict(headline, [], facts)


def _collective(found: Found, rows: Sequence[Found], title: str) -> str:
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    fits = {(each["tier"], each["kind"], each["algorithm"]): each for each in found["fits"]}
    lines = []
    for name in names:
        own = [row for row in rows if row["algorithm"] == name]
        points = [(row["bytes"], row["bandwidth"], row["bandwidth"], row["bandwidth"]) for row in own]
        fit = fits.get((own[0]["tier"], own[0]["kind"], name))
        lines.append(Line(name, points, list(_fitted(own, fit))))
    xs = [row["bytes"] for row in rows]
    ys = [row["bandwidth"] for row in rows] + [y for line in lines for _, y in line.dashed]
    x = log_axis(xs, lambda size: f"{size_of(size, 1024)}B", 4.0)
    y = log_axis(ys, lambda rate: f"{size_of(rate)}B/s", 10.0)
    drawn = chart(lines, x, y, title)
    head = ("size", "algorithm", "time", "bandwidth", "bus bandwidth", "of the link")
    figures = f'<p class="note">{BUS}</p>{table(head, map(_cells, rows), kind="bench")}'
    figures = details("figures; * is the fastest of its size", figures)
    return section(title.replace("_", "-"), drawn + keys(names, dashed="fitted") + figures, note=NOTE)


def _cells(row: Found) -> tuple[str, ...]:
    return (
        f"{size_of(row['bytes'], 1024)}B",
        f"{row['algorithm']}{' *' * bool(row['best'])}",
        f"{row['seconds'] * 1e3:.3f} ms",
        f"{size_of(row['bandwidth'])}B/s",
        f"{size_of(row['bus_bandwidth'])}B/s",
        percent(row["link_fraction"]),
    )


def _fitted(rows: Sequence[Found], fit: Found | None) -> Iterator[tuple[float, float]]:
    for row in rows if fit is not None else ():
        assert fit is not None
        seconds = row["rounds"] * fit["alpha"] + row["critical_path_bytes"] * fit["beta"]
        if seconds > 0:
            yield row["bytes"], row["bytes"] / seconds


def _messages(found: Found) -> str:
    pairs = dict.fromkeys((row["kind"], row["algorithm"]) for row in found["timings"])
    parts = []
    for kind, algorithm in pairs:
        if kind in KINDS and algorithm in ALGORITHMS and algorithm != "hierarchical":
            try:
                drawn = drawing(steps(kind, algorithm, found["ranks"], ELEMENTS))
            except ShoalError:
                continue
            parts.append(details(f"{algorithm} {kind}", f"<div>{drawn}</div>") if drawn else "")
    return section("Messages, round by round", "".join(parts), name="messages", note=MESSAGES)


def size_of(number: float, thousand: int = 1000) -> str:
    """A number with a prefix, without its unit."""
    prefixes = ["", "K" if thousand == 1024 else "k", "M", "G", "T"]
    while number >= thousand * 0.9995 and len(prefixes) > 1:
        number, prefixes = number / thousand, prefixes[1:]
    return f"{figure(number, 3)} {prefixes[0]}"
