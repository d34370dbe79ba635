"""The page of a run, or of several side by side, as one HTML file that needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.files import open_regular
from shoal.pages import curves
from shoal.pages.html import page, section, text
from shoal.pages.run.read_run import RunRecord
from shoal.pages.sections import compare, layout, marks, origin, profile, time_spent, top

BUTTONS = """\
<div class="controls" hidden><span class="group" role="group" aria-label="horizontal axis">\
<button type="button" data-axis="step" aria-pressed="true">steps</button>{counted}\
<button type="button" data-axis="seconds" aria-pressed="false">time</button></span>\
<span class="group"><button type="button" data-log aria-pressed="false">log scale</button>\
<button type="button" data-smooth aria-pressed="false">smooth</button></span>\
<span class="group"><button type="button" data-reset>reset zoom</button></span></div>"""
COUNTED = '<button type="button" data-axis="tokens" aria-pressed="false">{unit}</button>'

NAMED = "<section id="
NOTE = (
    "Drag over a chart to zoom into all of them; a double click shows everything again. Dashed lines are failures (red)"
    " and restarts; short ticks are saves."
)


def make_report(runs: Sequence[RunRecord]) -> str:
    """The page."""
    body, found = report_body(runs)
    return page(f"{title_of(runs)} – shoal report", top.header(runs) + body, found)


def title_of(runs: Sequence[RunRecord]) -> str:
    """The names of the runs."""
    return " · ".join(run.name[:80] for run in runs)


def report_body(runs: Sequence[RunRecord]) -> tuple[str, dict[str, Any]]:
    """The page without its header, and the data of its charts."""
    found = curves.payload(runs)
    for each, run in zip(found["runs"], runs, strict=True):
        each["marks"] = marks.drawn(run)
    drawn = curves.charts(runs, found)
    buttons = BUTTONS.format(counted=COUNTED.format(unit=found["unit"]) if found["unit"] else "")
    drawn = section("Curves", buttons + drawn, name="curves", note=NOTE) if drawn else ""
    return (_one(runs[0], drawn) if len(runs) == 1 else _several(runs, drawn)), found


def _one(run: RunRecord, drawn: str) -> str:
    parts = (
        top.verdict(run), top.look_next(run), drawn, time_spent.time_spent(run), profile.profile(run),
        time_spent.ranks(run), marks.history(run), origin.predicted(run), layout.layout(run), origin.origin(run),
    )  # fmt: skip
    return "".join(parts)


def _several(runs: Sequence[RunRecord], drawn: str) -> str:
    parts = [compare.figures(runs), drawn, compare.profiles(runs), compare.differences(runs)]
    for run in runs:
        name = section(f"<bdi>{text(run.name, 80)}</bdi>", top.verdict(run) + top.look_next(run))
        own = (time_spent.time_spent(run), profile.profile(run), time_spent.ranks(run), marks.history(run),
               layout.layout(run), origin.origin(run))  # fmt: skip
        # A name stands for one section of a page, which here has one of each run.
        parts.append(f'<div class="run">{name}{"".join(own)}</div>'.replace(NAMED, "<section data-part="))
    return "".join(parts)


def write_page(path: Path, content: str, option: str = "-o") -> None:
    """Write the page at once: a reader sees the old one or the new one. A link in its place is replaced. `option`: of
    the command, which names another file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(open_regular(part, flags), "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        what = f"the page {str(path)!r} cannot be written: {error.strerror}"
        raise ShoalError(what, fix=f"{option} ELSEWHERE.html", code="R061") from None
