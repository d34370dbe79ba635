"""`plan: auto`: let the planner choose what the plan of a recipe leaves open, for this machine and this model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.bf16_weights import check_bf16_weights
from shoal.config.checks.settings import KEPT_BY_THE_PLANNER
from shoal.config.recipe import Recipe
from shoal.errors import Problem, ShoalError, raise_if
from shoal.parallel.data.shard_policy import DEFAULT_SHARDING
from shoal.parallel.lora.apply import ALL_LINEAR
from shoal.parallel.lora.layers import adapted_layers
from shoal.planner.search import search
from shoal.planner.suggestions import reject_contradictions, smallest_changes
from shoal.planner.task import Task
from shoal.predict.cluster import GIB, Cluster
from shoal.predict.cluster_parser import is_measured_here, parse_cluster
from shoal.predict.huggingface_config import NoDimensions, from_hugging_face
from shoal.predict.predict import Prediction
from shoal.predict.presets.frameworks import shoal_profile
from shoal.predict.workload import Workload
from shoal.train.build_model import build_model, describe, without_memory

if TYPE_CHECKING:
    from torch import nn

DIMENSIONS = {
    "hidden": "hidden", "num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads", "ffn": "ffn",
    "vocabulary": "vocabulary", "tied": "tied", "head_dim": "head_dim", "num_experts": "experts", "top_k": "top_k",
    "expert_ffn": "expert_ffn", "num_dense_layers": "dense_layers",
}  # fmt: skip
"""Names of dimensions in the config of a transformer → names in a workload."""


def with_best_plan(recipe: Recipe, num_ranks: int, per_node: int) -> tuple[Recipe, Prediction]:
    """The recipe with the best plan for this many ranks, `per_node` on each machine. Settings of its own plan stay."""
    if recipe.optim.param_dtype == "bf16":  # the planner does not choose a precision; `--plan auto` has replaced it
        instead = replace(recipe.plan, precision="bf16")
        raise_if(check_bf16_weights(recipe.plan, precision=f'--plan "auto {instead}"'))
    model = model_of(recipe)
    workload = workload_for(recipe, model)
    cluster = cluster_of_ranks(recipe.launch.device, num_ranks, per_node)
    task = replace(task_of(recipe, workload, cluster), description=describe(model))
    reject_contradictions(task, recipe.plan)
    best = search(task, recipe.plan, keep=1).best
    if not best:
        fixes = "; or ".join(_suggestions(recipe, task))
        what = f"no plan fits {workload.name} on {num_ranks} x {task.cluster.device.name} (predicted)"
        raise ShoalError(what, fix=fixes or "a smaller --model.preset", code="Q011")
    chosen = {"plan": best[0].plan, "run": recipe.run.model_copy(update={"planned": False})}  # it is explicit now
    return recipe.model_copy(update=chosen), best[0]


def check_best_plan(
    recipe: Recipe, num_ranks: int, per_node: int
) -> tuple[Recipe, Prediction | None, tuple[Problem, ...]]:
    """The recipe with the best plan, and its prediction. If there is none: the recipe without a layout, so that the
    rest of it can be checked on one rank, and the problems."""
    try:
        return *with_best_plan(recipe, num_ranks, per_node), ()
    except ShoalError as error:
        plan = Plan.of({key: value for key, value in recipe.plan.to_mapping().items() if key in KEPT_BY_THE_PLANNER})
        return recipe.model_copy(update={"plan": plan}), None, error.problems


def _suggestions(recipe: Recipe, task: Task) -> Iterator[str]:
    """Settings of `shoal train`, each with the plan that would fit."""
    for change in smallest_changes(task, recipe.plan):
        ((name, value),) = change.items()
        plan, changed = recipe.plan, task
        if name == "state_dtype":
            changed, flag = replace(task, profile=task.profile.with_bf16_moments()), f"--optim.state_dtype {value}"
        elif name == "seq_len":
            changed, flag = replace(task, sequence=value), f"--data.seq_len {value}"
        else:
            plan = replace(plan, **change)
            flag = f'--plan "auto {plan}"'
        if best := search(changed, plan, keep=1).best:
            yield f"{flag}: {best[0].plan.brief()} takes {best[0].memory.total / GIB:.1f} GiB"


def unpredicted(recipe: Recipe) -> str | None:
    """The settings that the planner does not know; None: it knows how the recipe is computed."""
    comm, plan, lora = recipe.comm, recipe.plan, recipe.model.lora
    if lora is not None and lora.base is not None:
        return f"with model.lora.base={lora.base}"
    if lora is not None and lora.targets != ALL_LINEAR:
        return "with LoRA on some of the layers"
    names = [field.name for field in fields(DEFAULT_SHARDING)]
    changed = [name for name in names if getattr(comm, name) != getattr(DEFAULT_SHARDING, name)]
    return f"with comm.{' and comm.'.join(changed)}" if changed and plan.is_sharded else None


def task_of(recipe: Recipe, workload: Workload, cluster: Cluster) -> Task:
    """The task of the planner for a recipe, its model and a cluster."""
    return Task(
        workload=workload,
        cluster=cluster,
        sequence=recipe.data.seq_len if workload.is_transformer else 1,
        global_batch=recipe.data.global_batch,
        profile=shoal_profile(
            compile=recipe.run.compile,
            state_dtype=recipe.optim.state_dtype,
            param_dtype=recipe.optim.param_dtype,
            recompute_swiglu=recipe.run.recompute_swiglu,
        ),
        compiles=recipe.run.compile,
    )


def model_of(recipe: Recipe) -> nn.Module:
    """The recipe's model, without memory."""
    model = without_memory(lambda: build_model(recipe.model))
    if model is None:
        raise ShoalError(
            "plan: auto needs a model that can be built on the meta device",
            fix='--plan "zero=3", or another explicit plan',
            code="Q013",
        )
    return model


def workload_for(recipe: Recipe, model: nn.Module) -> Workload:
    """The workload of a model, with LoRA if it has that: from the config of a transformer, or traced on the recipe's
    data."""
    found, adapted = _workload_for(recipe, model), adapted_layers(model)
    is_known = found.is_transformer and not found.experts and found.latent is None
    return replace(found, lora=next(iter(adapted.values())).rank) if adapted and is_known else found


def _workload_for(recipe: Recipe, model: nn.Module) -> Workload:
    dimensions = dimensions_of(model)
    if dimensions is not None:
        return Workload(name=recipe.model.name, **dimensions)
    if has_dimensions(model):
        with suppress(NoDimensions):
            return from_hugging_face(model.config.to_dict(), name=recipe.model.name)  # type: ignore[union-attr, operator]
    return _traced(model, recipe)


def has_dimensions(model: nn.Module) -> bool:
    """Whether a model says its dimensions, ours or those of transformers, so that it need not be traced."""
    return dimensions_of(model) is not None or hasattr(getattr(model, "config", None), "to_dict")


def dimensions_of(model: nn.Module) -> dict[str, Any] | None:
    """The dimensions in a transformer's config; None: it has none."""
    config = getattr(model, "config", None)
    found = {ours: getattr(config, theirs, None) for theirs, ours in DIMENSIONS.items()}
    if any(found[name] is None for name in ("hidden", "layers", "heads", "ffn", "vocabulary")):
        return None
    shared = (getattr(config, "num_shared_experts", 0) or 0) * (found["expert_ffn"] or 0)
    by_expert = getattr(config, "choice", "token") == "expert"
    routing = {
        "has_auxiliary_loss": not by_expert and bool(getattr(config, "auxiliary_coefficient", True)),
        "routes_by_sequence": by_expert or getattr(config, "capacity_factor", None) is not None,
    }
    return {"shared_ffn": shared, **routing, **{name: value for name, value in found.items() if value is not None}}


def _traced(model: nn.Module, recipe: Recipe) -> Workload:
    import numpy as np

    from shoal.data.sources.open import open_datasets
    from shoal.train.loss.objective import CrossEntropy, call_of
    from shoal.train.trace.model_trace import workload_of

    training, _ = open_datasets(recipe.data, recipe.run.seed)
    arguments, options = call_of(CrossEntropy(), training.batch(np.arange(2)))
    return workload_of(model, options or arguments, name=recipe.model.name, precision=recipe.plan.precision)


def cluster_for(device: str) -> Cluster:
    """This machine as a cluster: its calibration, the preset of its GPUs, or the preset of a CPU."""
    import torch

    is_cpu = device == "cpu" or not torch.cuda.is_available()
    if is_measured_here() and (here := parse_cluster("here")).device.is_host == is_cpu:
        return here
    if device != "cpu" and torch.cuda.is_available():
        return parse_cluster(preset_of(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory))
    return parse_cluster("cpu")


def cluster_of_ranks(device: str, num_ranks: int, per_node: int) -> Cluster:
    """This machine, and others like it: as many as a number of ranks needs, `per_node` on each."""
    per_node = min(per_node, num_ranks)
    return replace(cluster_for(device), per_node=per_node, nodes=-(-num_ranks // per_node))


def is_calibrated(cluster: Cluster) -> bool:
    """Whether all rates were measured on these machines. `shoal calibrate` measures no link between hosts."""
    return cluster.is_measured and (cluster.nodes == 1 or cluster.between.name == "measured")


def preset_of(name: str, memory: int) -> str:
    """The preset of a GPU, by torch's name for it.

    >>> preset_of("NVIDIA A100-SXM4-80GB", 80 * 2**30), preset_of("NVIDIA H200", 139 * 2**30)
    ('a100-80', 'h200')
    """
    from shoal.predict.presets.clusters import DEVICES

    lower = name.lower().replace(" ", "")
    if "a100" in lower:
        return "a100-80" if memory > 50 * 2**30 else "a100-40"
    for preset in sorted(DEVICES, key=len, reverse=True):
        if preset.replace("-", "") in lower.replace("-", ""):
            return preset
    raise ShoalError(f"there is no preset for {name!r}", fix="shoal calibrate", code="Q014")
