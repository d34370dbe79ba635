"""Everything about a run that can be wrong before a process is started, checked before a process is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch import nn

from shoal.blueprint.description import Description
from shoal.blueprint.local_sgd import reject_fragments
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.bf16_weights import reject_bf16_weights
from shoal.blueprint.validation.legality import check_plan
from shoal.comm.world import World
from shoal.config.no_effect import no_effect
from shoal.config.recipe import Recipe, RunSection
from shoal.data.dataset import Dataset
from shoal.data.fingerprint import Fingerprint
from shoal.data.sources.open import open_datasets
from shoal.data.sources.packing import PackedTokens
from shoal.errors import Problem, ShoalError, needs, raise_if, to_install
from shoal.parallel.checks import refuse_unbuilt, unfit
from shoal.parallel.data.local_sgd import OuterOptimizer
from shoal.parallel.options import Options
from shoal.parallel.pipeline.stage_io import stream_of
from shoal.train.build_model import build_model, describe, without_memory
from shoal.train.loss.objective import CrossEntropy, call_of, uncallable

T = TypeVar("T")
FAST_DEV_STEPS = 3


@dataclass(frozen=True)
class Job:
    """A recipe whose plan is resolved for a number of ranks, and its data, opened."""

    recipe: Recipe
    training: Dataset
    held_out: Dataset
    fingerprint: Fingerprint
    """Of both."""


def preflight(recipe: Recipe, world_size: int, *, tries_other_ways: bool = False) -> Job:
    """Find what is wrong with a recipe on this many ranks, without starting or writing anything. `tries_other_ways`:
    replicas will meet by other ways than the plan says, too, which its settings may be for."""
    found = Findings()
    plan = found.of(_runnable_plan, recipe, world_size)
    found.problems += [*_idle_settings(recipe), *_unfit_fragments(recipe)]
    found.problems += no_effect(recipe, plan) if plan is not None and not tries_other_ways else ()
    for tracker in recipe.run.trackers:
        found.of(needs, tracker, what=f"the tracker {tracker}", extra=tracker)
    if recipe.plan.precision == "fp8" and recipe.run.fp8 == "rowwise":
        found.problems += _without_torchao()
    model = found.of(without_memory, lambda: build_model(recipe.model))
    datasets = found.of(open_datasets, recipe.data, recipe.run.seed)
    if datasets is not None:
        found.problems += _misfits(recipe, model, datasets[0]) + _odd_lengths(recipe, datasets[0])
        if plan is not None and model is not None:
            found.problems += _unfit_for_plan(plan, model, recipe, datasets[0])
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
    """Raise, on every rank, if ranks have opened different data: hosts may hold different files under one path."""
    main, *others = world.all_gather_object(job.fingerprint, kinds=(Fingerprint,))
    for rank, other in enumerate(others, 1):
        if found := other.difference(main.to_mapping()):
            raise ShoalError(
                f"rank {rank} has other data than rank 0 under {job.recipe.data.source!r}: {found}",
                fix="the same files on every host, for example on a file system that they share",
            )


def reject_shortened_data(job: Job) -> None:
    """Raise if a file of the data has become shorter since it was opened. A process that reads beyond its end dies."""
    for data in (job.training, job.held_out):
        if isinstance(data, PackedTokens):
            data.refuse_shortened()


@dataclass
class Findings:
    """What several checks found wrong, each of which raises on its own."""

    problems: list[Problem] = field(default_factory=list)

    def of(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """What the function returns, or None and its problems kept."""
        try:
            return function(*arguments, **options)
        except ShoalError as error:
            self.problems += error.problems
            return None


def outer_of(recipe: Recipe) -> OuterOptimizer:
    """How islands meet."""
    comm = recipe.comm
    return OuterOptimizer(
        lr=comm.outer_lr,
        momentum=comm.outer_momentum,
        fragments=comm.fragments,
        delay=comm.outer_delay,
        rescale=comm.rescale,
    )


def _without_torchao() -> Iterator[Problem]:
    """Looked for, and not imported: that takes seconds, and says things that are not for our users."""
    if importlib.util.find_spec("torchao") is None:
        what = "rowwise fp8 needs the package torchao, which is not installed"
        yield Problem(what, f"{to_install('fp8')}, or --run.fp8 tensorwise")


def _unfit_fragments(recipe: Recipe) -> Iterator[Problem]:
    comm, synchrony = recipe.comm, recipe.plan.synchrony
    if synchrony is not None:
        yield from filter(None, [reject_fragments(comm.fragments, comm.outer_delay, synchrony.every)])


def _idle_settings(recipe: Recipe) -> Iterator[Problem]:
    """Settings that nothing would come of."""
    optim = recipe.optim
    is_own = optim.name == "adamw" and optim.implementation == "auto"
    other = optim.name if optim.name != "adamw" else f"optim.implementation {optim.implementation}"
    for key in ("state_dtype", "param_dtype"):
        if getattr(optim, key) == "bf16" and not is_own:
            what = f"optim.{key} bf16 is for adamw with its own kernel, not for {other}"
            yield Problem(what, f"--optim.{key} fp32, or --optim.name adamw --optim.implementation auto")
    if optim.state_dtype == "bf16" and recipe.plan.precision == "fp64":
        what = "optim.state_dtype bf16 is for weights in fp32 or bf16: under fp64 moments are float64"
        yield Problem(what, "--optim.state_dtype fp32, or another --plan.precision")
    yield from _idle_fp8(recipe)


def _idle_fp8(recipe: Recipe) -> Iterator[Problem]:
    """`run.fp8` alone reads as if it turned fp8 on; who said so would train in another precision, and never hear."""
    run, precision = recipe.run, recipe.plan.precision
    usual = {name: RunSection.model_fields[name].default for name in ("fp8", "fp8_min_features", "fp8_head")}
    said = [name for name in usual if getattr(run, name) != usual[name]]
    if precision != "fp8" and said:
        names = " and ".join(f"run.{name} {getattr(run, name)}" for name in said)
        what = f"{names} {'is' if len(said) == 1 else 'are'} about the precision fp8, and the plan's is {precision}"
        back = " ".join(f"--run.{name} {'null' if usual[name] is None else usual[name]}" for name in said)
        yield Problem(what, f"--plan.precision fp8, or {back}")


def _runnable_plan(recipe: Recipe, world_size: int) -> Plan:
    plan = recipe.plan.resolve(world_size)
    refuse_unbuilt(plan)
    if recipe.optim.param_dtype == "bf16":
        reject_bf16_weights(plan)
    plan.num_microbatches(recipe.data.global_batch)
    return plan


def _unfit_for_plan(plan: Plan, model: nn.Module, recipe: Recipe, data: Dataset) -> list[Problem]:
    """Why the plan cannot lay out this model."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = [name for name, _ in model.named_modules()]
    description, settings = describe(model), recipe.run
    found = check_plan(
        plan,
        description=description,
        batch=recipe.data.global_batch,
        sequence=data.tokens_per_sample,
        features=shapes,
        modules=names,
        compiles=settings.compile,
    )
    options = Options(
        find_unused_parameters=settings.find_unused_parameters,
        sync_batch_norm=settings.sync_batch_norm,
        fused_loss=fused_loss_of(recipe),
        fp8_min_features=settings.fp8_min_features,
    )
    return found or unfit(model, plan, description, options)


def fused_loss_of(recipe: Recipe) -> bool | None:
    """Whether the head is to compute the loss; None: where it can."""
    return {"auto": None, "fused": True, "plain": False}[recipe.run.loss]


def _misfits(recipe: Recipe, model: nn.Module | None, data: Dataset) -> list[Problem]:
    """Where the model and the data do not fit together."""
    description = describe(model) if model is not None else Description()
    problems = []
    if data.vocabulary is not None and data.vocabulary > (description.num_outputs or data.vocabulary):
        problems.append(
            Problem(
                f"the data has {data.vocabulary} different labels, but the model can tell only"
                f" {description.num_outputs} apart",
                f"--model.vocabulary (or --model.num_classes) {data.vocabulary}, or other data",
            )
        )
    tokens = data.tokens_per_sample
    if tokens is not None and description.max_tokens is not None and tokens > description.max_tokens:
        problems.append(
            Problem(
                f"a sample has {tokens} tokens, but the model takes at most {description.max_tokens}",
                f"--data.seq_len {description.max_tokens}, or --model.max_sequence {tokens}",
            )
        )
    return problems


def _odd_lengths(recipe: Recipe, data: Dataset) -> list[Problem]:
    """Runs of no length, and lengths in seconds beside lengths in steps: neither can be turned into the other."""
    optim, run = recipe.optim, recipe.run
    problems = []
    if run.duration.seconds == 0 or run.duration.steps(**units(recipe, data)) == 0:
        problems.append(Problem(f"a run of {run.duration} makes no step", "--run.duration 100step"))
    if run.evaluate_every.seconds is not None:
        what = f"run.evaluate_every {run.evaluate_every} is a length of time, and evaluations are counted in steps"
        problems.append(Problem(what, "--run.evaluate_every 100step"))
    if run.check_replicas.seconds is not None:
        what = f"run.check_replicas {run.check_replicas} is a length of time, and it is counted in steps"
        problems.append(Problem(what, "--run.check_replicas 100step"))
    kept = recipe.checkpoint
    if kept.memory_every.seconds is not None:
        what = f"checkpoint.memory_every {kept.memory_every} is a length of time, and it is counted in steps"
        problems.append(Problem(what, "--checkpoint.memory_every 1step"))
    if not kept.mtbf.seconds:
        what = f"checkpoint.mtbf {kept.mtbf} is no length of time"
        problems.append(Problem(what, "--checkpoint.mtbf 24h"))
    if optim.warmup.seconds and run.duration.seconds is None and not run.fast_dev_run:
        what = f"optim.warmup {optim.warmup} is a length of time, and a run of {run.duration} is not"
        problems.append(Problem(what, "--optim.warmup 20step, or a --run.duration in min"))
    return problems


def steps_of(job: Job) -> int | None:
    """The optimizer steps of the run; None when only the clock can tell."""
    if job.recipe.run.fast_dev_run:
        return FAST_DEV_STEPS
    return job.recipe.run.duration.steps(**units(job.recipe, job.training))


def units(recipe: Recipe, data: Dataset) -> dict[str, int]:
    """What turns epochs and tokens into steps."""
    return {
        "batch": recipe.data.global_batch,
        "samples_per_epoch": len(data),
        "tokens_per_sample": data.tokens_per_sample or 1,
    }
