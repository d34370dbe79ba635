"""Commands that train by a plan, ready to be pasted: on one host or several, under torchrun, and under Slurm."""

from __future__ import annotations

import shlex

from shoal.blueprint.plan import Plan
from shoal.planner.request import DIMENSIONS, PlanRequest
from shoal.planner.task import Task
from shoal.predict.presets.catalogue import model_flags

PORT = 29500


def commands(task: Task, plan: Plan, request: PlanRequest) -> dict[str, str]:
    """Name of a launcher → its command, with every setting of the prediction that is not a default."""
    words = shlex.join([*_model(request), "--plan", plan.brief(), *_settings(task, request)])
    cluster = task.cluster
    nodes, each = cluster.nodes, cluster.per_node if cluster.nodes > 1 else cluster.num_devices
    gpus = "" if cluster.device.is_host else f" --gpus-per-node {each}"
    slurm = f"srun --nodes {nodes} --ntasks-per-node {each}{gpus} shoal train {words}"
    if nodes == 1:
        return {
            "one host": f"shoal train {words} --nproc {each}",
            "torchrun": f"torchrun --standalone --nproc-per-node {each} -m shoal train {words}",
            "Slurm": slurm,
        }
    meets = f'--rdzv-backend c10d --rdzv-endpoint "$HEAD:{PORT}"'
    return {
        f"{nodes} hosts, by ssh": f'shoal train {words} --hosts "$HOSTS"',
        "torchrun, on each host": f"torchrun --nnodes {nodes} --nproc-per-node {each} {meets} -m shoal train {words}",
        "Slurm": slurm,
    }


def remark(task: Task, request: PlanRequest) -> str:
    """The names in the commands that a reader fills in; empty: there are none."""
    each = task.cluster.per_node
    parts = ["RECIPE.yaml is a recipe with this model"] if _model(request) == ["RECIPE.yaml"] else []
    parts += [f"HOSTS=host0:{each},host1:{each},... and HEAD=host0 name the hosts"] if task.cluster.nodes > 1 else []
    return "; ".join(parts)


def _model(request: PlanRequest) -> list[str]:
    """The flags of a model that trains here, else the recipe that names one."""
    is_changed = any(getattr(request, name) is not None for name in DIMENSIONS)
    flags = [] if is_changed or request.model is None else model_flags(request.model)
    return flags or ["RECIPE.yaml"]


def _settings(task: Task, request: PlanRequest) -> list[str]:
    has_tokens = task.workload.is_transformer or task.sequence > 1  # a custom model may read text, too
    words = ["--data.seq_len", str(task.sequence)] if has_tokens else []
    words += ["--data.global_batch", str(task.global_batch)]
    words += ["--model.lora.rank", str(task.workload.lora)] if task.workload.lora else []
    for key in ("param_dtype", "state_dtype"):
        words += [f"--optim.{key}", "bf16"] if getattr(request, key) == "bf16" else []
    return [*words, *(["--run.compile", "true"] if task.compiles else [])]
