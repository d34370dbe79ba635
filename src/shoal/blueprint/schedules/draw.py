"""Draw a simulated schedule as text or as SVG: a row per rank, time to the right, a box as long as its action.

In text, a box begins with the number of its microbatch, its filling shows the kind of action, and dots are idle time.
With several stages per rank, odd and even stages have different fillings, which shows the second pass of a microbatch.
A forward that is one column wide shows the second pass as a letter: a is microbatch 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

from shoal.blueprint.schedules.simulate import Timeline
from shoal.blueprint.schedules.table import Action, Kind

FILLING = {Kind.F: " '", Kind.B: "━═", Kind.I: "─╌", Kind.W: "░▒"}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
IDLE = "."

WIDTH, ROW, GAP, LABEL = 960, 28, 6, 62
"""Of an SVG, in pixels: its width, a rank's height, the space between two ranks, the column of their names."""
LETTER = 7.5
"""Pixels that a digit takes at most."""

# Forward blue, backward green, input gradient teal, weight gradient amber; the second pass (`later`) is darker.
STYLE = """\
svg { --text: #1f2328; --idle: #eaeef2; --F: #54aeff; --B: #4ac26b; --I: #39c5cf; --W: #eac54f; --later: 0.62; }
@media (prefers-color-scheme: dark) {
  svg { --text: #e6edf3; --idle: #21262d; --F: #1f6feb; --B: #238636; --I: #1b7c83; --W: #9e6a03; --later: 0.55; }
}
text { fill: var(--text); font: 12px ui-sans-serif, system-ui, sans-serif; }
.idle { fill: var(--idle); } .F { fill: var(--F); } .B { fill: var(--B); } .I { fill: var(--I); } .W { fill: var(--W); }
.later { fill-opacity: var(--later); } .number { text-anchor: middle; font-size: 11px; }"""


class Box(NamedTuple):
    """An action and the seconds that it fills. The halves of a pair share its span in proportion."""

    action: Action
    start: float
    end: float


def draw(timeline: Timeline, width: int = 100) -> str:
    """Draw a line per rank and a legend, at most `width` columns wide if every action can have a column.

    >>> from shoal.blueprint.schedules.schedule_orders import make_schedule
    >>> from shoal.blueprint.schedules.simulate import StageCost, simulate
    >>> table = make_schedule("1f1b", num_ranks=2, v=1, num_microbatches=3)
    >>> print(draw(simulate(table, StageCost(forward=1, input_grad=1, weight_grad=1)), width=44))
    rank 0 │0  1  ......0━━━━━2  1━━━━━...2━━━━━
    rank 1 │...0  0━━━━━1  1━━━━━2  2━━━━━......
            0   forward   0━━ backward   . idle
    """
    labels = [f"rank {rank} │" for rank in range(timeline.table.num_ranks)]
    margin = max(map(len, labels))
    scale = _columns_per_second(timeline, width - margin)
    lines = [
        label.rjust(margin) + "".join(_columns(timeline, rank, scale)).ljust(round(timeline.total * scale), IDLE)
        for rank, label in enumerate(labels)
    ]
    return "\n".join([*lines, " " * margin + _legend(timeline, scale)])


def _columns_per_second(timeline: Timeline, columns: int) -> float:
    """The largest scale that fits; where possible one that gives the shortest action a whole number of columns."""
    lengths = [end - start for rank in timeline.spans for _, start, end in rank if end > start]
    if not lengths:
        return 1.0
    whole = math.floor(columns * min(lengths) / timeline.total + 1e-9)
    return whole / min(lengths) if whole >= 1 else columns / timeline.total


def boxes(timeline: Timeline, rank: int) -> Iterator[Box]:
    """Every action of a rank, in order."""
    for slot, start, end in timeline.spans[rank]:
        lengths = [timeline.costs[part.stage].seconds(part.kind) for part in slot.parts]
        begin = start
        for number, part in enumerate(slot.parts):
            stop = start + (end - start) * sum(lengths[: number + 1]) / (sum(lengths) or 1)
            yield Box(part, begin, stop)
            begin = stop


def _columns(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    column = 0
    for action, start, end in boxes(timeline, rank):
        yield IDLE * (round(start * scale) - column)
        column = max(column, round(start * scale))
        stop = round(end * scale)
        yield _box(action, stop - column, timeline.table.num_ranks)
        column = max(column, stop)


def _box(action: Action, width: int, num_ranks: int) -> str:
    """A number that has no room is shown by its last digits. In a single column only forwards have theirs."""
    turn = action.stage // num_ranks % 2
    if width == 1 and action.kind is Kind.F:
        return ("0123456789", "abcdefghij")[turn][action.microbatch % 10]
    if width == 1:
        return FILLING[action.kind][turn]
    return str(action.microbatch)[-width:].ljust(width, FILLING[action.kind][turn]) if width > 0 else ""


def _legend(timeline: Timeline, scale: float) -> str:
    """A box of microbatch 0 for every kind that there is, and for both turns of it."""
    table = timeline.table
    boxes: dict[Kind, dict[int, str]] = {}
    for part in (part for _, _, slot in table.ticks() for part in slot.parts):
        width = min(3, max(1, round(timeline.costs[part.stage].seconds(part.kind) * scale)))
        boxes.setdefault(part.kind, {}).setdefault(
            part.stage // table.num_ranks % 2, _box(part._replace(microbatch=0), width, table.num_ranks)
        )
    words = [
        f"{' or '.join(boxes[kind][turn] for turn in sorted(boxes[kind]))} {NAMES[kind]}"
        for kind in Kind
        if kind in boxes
    ]
    return "   ".join([*words, f"{IDLE} idle"])


def svg(timeline: Timeline, title: str) -> str:
    """Draw a bar per rank, a title such as `1f1b, 4 ranks`, and a legend. Colours follow the light or dark mode."""
    title = escape(f"{title}: bubble {timeline.bubble:.0%}")
    ranks, scale = timeline.table.num_ranks, (WIDTH - LABEL) / (timeline.total or 1)
    height = (ranks + 2) * (ROW + GAP)
    rows = [part for rank in range(ranks) for part in _bar(timeline, rank, scale)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<text x="{LABEL}" y="19" font-weight="bold">{title}</text>',
            *rows,
            *_svg_legend(timeline, (ranks + 1) * (ROW + GAP)),
            "</svg>",
            "",
        ]
    )


def _bar(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    """A rank: its name, an idle bar, and on top of it the actions."""
    y = (rank + 1) * (ROW + GAP)
    yield f'<text x="0" y="{y + 19}">rank {rank}</text>'
    yield f'<rect class="idle" x="{LABEL}" y="{y}" width="{WIDTH - LABEL}" height="{ROW}"/>'
    for action, start, end in boxes(timeline, rank):
        x, width = LABEL + start * scale, (end - start) * scale
        later = " later" if action.stage // timeline.table.num_ranks % 2 else ""
        drawn = max(0.0, width - 1)  # a pixel between two neighbours
        yield f'<rect class="{action.kind.name}{later}" x="{x:.1f}" y="{y}" width="{drawn:.1f}" height="{ROW}" rx="2"/>'
        if len(str(action.microbatch)) * LETTER <= drawn:
            yield f'<text class="number" x="{x + drawn / 2:.1f}" y="{y + 18}">{action.microbatch}</text>'


def _svg_legend(timeline: Timeline, y: int) -> Iterator[str]:
    """A square and a name for every kind of action, then for idle time and for the second pass."""
    used = {part.kind for _, _, slot in timeline.table.ticks() for part in slot.parts}
    words = [(kind.name, NAMES[kind]) for kind in Kind if kind in used]
    if timeline.table.num_stages > timeline.table.num_ranks:
        words.append((f"{words[0][0]} later", "the same on the rank's second stage"))
    x = float(LABEL)
    for colour, name in [*words, ("idle", "idle")]:
        yield f'<rect class="{colour}" x="{x:.0f}" y="{y + 8}" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 18:.0f}" y="{y + 18}">{name}</text>'
        x += 18 + LETTER * len(name) + 18
