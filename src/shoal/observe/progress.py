"""The progress line: a live bar on a terminal, an occasional plain line in a log file, nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

_PLAIN_EVERY = 10.0  # seconds between two lines in a log file
_PLAIN_AFTER = 1.0  # seconds of an evaluation before its first line in a log file: most are over by then


class ProgressLine(Protocol):
    """The progress of a run. `done` goes from 0 to 1."""

    def show(self, record: Mapping[str, Any], done: float) -> None:
        """Show a finished step."""

    def evaluating(self, done: int, total: int) -> None:
        """Show the number of scored held-out samples; an evaluation begins with 0 of them."""

    def note(self, text: str) -> None:
        """Print information, unless quiet."""

    def say(self, text: str) -> None:
        """Print a message that must not be missed."""

    def close(self) -> None:
        """End the line."""


class Quiet:
    """Prints only messages that must not be missed."""

    def __init__(self, console: Console, unit: str = "tok") -> None:
        self._console, self._unit = console, unit

    def show(self, record: Mapping[str, Any], done: float) -> None:
        """Do nothing."""

    def evaluating(self, done: int, total: int) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=not self._console.is_terminal)

    def close(self) -> None:
        """Do nothing."""


class TimeLeft:
    """The remaining time of a run, from the steps since its first one.

    The first step may compile, and steps before it belong to an earlier run.
    """

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def after(self, now: float, done: float) -> str:
        """The remaining time after a step; empty after the first one."""
        began, before = self._first = self._first or (now, done)
        return time_left(now - began, (done - before) / (1.0 - before)) if done < 1.0 else ""


class Plain(Quiet):
    """One line every ten seconds, for output that is not a terminal."""

    def __init__(self, console: Console, unit: str = "tok") -> None:
        super().__init__(console, unit)
        self._evaluation = self._next = self._last = time.monotonic()
        self._left = TimeLeft()

    def note(self, text: str) -> None:
        """Print a line."""
        self.say(text)

    def show(self, record: Mapping[str, Any], done: float) -> None:
        """Print a line every ten seconds, and for the first and the last step."""
        now = time.monotonic()
        left = self._left.after(now, done)
        if record["step"] == 1 or done >= 1.0 or now - self._last >= _PLAIN_EVERY:
            self._last = now
            self.say(f"{done:4.0%}  {status(record, self._unit)}{left}")

    def evaluating(self, done: int, total: int) -> None:
        """Print a line after one second, and then every ten seconds."""
        now = time.monotonic()
        if not done:
            self._evaluation, self._next = now, now + _PLAIN_AFTER
        elif now >= self._next:
            self._last, self._next = now, now + _PLAIN_EVERY
            part = done / total
            self.say(f"{part:4.0%}  {scored(done, total)}{time_left(now - self._evaluation, part)}")


class Live(Quiet):
    """A bar that is redrawn in place."""

    def __init__(self, console: Console, unit: str = "tok") -> None:
        super().__init__(console, unit)
        self._evaluation = time.monotonic()
        self._left = TimeLeft()
        self._progress = Progress(
            BarColumn(bar_width=24 if console.width >= 100 else 8),
            TextColumn("{task.percentage:>3.0f}%"),
            _Status(table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=1.0, status="")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self.say(text)

    def show(self, record: Mapping[str, Any], done: float) -> None:
        """Redraw. The bar begins with the first step, so that an earlier failure leaves the terminal as it was."""
        self._progress.start()
        left = self._left.after(time.monotonic(), done)
        self._progress.update(self._task, completed=done, status=status(record, self._unit) + left)

    def evaluating(self, done: int, total: int) -> None:
        """Redraw. The bar shows the evaluation until the next step."""
        self._progress.start()
        now = time.monotonic()
        if not done:
            self._evaluation = now
        left = time_left(now - self._evaluation, done / total)
        self._progress.update(self._task, completed=done / total, status=scored(done, total) + left)

    def close(self) -> None:
        """Remove the bar; a table follows."""
        self._progress.stop()


class _Status(ProgressColumn):
    def render(self, task: Any) -> Text:
        return Text(task.fields["status"])


def progress_line(console: Console, *, quiet: bool, unit: str = "tok") -> ProgressLine:
    """The progress line for the kind of output. `unit` is counted per second: `tok` or `sample`."""
    if quiet:
        return Quiet(console)
    return Live(console, unit) if console.is_terminal else Plain(console, unit)


def status(record: Mapping[str, Any], unit: str = "tok") -> str:
    """`step 12  loss 4.2113  18.3k tok/s  MFU 41.2%  1.31 GiB`."""
    words = [f"step {record['step']}", f"loss {record['loss']:.4f}", f"{human(record['tokens_per_s'])} {unit}/s"]
    if record.get("mfu") is not None:
        words.append(f"MFU {record['mfu']:.1%}")
    words.append(f"{record['memory_gib']:.2f} GiB")
    if "expert_load_max" in record:
        words.append(f"hottest expert {record['expert_load_max']:.2f}x")
    return "  ".join(words)


def scored(done: int, total: int) -> str:
    """`evaluating 1,200 of 3,423 samples`."""
    return f"evaluating {done:,} of {total:,} samples"


def time_left(elapsed: float, done: float) -> str:
    """`  1:05 left`; empty before the first progress and at the end."""
    if not 0.0 < done < 1.0:
        return ""
    minutes, seconds = divmod(round(elapsed * (1.0 - done) / done), 60)
    hours, minutes = divmod(minutes, 60)
    return f"  {hours}:{minutes:02}:{seconds:02} left" if hours else f"  {minutes}:{seconds:02} left"


def human(number: float) -> str:
    """Format a number with three digits and a letter.

    >>> human(18312), human(1.5e9), human(42)
    ('18.3k', '1.5G', '42')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:  # three digits of a smaller one would be 1e+03
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
