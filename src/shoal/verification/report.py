"""The result of a verification, as tables and as one JSON object.

Every number says its origin: `predicted` by shoal.predict, `counted` by instruments in the run, or `measured` by an
allocator. Predicted stands beside counted, so that differences are easy to see.
"""

from __future__ import annotations

import io
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
    """One quantity, as predicted and as it was in the run. None: not known."""

    predicted: int | None = None
    counted: int | None = None
    measured: int | None = None

    def fits(self, within: float = 0.0) -> bool | None:
        """Whether the run matches the prediction; None if one of the two is not known."""
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
    """How replicas synchronise, under compression or local SGD."""

    axis: str
    """The bytes of this axis are those that ranks send in one synchronisation."""
    every: int
    """Steps between two synchronisations."""
    has_equal_weights: bool
    """Whether all replicas have the same weights afterwards."""
    sends_weights: bool = False
    """Whether replicas send weights (local SGD) and not gradients."""

    def __str__(self) -> str:
        verdict = "are equal" if self.has_equal_weights else "are NOT equal"
        often = "after every step" if self.every == 1 else f"every {self.every} steps"
        return f"replicas differ by design between syncs ({often}); after a sync their weights {verdict}"


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """The result of one verification."""

    plan: str
    world_size: int
    verdict: Comparison
    cause: str | None = None
    """The likely cause of the first difference; None: there is no difference."""

    seconds: float
    bytes: Mapping[str, Count] = field(default_factory=dict)
    """axis → bytes of one step, over all ranks."""

    collectives: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)
    """axis → operation → calls of one step, over all ranks."""

    memory: Mapping[str, Count] = field(default_factory=dict)
    """Kind (parameters, gradients, optimizer, ...) → bytes on the rank that holds most."""

    notes: tuple[str, ...] = ()
    """Limits of the verification."""

    compression_error: CompressionError | None = None
    """The error of a gradient, if the plan has compression."""

    replica_sync: ReplicaSync | None = None
    """How replicas synchronise, if the plan has compression or local SGD."""

    def __str__(self) -> str:
        """The tables that `shoal verify` prints."""
        console = Console(file=io.StringIO(), width=WIDTH)
        with console.capture() as drawn:
            render(console, self)
        return drawn.get().rstrip()

    @property
    def equal(self) -> bool:
        """Whether the plan equals one process. With compression: without it, and its error is within the bound. With
        local SGD: in a step of all replicas, and replicas have equal weights after a sync."""
        is_within_bound = self.compression_error is None or self.compression_error.is_within_bound
        has_equal_weights = self.replica_sync is None or self.replica_sync.has_equal_weights
        return self.verdict.equal and is_within_bound and has_equal_weights

    @property
    def tensors(self) -> list[tuple[str, float, float]]:
        """Each tensor with the largest relative differences of its gradient and of its weight, over all steps."""
        gradients, weights = self.verdict.gradients, self.verdict.weights
        names = dict.fromkeys((*gradients, *weights))
        return [(name, gradients.get(name, 0.0), weights.get(name, 0.0)) for name in names]

    @property
    def is_local_sgd(self) -> bool:
        """Whether replicas make local steps between two synchronisations."""
        return self.replica_sync is not None and self.replica_sync.sends_weights


def to_mapping(result: VerifyResult) -> dict[str, Any]:
    """The JSON of a result. An infinite difference is the text "inf", since JSON has no such number."""
    verdict = result.verdict
    return {
        "equal": result.equal,
        "plan": result.plan,
        "ranks": result.world_size,
        "worst": {key: _plain(value) for key, value in asdict(verdict.worst).items()},
        "first_difference": None if verdict.first is None else _first(verdict.first, result.cause),
        "bytes": {axis: count.to_mapping() for axis, count in result.bytes.items()},
        "collectives": {
            axis: {operation: count.to_mapping() for operation, count in calls.items()}
            for axis, calls in result.collectives.items()
        },
        "memory": {kind: count.to_mapping() for kind, count in result.memory.items()},
        "compression_error": _compression_error(result),
        "replica_sync": None if result.replica_sync is None else asdict(result.replica_sync),
        "notes": list(result.notes),
        "tolerance": verdict.tolerance,
        "steps": len(verdict.steps),
        "seconds": result.seconds,
    }


def render(console: Console, result: VerifyResult) -> None:
    """Print the headline, then differences by step, communication by axis, and memory, as far as they are known."""
    width = min(WIDTH, console.width)
    console.print(_headline(result), width=width, highlight=False)
    for table in (_steps(result.verdict), _axes(result), _memory(result)):
        if table.row_count:
            console.print()
            console.print(table, width=min(width, console.measure(table).maximum), highlight=False)


def _compression_error(result: VerifyResult) -> dict[str, Any] | None:
    error = result.compression_error
    return None if error is None else {**asdict(error), "is_within_bound": error.is_within_bound}


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


# ---- tables ---------------------------------------------------------------------------------------------------------


def _headline(result: VerifyResult) -> Table:
    """The verdict in one word, with details on the lines below."""
    verdict = result.verdict
    ranks = f"on {result.world_size} rank{'s' * (result.world_size != 1)}"
    steps = f"{len(verdict.steps)} step{'s' * (len(verdict.steps) != 1)} in {result.seconds:.1f} s"
    lines = Table.grid(padding=(0, 2, 0, 0))
    if verdict.first is None:
        of = verdict.worst
        worst = _short(max(of.loss, of.grad_norm, of.grad, of.weight, of.replicas))
        lines.add_row(*_verdict(result, ranks))
        lines.add_row(
            "", f"worst relative difference {worst} in {of.tensor}, tolerance {_short(verdict.tolerance)}; {steps}"
        )
        for note in (*([str(result.replica_sync)] if result.is_local_sgd else ()), *result.notes):
            lines.add_row("", Text(note))
        return lines
    lines.add_row(Text("NOT equal", "bold red"), Text(f"{result.plan} {ranks} differs from one process"))
    lines.add_row(Text("first", "bold"), Text(f"{where(verdict.first)}; {steps}"))
    if result.cause:
        lines.add_row(Text("cause", "bold"), Text(result.cause))
    for note in result.notes:
        lines.add_row("", Text(note))
    return lines


def _verdict(result: VerifyResult, ranks: str) -> tuple[Text, Text]:
    error, sync = result.compression_error, result.replica_sync
    if sync is not None and not sync.has_equal_weights:
        return Text("NOT equal", "bold red"), Text(f"{result.plan} {ranks}: replicas differ after a sync")
    if error is None and result.is_local_sgd:
        what = f"{result.plan} {ranks}: one step of all replicas computes the same as one process"
        return Text("local SGD", "bold green"), Text(what)
    if error is None:
        return Text("equal", "bold green"), Text(f"{result.plan} {ranks} computes the same as one process")
    word = Text("within bound", "bold green") if error.is_within_bound else Text("NOT within bound", "bold red")
    return word, Text(f"{result.plan} {ranks}: {error}")


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
    table = _table("relative differences by step")
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


def _axes(result: VerifyResult) -> Table:
    table = _table("communication of one step, by axis")
    table.add_column("axis", no_wrap=True)
    table.add_column("quantity", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("counted", justify="right", no_wrap=True)
    table.add_column("")
    for axis in dict.fromkeys((*result.bytes, *result.collectives)):
        rows = [(f"{name} calls", count) for name, count in result.collectives.get(axis, {}).items()]
        rows += [(_bytes_of(axis, result.replica_sync), result.bytes[axis])] if axis in result.bytes else []
        for number, (name, count) in enumerate(rows):
            heading = axis if number == 0 else ""
            table.add_row(heading, name, _grouped(count.predicted), _grouped(count.counted), _mark(count.fits()))
    return table


def _bytes_of(axis: str, sync: ReplicaSync | None) -> str:
    """The name of the bytes of an axis: those passed to torch.distributed, or those sent after encoding."""
    if sync is None or sync.axis != axis:
        return "bytes"
    return "bytes sent" if sync.every == 1 else f"bytes sent, every {sync.every} steps"


def _memory(result: VerifyResult) -> Table:
    table = _table("memory of the rank that holds most")
    table.add_column("kind", no_wrap=True)
    for heading in ("predicted", "counted", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for kind, count in result.memory.items():
        numbers = (_size(count.predicted), _size(count.counted), _size(count.measured))
        table.add_row(kind, *numbers, _mark(count.fits(within=0.01)))
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
    """The end of a long name, which is more specific than its start.

    >>> _shortened("model.layers.11.self_attn.q_proj.weight", 24)
    '…self_attn.q_proj.weight'
    """
    return name if len(name) <= width else "…" + name[1 - width :].lstrip(".")


def _short(number: float) -> str:
    return f"{number:.1e}" if number else "0"


def _grouped(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _size(number: int | None) -> str:
    """Bytes in the largest unit; below 10 KiB exactly.

    >>> _size(4096), _size(300_000)
    ('4,096 B', '293.0 KiB')
    """
    if number is None or number < 10_240:
        return "–" if number is None else f"{number:,} B"
    power = min(int(math.log(number, 1024)), 4)
    return f"{number / 1024**power:,.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _plain(value: Any) -> Any:
    return "inf" if isinstance(value, float) and not math.isfinite(value) else value


def matrix_row(result: VerifyResult) -> str:
    """One line for one layout."""
    of = result.verdict.worst
    worst = max(of.loss, of.grad_norm, of.grad, of.weight, of.replicas)
    if result.verdict.first is None:
        return f"equal      {_short(worst)}  {result.seconds:4.1f} s  {result.plan}"
    return f"NOT equal  {result.plan}: {where(result.verdict.first)}. {result.cause or ''}"


def matrix_table(results: Sequence[VerifyResult]) -> Table:
    """Every layout with its worst relative differences."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{len(results)} layout{'s' * (len(results) != 1)}", title_justify="left")
    for heading in ("plan", "equal", "loss", "gradient", "weight"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for result in results:
        of = result.verdict.worst
        is_equal = "yes" if result.verdict.equal else "NO"
        table.add_row(result.plan, is_equal, _short(of.loss), _short(of.grad), _short(of.weight))
    return table
