"""What a verification found, as one JSON object and as something to read.

A number says where it comes from: `predicted` by the blueprint, `counted` by instruments in the run, or `measured` by
an allocator. Predicted stands beside counted, so that a person sees at a glance where paper and machine part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.verification.compare import Comparison, Difference
from shoal.verification.compression_error import CompressionError

WIDTH = 100
_KINDS = {"loss": "the loss", "grad_norm": "the gradient norm", "gradient": "the gradient", "weight": "the weight"}


@dataclass(frozen=True, slots=True)
class Count:
    """One quantity, on paper and in the run. None: not known from there."""

    predicted: int | None = None
    counted: int | None = None
    measured: int | None = None

    def fits(self, within: float = 0.0) -> bool | None:
        """Whether the run is as predicted; None where one of the two is not known."""
        actual = self.counted if self.counted is not None else self.measured
        if self.predicted is None or actual is None:
            return None
        return abs(actual - self.predicted) <= within * self.predicted

    def to_mapping(self) -> dict[str, int | None]:
        """predicted and counted, and measured where it is known."""
        known = {"predicted": self.predicted, "counted": self.counted}
        return known if self.measured is None else {**known, "measured": self.measured}


@dataclass(frozen=True, slots=True)
class ReplicaSync:
    """How replicas meet, where they do not just average gradients."""

    axis: str
    """Its bytes are those that ranks send when they do."""
    every: int
    """Steps; 1: in each."""
    alike: bool
    """Whether all had the same weights afterwards."""
    has_islands: bool = False
    """Whether weights are sent then, and not gradients."""

    def __str__(self) -> str:
        verdict = "all have the same weights" if self.alike else "they do NOT have the same weights"
        often = "after every step" if self.every == 1 else f"every {self.every} steps"
        return f"islands differ by design until they meet, {often}; after a meeting {verdict}"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Everything that one verification has to show."""

    plan: str
    world_size: int
    verdict: Comparison
    cause: str | None = None
    """Why it is not equal; None if it is."""

    seconds: float
    bytes: Mapping[str, Count] = field(default_factory=dict)
    """axis → bytes of one step, over all ranks."""

    collectives: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)
    """axis → operation → calls of one step, over all ranks."""

    memory: Mapping[str, Count] = field(default_factory=dict)
    """cause (parameters, gradients, optimizer, ...) → bytes on the fullest rank."""

    notes: tuple[str, ...] = ()
    """What a reader of the verdict should know."""

    bounded: CompressionError | None = None
    """What compression does to a gradient, where the plan compresses."""

    meeting: ReplicaSync | None = None
    """How replicas meet, where the plan compresses or has islands."""

    @property
    def equal(self) -> bool:
        """Whether the plan computes what one device computes; with compression, what it may; with islands, whether a
        step of all of them does, and they agree when they have met."""
        is_bounded = self.bounded is None or self.bounded.holds
        return self.verdict.equal and is_bounded and (self.meeting is None or self.meeting.alike)

    @property
    def has_islands(self) -> bool:
        """Whether replicas go their own way between two meetings."""
        return self.meeting is not None and self.meeting.has_islands


def to_mapping(proof: Proof) -> dict[str, Any]:
    """The object that `--json` prints. An infinite difference is the text "inf", which JSON has no number for."""
    verdict = proof.verdict
    return {
        "equal": proof.equal,
        "plan": proof.plan,
        "world": proof.world_size,
        "worst": {key: _plain(value) for key, value in asdict(verdict.worst).items()},
        "first": None if verdict.first is None else _first(verdict.first, proof.cause),
        "bytes": {axis: count.to_mapping() for axis, count in proof.bytes.items()},
        "collectives": {
            axis: {operation: count.to_mapping() for operation, count in calls.items()}
            for axis, calls in proof.collectives.items()
        },
        "memory": {cause: count.to_mapping() for cause, count in proof.memory.items()},
        "bounded": None if proof.bounded is None else {**asdict(proof.bounded), "holds": proof.bounded.holds},
        "meeting": None if proof.meeting is None else asdict(proof.meeting),
        "notes": list(proof.notes),
        "tolerance": verdict.tolerance,
        "steps": len(verdict.steps),
        "seconds": proof.seconds,
    }


def render(console: Console, proof: Proof) -> None:
    """Print the headline, then steps, traffic by axis and memory as far as they are known."""
    width = min(WIDTH, console.width)
    console.print(_headline(proof), width=width, highlight=False)
    for table in (_steps(proof.verdict), _axes(proof), _memory(proof)):
        if table.row_count:
            console.print()
            console.print(table, width=min(width, console.measure(table).maximum), highlight=False)


def _first(difference: Difference, cause: str | None) -> dict[str, Any]:
    return {
        "step": difference.step,
        "kind": difference.kind,
        "tensor": difference.tensor,
        "difference": _plain(difference.difference),
        "axis": difference.axis,
        "note": difference.note,
        "cause": cause,
    }


# ---- to read --------------------------------------------------------------------------------------------------------


def _headline(proof: Proof) -> Table:
    """One word that says it all, and what belongs to it on the lines below."""
    verdict = proof.verdict
    ranks = f"on {proof.world_size} rank{'s' * (proof.world_size != 1)}"
    steps = f"{len(verdict.steps)} step{'s' * (len(verdict.steps) != 1)} in {proof.seconds:.1f} s"
    lines = Table.grid(padding=(0, 2, 0, 0))
    if verdict.first is None:
        of = verdict.worst
        worst = _short(max(of.loss, of.grad_norm, of.grad, of.weight, of.replicas))
        lines.add_row(*_verdict(proof, ranks))
        lines.add_row(
            "", f"worst relative difference {worst} in {of.tensor}, tolerance {_short(verdict.tolerance)}; {steps}"
        )
        for note in (*([str(proof.meeting)] if proof.has_islands else ()), *proof.notes):
            lines.add_row("", Text(note))
        return lines
    lines.add_row(Text("NOT equal", "bold red"), Text(f"{proof.plan} {ranks} differs from one device"))
    lines.add_row(Text("first", "bold"), Text(f"{where(verdict.first)}; {steps}"))
    if proof.cause:
        lines.add_row(Text("cause", "bold"), Text(proof.cause))
    for note in proof.notes:
        lines.add_row("", Text(note))
    return lines


def _verdict(proof: Proof, ranks: str) -> tuple[Text, Text]:
    bounded, meeting = proof.bounded, proof.meeting
    if meeting is not None and not meeting.alike:
        return Text("NOT alike", "bold red"), Text(f"{proof.plan} {ranks}: replicas differ after they have met")
    if bounded is None and proof.has_islands:
        what = f"{proof.plan} {ranks}: a step of all islands together computes what one device computes"
        return Text("islands", "bold green"), Text(what)
    if bounded is None:
        return Text("equal", "bold green"), Text(f"{proof.plan} {ranks} computes what one device computes")
    word = Text("bounded", "bold green") if bounded.holds else Text("NOT bounded", "bold red")
    return word, Text(f"{proof.plan} {ranks}: {bounded}")


def where(difference: Difference) -> str:
    """A difference in words.

    >>> where(Difference(1, "gradient", "norm.weight", 0.5))
    'step 1, the gradient of norm.weight, off by 5.0e-01'
    """
    place = f"step {difference.step}, "
    if difference.kind == "replicas":
        place += f"{difference.note} of {difference.tensor}"
    else:
        place += _KINDS[difference.kind] + (f" of {difference.tensor}" if difference.tensor else "")
    if math.isfinite(difference.difference):
        return f"{place}, off by {_short(difference.difference)}"
    return f"{place}: {difference.note or 'not finite'}"


def _steps(verdict: Comparison) -> Table:
    table = _table("how far off each step is")
    for heading in ("step", "loss", "norm", "gradients", "weights"):
        table.add_column(
            heading, justify="right", no_wrap=True, min_width=max(7, len(heading)) if heading != "step" else 4
        )
    table.add_column("worst tensor", no_wrap=True)
    table.add_column("", min_width=1)
    for number, step in enumerate(verdict.steps):
        differences = (step.loss_difference, step.grad_norm_difference, step.gradient, step.weight, step.replicas)
        worst = step.gradient_tensor if step.gradient >= step.weight else step.weight_tensor
        table.add_row(
            str(number),
            _short(step.loss_difference),
            _short(step.grad_norm_difference),
            _short(step.gradient),
            _short(step.weight),
            _shortened(worst or "–"),
            _mark(all(one <= verdict.tolerance for one in differences)),
        )
    return table


def _axes(proof: Proof) -> Table:
    table = _table("traffic of one step, by axis")
    table.add_column("axis", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("counted", justify="right", no_wrap=True)
    table.add_column("")
    for axis in dict.fromkeys((*proof.bytes, *proof.collectives)):
        rows = [(f"{name} calls", count) for name, count in proof.collectives.get(axis, {}).items()]
        rows += [(_bytes_of(axis, proof.meeting), proof.bytes[axis])] if axis in proof.bytes else []
        for number, (name, count) in enumerate(rows):
            heading = axis if number == 0 else ""
            table.add_row(heading, name, _grouped(count.predicted), _grouped(count.counted), _mark(count.fits()))
    return table


def _bytes_of(axis: str, meeting: ReplicaSync | None) -> str:
    """What is counted on an axis: messages as they are handed over, or what ranks send of what stands for them."""
    if meeting is None or meeting.axis != axis:
        return "bytes"
    return "bytes sent" if meeting.every == 1 else f"bytes sent, every {meeting.every} steps"


def _memory(proof: Proof) -> Table:
    table = _table("memory of the fullest rank")
    table.add_column("cause", no_wrap=True)
    for heading in ("predicted", "counted", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for cause, count in proof.memory.items():
        numbers = (_size(count.predicted), _size(count.counted), _size(count.measured))
        table.add_row(cause, *numbers, _mark(count.fits(within=0.01)))
    return table


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
    )


def _mark(fits: bool | None) -> Text:
    return Text("") if fits is None else Text("✓", style="green") if fits else Text("✗", style="bold red")


def _shortened(name: str, width: int = 30) -> str:
    """A long name by its end, which tells more than its start.

    >>> _shortened("model.layers.11.self_attn.q_proj.weight", 24)
    '…self_attn.q_proj.weight'
    """
    return name if len(name) <= width else "…" + name[1 - width :].lstrip(".")


def _short(number: float) -> str:
    return f"{number:.1e}" if number else "0"


def _grouped(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _size(number: int | None) -> str:
    """Bytes in the largest unit that they fill; few of them exactly.

    >>> _size(4096), _size(300_000)
    ('4,096 B', '293.0 KiB')
    """
    if number is None or number < 10_240:
        return "–" if number is None else f"{number:,} B"
    power = min(int(math.log(number, 1024)), 4)
    return f"{number / 1024**power:,.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _plain(value: Any) -> Any:
    return "inf" if isinstance(value, float) and not math.isfinite(value) else value


def matrix_row(proof: Proof) -> str:
    """One layout in one line."""
    of = proof.verdict.worst
    worst = max(of.loss, of.grad_norm, of.grad, of.weight, of.replicas)
    if proof.verdict.first is None:
        return f"equal      {_short(worst)}  {proof.seconds:4.1f} s  {proof.plan}"
    return f"NOT equal  {proof.plan}: {where(proof.verdict.first)}. {proof.cause or ''}"


def matrix_table(proofs: Sequence[Proof]) -> Table:
    """Every layout with its worst relative differences."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{len(proofs)} layout{'s' * (len(proofs) != 1)}", title_justify="left")
    for heading in ("plan", "equal", "loss", "gradient", "weight"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for proof in proofs:
        of = proof.verdict.worst
        is_equal = "yes" if proof.verdict.equal else "NO"
        table.add_row(proof.plan, is_equal, _short(of.loss), _short(of.grad), _short(of.weight))
    return table
