"""Metrics of a run: a record for each step, and the summary at the end. They read the run and change nothing."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.blueprint.description import Description
from shoal.comm.all_or_none import all_or_none
from shoal.comm.heartbeat import slowest
from shoal.comm.profile.axis_overlap import AxisOverlap, AxisTime
from shoal.data.loader import Loader
from shoal.errors import ShoalError
from shoal.numerics.async_scalars import AsyncScalars
from shoal.observe.durable_write import room
from shoal.observe.metrics import TRACKERS, Guarded, JsonLines, Sink, peak_memory_gib, print_to_stderr
from shoal.observe.progress import ProgressLine
from shoal.observe.slow_data import SlowData
from shoal.observe.slow_link import SlowLink
from shoal.observe.stragglers import Stragglers
from shoal.predict.presets.peak_flops import peak_flops
from shoal.train.recipe.preflight import Job
from shoal.train.run import Run
from shoal.train.step.report import StepReport

Record = dict[str, Any]

ORDER = (
    *("step", "loss", "grad_norm", "lr", "tokens", "epoch", "step_seconds", "data_wait_seconds", "tokens_per_s"),
    *("mfu", "memory_gib", "loss_scale", "skipped"),
)
"""Keys of every record."""
REPLICAS = ("comm_seconds", "comm_overlap_fraction", "comm_bytes")
"""Further keys where replicas communicate."""
# In the first step after each measurement on several ranks, `slowest.METRICS` as well.
AXIS = ("comm_seconds_{axis}", "comm_overlap_fraction_{axis}")
"""Further keys of every axis that communicates, in the steps that are timed."""
EXPERTS = ("expert_load_max", "expert_dropped_fraction", "auxiliary_loss")
"""Further keys where the model has experts."""


@dataclass(frozen=True, slots=True)
class _PendingRecord:
    """A step that was started, and the facts that were known then."""

    report: StepReport
    facts: Record
    experts: AsyncScalars | None
    axes: dict[str, AxisTime]
    line: ProgressLine
    done: float
    loader_processes: int
    """Processes that prepare batches of this rank."""


class StepMetrics:
    """Clock, counters and sinks of one rank. `directory` is None where no file is written."""

    def __init__(
        self,
        run: Run,
        job: Job,
        description: Description,
        directory: Path | None,
        *,
        start_time: float,
        history: Record | None = None,
        evaluation: tuple[int, float] | None = None,
        say: Callable[[str], None] = print_to_stderr,
    ) -> None:
        self.run, self.job, self.directory, self.start_time = run, job, directory, start_time
        self.sinks = _sinks(run, job, directory, say)
        self.tokens_per_step = job.recipe.data.global_batch * (job.training.tokens_per_sample or 1)
        self.flops_per_step = _flops_per_step(job, description)
        self.peak = _peak_of_device(run)
        history = history or {}
        self.loss_first: float | None = history.get("loss_first")
        known = (math.nan if loss is None else loss for loss in history.get("last_losses", ()))
        self.last_losses: deque[float] = deque(known, maxlen=10)
        self.step_seconds, self.data_wait_seconds = array("d"), array("d")
        self.comm_seconds, self.comm_exposed, self.comm_bytes = array("d"), array("d"), array("d")
        self.comm_rows = array("q")
        """The place in `step_seconds` of each of them: not every step is timed."""
        self.evaluated_at: int | None
        """The step of the last evaluation; None: there was none, or it is not recorded."""
        self.eval_loss: float | None
        self.evaluated_at, self.eval_loss = evaluation or (None, history.get("eval_loss"))
        self.num_skipped = int(history.get("skipped_steps", 0))
        self.seconds_before = float(history.get("seconds_training", 0.0))
        """Seconds of training before the run was interrupted."""
        self.waited = 0.0
        self.start = self.last = time.perf_counter()
        self.first_step_seconds: float | None = None
        self.seconds_training = self.seconds_before
        self.num_experts = torch.tensor(list(run.composed.routed.values()), device=run.device)
        self._pending: deque[_PendingRecord] = deque()
        self.stragglers, self.slow_data, self.slow_link = Stragglers(), SlowData(), SlowLink()
        self.overlap = AxisOverlap(is_on=_times_axes(run, job))
        self._axes: dict[str, list[tuple[int, AxisTime]]] = {}

    def record_step(self, loader: Loader, line: ProgressLine, done: float) -> None:
        """Record the step that was just started. On a GPU its numbers arrive later: write the step before it."""
        report = self.run.report
        assert report is not None
        experts = self._experts(report.experts)
        waited, self.waited = loader.seconds_waited - self.waited, loader.seconds_waited
        facts = {
            "step": self.run.steps_done,
            "lr": self.run.optimizer.param_groups[0]["lr"],
            "tokens": self.run.steps_done * self.tokens_per_step,
            "epoch": loader.epoch,
            "data_wait_seconds": waited,
            "loss_scale": self.run.loss_scale.scale,
        }
        axes = self._by_axis(report)
        self._pending.append(_PendingRecord(report, facts, experts, axes, line, done, loader.num_processes))
        while len(self._pending) > (self.run.device.type == "cuda"):
            self._record(self._pending.popleft())
        if self.overlap.is_on and self.slow_link.is_due(self.run.steps_done):
            waits = self.run.world.all_gather_object(self.slow_link.own())
            if warning := self.slow_link.warning(waits):
                line.say(f"shoal: {warning}")

    def flush(self) -> None:
        """Wait for every step that was started, and record it."""
        while self._pending:
            self._record(self._pending.popleft())

    def _record(self, pending: _PendingRecord) -> None:
        """Read the numbers of a step, write its record and show it."""
        report = pending.report
        loss, grad_norm = report.numbers.read()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if self.first_step_seconds is None:
            self.first_step_seconds = time.time() - self.start_time
        self.num_skipped += report.was_skipped
        known: Record = {
            **pending.facts,
            "loss": loss,
            "grad_norm": grad_norm,
            "step_seconds": seconds,
            "tokens_per_s": self.tokens_per_step / seconds,
            "mfu": self.mfu(seconds),
            "memory_gib": peak_memory_gib(self.run.device),
            "skipped": report.was_skipped,
        }
        if (overlap := report.overlap) is not None:
            known |= dict(zip(REPLICAS, (overlap.seconds, overlap.part, overlap.bytes), strict=True))
            self.comm_rows.append(len(self.step_seconds))
            self.comm_seconds.append(overlap.seconds)
            self.comm_exposed.append(overlap.exposed)
            self.comm_bytes.append(overlap.bytes)
        axes = self._of_axes(pending.axes)
        self.slow_link.note(pending.axes, seconds, without_core=self.overlap.without_core)
        known |= self._straggler(pending.line)
        if pending.experts is not None:
            known |= dict(zip(EXPERTS, pending.experts.read(), strict=True))
        record = {name: known[name] for name in (*ORDER, *REPLICAS, *slowest.METRICS, *EXPERTS) if name in known} | axes
        self.loss_first = loss if self.loss_first is None else self.loss_first
        self.last_losses.append(loss)
        self.step_seconds.append(seconds)
        self.data_wait_seconds.append(record["data_wait_seconds"])
        self.seconds_training = self.seconds_before + now - self.start
        if record["step"] % self.job.recipe.run.log_every == 0:
            self._write(record)
        waited = record["data_wait_seconds"]
        if warning := self.slow_data.warning(seconds, waited, workers=pending.loader_processes):
            pending.line.say(f"shoal: {warning}")
        if report.note:
            pending.line.say(f"skipped: {report.note}")
        pending.line.show(record, pending.done)

    def _by_axis(self, report: StepReport) -> dict[str, AxisTime]:
        """Axis → its communication in the last step; that of replicas by their own timers, if they have any."""
        if self.overlap.last is None:
            return {}
        found = dict(self.overlap.last)
        if report.overlap is not None:
            axis = "dp_replicate" if self.run.composed.is_sharded else self.run.plan.gradient_axis
            found[axis] = AxisTime(report.overlap.seconds, report.overlap.exposed)
        return found

    def _of_axes(self, axes: dict[str, AxisTime]) -> Record:
        """The values of `AXIS`."""
        found: Record = {}
        for axis, each in axes.items():
            self._axes.setdefault(axis, []).append((len(self.step_seconds), each))
            names = (name.format(axis=axis) for name in AXIS)
            found |= dict(zip(names, (each.seconds, each.hidden), strict=True))
        return found

    def history(self) -> Record:
        """Facts about the steps so far that a resumed run needs; JSON."""
        self.flush()
        return {
            "loss_first": _finite(self.loss_first),
            "last_losses": [_finite(loss) for loss in self.last_losses],
            "eval_loss": _finite(self.eval_loss),
            "skipped_steps": self.num_skipped,
            "seconds_training": self.seconds_training,
        }

    def leave_out(self, seconds: float) -> None:
        """Leave time since the last record out of the next step: no part of training has taken it."""
        self.last += seconds

    def record_evaluation(self, loss: float) -> None:
        """Record the validation loss after the steps so far."""
        self.flush()
        self.last = time.perf_counter()  # the time of an evaluation is not part of the next step
        self.evaluated_at, self.eval_loss = self.run.steps_done, loss
        self._write({"step": self.run.steps_done, "eval_loss": loss})

    def summary(self, *, was_stopped: bool) -> Record:
        """The summary of the run. Every rank calls it."""
        memory = self.run.world.all_gather_object(peak_memory_gib(self.run.device))
        warmup = len(self.step_seconds) // 5  # the first steps include allocation and compilation
        step_seconds = statistics.median(self.step_seconds[warmup:]) if self.step_seconds else math.nan
        return {
            "steps": self.run.steps_done,
            "samples": self.run.steps_done * self.job.recipe.data.global_batch,
            "tokens": self.run.steps_done * self.tokens_per_step,
            "unit": "samples" if self.job.training.tokens_per_sample is None else "tokens",
            "loss_first": self.loss_first,
            "loss_last": statistics.fmean(self.last_losses),
            "eval_loss": self.eval_loss,
            "skipped_steps": self.num_skipped,
            "was_stopped": was_stopped,
            "ranks": self.run.world.size,
            "ranks_per_host": self.run.world.local_size,
            "plan": str(self.run.plan),
            "parameters": self.run.composed.num_parameters,
            "step_seconds_median": step_seconds,
            "tokens_per_s": self.tokens_per_step / step_seconds,
            "mfu": self.mfu(step_seconds),
            "data_wait_fraction": sum(self.data_wait_seconds[warmup:]) / (sum(self.step_seconds[warmup:]) or math.nan),
            **self._communication(warmup),
            "comm_axes": self._axes_summary(warmup),
            "straggler": self.stragglers.summary(self.run.world),
            "memory_gib_max": max(memory),
            "seconds_to_first_step": self.first_step_seconds,
            "seconds_training": self.seconds_training,
            "run_directory": str(self.directory) if self.directory else None,
        }

    def _communication(self, warmup: int) -> Record:
        """The fraction of the time in which replicas communicate, and the fraction of that which is overlapped."""
        if not self.comm_seconds:
            return {"comm_fraction": None, "comm_bytes": None, "comm_overlap_fraction": None}
        of_step = statistics.fmean(self.step_seconds[warmup:])
        first = _first_after(self.comm_rows, warmup)
        seconds = statistics.fmean(self.comm_seconds[first:])
        return {
            "comm_fraction": min(1.0, seconds / of_step),
            "comm_bytes": statistics.fmean(self.comm_bytes[first:]),
            "comm_overlap_fraction": 1 - statistics.fmean(self.comm_exposed[first:]) / seconds if seconds else None,
        }

    def _axes_summary(self, warmup: int) -> Record:
        """Axis → the fraction of the time in which it communicates, and the fraction of that which is overlapped."""
        of_step = statistics.fmean(self.step_seconds[warmup:]) if self.step_seconds else math.nan
        found = {}
        for axis, every in self._axes.items():
            timed = [each for _, each in every[_first_after([row for row, _ in every], warmup) :]]
            seconds, exposed = (
                statistics.fmean(getattr(each, name) for each in timed) for name in ("seconds", "exposed")
            )
            fraction = min(1.0, seconds / of_step)
            found[axis] = {"fraction": fraction, "overlap_fraction": AxisTime(seconds, exposed).hidden}
        return found

    def close(self) -> None:
        """Record the remaining steps, and close all sinks."""
        try:
            self.flush()
        finally:
            for sink in self.sinks:
                sink.close()

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)

    def _experts(self, totals: Tensor | None) -> AsyncScalars | None:
        """The values of `EXPERTS`; None without experts."""
        if totals is None:
            return None
        loads, dropped, auxiliary = totals[:, :-2], totals[:, -2].sum(), totals[:, -1].sum()
        hottest = (loads.amax(1) * self.num_experts / loads.sum(1)).max()  # of the least balanced layer
        return AsyncScalars(hottest, dropped / loads.sum(), auxiliary / self.job.recipe.data.global_batch)

    def _straggler(self, line: ProgressLine) -> Record:
        """The values of `slowest.METRICS`, if they were measured since the last record."""
        found = self.stragglers.newly_found()
        if found is None:
            return {}
        if warning := self.stragglers.warning(self.run.world.size):
            line.say(f"shoal: {warning}")
        return slowest.to_metrics(found)

    def mfu(self, seconds: float) -> float | None:
        """Counted FLOPs per second over the datasheet's peak of all devices; None unless both are known."""
        if self.flops_per_step is None or self.peak is None:
            return None
        return self.flops_per_step / seconds / (self.peak * self.run.world.size)


def _first_after(rows: Sequence[int], warmup: int) -> int:
    """The place of the first timed step after the warm-up, as the page of a run counts it; at least one step is left,
    and the first one, which is slow, only if it is alone.

    >>> _first_after([0, 2, 4, 30, 60], 12), _first_after([0, 2], 12), _first_after([0, 2], 0), _first_after([0], 0)
    (3, 1, 1, 0)
    """
    return min(max(sum(row < warmup for row in rows), 1), len(rows) - 1)


def _finite(loss: float | None) -> float | None:
    """The loss, or None if it is not finite: JSON in a manifest has finite numbers alone."""
    return loss if loss is not None and math.isfinite(loss) else None


def _sinks(run: Run, job: Job, directory: Path | None, say: Callable[[str], None]) -> list[Sink]:
    """Open this rank's files. Every rank calls it, and all raise if one fails."""
    if directory is None:
        return []
    opened: list[Sink] = []
    failed = f"the metrics in {str(directory)!r} cannot be written"
    open_own = lambda: opened.extend(_open_sinks(run, job, directory, say))  # noqa: E731
    all_or_none(run.world, open_own, failed=failed, fix="--run.dir OTHER_DIRECTORY")
    return opened


def _open_sinks(run: Run, job: Job, directory: Path, say: Callable[[str], None]) -> Iterator[Sink]:
    settings = job.recipe.run
    if settings.per_rank_metrics:
        yield _lines(directory / f"metrics.rank{run.world.rank}.jsonl", say if run.world.is_main else print_to_stderr)
    if run.world.is_main:
        yield _lines(directory / "metrics.jsonl", say)
        resolved = job.recipe.model_dump(mode="json")
        for tracker in settings.trackers:
            yield Guarded(tracker, TRACKERS[tracker](directory, settings.name, resolved), say)


def _lines(path: Path, say: Callable[[str], None]) -> JsonLines:
    try:
        return JsonLines(path, say)
    except OSError as error:
        why = f"{error.strerror}{room(path, error)}"
        raise ShoalError(
            f"{path} cannot be written: {why}", fix="free space, or --run.dir OTHER_DIRECTORY", code="C026"
        ) from None


def _flops_per_step(job: Job, description: Description) -> float | None:
    """FLOPs of a step as the model's description counts them, from the shape of its input."""
    if description.training_flops is None:
        return None
    sample = job.training.batch(np.zeros(1, dtype=np.int64))
    first = next(value for name, value in sample.items() if name != "labels")
    return description.training_flops((job.recipe.data.global_batch, *first.shape[1:]))


def _times_axes(run: Run, job: Job) -> bool:
    """Whether to time collectives by axis. A GPU does not say when they end, compiled code would be compiled again for
    the steps that are timed, and a profile times all of them."""
    settings = job.recipe.run
    return run.world.size > 1 and run.device.type == "cpu" and not settings.compile and not settings.profile.amount


def _peak_of_device(run: Run) -> float | None:
    if run.device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(run.device), run.plan.precision)
