"""What would help when no plan fits: the cheapest change of the task, and the smallest cluster that does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.blueprint.candidates import layouts
from shoal.blueprint.footprint import Footprint
from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import DEGREES, Plan
from shoal.blueprint.search import search
from shoal.blueprint.task import Task
from shoal.errors import Problem, ShoalError, listed, raise_if

MOST_NODES = 2**14


def refuse_contradictions(task: Task, wanted: Plan) -> None:
    """Raise if there is not one layout to try: the words that cannot be, each with what could."""
    found = list(layouts(task, wanted))
    shares = sorted({task.global_batch // (one["dp_shard"] * one["dp_replicate"]) for one in found})
    if wanted.mb is not None and found and not any(share % wanted.mb == 0 for share in shares):
        sizes = sorted({size for share in shares for size in divisors(share) if size <= 128})
        what = f"mb={wanted.mb} divides no rank's share of {task.global_batch} samples"
        raise ShoalError(what, fix=f"mb={listed(sizes)}")
    if found:
        return
    model, free = task.workload.name, Plan(precision=wanted.precision)
    said = {axis: getattr(wanted, axis) for axis in (*DEGREES, "zero") if getattr(wanted, axis) is not None}
    possible = list(layouts(task, free))
    legal = {axis: sorted({layout[axis] for layout in possible}) for axis in said}
    raise_if(
        (
            Problem(f"no plan for {model} on {task.cluster} has {axis}={value}", f"{axis}={listed(legal[axis])}")
            for axis, value in said.items()
            if legal[axis] and value not in legal[axis]
        ),
        title="nothing to plan" if len(said) > 1 else "",
    )
    if len(said) > 1 and possible:
        words = " ".join(f"{axis}={value}" for axis, value in said.items())
        free_of = [axis for axis in said if any(True for _ in layouts(task, Plan.of(_without(wanted, axis))))]
        raise ShoalError(
            f"no plan for {model} on {task.cluster} has all of {words}, with {task.global_batch} samples a step",
            fix=f"leave out {listed(free_of)}" if free_of else "fewer of these words",
        )
    devices = task.cluster.num_devices
    near = devices * max(1, round(task.global_batch / devices))
    what = f"no layout of {devices} devices divides a global batch of {task.global_batch} samples and {model}"
    raise ShoalError(what, fix=f"--global-batch {near}")


def _without(plan: Plan, axis: str) -> dict[str, Any]:
    return {name: value for name, value in plan.to_mapping().items() if name != axis}


def remedies(task: Task, wanted: Plan) -> Iterator[str]:
    """Changes that make room, the cheapest first; each was tried."""
    changes: list[tuple[str, Task, Plan]] = []
    if task.habits.moments > 4:
        lean = task.habits.with_narrow_moments()
        changes.append(("optim.states: bf16", replace(task, habits=lean), wanted))
    if wanted.offload == "none" and not task.cluster.device.is_host:
        changes.append(("offload=optimizer", task, replace(wanted, offload="optimizer")))
    if wanted != (free := Plan(precision=wanted.precision)):
        changes.append(("no constraints", task, free))
    for shorter in (task.sequence // 2, task.sequence // 4):
        if task.workload.is_transformer and shorter >= 512:
            changes.append((f"--seq {shorter}", replace(task, sequence=shorter), wanted))
    for name, changed, words in changes:
        if best := search(changed, words, keep=1).best:
            yield f"{name}: {best[0].plan.brief()} takes {_gib(best[0].memory)} GiB"
    if larger := _smallest_cluster(task, wanted):
        yield larger


def _smallest_cluster(task: Task, wanted: Plan) -> str:
    """Twice the nodes, again and again; the batch grows where it has to."""
    nodes = task.cluster.nodes
    free = Plan(precision=wanted.precision, recompute=wanted.recompute, offload=wanted.offload)
    while nodes < MOST_NODES:
        nodes *= 2
        cluster = replace(task.cluster, nodes=nodes)
        batch = max(task.global_batch, cluster.num_devices)
        if best := search(replace(task, cluster=cluster, global_batch=batch), free, keep=1).best:
            name = f"here:{cluster.per_node}x{nodes}" if cluster.is_measured else str(cluster)
            return f"--cluster {name}: {best[0].plan.brief()} takes {_gib(best[0].memory)} GiB"
    return ""


def _gib(memory: Footprint) -> str:
    return f"{memory.total / 2**30:.1f}"
