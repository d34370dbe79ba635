"""The page of `shoal plan`: every plan that fits as a dot, the first one in detail, and the reasons for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from shoal.pages.html import page, section, table, text
from shoal.pages.parts_bar import parts_bar
from shoal.pages.plan.scatter import Dot, scatter
from shoal.pages.sections.layout import layout_of
from shoal.pages.words import duration, figure, large, memory_size, percent
from shoal.planner.answer import MEMORY, Answer, Choice, tradeoff_rows, tradeoffs_of, why_fewer
from shoal.planner.candidates import check_candidate
from shoal.planner.search import Candidate
from shoal.predict.cluster import GIB
from shoal.predict.predict import Prediction
from shoal.version import __version__

CELLS = 90
"""Cells of the drawing in each direction. Each has a dot for its fastest plan."""
Row = Sequence[str]


def plan_page(answer: Answer, seen: Sequence[Candidate]) -> str:
    """The page."""
    body = _header(answer)
    body += _first(answer) + _scatter(answer, seen) + _best(answer) if answer.best else _nothing(answer)
    if answer.best:
        first = answer.best[0]
        body += _causes(first.prediction) + layout_of(first.prediction.plan, first.task.global_batch) + _why(answer)
        commands = "".join(f"<dt>{text(name)}</dt><dd><code>{text(line, 4000)}</code></dd>"
                           for name, line in answer.commands.items())  # fmt: skip
        body += section("To train by it", f'<dl class="commands">{commands}</dl>', name="commands")
    return page(f"{answer.task.workload.name[:80]} – shoal plan", body)


def _header(answer: Answer) -> str:
    task = answer.task
    what = f" of {task.sequence:,} tokens" if task.sequence > 1 else ""
    where = f"{task.cluster.num_devices:,} x {task.cluster.device.name}"
    rates = "measured on this machine" if task.cluster.is_measured else "from datasheets and published runs"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return (
        f'<header><p class="brand">shoal plan</p><h1><bdi>{text(task.workload.name, 80)}</bdi> on {text(where)}</h1>'
        f'<p class="made">{task.global_batch:,} samples{what} a step. All numbers are predicted, with rates {rates}.'
        f" Made {made}, shoal {__version__}</p></header>"
    )


def _first(answer: Answer) -> str:
    """The first plan with its figures."""
    time_, memory = answer.best[0].prediction.time, answer.best[0].prediction.memory
    unit = "tokens" if answer.task.sequence > 1 else "samples"
    facts = [
        ("Step", duration(time_.total), f"{duration(time_.low)} to {duration(time_.high)} is the 80 % interval"),
        ("Memory", f"{memory.total / GIB:.1f} GiB", f"of {answer.task.memory_limit / GIB:.1f} on the fullest rank"),
        ("Speed", f"{large(time_.tokens_per_s_per_device)} {unit}/s", "a device"),
        ("MFU", percent(time_.mfu), "of the datasheet's peak"),
    ]
    cards = "".join(
        f'<div class="fact"><dt>{text(name)}</dt><dd>{text(value)}</dd><dd class="remark">{text(remark)}</dd></div>'
        for name, value, remark in facts
    )
    plan = text(answer.best[0].prediction.plan.brief())
    return f'<section class="verdict"><p class="headline">{plan}</p><dl class="facts">{cards}</dl></section>'


def _nothing(answer: Answer) -> str:
    """What is said where no plan fits."""
    least = answer.search.smallest
    lines = [] if least is None else [
        f"The smallest, {least.plan.brief()}, takes {least.memory.total / GIB:.1f} GiB, and the limit is"
        f" {answer.task.memory_limit / GIB:.1f} GiB."
    ]  # fmt: skip
    lines += answer.rejection_reasons[:3]
    rows = "".join(f"<li>{text(each)}</li>" for each in answer.suggestions)
    reasons = "".join(f'<p class="reason">{text(line)}</p>' for line in lines)
    found = f'<section class="verdict dead"><p class="headline">No plan fits</p>{reasons}</section>'
    return found + section("Changes that would fit", f"<ul>{rows}</ul>" if rows else "", name="changes")


def _scatter(answer: Answer, seen: Sequence[Candidate]) -> str:
    """Every plan that fits: memory against time."""
    chosen = [Candidate(one.prediction.plan, one.prediction.memory.total, one.prediction.time.total)
              for one in answer.best if one.devices == answer.task.cluster.num_devices]  # fmt: skip
    frontier = [Candidate(one.plan, one.memory.total, one.time.total) for one in answer.search.frontier]
    others = [each for each in thinned(seen) if not check_candidate(answer.task, each.plan)]
    dots = [_dot(each, "plan") for each in others]
    dots += [_dot(each, "frontier") for each in frontier] + [_dot(each, "best") for each in reversed(chosen)]
    drawn = scatter(
        dots, ("GiB on the fullest rank", "time of a step"), (lambda x: f"{x:g}", lambda y: duration(y) if y else "0")
    )
    note = (
        f"{len(seen):,} plans fit, {answer.search.num_too_large:,} do not; of dots at one place, the fastest is drawn."
        " Hover over a dot to read its plan."
    )
    keys = (
        '<ul class="keys"><li><i class="line c1"></i>in the table below</li><li><i class="line c0"></i>no other is both'
        ' faster and smaller</li><li><i class="line c5"></i>other plans</li></ul>'
    )
    return section("Memory against time", drawn and drawn + keys, name="scatter", note=note)


def _dot(one: Candidate, kind: str) -> Dot:
    title = f"{one.plan.brief()}: {one.bytes / GIB:.1f} GiB, {duration(one.seconds)}"
    return Dot(one.bytes / GIB, one.seconds, title, kind)


def thinned(seen: Iterable[Candidate]) -> list[Candidate]:
    """The fastest plan of each place in the drawing."""
    known = list(seen)
    high = max((one.bytes for one in known), default=1.0) or 1.0
    slow = max((one.seconds for one in known), default=1.0) or 1.0
    cells: dict[tuple[int, int], Candidate] = {}
    for one in known:
        cell = int(CELLS * one.bytes / high), int(CELLS * one.seconds / slow)
        if cell not in cells or one.seconds < cells[cell].seconds:
            cells[cell] = one
    return list(cells.values())


def _best(answer: Answer) -> str:
    unit = "tokens" if answer.task.sequence > 1 else "samples"
    head = ("plan", "devices", "GiB", "step", "80 % interval", "MFU", f"{unit}/s/device")
    note = text(why_fewer(answer))
    fastest = min(answer.best, key=lambda choice: choice.prediction.time.total)
    if answer.best[0] is not fastest and answer.best[0].devices == fastest.devices:
        note += " The first is the simplest of the plans within 5 % of the fastest."
    return section("Plans", table(head, map(_row, answer.best)), name="plans", note=note)


def _row(choice: Choice) -> Row:
    memory, time_ = choice.prediction.memory, choice.prediction.time
    return (
        choice.prediction.plan.brief(), f"{choice.devices:,}", f"{memory.total / GIB:.1f}", duration(time_.total),
        f"{duration(time_.low)} to {duration(time_.high)}", percent(time_.mfu), figure(time_.tokens_per_s_per_device),
    )  # fmt: skip


def _causes(prediction: Prediction) -> str:
    """Memory and time of the first plan, by cause."""
    memory = {name: getattr(prediction.memory, name) for name in MEMORY}
    body = parts_bar("memory of the fullest rank", memory, lambda size: memory_size(size, prediction.memory.total))
    body += parts_bar("time of a step", dict(prediction.time.causes()), duration)
    return section("Where memory and time go", body, name="causes")


def _why(answer: Answer) -> str:
    """Other plans, and the reasons against them."""
    body = ""
    for label, plans in tradeoffs_of(answer).items():
        columns, others = tradeoff_rows(answer, plans)
        cells = [(one.plan.brief(), f"{one.memory.total / GIB:.1f}", duration(one.time.total), *why)
                 for one, why in others]  # fmt: skip
        body += section(text(label.capitalize()), table(columns, cells))
    rows = [(one.move, one.plan, one.reason) for one in answer.rejected]
    body += section("Alternatives", table(("change", "plan", "effect"), rows), name="alternatives")
    lints = [(one.code, one.title, one.numbers, f"{one.fix}: {one.saves}" if one.saves else one.fix)
             for one in answer.lints]  # fmt: skip
    return body + section("Lints", table(("code", "rule", "this plan", "fix"), lints), name="lints")
