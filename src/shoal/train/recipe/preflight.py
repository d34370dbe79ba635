"""Check a recipe, its plan, its model and its data before any process is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch import nn

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.blueprint.replicas.local_sgd import check_fragments
from shoal.blueprint.validation.bf16_weights import reject_bf16_weights
from shoal.blueprint.validation.check import check_plan
from shoal.comm.world import World
from shoal.config.no_effect import no_effect
from shoal.config.recipe import Recipe, RunSection
from shoal.data.dataset import Dataset
from shoal.data.fingerprint import Fingerprint
from shoal.data.sources.open import open_datasets
from shoal.data.sources.packing import PackedTokens
from shoal.errors import Problem, ShoalError, needs, raise_if, to_install
from shoal.parallel.checks import check_model, reject_unsupported
from shoal.parallel.pipeline.stage_io import stream_of
from shoal.parallel.policies import Policies
from shoal.train.build_model import adapt, build_model, describe, without_memory
from shoal.train.loss.objective import CrossEntropy, call_of, uncallable
from shoal.train.recipe.settings import settings_of

T = TypeVar("T")
FAST_DEV_STEPS = 3


@dataclass(frozen=True)
class Job:
    """A recipe whose plan is resolved for a number of ranks, and its opened data."""

    recipe: Recipe
    training: Dataset
    validation: Dataset
    fingerprint: Fingerprint
    """Of both datasets."""


def preflight(recipe: Recipe, world_size: int, *, tries_other_syncs: bool = False) -> Job:
    """Check a recipe on this many ranks without starting or writing anything; raises all problems at once.

    `tries_other_syncs`: the caller will also try other `sync` and `compress` values, which `comm.*` may be set for.
    """
    found = Findings()
    plan = found.of(_runnable_plan, recipe, world_size)
    found.problems += [*_check_optimizer(recipe), *_check_fp8(recipe), *_check_fragments(recipe)]
    found.problems += no_effect(recipe, plan) if plan is not None and not tries_other_syncs else ()
    for tracker in recipe.run.trackers:
        found.of(needs, tracker, what=f"the tracker {tracker}", extra=tracker)
    if recipe.plan.precision == "fp8" and recipe.run.fp8 == "rowwise":
        found.problems += _check_torchao()
    model = found.of(without_memory, lambda: build_model(recipe.model))
    datasets = found.of(open_datasets, recipe.data, recipe.run.seed)
    if datasets is not None:
        found.problems += [*_check_data(model, datasets[0]), *_check_durations(recipe, datasets[0])]
        if plan is not None and model is not None:
            found.problems += _check_model(plan, model, recipe, datasets[0])
            if not found.problems:
                call = call_of(CrossEntropy(), datasets[0].batch(np.arange(min(2, len(datasets[0])))))
                found.problems += uncallable(model, call)
                if plan.layout.pp > 1 and not found.problems:
                    found.of(stream_of, model, describe(model).blocks, call)
    raise_if(found.problems)
    assert plan is not None
    assert datasets is not None
    return Job(recipe.model_copy(update={"plan": plan}), *datasets, Fingerprint.of(*datasets))


def reject_unlike_data(world: World, job: Job) -> None:
    """Raise, on every rank, if ranks have opened different data: hosts may have different files under one path."""
    main, *others = world.all_gather_object(job.fingerprint, kinds=(Fingerprint,))
    for rank, other in enumerate(others, 1):
        if found := other.difference(main.to_mapping()):
            raise ShoalError(
                f"rank {rank} has other data than rank 0 under {job.recipe.data.source!r}: {found}",
                fix="copy the same files to every host, or --data.source PATH_ON_A_SHARED_FILE_SYSTEM",
            )


def reject_shortened_data(job: Job) -> None:
    """Raise if a data file has become shorter since it was opened. Reading beyond its end kills a process (SIGBUS)."""
    for data in (job.training, job.validation):
        if isinstance(data, PackedTokens):
            data.reject_shortened()


@dataclass
class Findings:
    """Problems of several checks, each of which raises on its own."""

    problems: list[Problem] = field(default_factory=list)

    def of(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """Call the function; if it raises, collect its problems and return None."""
        try:
            return function(*arguments, **options)
        except ShoalError as error:
            self.problems += error.problems
            return None


def _check_torchao() -> Iterator[Problem]:
    """Find torchao without importing it: the import takes seconds and prints warnings."""
    if importlib.util.find_spec("torchao") is None:
        what = "rowwise fp8 needs the package torchao, which is not installed"
        yield Problem(what, f"{to_install('fp8')}, or --run.fp8 tensorwise")


def _check_fragments(recipe: Recipe) -> Iterator[Problem]:
    comm, synchrony = recipe.comm, recipe.plan.sync_spec
    if synchrony is not None:
        yield from filter(None, [check_fragments(comm.fragments, comm.outer_delay, synchrony.every)])


def _check_optimizer(recipe: Recipe) -> Iterator[Problem]:
    """Find bf16 optimizer settings that would have no effect."""
    optim = recipe.optim
    has_own_kernel = optim.name == "adamw" and optim.implementation == "auto"
    other = optim.name if optim.name != "adamw" else f"optim.implementation {optim.implementation}"
    for key in ("state_dtype", "param_dtype"):
        if getattr(optim, key) == "bf16" and not has_own_kernel:
            what = f"optim.{key} bf16 is for adamw with its own kernel, not for {other}"
            yield Problem(what, f"--optim.{key} fp32, or --optim.name adamw --optim.implementation auto")
    if optim.state_dtype == "bf16" and recipe.plan.precision == "fp64":
        what = "optim.state_dtype must be fp32 under the precision fp64, got bf16"
        yield Problem(what, "--optim.state_dtype fp32, or another --plan.precision")


def _check_fp8(recipe: Recipe) -> Iterator[Problem]:
    """Find `run.fp8*` under another precision. `run.fp8` alone reads as if it turned fp8 on, and it does not."""
    run, precision = recipe.run, recipe.plan.precision
    defaults = {name: RunSection.model_fields[name].default for name in ("fp8", "fp8_min_features", "fp8_head")}
    changed = [name for name in defaults if getattr(run, name) != defaults[name]]
    if precision != "fp8" and changed:
        names = " and ".join(f"run.{name} {getattr(run, name)}" for name in changed)
        what = f"{names} {'needs' if len(changed) == 1 else 'need'} the precision fp8, got {precision}"
        back = " ".join(f"--run.{name} {'null' if defaults[name] is None else defaults[name]}" for name in changed)
        yield Problem(what, f"--plan.precision fp8, or {back}")


def _runnable_plan(recipe: Recipe, world_size: int) -> Plan:
    plan = recipe.plan.resolve(world_size)
    reject_unsupported(plan)
    if recipe.optim.param_dtype == "bf16":
        reject_bf16_weights(plan)
    plan.num_microbatches(recipe.data.global_batch)
    return plan


def _check_model(plan: Plan, model: nn.Module, recipe: Recipe, data: Dataset) -> list[Problem]:
    """Find why the plan cannot distribute this model."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = [name for name, _ in model.named_modules()]
    description, settings = describe(model), recipe.run
    adapt(model, description, plan)
    found = check_plan(
        plan,
        description=description,
        batch=recipe.data.global_batch,
        sequence=data.tokens_per_sample,
        features=shapes,
        modules=names,
        compiles=settings.compile,
    )
    policies = Policies.of(**settings_of(recipe))
    return found or check_model(model, plan, description, policies.compute, policies.sync)


def _check_data(model: nn.Module | None, data: Dataset) -> Iterator[Problem]:
    """Find where the model does not fit the data."""
    description = describe(model) if model is not None else Description()
    outputs, vocabulary = description.num_outputs, data.vocabulary
    if vocabulary is not None and vocabulary > (outputs or vocabulary):
        yield Problem(
            f"the model must have at least {vocabulary} outputs for the labels of the data, got {outputs}",
            f"--model.vocabulary (or --model.num_classes) {vocabulary}, or other data",
        )
    tokens, most = data.tokens_per_sample, description.max_tokens
    if tokens is not None and most is not None and tokens > most:
        yield Problem(
            f"a sample must have at most the model's {most} tokens, got {tokens}",
            f"--data.seq_len {most}, or --model.max_sequence {tokens}",
        )


def _check_durations(recipe: Recipe, data: Dataset) -> Iterator[Problem]:
    """Find durations of no step, and times where steps are expected: neither can be converted to the other."""
    optim, run, checkpoint = recipe.optim, recipe.run, recipe.checkpoint
    if run.duration.seconds == 0 or run.duration.steps(**units(recipe, data)) == 0:
        yield Problem(f"run.duration must be at least one step, got {run.duration}", "--run.duration 100step")
    in_steps = (
        ("run.evaluate_every", run.evaluate_every, 100),
        ("run.check_replicas", run.check_replicas, 100),
        ("checkpoint.memory_every", checkpoint.memory_every, 1),
    )
    for name, value, steps in in_steps:
        if value.seconds is not None:
            yield Problem(f"{name} must be a number of steps, got the time {value}", f"--{name} {steps}step")
    if not checkpoint.mtbf.seconds:
        yield Problem(f"checkpoint.mtbf must be a time, got {checkpoint.mtbf}", "--checkpoint.mtbf 24h")
    if optim.warmup.seconds and run.duration.seconds is None and not run.fast_dev_run:
        what = f"optim.warmup must be in steps where run.duration is {run.duration}, got the time {optim.warmup}"
        yield Problem(what, "--optim.warmup 20step, or a time as --run.duration, such as 10min")


def steps_of(job: Job) -> int | None:
    """The optimizer steps of the run; None for a run by the clock."""
    if job.recipe.run.fast_dev_run:
        return FAST_DEV_STEPS
    return job.recipe.run.duration.steps(**units(job.recipe, job.training))


def units(recipe: Recipe, data: Dataset) -> dict[str, int]:
    """The arguments of `Duration.steps`, which convert epochs and tokens to steps."""
    return {
        "batch": recipe.data.global_batch,
        "samples_per_epoch": len(data),
        "tokens_per_sample": data.tokens_per_sample or 1,
    }
