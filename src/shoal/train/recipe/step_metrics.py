"""What a run shows of itself: a record for each step, the summary at the end. It reads the run and changes nothing."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.blueprint.description import Description
from shoal.comm.all_or_none import all_or_none
from shoal.data.loader import Loader
from shoal.errors import ShoalError
from shoal.numerics.async_scalars import AsyncScalars
from shoal.observe.durable_write import room
from shoal.observe.metrics import TRACKERS, Guarded, JsonLines, Sink, peak_memory_gib, print_to_stderr
from shoal.observe.progress import ProgressLine
from shoal.predict.presets.peak_flops import peak_flops
from shoal.train.recipe.preflight import Job
from shoal.train.run import Run
from shoal.train.step import StepReport

Record = dict[str, Any]

ORDER = (
    *("step", "loss", "grad_norm", "lr", "tokens", "epoch", "step_seconds", "data_seconds", "tokens_per_s", "mfu"),
    *("memory_gib", "loss_scale", "skipped"),
)
"""Of what is known of every step."""
REPLICAS = ("comm_seconds", "comm_hidden_part", "comm_bytes")
"""Of what is known besides where replicas send each other something."""
EXPERTS = ("expert_load_max", "expert_dropped_part", "auxiliary_loss")
"""Of what is known besides where there are experts."""


@dataclass(frozen=True, slots=True)
class _PendingRecord:
    """A step that was asked for, and what was known when it was."""

    report: StepReport
    facts: Record
    experts: AsyncScalars | None
    line: ProgressLine
    done: float


class StepMetrics:
    """Clock, counters and sinks of one rank. `directory` is None on ranks, and in runs, that keep nothing."""

    def __init__(
        self,
        run: Run,
        job: Job,
        description: Description,
        directory: Path | None,
        *,
        began: float,
        history: Record | None = None,
        evaluation: tuple[int, float] | None = None,
        say: Callable[[str], None] = print_to_stderr,
    ) -> None:
        self.run, self.job, self.directory, self.began = run, job, directory, began
        self.sinks = _sinks(run, job, directory, say)
        self.tokens_per_step = job.recipe.data.global_batch * (job.training.tokens_per_sample or 1)
        self.flops_per_step = _flops_per_step(job, description)
        self.peak = _peak(run)
        history = history or {}
        self.loss_first: float | None = history.get("loss_first")
        known = (math.nan if loss is None else loss for loss in history.get("last_losses", ()))
        self.last_losses: deque[float] = deque(known, maxlen=10)
        self.step_seconds, self.data_seconds = array("d"), array("d")
        self.comm_seconds, self.comm_exposed, self.comm_bytes = array("d"), array("d"), array("d")
        self.evaluated_at: int | None
        """After which step the held-out samples were scored last; None: never, or nobody remembers."""
        self.eval_loss: float | None
        self.evaluated_at, self.eval_loss = evaluation or (None, history.get("eval_loss"))
        self.num_skipped = int(history.get("skipped_steps", 0))
        self.seconds_before = float(history.get("seconds_training", 0.0))
        """How long the run was trained before it was interrupted."""
        self.waited = 0.0
        self.start = self.last = time.perf_counter()
        self.setup_seconds = time.time() - began
        self.first_step_seconds: float | None = None
        self.seconds_training = self.seconds_before
        self.num_experts = torch.tensor(list(run.composed.routed.values()), device=run.device)
        self._untold: deque[_PendingRecord] = deque()

    def stepped(self, loader: Loader, line: ProgressLine, done: float) -> None:
        """A step was asked for: on a GPU, measure, keep and show the one before it, which has ended; else this one."""
        report = self.run.report
        assert report is not None
        experts = self._experts(report.experts)
        waited, self.waited = loader.seconds_waited - self.waited, loader.seconds_waited
        facts = {
            "step": self.run.steps_done,
            "lr": self.run.optimizer.param_groups[0]["lr"],
            "tokens": self.run.steps_done * self.tokens_per_step,
            "epoch": loader.epoch,
            "data_seconds": waited,
            "loss_scale": self.run.loss_scale.scale,
        }
        self._untold.append(_PendingRecord(report, facts, experts, line, done))
        while len(self._untold) > (self.run.device.type == "cuda"):
            self._tell(self._untold.popleft())

    def settle(self) -> None:
        """Tell of every step that was asked for, and wait for it."""
        while self._untold:
            self._tell(self._untold.popleft())

    def _tell(self, untold: _PendingRecord) -> None:
        report = untold.report
        loss, grad_norm = report.numbers.read()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if self.first_step_seconds is None:
            self.first_step_seconds = time.time() - self.began
        self.num_skipped += report.was_skipped
        told: Record = {
            **untold.facts,
            "loss": loss,
            "grad_norm": grad_norm,
            "step_seconds": seconds,
            "tokens_per_s": self.tokens_per_step / seconds,
            "mfu": self._mfu(seconds),
            "memory_gib": peak_memory_gib(self.run.device),
            "skipped": report.was_skipped,
        }
        if (overlap := report.overlap) is not None:
            told |= dict(zip(REPLICAS, (overlap.seconds, overlap.part, overlap.bytes), strict=True))
            self.comm_seconds.append(overlap.seconds)
            self.comm_exposed.append(overlap.exposed)
            self.comm_bytes.append(overlap.bytes)
        if untold.experts is not None:
            told |= dict(zip(EXPERTS, untold.experts.read(), strict=True))
        record = {name: told[name] for name in (*ORDER, *REPLICAS, *EXPERTS) if name in told}
        self.loss_first = loss if self.loss_first is None else self.loss_first
        self.last_losses.append(loss)
        self.step_seconds.append(seconds)
        self.data_seconds.append(record["data_seconds"])
        self.seconds_training = self.seconds_before + now - self.start
        if record["step"] % self.job.recipe.run.log_every == 0:
            self._write(record)
        if report.note:
            untold.line.say(f"dropped: {report.note}")
        untold.line.show(record, untold.done)

    def history(self) -> Record:
        """What a run that goes on has to know of the steps before; JSON."""
        self.settle()
        return {
            "loss_first": _finite(self.loss_first),
            "last_losses": [_finite(loss) for loss in self.last_losses],
            "eval_loss": _finite(self.eval_loss),
            "skipped_steps": self.num_skipped,
            "seconds_training": self.seconds_training,
        }

    def evaluated(self, loss: float) -> None:
        """The held-out samples were scored."""
        self.settle()
        self.last = time.perf_counter()  # an evaluation is not part of the step that follows it
        self.evaluated_at, self.eval_loss = self.run.steps_done, loss
        self._write({"step": self.run.steps_done, "eval_loss": loss})

    def summary(self, *, was_stopped: bool) -> Record:
        """How the run went. Times are measured; every rank must call it together."""
        memory = self.run.world.all_gather_object(peak_memory_gib(self.run.device))
        settled = len(self.step_seconds) // 5  # the first steps pay for allocation and compilation
        step_seconds = statistics.median(self.step_seconds[settled:]) if self.step_seconds else math.nan
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
            "plan": str(self.run.plan),
            "parameters": self.run.composed.num_parameters,
            "step_seconds_median": step_seconds,
            "tokens_per_s": self.tokens_per_step / step_seconds,
            "mfu": self._mfu(step_seconds),
            "data_wait_part": sum(self.data_seconds[settled:]) / (sum(self.step_seconds[settled:]) or math.nan),
            **self._of_replicas(settled),
            "memory_gib_max": max(memory),
            "seconds_to_first_step": self.first_step_seconds,
            "seconds_training": self.seconds_training,
            "directory": str(self.directory) if self.directory else None,
        }

    def _of_replicas(self, settled: int) -> Record:
        """How much of the time replicas sent each other something, and how much of that was hidden."""
        if not self.comm_seconds:
            return {"comm_part": None, "comm_bytes": None, "comm_hidden_part": None}
        of_step = statistics.fmean(self.step_seconds[settled:])
        num_timed = len(self.comm_seconds)  # not every step is; the first one, which is slow, always
        settled = max(num_timed // 5, min(1, num_timed - 1))
        seconds = statistics.fmean(self.comm_seconds[settled:])
        return {
            "comm_part": min(1.0, seconds / of_step),
            "comm_bytes": statistics.fmean(self.comm_bytes[settled:]),
            "comm_hidden_part": 1 - statistics.fmean(self.comm_exposed[settled:]) / seconds if seconds else None,
        }

    def close(self) -> None:
        """Tell the rest, and close all sinks."""
        try:
            self.settle()
        finally:
            for sink in self.sinks:
                sink.close()

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)

    def _experts(self, totals: Tensor | None) -> AsyncScalars | None:
        """How evenly the experts of the layers were used, as in `EXPERTS`; None, where there are none."""
        if totals is None:
            return None
        loads, dropped, auxiliary = totals[:, :-2], totals[:, -2].sum(), totals[:, -1].sum()
        hottest = (loads.amax(1) * self.num_experts / loads.sum(1)).max()  # where it is worst
        return AsyncScalars(hottest, dropped / loads.sum(), auxiliary / self.job.recipe.data.global_batch)

    def _mfu(self, seconds: float) -> float | None:
        """Counted FLOPs per second over the datasheet's peak of all devices; None unless both are known."""
        if self.flops_per_step is None or self.peak is None:
            return None
        return self.flops_per_step / seconds / (self.peak * self.run.world.size)


def _finite(loss: float | None) -> float | None:
    """For a manifest, in which every number is one."""
    return loss if loss is not None and math.isfinite(loss) else None


def _sinks(run: Run, job: Job, directory: Path | None, say: Callable[[str], None]) -> list[Sink]:
    """Every rank calls it, and all raise if one cannot open its files."""
    if directory is None:
        return []
    opened: list[Sink] = []
    failed = f"the metrics in {str(directory)!r} cannot be written"
    open_own = lambda: opened.extend(_open_sinks(run, job, directory, say))  # noqa: E731
    all_or_none(run.world, open_own, failed=failed, fix="--run.dir SOMEWHERE_ELSE")
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
        raise ShoalError(f"{path} cannot be written: {why}", fix="make room, or --run.dir SOMEWHERE_ELSE") from None


def _flops_per_step(job: Job, description: Description) -> float | None:
    """Counted by the model itself, from the shape of what a step feeds it."""
    if description.training_flops is None:
        return None
    sample = job.training.batch(np.zeros(1, dtype=np.int64))
    first = next(value for name, value in sample.items() if name != "labels")
    return description.training_flops((job.recipe.data.global_batch, *first.shape[1:]))


def _peak(run: Run) -> float | None:
    if run.device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(run.device), run.plan.precision)
