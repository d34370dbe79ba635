"""What a run shows of itself: a record for each step, the summary at the end. It reads the run and changes nothing."""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.blueprint.description import Description
from shoal.blueprint.devices import peak_flops
from shoal.data.loading import Loader
from shoal.observe.metrics import TRACKERS, JsonLines, Sink, peak_memory_gib
from shoal.observe.progress import ProgressLine
from shoal.train.job import Job
from shoal.train.run import Run

Record = dict[str, Any]


class Meter:
    """Clock, counters and sinks of one rank. `directory` is None on ranks, and in runs, that keep nothing."""

    def __init__(self, run: Run, job: Job, description: Description, directory: Path | None, *, began: float) -> None:
        self.run, self.job, self.directory, self.began = run, job, directory, began
        self.sinks = _sinks(run, job, directory)
        self.tokens_per_step = job.recipe.data.batch * job.training.tokens_per_sample
        self.flops_per_step = _flops_per_step(job, description)
        self.peak = _peak(run)
        self.loss_first: float | None = None
        self.last_losses: deque[float] = deque(maxlen=10)
        self.step_seconds, self.data_seconds = array("d"), array("d")
        self.eval_loss: float | None = None
        self.num_skipped = 0
        self.waited = 0.0
        self.start = self.last = time.perf_counter()
        self.setup_seconds = time.time() - began
        self.first_step_seconds: float | None = None
        self.seconds_training = 0.0

    def stepped(self, loader: Loader, line: ProgressLine, done: float) -> None:
        """A step was made: measure it, keep it, show it."""
        report = self.run.report
        assert report is not None
        loss, grad_norm = torch.stack([report.loss, report.grad_norm.to(report.loss)]).tolist()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        waited, self.waited = loader.seconds_waited - self.waited, loader.seconds_waited
        if self.first_step_seconds is None:
            self.first_step_seconds = time.time() - self.began
        self.num_skipped += report.was_skipped
        record: Record = {
            "step": self.run.steps_done,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.run.optimizer.param_groups[0]["lr"],
            "tokens": self.run.steps_done * self.tokens_per_step,
            "epoch": loader.epoch,
            "step_seconds": seconds,
            "data_seconds": waited,
            "tokens_per_s": self.tokens_per_step / seconds,
            "mfu": self._mfu(seconds),
            "memory_gib": peak_memory_gib(self.run.device),
            "loss_scale": self.run.loss_scale.scale,
            "skipped": report.was_skipped,
            **self._experts(report.experts),
        }
        self.loss_first = loss if self.loss_first is None else self.loss_first
        self.last_losses.append(loss)
        self.step_seconds.append(seconds)
        self.data_seconds.append(waited)
        self.seconds_training = now - self.start
        if self.run.steps_done % self.job.recipe.run.log_every == 0:
            self._write(record)
        if report.note:
            line.say(f"dropped: {report.note}")
        line.show(record, done)

    def evaluated(self, loss: float | None) -> None:
        """The held-out samples were scored."""
        self.last = time.perf_counter()  # an evaluation is not part of the step that follows it
        if loss is not None:
            self.eval_loss = loss
            self._write({"step": self.run.steps_done, "eval_loss": loss})

    def summary(self, *, was_stopped: bool) -> Record:
        """How the run went. Times are measured; every rank must call it together."""
        memory = self.run.world.all_gather_object(peak_memory_gib(self.run.device))
        settled = len(self.step_seconds) // 5  # the first steps pay for allocation and compilation
        step_seconds = statistics.median(self.step_seconds[settled:])
        return {
            "steps": self.run.steps_done,
            "samples": self.run.steps_done * self.job.recipe.data.batch,
            "tokens": self.run.steps_done * self.tokens_per_step,
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
            "data_wait_part": sum(self.data_seconds[settled:]) / sum(self.step_seconds[settled:]),
            "memory_gib_max": max(memory),
            "seconds_to_first_step": self.first_step_seconds,
            "seconds_training": self.seconds_training,
            "directory": str(self.directory) if self.directory else None,
        }

    def close(self) -> None:
        """Close all sinks."""
        for sink in self.sinks:
            sink.close()

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)

    def _experts(self, totals: Tensor | None) -> Record:
        """How evenly the experts of the layers were used; nothing, where there are none."""
        if totals is None:
            return {}
        loads, dropped, auxiliary = totals[:, :-2], totals[:, -2].sum(), totals[:, -1].sum()
        num_experts = torch.tensor(list(self.run.composed.routed.values()), device=loads.device)
        hottest = (loads.amax(1) * num_experts / loads.sum(1)).max()  # of the layer where it is worst
        numbers = torch.stack([hottest, dropped / loads.sum(), auxiliary / self.job.recipe.data.batch]).tolist()
        return dict(zip(("expert_load_max", "expert_dropped_part", "auxiliary_loss"), numbers, strict=True))

    def _mfu(self, seconds: float) -> float | None:
        """Counted FLOPs per second over the datasheet's peak of all devices; None unless both are known."""
        if self.flops_per_step is None or self.peak is None:
            return None
        return self.flops_per_step / seconds / (self.peak * self.run.world.size)


def _sinks(run: Run, job: Job, directory: Path | None) -> list[Sink]:
    if directory is None:
        return []
    settings = job.recipe.run
    sinks: list[Sink] = []
    if settings.per_rank_metrics:
        sinks.append(JsonLines(directory / f"metrics.rank{run.world.rank}.jsonl"))
    if run.world.is_main:
        sinks.append(JsonLines(directory / "metrics.jsonl"))
        resolved = job.recipe.model_dump(mode="json")
        sinks += [TRACKERS[tracker](directory, settings.name, resolved) for tracker in settings.trackers]
    return sinks


def _flops_per_step(job: Job, description: Description) -> float | None:
    """Counted by the model itself, from the shape of what a step feeds it."""
    if description.training_flops is None:
        return None
    sample = job.training.batch(np.zeros(1, dtype=np.int64))
    first = next(value for name, value in sample.items() if name != "labels")
    return description.training_flops((job.recipe.data.batch, *first.shape[1:]))


def _peak(run: Run) -> float | None:
    if run.device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(run.device), run.plan.precision)
