"""What to look at next, from evidence in the metrics alone. The costliest comes first."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.pages.run.metrics_table import number
from shoal.pages.run.read_run import RunRecord
from shoal.pages.run.time_parts import whole_run
from shoal.pages.run.verdict import host_of, last_failure
from shoal.pages.words import duration, figure, percent, times

WORTH = 0.05
"""The fraction of the time from which a part is named."""
JITTER = 1.3
"""The ratio of the 95th percentile to the median from which steps count as uneven."""


@dataclass(frozen=True)
class Finding:
    """One thing to look at: the evidence, and what to type or to read."""

    what: str
    evidence: str
    next: str
    weight: float
    """1: the run failed; below: the fraction of the time that it costs."""


def findings(run: RunRecord) -> list[Finding]:
    """All findings of a run, the costliest first."""
    checks = (_death, _silence, _damage, _losses, _saves, _data, _communication, _straggler, _jitter, _validation,
              _profiled)  # fmt: skip
    found = [finding for check in checks for finding in check(run)]
    return sorted(found, key=lambda finding: -finding.weight)


def _death(run: RunRecord) -> Iterator[Finding]:
    if run.state == "dead":
        saved = run.saved_step
        lost = times(run.step - saved, "step")
        what = f"The same command resumes from step {saved:,}" if saved else "No step was saved"
        failure = last_failure(run)
        code = str(failure.get("code", ""))[:4] if failure else ""
        fix = f"shoal explain {code}" if code.isalnum() else "the last lines that the command printed"
        yield Finding(what, f"{lost} since then will be repeated", fix, 1.0)


def _silence(run: RunRecord) -> Iterator[Finding]:
    if run.state == "silent":
        evidence = "no lock and no new line is seen from here"
        where = f"shoal doctor {shlex.quote(str(run.path))}   # on {host_of(run)}"
        yield Finding("Whether it still trains is seen on its host alone", evidence, where, 0.99)


def _damage(run: RunRecord) -> Iterator[Finding]:
    if run.damaged:
        evidence = f"{', '.join(run.damaged)}: what they held is not on this page"
        yield Finding("Files of the run are damaged", evidence, f"ls -l {shlex.quote(str(run.path))}", 0.96)


def _losses(run: RunRecord) -> Iterator[Finding]:
    table = run.metrics
    if table.not_finite:
        yield Finding(
            "The loss is not finite",
            f"first at step {table.not_finite[0]:,}",
            "a lower --optim.lr; --run.on_nan says what follows",
            0.95,
        )
    if table.skipped:
        evidence = f"{times(len(table.skipped), 'update')} skipped, the first at step {table.skipped[0]:,}"
        yield Finding("Updates were skipped: gradients were not finite", evidence, "--optim.lr, --optim.clip", 0.3)
    losses = table.finite("loss")
    size = len(losses) // 10
    if size >= 10:
        means = [statistics.fmean(losses[i : i + size]) for i in range(0, size * 10, size)]
        best = min(means)
        if means[-1] > best + 0.05 * abs(best) and means[-1] > best + 1e-3:
            evidence = f"mean of the last tenth {figure(means[-1])}, of the best tenth {figure(best)}"
            yield Finding("The loss has risen again", evidence, "a lower --optim.lr or --optim.clip", 0.5)


def _saves(run: RunRecord) -> Iterator[Finding]:
    failed = number(run.summary.get("saves_failed"))
    failed = failed if math.isfinite(failed) else sum(event.get("event") == "not saved" for event in run.events)
    if failed > 0:
        yield Finding("Saves failed", times(failed, "save"), "free space, or --checkpoint.dir", 0.9)
    stall, total = number(run.summary.get("save_stall_seconds")), _seconds_of_last_part(run)
    if total > 0 and stall / total >= 0.02:
        evidence = f"{duration(stall)}, {percent(stall / total)} of the time, measured"
        every = _setting(run, "checkpoint", "every")
        fix = f"--checkpoint.every above {every}, a faster disk" if every else "fewer saves, a faster disk"
        yield Finding("Training waits for saves", evidence, fix, stall / total)


def _seconds_of_last_part(run: RunRecord) -> float:
    """Seconds of training since the run was resumed, as far as its saves are counted; NaN: not known."""
    resumed = number(run.summary.get("resumed_from"))
    if not resumed > 0:
        return number(run.summary.get("seconds_training"))
    until = run.metrics.seconds()
    before = max((s for step, s in zip(run.metrics.steps, until, strict=True) if step <= resumed), default=0.0)
    return until[-1] - before if until else math.nan


def _data(run: RunRecord) -> Iterator[Finding]:
    parts = whole_run(run.metrics)
    if parts is not None and parts.data >= WORTH:
        evidence = f"{percent(parts.data)} of the time of a step, measured"
        workers = _setting(run, "data", "workers")
        more = 2 * workers if isinstance(workers, int) and 0 < workers < 1024 else 2
        yield Finding("Steps wait for data", evidence, f"--data.workers {more}, while cores are free", parts.data)


def _setting(run: RunRecord, section: str, key: str) -> Any:
    """A setting of the run's recipe; None: its file lacks it."""
    found = run.recipe.get(section)
    return found.get(key) if isinstance(found, dict) else None


def _communication(run: RunRecord) -> Iterator[Finding]:
    parts = whole_run(run.metrics)
    if parts is not None and parts.comm is not None and parts.comm >= WORTH:
        evidence = f"{percent(parts.comm)} of the time of a step is not hidden by computation, measured"
        yield Finding(
            "Steps wait for communication",
            evidence,
            f"{_profile(run)}: which axis, and what to change",
            parts.comm,
        )


def _profile(run: RunRecord) -> str:
    """The command that says where the time of a step of this run goes."""
    return f"shoal profile {shlex.quote(str(run.path / 'recipe.yaml'))}"


def _straggler(run: RunRecord) -> Iterator[Finding]:
    found = run.slowest
    if found is not None and found.cost_fraction >= WORTH and found.stands_out:
        evidence = f"{duration(found.late_seconds)} late (median); at least {percent(found.cost_fraction)} of the time"
        fix = "shoal doctor on its host; top -H there"
        yield Finding(f"All wait for rank {found.rank}", evidence, fix, found.cost_fraction)


def _profiled(run: RunRecord) -> Iterator[Finding]:
    """The verdict of a profile, unless the run is bound by computation, which nothing has to change."""
    found = run.profile.get("verdict")
    if isinstance(found, dict) and found.get("kind") != "compute" and number(found.get("cost")) >= WORTH:
        what, evidence, fix = (str(found.get(key) or "") for key in ("title", "evidence", "next"))
        yield Finding(f"Profile: {what}", evidence, fix, min(1.0, number(found.get("cost"))))


def _jitter(run: RunRecord) -> Iterator[Finding]:
    seconds = sorted(run.metrics.finite("step_seconds", run.metrics.warmup))
    if len(seconds) < 40:
        return
    middle, high = seconds[len(seconds) // 2], seconds[len(seconds) * 95 // 100]
    if middle > 0 and high / middle > JITTER:
        cost = statistics.fmean(seconds) / middle - 1
        evidence = f"one step in 20 takes {duration(high)} or more, the median {duration(middle)}"
        yield Finding("Steps are uneven", evidence, "top -H: other programs; saves and evaluations", max(0.01, cost))


def _validation(run: RunRecord) -> Iterator[Finding]:
    known = [(step, loss) for step, loss in run.metrics.evaluations if math.isfinite(loss)]
    if len(known) > 2:
        best = min(known, key=lambda pair: pair[1])
        if known[-1][1] > 1.02 * best[1] and best[0] < known[-1][0]:
            evidence = f"{figure(best[1])} at step {best[0]:,}, {figure(known[-1][1])} at the end"
            yield Finding(
                "The validation loss was lower before", evidence, f"the checkpoint near step {best[0]:,}", 0.2
            )
