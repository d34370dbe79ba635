"""A run in the terminal: the present, its ranks and its last events, drawn again every second."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.comm.heartbeat import slowest
from shoal.observe.jsonable import jsonable
from shoal.pages.live.now import Now, now_of
from shoal.pages.live.ranks import RankState, rank_states
from shoal.pages.run.own_files import Record, read_object, tail_records
from shoal.pages.run.read_run import is_run, read_recipe
from shoal.pages.run.state import last_write, state_of
from shoal.pages.run.metrics_table import loss_of, number
from shoal.pages.words import duration, figure, percent, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY = 1.0
"""Seconds between two pictures."""
EVENTS = 6
RANKS = 32
"""Ranks of which each has a line; of more, the late ones and the last."""
STYLES = {"running": "cyan", "ended": "green", "stopped": "yellow", "dead": "red", "silent": "yellow", "waiting": "dim"}
MARKS = "▁▂▃▄▅▆▇█"


def show_run(path: Path, *, as_json: bool = False) -> None:
    """Show the run until it ends or Ctrl-C. Without a terminal, show this moment once."""
    if as_json:
        print(json.dumps(snapshot(path), allow_nan=False))
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        console.print(picture(path))
        return
    with Live(picture(path), console=console, auto_refresh=False, screen=False) as live:
        while state(path) in ("running", "waiting", "silent"):
            time.sleep(EVERY)
            live.update(picture(path), refresh=True)


def state(path: Path) -> str:
    """The state of the run, or `waiting`."""
    if not is_run(path):
        return "waiting"
    return state_of(path, read_object(path / "summary.json"), read_object(path / "environment.json"))


def snapshot(path: Path) -> dict[str, Any]:
    """This moment as one object."""
    now = present(path, tail_records(path / "metrics.jsonl"))
    figures = {name: None if isinstance(each, float) and not math.isfinite(each) else each
               for name, each in asdict(now).items()} | jsonable({"loss": now.loss})  # fmt: skip
    ranks = [{"rank": each.rank, "step": each.step, "state": each.state} for each in rank_states(path)]
    return {"run": str(path), "state": state(path), **figures, "ranks": ranks}


def present(path: Path, records: list[Record]) -> Now:
    """The figures of the present."""
    return now_of(records, read_recipe(path) if is_run(path) else {})


def picture(path: Path) -> RenderableType:
    """This moment as it is drawn."""
    from rich.console import Group
    from rich.text import Text

    how, records = state(path), tail_records(path / "metrics.jsonl")
    head = Text.assemble((printable(str(path)), "bold"), "  ", (how, STYLES[how]))
    if how == "waiting":
        return Group(head, Text("this directory holds no run yet", "dim"))
    silent = time.time() - last_write(path)
    if how in ("running", "silent") and silent > 60:
        head.append(f"  its last line is {duration(silent)} old", "yellow")
    words = present(path, records).words()
    ranks = _ranks(rank_states(path), records) if how == "running" else []
    parts = [head, _figures(words if how == "running" else words[:-1]), _curve(records), *ranks]
    return Group(*parts, *_events(tail_records(path / "events.jsonl")))


def _figures(words: list[tuple[str, str, str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name, _, _ in words:
        table.add_column(name)
    table.add_row(*(Text(value, "bold") for _, value, _ in words))
    table.add_row(*(Text(remark, "dim") for _, _, remark in words))
    return table


def _curve(records: list[Record]) -> RenderableType:
    """The loss of the last lines as one line of blocks."""
    from rich.text import Text

    losses = [loss for each in records if (loss := loss_of(each, "loss")) is not None][-60:]
    known = [loss for loss in losses if math.isfinite(loss)]
    if len(known) < 2:
        return Text("")
    low, high = min(known), max(known)
    marks = "".join(_mark((loss - low) / ((high - low) or 1)) for loss in losses)
    ends = f"  {figure(low)} to {figure(high)}, the last {len(losses)} lines"
    return Text.assemble(("loss  ", "dim"), (marks, "cyan"), (ends, "dim"))


def _mark(height: float) -> str:
    """The block of a height from 0 to 1; a cross for a loss that is not finite."""
    return MARKS[round(height * (len(MARKS) - 1))] if math.isfinite(height) else "×"


def _ranks(found: list[RankState], records: list[Record]) -> list[RenderableType]:
    """A line for each rank, or why there is none; and the rank that the others wait for."""
    from rich.text import Text

    lines: list[RenderableType] = []
    shown = found if len(found) <= RANKS else [each for each in found if each.state == "late"][:RANKS]
    for each in shown:
        style = "red" if each.state == "late" else "green"
        words = f"  step {each.step:,}  {duration(each.step_seconds)} a step  last line {duration(each.age_seconds)} ago"
        lines.append(Text.assemble((f"rank {each.rank:<4}", "dim"), (f"{each.state:<5}", style), words))
    if len(found) > RANKS:
        late = sum(each.state == "late" for each in found)
        lines.append(Text(f"{len(found)} ranks, {late} late", "red" if late else "green"))
    if not found:
        lines.append(Text("ranks: run.per_rank_metrics: true gives each a line here", "dim"))
    return [*lines, *_straggler(records)]


def _straggler(records: list[Record]) -> list[RenderableType]:
    from rich.text import Text

    last = next((each for each in reversed(records) if each.get("straggler_rank") is not None), None)
    if last is None:
        return []
    found = slowest.of_metrics(last)
    if found is None:
        return []
    if not found.stands_out:
        return [Text("ranks are late in turns: the others wait for no single one", "dim")]
    return [Text(f"the others wait for rank {found.rank} {percent(found.cost_fraction)} of the time", "yellow")]


def _events(records: list[Record]) -> list[RenderableType]:
    from rich.text import Text

    lines: list[RenderableType] = []
    for each in records[-EVENTS:]:
        seconds = number(each.get("time"))
        when = time.strftime("%H:%M:%S", time.localtime(seconds)) if 0 < seconds < 1e11 else ""
        kind = printable(str(each.get("event")))[:20]
        words = printable(str(each.get("reason") or ""))[:300]
        style = "red" if kind in ("failed", "not saved") else ""
        lines.append(Text.assemble((f"{when:8}  ", "dim"), (f"{kind:<9}", style), f"  step {each['step']:,}  {words}"))
    return lines
