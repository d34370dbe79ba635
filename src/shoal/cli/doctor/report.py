"""Print the findings of `shoal doctor`, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.doctor.finding import Finding, Level, by_severity
from shoal.pages.words import printable

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {
    Level.FAIL: ("✗", "bold red"),
    Level.WARNING: ("!", "yellow"),
    Level.HINT: ("·", "cyan"),
    Level.OK: ("✓", "green"),
}


def render(console: Console, title: str, findings: Sequence[Finding], seconds: float) -> None:
    """Print a line for each finding, its fix below it, and one line with the result."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for overflow in ("ignore", "ignore", "fold"):
        table.add_column(no_wrap=overflow == "ignore", overflow="fold")
    for each in by_severity(findings):
        sign, style = STYLES[each.level]
        # Evidence quotes files of runs and names of hosts, which may have control characters.
        text = Text(_lines(f"{each.host}: {each.evidence}" if each.host else each.evidence))
        if each.fix:
            text.append(f"\nfix: {_lines(each.fix)}", style="bold" if each.level is Level.FAIL else "dim")
        table.add_row(Text(f"{sign} {each.level.value}", style=style), each.check, text)
    console.print(Text(printable(title), style="bold"), highlight=False)
    console.print()
    console.print(table, highlight=False)
    console.print()
    console.print(Text(conclusion(findings, seconds), style=STYLES[worst(findings)][1]), highlight=False)


def _lines(words: str) -> str:
    return "\n".join(map(printable, words.split("\n")))


def worst(findings: Sequence[Finding]) -> Level:
    """The level of the worst finding."""
    return by_severity(findings)[0].level if findings else Level.OK


def conclusion(findings: Sequence[Finding], seconds: float) -> str:
    """The last line."""
    counts = Counter(each.level for each in findings)
    parts = [f"{counts[level]} {_noun(level, counts[level])}" for level in Level if counts[level]]
    said = {
        Level.FAIL: "Runs will fail: fix the lines marked ✗ first.",
        Level.WARNING: "Nothing is sure to fail; some runs may fail or be slow.",
        Level.HINT: "Nothing will fail.",
        Level.OK: "Nothing will fail.",
    }[worst(findings)]
    return f"{said} {', '.join(parts)}, in {seconds:.1f} s"


def _noun(level: Level, number: int) -> str:
    plural = level in (Level.WARNING, Level.HINT) and number != 1
    return f"{level.value}{'s' * plural}"
