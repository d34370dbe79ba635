"""Parameters, memory and arithmetic of a step, before anything is allocated; for `shoal train --dry-run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.checks.memory import optimizer_bytes
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.numerics.optim.groups import moments_of
from shoal.observe.durable_write import write_whole
from shoal.planner.backtest.rows import append
from shoal.predict.cluster import GIB
from shoal.train.build_model import build_model, describe, without_memory
from shoal.train.recipe.auto_plan import (
    cluster_of_ranks,
    dimensions_of,
    is_calibrated,
    task_of,
    unpredicted,
    workload_for,
)

if TYPE_CHECKING:
    from torch import nn

    from shoal.planner.task import Task
    from shoal.predict.cluster import Cluster


def predict_step(recipe: Recipe) -> dict[str, Any]:
    """The figures of a recipe whose plan is resolved, as JSON has them; a figure that is not known is left out.

    parameters, trained_parameters  counted
    memory                          bytes on the fullest rank at its fullest moment, by cause: predicted
    flops                           floating-point operations of a step on all ranks, without recomputation: predicted
    not_predicted                   why memory, or memory and flops, are missing
    """
    model = without_memory(lambda: build_model(recipe.model))
    if model is None:
        return {"not_predicted": "the model cannot be built on the meta device"}
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    counted = {
        "parameters": sum(size for size, _ in sizes),
        "trained_parameters": sum(size for size, is_trained in sizes if is_trained),
    }
    try:
        return {**counted, **_predicted(recipe, model)}
    except ShoalError as error:
        return {**counted, "not_predicted": error.problems[0].what}


def write_prediction(recipe: Recipe, directory: Path, per_node: int) -> None:
    """Write what the planner predicts of a run into its directory, for its page. Raises where it predicts nothing.
    `per_node`: the ranks of each host."""
    model = without_memory(lambda: build_model(recipe.model))
    assert model is not None, "the model cannot be built on the meta device"
    if unpredicted(recipe) is not None:
        return
    task = task_for(recipe, model, per_node=per_node)
    found = task.predict(recipe.plan)
    figures = {"step_seconds": found.time.total, "memory_gib": found.memory.total / GIB}
    known = {**figures, "is_calibrated": is_calibrated(task.cluster)}
    write_whole(directory / "prediction.json", json.dumps(known, indent=2) + "\n")


def append_measurement(recipe: Recipe, summary: Mapping[str, Any], path: Path) -> bool:
    """Append the run to a table that `shoal backtest` reads, and write `prediction.json` into its directory. A model
    whose config lacks dimensions adds neither: then False. Nor does a run with settings that are not predicted: then
    True."""
    if unpredicted(recipe) is not None:
        return True
    model = without_memory(lambda: build_model(recipe.model))
    if model is None or dimensions_of(model) is None:
        return False
    task = task_for(recipe, model, per_node=summary["ranks_per_host"])
    workload, cluster = task.workload, task.cluster
    predicted = task.predict(recipe.plan)
    figures = {"step_seconds": predicted.time.total, "memory_gib": predicted.memory.total / GIB}
    beside = Path(summary["run_directory"]) / "prediction.json"
    write_whole(beside, json.dumps({**figures, "is_calibrated": is_calibrated(cluster)}, indent=2) + "\n")
    size = f"{cluster.per_node}x{cluster.nodes}" if cluster.nodes > 1 else f"{cluster.per_node}"
    append(
        path,
        {
            "source": "shoal", "model": workload.name, "params_b": round(workload.parameters / 1e9, 6),
            "layers": workload.layers, "hidden": workload.hidden, "heads": workload.heads,
            "kv_heads": workload.kv_heads, "ffn": workload.ffn, "vocab": workload.vocabulary, "seq": task.sequence,
            "gpu": cluster.device.name, "n_gpus": summary["ranks"], "global_batch": task.global_batch,
            "notes": "compiled" if recipe.run.compile else "eager", "recompute": recipe.plan.recompute,
            "precision": recipe.plan.precision,
            "iter_time_s": round(summary["step_seconds_median"], 6), "mem_gib": round(summary["memory_gib_max"], 4),
            "tokens_per_s_per_gpu": round(summary["tokens_per_s"] / summary["ranks"], 3), "plan": str(recipe.plan),
            "cluster": f"{'here' if cluster.is_measured else cluster.device.name}:{size}",
            "predicted_s": round(predicted.time.total, 6), "predicted_gib": round(predicted.memory.total / GIB, 4),
        },
    )  # fmt: skip
    return True


def task_for(recipe: Recipe, model: nn.Module, cluster: Cluster | None = None, *, per_node: int | None = None) -> Task:
    """The planner's task for a recipe whose plan is resolved, with the states of its optimizer. `cluster` None: this
    machine and others like it, with `per_node` ranks on each; None: with all of them on this one."""
    workload, world_size = workload_for(recipe, model), recipe.plan.layout.world_size
    if cluster is None:
        cluster = cluster_of_ranks(recipe.launch.device, world_size, per_node or world_size)
    task = task_of(recipe, workload, cluster)
    moments = moments_of(recipe.optim.name, model, describe(model).blocks)
    return replace(task, profile=replace(task.profile, moments=optimizer_bytes(recipe, moments=moments)))


def _predicted(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    task = task_for(recipe, model)
    flops = round(task.workload.flops_per_token(task.sequence) * task.sequence * task.global_batch)
    if (what := unpredicted(recipe)) is not None:
        return {"flops": flops, "not_predicted": what}
    found = task.memory(recipe.plan)
    by_cause = {cause: round(size) for cause, size in asdict(found).items() if cause != "stage" and size >= 1}
    return {"memory": {**by_cause, "total": round(found.total)}, "flops": flops}
