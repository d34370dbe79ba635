"""Report a backtest as one JSON object and as tables, with the bars that the planner must reach.

A bar is checked only where the tables have rows for it. Every number is either measured by others or predicted; the
heading says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.planner.backtest import score
from shoal.planner.backtest.predict import Prediction, predict
from shoal.planner.backtest.rows import Row


@dataclass(frozen=True, kw_only=True)
class Source:
    """Errors over the rows of one source."""

    name: str
    rows: int
    predicted: int
    """Rows with a prediction."""
    time: score.Errors | None
    memory: score.Errors | None
    coverage: float | None
    """Part of the measured times inside the interval."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One figure that the planner has to reach."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the value is within its limits."""
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one backtest."""

    rows: int
    sources: tuple[Source, ...]
    cells: tuple[score.Cell, ...]
    halves: dict[str, score.Halves]
    """Source → regret where only a random half of its runs is known."""
    fits: score.Fits | None
    coverage: tuple[int, float] | None
    dense: score.Errors | None
    """Time of all dense rows that say everything."""
    bars: tuple[Bar, ...]
    silent: tuple[tuple[str, int], ...]
    """Why nothing could be predicted, and for how many rows."""
    is_blind: bool = False
    """Whether each source was predicted without what is known of its system."""


def backtest(rows: Sequence[Row], *, leave_out: bool = False) -> Report:
    """Predict every row, and score. `leave_out`: predict each source without figures measured on its system, with one
    factor for time that makes the other sources right on the whole."""
    found = score.blind(rows) if leave_out else [predict(row) for row in rows]
    groups = score.by_source(found)
    cells = tuple(score.cells(found))
    return Report(
        rows=len(found),
        sources=tuple(_source(name, group) for name, group in groups.items()),
        cells=cells,
        halves=score.halves(found),
        fits=score.fits(found),
        coverage=score.coverage(found),
        dense=score.errors(score.times(one for one in found if one.is_dense and one.is_full)),
        bars=tuple(_bars(found, cells)),
        silent=tuple(Counter(f"{one.row.family}: {one.reason}" for one in found if one.reason).most_common()),
        is_blind=leave_out,
    )


def _source(name: str, group: Sequence[Prediction]) -> Source:
    coverage = score.coverage(group)
    return Source(
        name=name,
        rows=len(group),
        predicted=sum(not one.reason for one in group),
        time=score.errors(score.times(group)),
        memory=score.errors(score.memories(group)),
        coverage=coverage[1] if coverage else None,
    )


# ---- bars -----------------------------------------------------------------------------------------------------------


def _bars(found: Sequence[Prediction], cells: Sequence[score.Cell]) -> Iterable[Bar]:
    swept = [cell for cell in cells if "nanotron" in cell.source]
    if swept:
        yield Bar(name="nanotron cells: mean regret", value=mean(cell.regret for cell in swept), most=0.05)
        yield Bar(name="nanotron cells: worst regret", value=max(cell.regret for cell in swept), most=0.15)
        yield Bar(name="nanotron cells: mean rank correlation", value=mean(cell.rank for cell in swept), least=0.85)
    if fits := score.fits(found):
        yield Bar(name="predicted failures: recall", value=fits.recall, least=0.9)
        yield Bar(name="predicted failures: precision", value=fits.precision, least=0.8)
    for word, name, kind, figure, most in (
        ("llm-foundry H100", "time, llm-foundry on H100", score.times, "mean", 0.087),
        ("vTrain", "time, vTrain on one node", score.times, "mean", 0.25),
        ("Megatron-LM", "memory, Megatron's CI", score.memories, "median", 0.05),
        ("ZeRO", "memory, table of the ZeRO paper", score.memories, "mean", 0.005),
        ("torchtitan", "memory, torchtitan", score.memories, "median", 0.08),
        ("bigscience", "memory, BigScience", score.memories, "median", 0.08),
    ):
        off = score.errors(kind(one for one in found if word in one.row.family))
        if off:
            yield Bar(name=f"{name}: {figure} error", value=getattr(off, figure), most=most)
    dense = score.errors(score.times(one for one in found if one.is_dense and one.is_full))
    if dense:
        yield Bar(name="time, all dense rows that say everything: median error", value=dense.median, most=0.2)
    if coverage := score.coverage(found):
        yield Bar(name="intervals of 80 %: coverage", value=coverage[1], least=0.7, most=0.9)


# ---- as JSON --------------------------------------------------------------------------------------------------------


def to_mapping(report: Report) -> dict[str, Any]:
    """The object that `--json` prints."""
    fits = report.fits
    return {
        "rows": report.rows,
        "blind": report.is_blind,
        "sources": {source.name: {**asdict(source)} for source in report.sources},
        "cells": [asdict(cell) for cell in report.cells],
        "halves": {source: asdict(halves) for source, halves in report.halves.items()},
        "failures": None if fits is None else {**asdict(fits), "recall": fits.recall, "precision": fits.precision},
        "coverage": None if report.coverage is None else {"rows": report.coverage[0], "part": report.coverage[1]},
        "dense_time": None if report.dense is None else asdict(report.dense),
        "bars": [{**asdict(bar), "holds": bar.holds} for bar in report.bars],
        "not_predicted": [{"why": why, "rows": count} for why, count in report.silent],
    }


WORST = 5
"""Cells of a source that are shown one by one."""


# ---- to read --------------------------------------------------------------------------------------------------------


def render(console: Console, report: Report) -> None:
    """Sources, cells, bars, and what could not be predicted."""
    blind = ", each source without figures measured on its system" if report.is_blind else ""
    console.print(f"{report.rows} rows: predicted beside measured{blind}\n", highlight=False)
    console.print(_table_of_sources(report.sources))
    if report.cells:
        console.print(_table_of_cells(report.cells, report.halves))
    if report.bars:
        console.print(_table_of_bars(report.bars))
    if report.silent:
        console.print(_table_of_silence(report.silent))


def _table(*columns: str, title: str) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        is_text = not number or column in ("picked", "fastest")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table


def _table_of_sources(sources: Iterable[Source]) -> Table:
    columns = (
        "source",
        "rows",
        "predicted",
        "time: mean",
        "median",
        "signed",
        "memory: mean",
        "median",
        "signed",
        "covered",
    )
    table = _table(*columns, title="error of predictions")
    for each in sources:
        figures = [_percent(getattr(off, key, None)) for off in (each.time, each.memory) for key in ("mean", "median")]
        signed = [_percent(off.signed, signed=True) if off else "" for off in (each.time, each.memory)]
        middle = [figures[0], figures[1], signed[0], figures[2], figures[3], signed[1]]
        table.add_row(each.name, str(each.rows), str(each.predicted), *middle, _percent(each.coverage))
    return table


def _table_of_cells(cells: Sequence[score.Cell], halves: Mapping[str, score.Halves]) -> Table:
    """One line for all cells of a source, one for random halves of its runs, and one for each of the cells in which the
    pick was worst."""
    table = _table("cells", "devices", "runs", "regret", "rank", "picked", "fastest", title="which plan is picked")
    for source in dict.fromkeys(cell.source for cell in cells):
        mine = [cell for cell in cells if cell.source == source]
        wrong = [cell for cell in mine if cell.regret > 0]
        summary = f"{len(mine) - len(wrong)} of {len(mine)} picks are the fastest"
        if repeats := sum(cell.is_repeat for cell in wrong):
            summary += f", {repeats} {'is another run' if repeats == 1 else 'are other runs'} of the fastest's plan"
        means = (_percent(mean(cell.regret for cell in mine)), f"{mean(cell.rank for cell in mine):.2f}")
        table.add_row(source, "", str(sum(cell.count for cell in mine)), *means, summary, "")
        if source in halves:
            drawn = halves[source]
            says = f"at most {drawn.high:.1%} in 9 of 10 draws; {drawn.close:.0%} of picks within 15 %"
            table.add_row("  random halves", "", "", _percent(drawn.mean), "", says, "")
        for cell in sorted(wrong, key=lambda cell: -cell.regret)[:WORST]:
            numbers = (str(cell.devices), str(cell.count), _percent(cell.regret), f"{cell.rank:.2f}")
            table.add_row(f"  {cell.model}", *numbers, cell.pick, cell.best)
    return table


def _table_of_bars(bars: Iterable[Bar]) -> Table:
    table = _table("bar", "value", "required", "", title="bars of the planner")
    for bar in bars:
        required = [f"at least {bar.least:g}"] if bar.least is not None else []
        required += [f"at most {bar.most:g}"] if bar.most is not None else []
        table.add_row(
            bar.name, f"{bar.value:.3f}", ", ".join(required), "holds" if bar.holds else "[bold]missed[/bold]"
        )
    return table


def _table_of_silence(silent: Sequence[tuple[str, int]]) -> Table:
    table = _table("why", "rows", title="could not be predicted")
    for why, count in silent[:20]:
        table.add_row(why, str(count))
    if len(silent) > 20:
        table.add_row("others, each rarer", str(sum(count for _, count in silent[20:])))
    return table


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "" if value is None else f"{value:{'+' if signed else ''}.1%}"
