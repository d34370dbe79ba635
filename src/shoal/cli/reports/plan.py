"""The answer of `shoal plan`, for people and for machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shoal.blueprint.plan import Plan
from shoal.cli.parse_units import count_of
from shoal.cli.reports.plan_suggestions import Suggestion, suggestions
from shoal.planner.alternatives import Rejected, alternatives
from shoal.planner.explain import Laws, Move, RuleOfThumb, Scale, laws, moves, rules_of_thumb, scaling
from shoal.planner.lint.lint import Lint, lint
from shoal.planner.search import SearchResult, search, tradeoffs
from shoal.planner.suggestions import AS_OPTIONS, refuse_contradictions
from shoal.planner.task import Task
from shoal.predict.cluster import GIB
from shoal.predict.predict import Prediction
from shoal.predict.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.cli.plan import Options

MEMORY = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "buffers",
    "logits",
    "allocator",
    "context",
)
TOLD_FRONTIER = 6


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan that was found, and on how many devices."""

    task: Task
    verdict: Prediction

    @property
    def devices(self) -> int:
        """That it takes."""
        return self.task.cluster.num_devices

    def device_hours(self, tokens: float) -> float:
        """Of training on so many tokens."""
        per_step = self.task.global_batch * self.task.sequence
        return tokens / per_step * self.verdict.time.total * self.devices / 3600

    def cost(self, tokens: float) -> float | None:
        """Of training on so many tokens, in money; None: nobody has said what a device costs."""
        price = self.task.cluster.price
        return None if price is None else self.device_hours(tokens) * price

    def to_mapping(self) -> dict[str, Any]:
        """For machines."""
        memory, time = self.verdict.memory, self.verdict.time
        saved = self.task.saved(self.verdict.plan)
        seconds = {name: round(value, 6) for name, value in time.causes().items()}
        return {
            "plan": str(self.verdict.plan),
            "devices": self.devices,
            "memory_gib": {
                **{name: round(getattr(memory, name) / GIB, 4) for name in MEMORY},
                "allocated": round(memory.allocated / GIB, 4),
                "reserved": round(memory.reserved / GIB, 4),
                "total": round(memory.total / GIB, 4),
            },
            "checkpoint_gib": {
                "total": round(saved.total / GIB, 4),
                "host_memory_per_rank": round(saved.copied / GIB, 4),
            },
            "step_s": {
                **seconds,
                "total": round(time.total, 6),
                "low": round(time.low, 6),
                "high": round(time.high, 6),
            },
            "mfu": round(time.mfu, 5),
            "tokens_per_s_per_device": round(time.tokens_per_s_per_device, 2),
            "cost_of_billion_tokens": self.cost(1e9),
        }


@dataclass
class Answer:
    """All that there is to say."""

    task: Task
    found: SearchResult
    best: list[Choice]
    by: str = "time"
    top: int = 5
    """Plans that were asked for."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Dimensions of the model that were not given → what was taken, and why."""
    rejected: list[Rejected] = field(default_factory=list)
    lints: list[Lint] = field(default_factory=list)
    remedies: list[Suggestion] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Why plans that were asked for, and that fit, cannot be run."""
    way: list[Move] = field(default_factory=list)
    laws: Laws | None = None
    scaling: list[Scale] = field(default_factory=list)
    thumbs: list[RuleOfThumb] = field(default_factory=list)
    tokens: float | None = None
    command: str | None = None
    """What trains by the first plan as it was judged."""


def answer(task: Task, wanted: Mapping[str, Any], options: Options) -> Answer:
    """Search, and say why."""
    refuse_contradictions(task, Plan.of(wanted), AS_OPTIONS)
    found = search(task, wanted, keep=options.top, by=options.by)
    choices = [Choice(task, verdict) for verdict in found.best]
    if options.by == "money":
        choices = _cheapest(task, wanted, options.top)
    told = Answer(task, found, choices, options.by, options.top, assumed(options, task.workload))
    if options.tokens is not None:
        told.tokens = count_of(options.tokens)
    if not choices:
        told.refused = list(found.refused) if options.limits() else []
        told.remedies = suggestions(options, task, dict(wanted), is_refused=bool(told.refused))
        return told
    first = choices[0]
    told.command = _command(first, options)
    told.rejected = alternatives(first.task, first.verdict)
    told.lints = lint(
        first.task, first.verdict.plan, learning_rate=options.learning_rate, base_batch=options.base_batch
    )
    told.thumbs = rules_of_thumb(first.task, first.verdict, wanted) if options.by == "time" else []
    if options.explain:
        told.way = moves(first.task, first.verdict.plan)
        told.laws = laws(first.task, first.verdict)
        told.scaling = scaling(first.task, first.verdict.plan)
    return told


def _command(choice: Choice, options: Options) -> str:
    """`shoal train` with all that the plan was judged by and that a run is not by itself; a recipe says the model."""
    task = choice.task
    words = ["shoal train ...", f'--plan "{choice.verdict.plan.brief()}"']
    words += [f"--nproc {choice.devices}"] if task.cluster.nodes == 1 else []  # several are started by torchrun
    words += [f"--data.seq_len {task.sequence}"] if task.workload.is_transformer else []
    words += [f"--data.global_batch {task.global_batch}"]
    words += [f"--optim.{key} bf16" for key in ("param_dtype", "state_dtype") if getattr(options, key) == "bf16"]
    words += ["--run.compile true"] if task.compiles else []
    return " ".join(words)


def _cheapest(task: Task, wanted: Mapping[str, Any], keep: int) -> list[Choice]:
    """The best plan of every size of the cluster that can be made by halving it, by device-seconds a step."""
    choices: list[Choice] = []
    devices = task.cluster.num_devices
    while devices >= 1:
        fewer = replace(task, cluster=task.cluster.resized(devices))
        choices += [Choice(fewer, verdict) for verdict in search(fewer, wanted, keep=2).best]
        if devices % 2 or (devices > task.cluster.per_node and (devices // 2) % task.cluster.per_node):
            break
        devices //= 2
    return sorted(choices, key=lambda choice: choice.devices * choice.verdict.time.total)[:keep]


def to_mapping(told: Answer) -> dict[str, Any]:
    """For machines: every number is predicted."""
    task = told.task
    said: dict[str, Any] = {
        "model": task.workload.name,
        "parameters": task.workload.parameters,
        "cluster": str(task.cluster),
        "is_measured_cluster": task.cluster.is_measured,
        "seq_len": task.sequence,
        "global_batch": task.global_batch,
        "assumed": told.assumed,
        "room_gib": round(task.room / GIB, 3),
        "num_judged": told.found.num_judged,
        "num_too_large": told.found.num_too_large,
        "plans": [choice.to_mapping() for choice in told.best],
        "why_fewer": why_fewer(told),
        "command": told.command,
        "frontier": [Choice(task, verdict).to_mapping() for verdict in told.found.frontier],
        "rejected": [one.to_mapping() for one in told.rejected],
        "lint": [one.to_mapping() for one in told.lints],
        "rules_of_thumb": [{"rule": one.rule, "agrees": one.agrees, "why": one.why} for one in told.thumbs],
    }
    if not told.best:
        said["remedies"] = [str(remedy) for remedy in told.remedies]
        said["refused"] = told.refused
        said["smallest"] = None if told.found.smallest is None else Choice(task, told.found.smallest).to_mapping()
    if told.way:
        said["explain"] = [move.to_mapping() for move in told.way]
    if told.laws is not None:
        law = told.laws
        limit = None if law.limit == float("inf") else law.limit
        said["laws"] = {
            "serial_part": law.serial_part, "amdahl_limit": limit, "message_bytes": law.message,
            "latency_s": law.latency, "transfer_s": law.transfer,
        }  # fmt: skip
        said["scaling"] = [
            {"devices": one.devices, "step_s": one.seconds, "efficiency": one.efficiency} for one in told.scaling
        ]
    if told.tokens is not None and told.best:
        said["run"] = _run(told)
    return said


def _run(told: Answer) -> dict[str, Any]:
    """What training on all tokens takes."""
    assert told.tokens is not None
    first = told.best[0]
    hours = first.device_hours(told.tokens)
    return {
        "tokens": told.tokens,
        "days": hours / first.devices / 24,
        "device_hours": hours,
        "cost": first.cost(told.tokens),
    }


# ---- for people -----------------------------------------------------------------------------------------------------


def render(console: Console, told: Answer) -> None:
    """As tables."""
    task = told.task
    _render_title(console, told)
    if not told.best:
        _render_nothing(console, told)
        return
    unit = "tokens" if task.sequence > 1 else "samples"
    columns = ["plan", "devices", "GiB", "step", "in 8 of 10 runs", "MFU", f"{unit}/s/device"]
    rows = [_row(choice) for choice in told.best]
    if told.by == "money":
        columns.append(f"{'device-hours' if task.cluster.price is None else 'money'}/B {unit}")
        rows = [[*row, _cost(choice)] for row, choice in zip(rows, told.best, strict=True)]
    _table(console, "", columns, rows)
    if reason := why_fewer(told):
        console.print(f"[dim]{reason}[/dim]\n", highlight=False)
    if told.by == "money" and task.cluster.price is not None:
        console.print(f"[dim]at {task.cluster.price:g} for one device and one hour; --price says another[/dim]\n")
    fastest = min(told.best, key=lambda choice: choice.verdict.time.total)
    if told.best[0] is not fastest and told.best[0].devices == fastest.devices:
        console.print("[dim]the first is the simplest of those that are within 5 % of the fastest[/dim]\n")
    _render_causes(console, told.best[0].verdict)
    saved = told.best[0].task.saved(told.best[0].verdict.plan)
    console.print(
        f"[dim]a checkpoint has {saved.total / GIB:,.1f} GiB; while it is written, each rank keeps up to"
        f" {saved.copied / GIB:,.1f} GiB of it in host memory[/dim]\n",
        highlight=False,
    )
    for label, plans in _tradeoffs(told).items():
        rows = [[one.plan.brief(), f"{one.memory.total / GIB:.1f}", seconds(one.time.total)] for one in plans]
        _table(console, label, ["plan", "GiB", "step"], rows)
    rows = [[one.move, one.reason] for one in told.rejected]
    _table(console, "why not", ["one thing else", "then"], rows)
    for thumb in told.thumbs:
        mark = "as usual" if thumb.agrees else "[yellow]not as usual[/yellow]"
        console.print(f"{mark}: {thumb.rule}{': ' * bool(thumb.why)}{thumb.why}", highlight=False)
    for one in told.lints:
        console.print(f"[yellow]{one}[/yellow]", highlight=False)
    if told.way:
        _render_way(console, told)
    if told.tokens is not None:
        run = _run(told)
        cost = "" if run["cost"] is None else f", {run['cost']:,.0f} in money"
        days, hours = run["days"], run["device_hours"]
        console.print(f"\n{told.tokens:.3g} tokens: {days:,.1f} days, {hours:,.0f} device-hours{cost}", highlight=False)
    console.print(f"\n{told.command}", highlight=False, soft_wrap=True)  # in one line, to be copied


def _render_title(console: Console, told: Answer) -> None:
    """The model, the cluster, and where the numbers come from."""
    task = told.task
    size = f"{task.workload.parameters / 1e9:.3g} B parameters"
    what = f" of {task.sequence:,} tokens" if task.sequence > 1 else ""
    console.print(
        f"[bold]{task.workload.name}[/bold], {size}, on {task.cluster.num_devices} x {task.cluster.device.name},"
        f" {task.global_batch:,} samples{what} a step",
        highlight=False,
    )
    if told.assumed:
        taken = ", ".join(f"--{name.replace('_', '-')} {what}" for name, what in told.assumed.items())
        console.print(f"assumed: {taken}", highlight=False)
    measured = "measured on this machine" if task.cluster.is_measured else "from datasheets and published runs"
    if task.cluster.num_devices > 1 and not task.cluster.device.is_host:
        measured += ", and shoal was never run on several GPUs"
    console.print(
        f"[dim]all numbers predicted, rates {measured}; {told.found.num_judged:,} plans judged,"
        f" {told.found.num_too_large:,} larger than {task.room / GIB:.1f} GiB[/dim]\n",
        highlight=False,
    )


def _render_nothing(console: Console, told: Answer) -> None:
    least = told.found.smallest
    if least is not None:
        console.print(
            f"nothing fits: the smallest plan, {least.plan.brief()}, takes {least.memory.total / GIB:.1f} GiB,"
            f" and {told.task.room / GIB:.1f} are there",
            highlight=False,
        )
        _render_causes(console, least)
    for what in told.refused[:3]:
        console.print(f"refused: {what}", highlight=False)
    console.print("what would help:" if told.remedies else "nothing that was tried would help", highlight=False)
    for remedy in told.remedies:
        console.print(f"  {remedy}", highlight=False)


def _tradeoffs(told: Answer) -> dict[str, list[Prediction]]:
    """Other plans by what they give for what. Those of the whole cluster are not compared with a plan of a part."""
    first = told.best[0]
    if first.devices != told.task.cluster.num_devices:
        return {}
    found = tradeoffs(first.verdict, told.found.frontier)
    return {label: plans[:TOLD_FRONTIER] for label, plans in found.items()}


def why_fewer(told: Answer) -> str:
    """Why there are fewer plans than were asked for; empty if there are as many."""
    count = len(told.best)
    if not count or count >= told.top:
        return ""
    shown = f"{count} plan{'s' * (count > 1)} instead of {told.top}"
    if told.by == "money":
        return f"{shown}: of each number of devices, the two best that fit"
    if left_out := told.found.num_left_out:
        others = f"{left_out} other layout{'s' * (left_out > 1)}"
        return f"{shown}: {others} would fit, and one of these matches each in time, memory and simplicity within 5 %"
    return f"{shown}: no other layout fits"


def assumed(options: Options, workload: Workload) -> dict[str, str]:
    """Dimensions that were assumed, of a model that is given by its dimensions."""
    if options.model is not None:
        return {}
    reasons = {
        "ffn": "4 x hidden, with a gate",
        "vocabulary": "a usual one",
        "kv_heads": "as many as heads",
        "expert_ffn": "as wide as ffn",
    }
    names = [name for name in reasons if getattr(options, name) is None and (name != "expert_ffn" or workload.experts)]
    return {name: f"{getattr(workload, name)} ({reasons[name]})" for name in names}


def _render_causes(console: Console, verdict: Prediction) -> None:
    """Memory and time of one plan, by cause, with bars."""
    memory, time = verdict.memory, verdict.time
    parts = [(name, getattr(memory, name) / GIB) for name in MEMORY if getattr(memory, name) > 0.005 * memory.total]
    rows = [[name, f"{gib:.1f} GiB", bar(gib * GIB / memory.total)] for name, gib in parts]
    _table(console, f"memory of the fullest rank, {memory.total / GIB:.1f} GiB", ["", "", ""], rows, has_head=False)
    causes = sorted(time.causes().items(), key=lambda item: -item[1])
    rows = [[name, seconds(value), bar(value / time.total)] for name, value in causes if value > 0.002 * time.total]
    _table(console, f"time of a step, {seconds(time.total)}", ["", "", ""], rows, has_head=False)


def _render_way(console: Console, told: Answer) -> None:
    rows = [
        [move.name, move.plan, f"{move.gib:.1f}", seconds(move.seconds), "yes" if move.fits else "no", move.note]
        for move in told.way
    ]
    _table(console, "from one device to this plan", ["move", "plan", "GiB", "step", "fits", "against before"], rows)
    assert told.laws is not None
    law = told.laws
    console.print(
        f"Amdahl: {law.serial_part:.2e} of one device's step does not get faster"
        + (
            ""
            if law.limit == float("inf")
            else f", so no number of devices is more than {law.limit:,.0f} times as fast"
        ),
        highlight=False,
    )
    console.print(
        f"alpha + beta M: gradients of {law.message / 1e9:.2f} GB take {law.latency * 1e3:.2f} ms whatever they are, "
        f"and {law.transfer * 1e3:.1f} ms to travel\n",
        highlight=False,
    )
    rows = [
        [f"{one.devices:,}", seconds(one.seconds), f"{one.efficiency:.0%}", bar(one.efficiency)] for one in told.scaling
    ]
    _table(console, "the same batch on more devices", ["devices", "step", "efficiency", ""], rows)


def _row(choice: Choice) -> list[str]:
    memory, time = choice.verdict.memory, choice.verdict.time
    return [
        choice.verdict.plan.brief(),
        f"{choice.devices:,}",
        f"{memory.total / GIB:.1f}",
        seconds(time.total),
        f"{seconds(time.low)} to {seconds(time.high)}",
        f"{time.mfu:.1%}",
        f"{time.tokens_per_s_per_device:,.0f}",
    ]


_NUMBERS = ("GiB", "step", "MFU", "/s/device", "devices", "efficiency", "/B tokens", "/B samples")
"""How the names of columns of numbers end."""


def _cost(choice: Choice) -> str:
    """What the cheapest is chosen by."""
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
    """A part of 1 as a bar.

    >>> bar(0.5, width=4)
    '██'
    """
    return "█" * max(0, min(width, round(part * width)))


def seconds(value: float) -> str:
    """As people say it.

    >>> seconds(0.01234), seconds(5.6721)
    ('12.3 ms', '5.67 s')
    """
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
