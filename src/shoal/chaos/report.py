"""The report of a drill: a verdict, the table of faults, and the same as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.chaos.journal import Journal
from shoal.chaos.kinds import KINDS
from shoal.chaos.measure import Goodput, Outcome
from shoal.chaos.oracle import Agreement, committed_steps_lost, restarts
from shoal.chaos.schedule import Injection

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is known after a drill."""

    seed: int
    schedule: list[Injection]
    left_out: dict[str, str]
    journal: Journal
    outcomes: list[Outcome]
    goodput: Goodput | None
    agreement: Agreement

    def broken(self) -> Iterator[str]:
        """The promises that were broken, in words."""
        lost, _ = committed_steps_lost(self.journal)
        agreement = self.agreement
        if self.journal.code is None:
            yield "the run did not end in time, and was ended"
        elif self.journal.code:
            yield f"the run ended with code {self.journal.code}"
        if lost:
            yield f"{lost} committed steps were lost"
        if agreement.samples_lost or agreement.samples_doubled:
            yield f"{agreement.samples_lost} samples were lost, and {agreement.samples_doubled} doubled"
        for steps, fault in (
            (agreement.missing_steps, "are not in the metrics"),
            (agreement.other_losses, "have another loss"),
        ):
            if steps:
                yield f"{len(steps)} steps {fault}, the first is {steps[0]}"
        if agreement.tensors_different:
            yield f"{agreement.tensors_different} tensors of the last checkpoint differ"
        for each in self.outcomes:
            if not each.is_right:
                yield f"fault {each.made.injection.number} was not named: {str(each.made.injection).strip()}"
            if each.recovered is None:
                yield f"fault {each.made.injection.number} had no recovery: {str(each.made.injection).strip()}"

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON values."""
        lost, damaged = committed_steps_lost(self.journal)
        agreement, broken = self.agreement, list(self.broken())
        return {
            "holds": not broken,
            "broken": broken,
            "seed": self.seed,
            "faults": {"scheduled": len(self.schedule), "made": len(self.outcomes), "left_out": self.left_out},
            "schedule": [str(each).strip() for each in self.schedule],
            "steps": agreement.steps,
            "committed_steps_lost": lost,
            "steps_of_damaged_checkpoints": damaged,
            "samples_lost": agreement.samples_lost,
            "samples_doubled": agreement.samples_doubled,
            "steps_with_another_loss": len(agreement.other_losses) + len(agreement.missing_steps),
            "tensors_different": agreement.tensors_different,
            "restarts": sum(1 for _ in restarts(self.journal)),
            "commands": self.journal.starts,
            "goodput": None if self.goodput is None else _goodput(self.goodput),
            "kinds": {row["kind"]: row for row in self.rows()},
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each kind of fault that was made."""
        for kind, about in KINDS.items():
            own = [each for each in self.outcomes if each.made.injection.kind == kind]
            if not own:
                continue
            due = [each for each in own if each.has_to_be_named]
            named = [each.named for each in due if each.named is not None]
            took = [each.recovered for each in own if each.recovered is not None]
            yield {
                "kind": kind,
                "faults": len(own),
                "to_name": len(due),
                "named": len(named),
                "named_median_s": _median(named),
                "named_worst_s": max(named, default=None),
                "named_limit_s": about.limit if about.report else None,
                "recovered": len(took),
                "recovered_median_s": _median(took),
                "recovered_worst_s": max(took, default=None),
            }


def _goodput(found: Goodput) -> dict[str, float]:
    return {
        "ettr": found.ettr,
        "ettr_predicted": found.predicted,
        "wall_s": found.wall,
        "step_s": found.step,
        "pauses_s": found.pauses,
        "steps_made_again": found.again,
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def render(console: Console, report: Report) -> None:
    """Print the table and the verdict."""
    from rich.table import Table

    found = report.to_mapping()
    table = Table(title=f"seed {report.seed}: {len(report.outcomes)} faults", title_justify="left")
    for name in ("fault", "n", "named rightly", "median", "worst", "limit", "next step, median", "worst"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for row in report.rows():
        named = f"{row['named']} of {row['to_name']}" if row["to_name"] else "-"
        numbers = [row[key] for key in ("named_median_s", "named_worst_s", "named_limit_s")]
        numbers = numbers if row["to_name"] else [None] * 3
        numbers += [row["recovered_median_s"], row["recovered_worst_s"]]
        table.add_row(str(row["kind"]), str(row["faults"]), named, *map(_seconds, numbers))
    console.print(table)
    for kind, why in report.left_out.items():
        console.print(f"left out: {kind} ({why})", highlight=False)
    if (goodput := report.goodput) is not None:
        console.print(
            f"ETTR {goodput.ettr:.3f} measured, {goodput.predicted:.3f} predicted: {goodput.wall:.0f} s for"
            f" {report.agreement.steps} steps of {goodput.step * 1e3:.0f} ms; {goodput.pauses:.1f} s without a step,"
            f" {goodput.again} steps made again",
            highlight=False,
        )
    console.print(
        f"{found['restarts']} restarts, {found['commands']} commands; {found['committed_steps_lost']} committed steps"
        f" lost, {found['steps_of_damaged_checkpoints']} made again since their checkpoint was damaged;"
        f" {found['samples_lost']} samples lost, {found['samples_doubled']} doubled",
        highlight=False,
    )
    if missing := len(report.schedule) - len(report.outcomes):
        console.print(f"{missing} faults were not made: the run had ended before", highlight=False)
    for text in found["broken"]:
        console.print(f"BROKEN: {text}", highlight=False)
    losses = "losses, samples and final state are those of an undisturbed run, bit for bit"
    console.print(f"verdict: {losses if found['holds'] else 'a promise is broken'}", highlight=False)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
