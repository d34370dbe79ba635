"""A profile: the parts of all ranks, the verdict, and what was predicted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe.durable_write import write_whole
from shoal.observe.profile.kernels import Kernel
from shoal.observe.profile.partition import RankParts, axis_of, in_order, mean, partition
from shoal.observe.profile.record import RankRecord
from shoal.observe.profile.trace import write_trace
from shoal.observe.profile.verdict import Verdict, judge, percentile
from shoal.observe.profile.words import spoken

FIXES = {
    "compute": 'Run("bf16"), compile=True, or more ranks',
    "data": "more num_workers= of the DataLoader, or data on a faster disk",
    "straggler": "top -H on its host: other processes, heat, a slow disk; or uneven batches",
    "link": "shoal bench comm, and fewer bytes: a larger batch, zero=1 in place of zero=3, compress=int8",
    "bucket": "Run(bucket_mb=25)",
    "bubble": "a smaller mb=, so that there are more microbatches",
    "recompute": "recompute=selective or none, if memory allows",
    "saving": "run.save(..., wait=False), or less often",
    "jitter": "top -H while it runs: other programs on this host",
    "cores": "top, to find other programs; or Run(threads=1), or fewer ranks on this host",
    "idle": "a larger microbatch, or compile=True: fewer and larger kernels",
}
"""What a script changes, by the kind of the verdict."""


@dataclass(frozen=True)
class Profile:
    """Where the time of the profiled steps went, on every rank."""

    ranks: list[RankParts]
    verdict: Verdict
    plan: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Part → predicted seconds of a step; empty: not predicted."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Operators, memory and the use of the GPU, as JSON values."""
    kernels: Sequence[Kernel] = ()
    """Kernels of further steps of the GPU of rank 0, for the trace."""

    @classmethod
    def of(
        cls,
        records: Sequence[RankRecord],
        *,
        plan: str = "",
        fix: Callable[[Verdict], str] = lambda verdict: FIXES[verdict.kind],
        predicted: Mapping[str, float] | None = None,
        more: Mapping[str, Any] | None = None,
        kernels: Sequence[Kernel] = (),
        gpu: Callable[[float], Mapping[str, Any]] | None = None,
    ) -> Profile:
        """The profile of what all ranks have recorded. `gpu`: the use of the GPU in a step of some seconds."""
        ranks = partition(records)
        found, computing, exposed = dict(more or {}), None, 0.0
        if gpu is not None:
            step = statistics.fmean(seconds for rank in ranks for seconds in rank.seconds)
            found["gpu"] = used = dict(gpu(step))
            exposed = used["exposed_seconds"] / step
            computing = used["busy_seconds"] / step - exposed
        if "memory" in found:
            fullest = max((rank.record for rank in ranks), key=lambda record: record.peak)
            found["memory"] = {"measured_peak": fullest.peak, "fullest_rank": fullest.rank, **found["memory"]}
        verdict = judge(ranks, fix, predicted or {}, computing=computing, exposed=exposed)
        return cls(ranks, verdict, plan, predicted or {}, found, kernels)

    @property
    def parts(self) -> dict[str, float]:
        """Part → seconds of a step, the mean over steps and ranks. They add to the step."""
        return mean(self.ranks)

    @property
    def step_seconds(self) -> list[float]:
        """Of each profiled step, the mean over ranks."""
        return [statistics.fmean(step) for step in zip(*(rank.seconds for rank in self.ranks), strict=True)]

    def to_mapping(self) -> dict[str, Any]:
        """As JSON values, for `profile.json`."""
        parts, steps = self.parts, self.step_seconds
        total = sum(parts.values())
        return {
            "plan": self.plan,
            "steps": len(steps),
            "step_seconds": statistics.fmean(steps),
            "step_seconds_median": statistics.median(steps),
            "step_seconds_p95": percentile(steps, 0.95),
            "predicted_step_seconds": sum(self.predicted.values()) if self.predicted else None,
            "parts": [
                {"part": name, "axis": axis_of(name) or None, "seconds": seconds, "fraction": seconds / total,
                 "predicted_seconds": self._predicted(name)}
                for name, seconds in in_order({**dict.fromkeys(self.predicted, 0.0), **parts}).items()
            ],
            "ranks": [_of_rank(rank) for rank in self.ranks],
            "verdict": self.verdict.to_mapping(),
            **self.more,
        }  # fmt: skip

    def write(self, path: str | Path) -> None:
        """Write `to_mapping` as JSON."""
        write_whole(Path(path), json.dumps(self.to_mapping(), indent=2) + "\n")

    def write_trace(self, path: str | Path) -> None:
        """Write a trace that https://ui.perfetto.dev opens: one process per rank."""
        write_trace(Path(path), [rank.record for rank in self.ranks], self.kernels)

    def _predicted(self, name: str) -> float | None:
        return self.predicted.get(name) if self.predicted else None

    def __str__(self) -> str:
        parts = self.parts
        total = sum(parts.values())
        said = {spoken(name): seconds for name, seconds in parts.items()}
        wide = max(map(len, said))
        lines = [f"{name:<{wide}} {seconds * 1e3:>8.1f} ms {seconds / total:>6.1%}" for name, seconds in said.items()]
        last = [f"{'step':<{wide}} {total * 1e3:>8.1f} ms", f"verdict: {self.verdict.title}: {self.verdict.evidence}"]
        return "\n".join([*lines, *last, f"next: {self.verdict.next}"])


def _of_rank(rank: RankParts) -> dict[str, Any]:
    """One rank, as JSON values."""
    return {
        "rank": rank.record.rank,
        "name": rank.record.name,
        "step_seconds": statistics.fmean(rank.seconds),
        "parts": mean([rank]),
        "waited_for": {str(last): seconds / len(rank.steps) for last, seconds in rank.late_for.items()},
        "core_wait_fraction": rank.delay,
        "peak_bytes": rank.record.peak,
    }
