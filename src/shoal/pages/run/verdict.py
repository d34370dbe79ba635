"""The verdict of a run in one sentence, and the figures that belong to it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.pages.run.metrics_table import MetricsTable, loss_of, number
from shoal.pages.run.read_run import RunRecord
from shoal.pages.words import duration, figure, large, loss_figure, percent, times

STARTS = ("started", "resumed")
REASON = "no reason is recorded: the processes were killed, or their machine was lost"


@dataclass(frozen=True)
class Verdict:
    """What became of a run."""

    headline: str
    reason: str
    """Why it died or stopped; empty where there is nothing to explain."""


def verdict_of(run: RunRecord) -> Verdict:
    """The verdict of a run."""
    step, goal = f"step {run.step:,}", _goal(run)
    if run.state == "running":
        silent = _age(run)
        return Verdict(f"Running, at {step}{goal}", f"its last line is {duration(silent)} old" if silent > 60 else "")
    if run.state == "stopped":
        is_saved = run.summary.get("saved_step") == run.summary.get("steps")
        after = "the same command resumes it" if is_saved else "its last step is not saved"
        return Verdict(f"Stopped at {step}{goal}", f"a signal stopped it; {after}")
    if run.state == "ended":
        restarts = number(run.summary.get("restarts"))
        reasons = ": the reasons are below" if last_failure(run) else ""
        after = f"after {times(restarts, 'restart')}{reasons}" if restarts > 0 else ""
        return Verdict(f"Ended after {step.removeprefix('step ')} steps", after)
    if run.state == "silent":
        where = f"it was started on {host_of(run)}, whose processes are not seen from here"
        return Verdict(f"Silent since {step}{goal}", f"{where}; its last line is {duration(_age(run))} old")
    failed = last_failure(run)
    return Verdict(f"Died at {step}{goal}", str(failed.get("reason") or REASON) if failed else REASON)


def host_of(run: RunRecord) -> str:
    """The host on which a run was started."""
    return str(run.environment.get("host") or "another host")[:80]


def _age(run: RunRecord) -> float:
    """Seconds since the last write."""
    return max(0.0, time.time() - run.last_write)


def last_failure(run: RunRecord) -> dict[str, Any] | None:
    """The failure that ended a run; None: there is none, or the run was started again after it."""
    last = next((event for event in reversed(run.events) if event.get("event") in ("failed", *STARTS)), None)
    return last if last is not None and last["event"] == "failed" else None


def first_loss(run: RunRecord) -> float | None:
    """The loss of the first step; None: it is not known."""
    known = loss_of(run.summary, "loss_first")
    return run.metrics.first("loss") if known is None else known


def last_loss(summary: Mapping[str, Any], table: MetricsTable) -> float | None:
    """The mean loss of the last ten steps, or of the last ten lines where there is no summary; None: it is not known.
    It is NaN if one of them was: the loss before a run has diverged is not that of the run."""
    known = loss_of(summary, "loss_last")
    if known is not None or "loss" not in table.columns:
        return known
    last = table.column("loss")[-10:]
    return statistics.fmean(last) if last else None


def step_seconds(run: RunRecord) -> float | None:
    """The median of a step, without the first fifth; measured."""
    known = number(run.summary.get("step_seconds_median"))
    if math.isfinite(known):
        return known
    seconds = run.metrics.finite("step_seconds", run.metrics.warmup)
    return statistics.median(seconds) if seconds else None


def speed(run: RunRecord) -> float | None:
    """Tokens or samples per second at that median."""
    known = number(run.summary.get("tokens_per_s"))
    if math.isfinite(known):
        return known
    speeds = run.metrics.finite("tokens_per_s", run.metrics.warmup)
    return statistics.median(speeds) if speeds else None


def mfu(run: RunRecord) -> float | None:
    """The fraction of the datasheet's peak; None: it is not known."""
    known = number(run.summary.get("mfu"))
    found = [known] if math.isfinite(known) else run.metrics.finite("mfu", run.metrics.warmup)
    return statistics.median(found) if found else None


def facts(run: RunRecord) -> list[tuple[str, str, str]]:
    """The figures below the verdict: name, value, and a remark."""
    first, last = first_loss(run), last_loss(run.summary, run.metrics)
    steps, found = step_seconds(run), []
    found.append(("Loss", loss_figure(last), f"from {loss_figure(first)}"))
    evaluated = run.metrics.evaluations
    if evaluated:
        found.append(("Validation loss", loss_figure(evaluated[-1][1]), f"at step {evaluated[-1][0]:,}"))
    found.append(("Speed", f"{large(speed(run))} {run.unit}/s", f"{duration(steps)} a step"))
    if (utilisation := mfu(run)) is not None:
        found.append(("MFU", percent(utilisation), "of the datasheet's peak"))
    memory = number(run.summary.get("memory_gib_max"))
    memory = memory if math.isfinite(memory) else run.metrics.last("memory_gib") or math.nan
    found.append(("Memory", f"{figure(memory, 3)} GiB", "peak, measured"))
    trained = number(run.summary.get("seconds_training"))
    trained = trained if math.isfinite(trained) else (run.metrics.seconds() or [math.nan])[-1]
    tokens = run.metrics.last("tokens")
    found.append(("Training time", duration(trained), f"{large(tokens)} {run.unit}"))
    return found


def _goal(run: RunRecord) -> str:
    section = run.recipe.get("run")
    words = str(section.get("duration", ""))[:20] if isinstance(section, dict) else ""
    return f" of {int(words[:-4]):,}" if words.endswith("step") and words[:-4].isdecimal() else ""
