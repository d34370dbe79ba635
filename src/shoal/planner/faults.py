"""What faults cost a run of the best plan, and what would make it lose less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.blueprint.plan import Plan
from shoal.config.duration import Duration
from shoal.errors import Findings, Problem, ShoalError
from shoal.planner.request import PlanRequest
from shoal.planner.task import Task
from shoal.predict.goodput.advise import Change, changes
from shoal.predict.goodput.recovery import HOST_COPY, STORAGE_PER_HOST, Recovery, best_interval, restart_seconds
from shoal.predict.goodput.simulate import Goodput, simulate


@dataclass(frozen=True, slots=True)
class Faults:
    """A prediction of a run with faults."""

    recovery: Recovery
    goodput: Goodput
    changes: list[Change]
    is_restart_assumed: bool

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "ettr": round(self.goodput.ettr, 4),
            "lost": {cause: round(part, 4) for cause, part in self.goodput.parts().items()},
            "between_faults_s": round(self.recovery.between_faults),
            "save_every_s": round(self.recovery.interval, 1),
            "save_stall_s": round(self.recovery.stall, 3),
            "restart_s": round(self.recovery.restart, 1),
            "is_restart_assumed": self.is_restart_assumed,
            "changes": [{"what": one.what, "ettr": round(one.goodput.ettr, 4)} for one in self.changes],
        }


def predict_faults(request: PlanRequest, task: Task, plan: Plan) -> Faults:
    """Predict the part of its time that a run is useful, with checkpoints at the best interval."""
    seconds = read_times(request)
    cluster, saved = task.cluster, task.saved(plan)
    assert request.mtbf is not None
    moved = saved.total / (cluster.nodes * STORAGE_PER_HOST)
    stall = saved.copied / HOST_COPY
    recovery = Recovery(
        hosts=cluster.nodes,
        per_host=cluster.per_node,
        mtbf=seconds["mtbf"],
        stall=stall,
        write=moved,
        read=moved,
        interval=max(best_interval(stall, seconds["mtbf"] / cluster.num_devices), stall, moved),
        restart=seconds.get("restart", restart_seconds(cluster.num_devices)),
        spares=request.spares,
        repair=seconds["repair"],
    )
    goodput = simulate(recovery)
    return Faults(recovery, goodput, changes(recovery, goodput), "restart" not in seconds)


def read_times(request: PlanRequest) -> dict[str, float]:
    """The lengths of time of a request, in seconds; those that are not given are left out."""
    found, read = Findings(), dict[str, float]()
    for name, example in (("mtbf", "50000h"), ("restart", "30sec"), ("repair", "24h")):
        if (text := getattr(request, name)) is None:
            continue
        duration = found.of(Duration.parse, text)
        if duration is not None and duration.seconds:
            read[name] = duration.seconds
        elif duration is not None:
            what = f"--{name} must be a length of time above 0, got {text!r}"
            found += [Problem("Q030", what, f"--{name} {example}")]
    if request.spares < 0:
        found += [Problem("Q030", f"--spares must be 0 or more, got {request.spares}", "--spares 1")]
    if found.problems:
        raise ShoalError(*found.problems)
    return read
