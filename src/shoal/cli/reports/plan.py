"""Print the answer of `shoal plan` as tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.pages.words import memory_size
from shoal.planner.answer import MEMORY, Answer, Choice, costs_of_run, tradeoff_rows, tradeoffs_of, why_fewer
from shoal.planner.faults import Faults
from shoal.predict.cluster import GIB
from shoal.predict.predict import Prediction

if TYPE_CHECKING:
    from rich.console import Console


def render(console: Console, answer: Answer) -> None:
    """Print the plans, the memory and time of the first, its alternatives and the command that trains by it."""
    task = answer.task
    _render_title(console, answer)
    if not answer.best:
        _render_nothing(console, answer)
        return
    unit = "tokens" if task.sequence > 1 else "samples"
    columns = ["plan", "devices", "GiB", "step", "80 % interval", "MFU", f"{unit}/s/device"]
    rows = [_row(choice) for choice in answer.best]
    if answer.by == "money":
        columns.append(f"{'device-hours' if task.cluster.price is None else 'money'}/B {unit}")
        rows = [[*row, _cost(choice)] for row, choice in zip(rows, answer.best, strict=True)]
    _table(console, "", columns, rows)
    if reason := why_fewer(answer):
        console.print(f"[dim]{reason}[/dim]\n", highlight=False)
    if answer.by == "money" and task.cluster.price is not None:
        console.print(f"[dim]at {task.cluster.price:g} for one device and one hour; --price sets another[/dim]\n")
    fastest = min(answer.best, key=lambda choice: choice.prediction.time.total)
    if answer.best[0] is not fastest and answer.best[0].devices == fastest.devices:
        console.print("[dim]the first is the simplest of the plans within 5 % of the fastest[/dim]\n")
    _render_causes(console, answer.best[0].prediction)
    saved = answer.best[0].task.saved(answer.best[0].prediction.plan)
    console.print(
        f"[dim]a checkpoint has {saved.total / GIB:,.1f} GiB; while it is written, each rank holds up to"
        f" {saved.copied / GIB:,.1f} GiB of it in host memory[/dim]\n",
        highlight=False,
    )
    for label, plans in tradeoffs_of(answer).items():
        columns, others = tradeoff_rows(answer, plans)
        rows = [
            [one.plan.brief(), f"{one.memory.total / GIB:.1f}", seconds(one.time.total), *why] for one, why in others
        ]
        _table(console, label, columns, rows)
    rows = [[one.move, one.reason] for one in answer.rejected]
    _table(console, "alternatives", ["change", "effect"], rows)
    for rule in answer.rules_of_thumb:
        verb = "follows" if rule.agrees else "[yellow]departs from[/yellow]"
        reason = f" ({rule.why})" if rule.why else ""
        console.print(f'the plan {verb} the rule of thumb "{rule.rule}"{reason}', highlight=False)
    for one in answer.lints:
        console.print(f"[yellow]{one}[/yellow]", highlight=False)
    if answer.explanation:
        _render_explanation(console, answer)
    if answer.faults is not None:
        _render_faults(console, answer.faults)
    if answer.tokens is not None:
        run = costs_of_run(answer)
        cost = "" if run["cost"] is None else f", {run['cost']:,.0f} in money"
        days, hours = run["days"], run["device_hours"]
        console.print(
            f"\n{answer.tokens:.3g} tokens: {days:,.1f} days, {hours:,.0f} device-hours{cost}", highlight=False
        )
    console.print(f"\n[dim]{answer.remark}[/dim]" if answer.remark else "", highlight=False)
    for name, command in answer.commands.items():  # each in one line, to be copied
        console.print(f"[dim]# {name}[/dim]", highlight=False)
        console.print(command, highlight=False, markup=False, soft_wrap=True)


def in_words(number: float) -> str:
    """A count in the unit that suits it.

    >>> in_words(8.03e9), in_words(77_100), in_words(640)
    ('8.03 B', '77.1 thousand', '640')
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


def _render_title(console: Console, answer: Answer) -> None:
    """The model, the cluster, and where the numbers come from."""
    task = answer.task
    model = task.workload
    size = f"{in_words(model.parameters)} parameters"
    size += f", LoRA of rank {model.lora} ({in_words(model.trained_parameters)})" if model.lora else ""
    what = f" of {task.sequence:,} tokens" if task.sequence > 1 else ""
    console.print(
        f"[bold]{model.name}[/bold], {size}, on {task.cluster.num_devices} x {task.cluster.device.name},"
        f" {task.global_batch:,} samples{what} a step",
        highlight=False,
    )
    if answer.assumed:
        taken = ", ".join(f"--{name.replace('_', '-')} {what}" for name, what in answer.assumed.items())
        console.print(f"assumed: {taken}", highlight=False)
    measured = "measured on this machine" if task.cluster.is_measured else "from datasheets and published runs"
    if task.cluster.num_devices > 1 and not task.cluster.device.is_host:
        measured += "; shoal was never run on several GPUs"
    console.print(
        f"[dim]all numbers predicted, rates {measured}\n{answer.search.num_predicted:,} plans predicted,"
        f" {answer.search.num_too_large:,} above the limit of {task.memory_limit / GIB:.1f} GiB[/dim]\n",
        highlight=False,
    )


def _render_nothing(console: Console, answer: Answer) -> None:
    least = answer.search.smallest
    if least is not None:
        console.print(
            f"no plan fits: the smallest, {least.plan.brief()}, takes {least.memory.total / GIB:.1f} GiB,"
            f" and the limit is {answer.task.memory_limit / GIB:.1f} GiB",
            highlight=False,
        )
        _render_causes(console, least)
    for what in answer.rejection_reasons[:3]:
        console.print(f"rejected: {what}", highlight=False)
    console.print(
        "changes that would fit:" if answer.suggestions else "no change that was tried would fit", highlight=False
    )
    for suggestion in answer.suggestions:
        console.print(f"  {suggestion}", highlight=False)


def _render_causes(console: Console, prediction: Prediction) -> None:
    """Memory and time of one plan, by cause, with bars."""
    memory, time = prediction.memory, prediction.time
    parts = [(name, getattr(memory, name)) for name in MEMORY if getattr(memory, name) > 0.005 * memory.total]
    rows = [[name, memory_size(size, memory.total), bar(size / memory.total)] for name, size in parts]
    title = f"memory of the fullest rank, {memory_size(memory.total, memory.total)}"
    _table(console, title, ["", "", ""], rows, has_head=False)
    causes = sorted(time.causes().items(), key=lambda item: -item[1])
    rows = [[name, seconds(value), bar(value / time.total)] for name, value in causes if value > 0.002 * time.total]
    _table(console, f"time of a step, {seconds(time.total)}", ["", "", ""], rows, has_head=False)


def _render_faults(console: Console, faults: Faults) -> None:
    """The part of its time that a run trains, where the rest goes, and what would help."""
    recovery, goodput = faults.recovery, faults.goodput
    rows = [["useful", f"{goodput.ettr:.2%}", bar(goodput.ettr)]]
    rows += [[cause, f"{part:.2%}", bar(part)] for cause, part in goodput.parts().items() if part > 0]
    title = f"faults: one in {long_time(recovery.between_faults)}, a checkpoint every {long_time(recovery.interval)}"
    _table(console, title, ["", "", ""], rows, has_head=False)
    restart = "assumed; --restart says what was measured" if faults.is_restart_assumed else "given"
    console.print(
        f"[dim]simulated; a restart takes {long_time(recovery.restart)} ({restart}),"
        f" {recovery.lost_hosts:.0%} of faults take a host away for {long_time(recovery.repair)}[/dim]\n",
        highlight=False,
    )
    rows = [[one.what, f"{one.goodput.ettr:.2%}"] for one in faults.changes]
    if not rows:
        console.print("[dim]nothing that was tried would bring 0.2 %[/dim]", highlight=False)
        return
    _table(console, "what would help", ["change", "useful"], rows)


def _render_explanation(console: Console, answer: Answer) -> None:
    rows = [
        [move.name, move.plan, f"{move.gib:.1f}", seconds(move.seconds), "yes" if move.fits else "no", move.note]
        for move in answer.explanation
    ]
    _table(console, "from one device to this plan", ["move", "plan", "GiB", "step", "fits", "change"], rows)
    assert answer.laws is not None
    law = answer.laws
    console.print(
        f"Amdahl: {law.serial_part:.2e} of one device's step is serial"
        + (
            ""
            if law.limit == float("inf")
            else f", so no number of devices is more than {law.limit:,.0f} times as fast"
        ),
        highlight=False,
    )
    console.print(
        f"alpha + beta M: gradients of {law.message / 1e9:.2f} GB take {law.latency * 1e3:.2f} ms of latency "
        f"and {law.transfer * 1e3:.1f} ms of transfer\n",
        highlight=False,
    )
    rows = [
        [f"{one.devices:,}", seconds(one.seconds), f"{one.efficiency:.0%}", bar(one.efficiency)]
        for one in answer.scaling
    ]
    _table(console, "the same batch on more devices", ["devices", "step", "efficiency", ""], rows)


def _row(choice: Choice) -> list[str]:
    memory, time = choice.prediction.memory, choice.prediction.time
    return [
        choice.prediction.plan.brief(),
        f"{choice.devices:,}",
        f"{memory.total / GIB:.1f}",
        seconds(time.total),
        f"{seconds(time.low)} to {seconds(time.high)}",
        f"{time.mfu:.1%}",
        f"{time.tokens_per_s_per_device:,.0f}",
    ]


_NUMBERS = ("GiB", "step", "MFU", "/s/device", "devices", "efficiency", "/B tokens", "/B samples")
"""Endings of the names of columns that hold numbers."""


def _cost(choice: Choice) -> str:
    """Money for a billion tokens, or device-hours where the price is unknown: what `--by money` sorts by."""
    cost = choice.cost(1e9)
    return f"{choice.device_hours(1e9):,.1f}" if cost is None else f"{cost:,.0f}"


def _table(
    console: Console, title: str, columns: list[str], rows: Iterable[list[str]], *, has_head: bool = True
) -> None:
    from rich.table import Table

    drawn = Table(box=None, show_header=has_head, header_style="dim", pad_edge=False)
    for number, column in enumerate(columns):
        is_number = column.endswith(_NUMBERS) or (not has_head and number == 1)
        drawn.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        drawn.add_row(*row)
    if title:
        console.print(f"[bold]{title}[/bold]", highlight=False)
    console.print(drawn)
    console.print()


def bar(part: float, width: int = 30) -> str:
    """Draw a fraction as a bar.

    >>> bar(0.5, width=4)
    '██'
    """
    return "█" * max(0, min(width, round(part * width)))


def seconds(value: float) -> str:
    """Format seconds, or milliseconds below one.

    >>> seconds(0.01234), seconds(5.6721)
    ('12.3 ms', '5.67 s')
    """
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def long_time(value: float) -> str:
    """Format seconds in the unit that suits them.

    >>> long_time(703_125), long_time(7200), long_time(482.2), long_time(5)
    ('8.1 days', '2.0 h', '8.0 min', '5.0 s')
    """
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if value >= 2 * unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.1f} s"
