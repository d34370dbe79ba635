"""The present of a run, from its last records: step, loss, speed, memory, and the time that is left."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config.duration import Duration
from shoal.errors import ShoalError
from shoal.pages.run.metrics_table import loss_of, number, unit_of
from shoal.pages.run.own_files import Record
from shoal.pages.words import duration, figure, large, loss_figure, times

LAST = 20
"""Records over which the present is the mean or the median."""


@dataclass(frozen=True)
class Now:
    """Figures of the present; NaN where one is not known."""

    step: int
    goal: str
    """Such as `of 400`; empty: not known."""
    done: float
    """From 0 to 1."""
    loss: float | None
    """NaN: one of its lines was not finite; None: not known."""
    lines: int
    """Of which it is the mean."""
    speed: float
    """Tokens or samples per second."""
    step_seconds: float
    memory_gib: float
    left_seconds: float
    unit: str

    def words(self) -> list[tuple[str, str, str]]:
        """The figures for a reader: name, value, remark."""
        share = f"{100 * self.done:.0f} %" if math.isfinite(self.done) else ""
        return [
            ("Step", f"{self.step:,}", " · ".join(part for part in (self.goal, share) if part)),
            ("Loss", loss_figure(self.loss), f"mean of {times(self.lines, 'line')}"),
            ("Speed", f"{large(self.speed)} {self.unit}/s", f"{duration(self.step_seconds)} a step"),
            ("Memory", f"{figure(self.memory_gib, 3)} GiB", "peak on rank 0"),
            ("Left", duration(self.left_seconds), "at this speed"),
        ]


def now_of(records: Sequence[Record], recipe: Mapping[str, Any]) -> Now:
    """The present after these records, the last one last."""
    trained = [record for record in records if "eval_loss" not in record][-LAST:]
    step = trained[-1]["step"] if trained else 0
    seconds = _middle(trained, "step_seconds")
    goal = _goal(recipe)
    steps_left, done = _ahead(trained, goal)
    losses = [loss for record in trained if (loss := loss_of(record, "loss")) is not None]
    return Now(
        step=step,
        goal="" if goal is None else f"of {goal.amount:,.0f}" if goal.unit == "step" else f"of {goal}",
        done=done,
        loss=statistics.fmean(losses) if losses else None,
        lines=len(losses),
        speed=_middle(trained, "tokens_per_s"),
        step_seconds=seconds,
        memory_gib=(_finite(trained, "memory_gib") or [math.nan])[-1],
        left_seconds=steps_left * seconds,
        unit=unit_of(recipe, step, number(trained[-1].get("tokens"))) if trained else "tokens",
    )


def _goal(recipe: Mapping[str, Any]) -> Duration | None:
    section = recipe.get("run")
    try:
        return Duration.parse(str(section.get("duration"))[:20]) if isinstance(section, dict) else None
    except ShoalError:
        return None


def _ahead(records: Sequence[Record], goal: Duration | None) -> tuple[float, float]:
    """The steps that are left, and the part that is done; NaN for a length of time, which metrics do not have."""
    key = {"step": "step", "tok": "tokens", "epoch": "epoch"}.get(goal.unit if goal else "")
    if key is None or goal is None or not records or goal.amount <= 0:
        return math.nan, math.nan
    at, steps = number(records[-1].get(key)), records[-1]["step"]
    if not 0 < at < math.inf or steps <= 0:
        return math.nan, math.nan
    return max(0.0, goal.amount - at) * steps / at, min(1.0, at / goal.amount)


def _finite(records: Sequence[Record], key: str) -> list[float]:
    return [value for record in records if math.isfinite(value := number(record.get(key)))]


def _middle(records: Sequence[Record], key: str) -> float:
    found = _finite(records, key)
    return statistics.median(found) if found else math.nan
