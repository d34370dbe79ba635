"""Check a recipe, its plan, its model and its data before any process is started."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import nn

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.check import check_plan
from shoal.comm.world import World
from shoal.config.checks.durations import no_step
from shoal.config.checks.settings import check_settings
from shoal.config.data_source import spelled
from shoal.config.recipe import Recipe
from shoal.data.dataset import Dataset
from shoal.data.fingerprint import Fingerprint
from shoal.data.mixture import Union
from shoal.data.sources.open import TOKENIZED, open_datasets, source_kind
from shoal.data.sources.packing import PackedTokens
from shoal.data.task import FLAGS, Task
from shoal.errors import Findings, Problem, ShoalError, listed, raise_if
from shoal.launch.local import one_thread
from shoal.parallel.checks import check_model
from shoal.parallel.pipeline.skeleton import Call
from shoal.parallel.pipeline.stage_io import traced
from shoal.parallel.policies import Policies
from shoal.train.build_model import adapt, adapter_of, build_model, describe, without_memory
from shoal.train.loss.labels import needs_labels
from shoal.train.loss.objective import CrossEntropy, LabelRule, call_of, uncallable
from shoal.train.model_prefix import function_for, value_for
from shoal.train.optim.build import check_matrices
from shoal.train.recipe.check_own_model import check_own_model
from shoal.train.recipe.saving.start_weights import check_weights, with_dimensions
from shoal.train.recipe.settings import settings_of
from shoal.train.trace.find_blocks import attach_blocks

if TYPE_CHECKING:
    from shoal.predict.predict import Prediction

FAST_DEV_STEPS = 3


@dataclass(frozen=True)
class Job:
    """A recipe whose plan is resolved for a number of ranks, and its opened data."""

    recipe: Recipe
    training: Dataset
    validation: Dataset
    fingerprint: Fingerprint
    """Of both datasets."""


Datasets = tuple[Dataset, Dataset]
ModelCheck = Callable[[Recipe, nn.Module], Iterable[Problem]]
"""A further check of a recipe with its resolved plan, and of its model without memory."""


@dataclass(frozen=True)
class Checked:
    """The result of all checks of a recipe."""

    recipe: Recipe
    world_size: int
    problems: list[Problem]
    datasets: Datasets | None
    """None: they could not be opened."""
    chosen: Prediction | None = None
    """The prediction of a plan that the planner has chosen."""

    def job(self) -> Job:
        """The job of a recipe; raises all problems at once."""
        raise_if(self.problems)
        assert self.datasets is not None
        plan = self.recipe.plan.resolve(self.world_size)
        return Job(self.recipe.model_copy(update={"plan": plan}), *self.datasets, Fingerprint.of(*self.datasets))


def preflight(recipe: Recipe, world_size: int, *, tries_other_syncs: bool = False) -> Job:
    """Check a recipe on this many ranks without starting or writing anything; raises all problems at once."""
    return check_recipe(recipe, world_size, tries_other_syncs=tries_other_syncs).job()


def check_recipe(
    recipe: Recipe,
    world_size: int,
    *,
    tries_other_syncs: bool = False,
    check_size: ModelCheck | None = None,
) -> Checked:
    """Find all problems of a recipe on this many ranks, without starting or writing anything.

    A check that needs the result of a failed one is skipped; all others run. So a model is checked against every degree
    of a plan that does not fit the ranks. `tries_other_syncs`: the caller will also try other `sync` and `compress`
    values, which `comm.*` may be set for. `check_size` is called where plan and model are known.
    """
    plan, of_model, of_data = recipe.plan.fill(world_size), Findings(), Findings()
    of_model += check_tokenizer(recipe)
    recipe = of_model.of(as_trained, recipe) or recipe
    model = of_model.of(without_memory, lambda: build_model(recipe.model))
    datasets = of_data.of(open_datasets, recipe.data, recipe.run.seed)
    data = None if datasets is None else datasets[0]
    if model is not None:
        of_model += [*check_weights(recipe, model), *_check_model(plan, model, recipe, data)]
    found = Findings()
    found += check_settings(
        recipe, world_size, tries_other_syncs=tries_other_syncs, has_to_change=bool(of_model.problems)
    )
    found += [*(() if data is None else _check_num_steps(recipe, data)), *of_model.problems, *of_data.problems]
    if model is not None and data is not None:
        found += _check_data(plan, model, data, is_checked=not of_model.problems)
    if model is not None and check_size is not None and not recipe.plan.check(world_size):
        found += check_size(recipe.model_copy(update={"plan": plan}), model)
    return Checked(recipe, world_size, found.problems, datasets)


def check_tokenizer(recipe: Recipe) -> Iterator[Problem]:
    """Weights of others must not be trained on bytes because a tokenizer is missing."""
    name = recipe.model.name
    has_own = function_for("TOKENIZERS", name) is not None
    if recipe.data.tokenizer != "auto" or not has_own or value_for("TOKENIZERS", recipe.model) is not None:
        return
    kinds = Findings().of(lambda: [source_kind(one) for one in recipe.data.each])  # what fails, the data reports
    if any(kind in TOKENIZED for kind in kinds or ()):
        what = f"text is tokenized by the tokenizer.json of the model, and {name!r} has none"
        yield Problem("M080", what, "--data.tokenizer PATH/tokenizer.json, or --data.tokenizer bytes")


def as_trained(recipe: Recipe) -> Recipe:
    """The recipe with what its folders decide: the sizes of a llama that starts from one, and the tokenizer."""
    return with_tokenizer(with_dimensions(recipe))


def with_tokenizer(recipe: Recipe) -> Recipe:
    """The recipe with the tokenizer of its model in place of `auto`; bytes, if the model has none."""
    if recipe.data.tokenizer != "auto":
        return recipe
    name = value_for("TOKENIZERS", recipe.model) or "bytes"
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokenizer": name})})


def reject_unlike_data(world: World, job: Job) -> None:
    """Raise, on every rank, if ranks have opened different data: hosts may have different files under one path."""
    main, *others = world.all_gather_object(job.fingerprint, kinds=(Fingerprint,))
    for rank, other in enumerate(others, 1):
        if found := other.difference(main.to_mapping()):
            raise ShoalError(
                f"rank {rank} has other data than rank 0 under {spelled(job.recipe.data.source)}: {found}",
                fix="copy the same files to every host, or --data.source PATH_ON_A_SHARED_FILE_SYSTEM",
                code="D032",
            )


def reject_shortened_data(job: Job) -> None:
    """Raise if a data file has become shorter since it was opened. Reading beyond its end kills a process (SIGBUS)."""
    for data in (job.training, job.validation):
        for member in data.members if isinstance(data, Union) else [data]:
            if isinstance(member, PackedTokens):
                member.reject_shortened()


def _check_model(plan: Plan, model: nn.Module, recipe: Recipe, data: Dataset | None) -> list[Problem]:
    """Find why the plan cannot distribute this model. `check_settings` checks the batch."""
    found = Findings()
    found.of(attach_blocks, model, plan.pp, functools.partial(first_call, model, data))
    description, settings = describe(model), recipe.run
    found.of(adapt, model, description, plan.with_layout())
    found += check_plan(
        plan,
        description=description,
        sequence=_num_tokens(recipe, description, data),
        features={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        modules=[name for name, _ in model.named_modules()],
        compiles=settings.compile,
    )
    if recipe.optim.name == "muon":
        found += check_matrices(model, description.blocks)
    policies = Policies.of(**settings_of(recipe))
    return [*found.problems, *check_model(model, plan, description, policies)]


def first_call(model: nn.Module, data: Dataset | None) -> Call | None:
    """The arguments of the model for two samples."""
    objective = CrossEntropy(rule=LabelRule(needs_labels(model)))
    return None if data is None else call_of(objective, data.batch(np.arange(min(2, len(data)))))


def _num_tokens(recipe: Recipe, description: Description, data: Dataset | None) -> int | None:
    """Tokens of a sample, also of data that could not be opened; None: samples have no tokens."""
    if data is not None:
        return data.tokens_per_sample
    return recipe.data.seq_len if description.num_heads is not None else None


def _check_data(plan: Plan, model: nn.Module, data: Dataset, *, is_checked: bool) -> Iterator[Problem]:
    """Find where the model does not fit the data. `is_checked`: the plan can distribute the model."""
    if problems := list(check_task(model, data)):
        yield from problems
        return
    found = list(check_sizes(model, data))
    call = first_call(model, data)
    assert call is not None
    found += uncallable(model, call)
    if not found and data.vocabulary is not None and describe(model).num_outputs is None:
        found += check_own_model(model, call, data.vocabulary, data.num_classes)
    yield from found
    if is_checked and plan.pp != 1 and not found:
        try:
            with one_thread():  # positions and masks are computed; workers are forked from this process
                traced(model, describe(model), call)
        except ShoalError as error:
            yield from error.problems


def check_task(model: nn.Module, data: Dataset) -> Iterator[Problem]:
    """Find data with labels of another meaning than those of the model; of models of other packages, which say theirs.
    A model that sees all tokens would learn to copy the next one."""
    if not hasattr(model, "recipe_task"):
        return
    task, kind = cast("Task | None", model.recipe_task), type(model).__name__
    if task is None:
        what = f"a recipe trains models that predict {_TASKS}, and {kind} has another task, or sees later tokens"
        fix = "a loop of your own with shoal.Run and shoal.verify, which take every model (docs/huggingface.md)"
        if sibling := _with_head(model):
            what += f": {kind} has no head, and {sibling} has one"
            fix = (
                "transformers.AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER), with the NAME or"
                f" folder that the weights came from; or {fix}"
            )
        yield Problem("M079", what, fix)
    elif task != data.task:
        what = f"{kind} predicts {_TASK_NAMES[task]}, and the labels of the data are of {_TASK_NAMES[data.task]}"
        yield Problem("M083", what, FLAGS[task])
    else:
        yield from adapter_of(model).check_data(model, data)  # type: ignore[union-attr]


def _with_head(model: nn.Module) -> str | None:
    """The class that predicts the next token, of a base model of transformers, which has no head. An encoder has none
    that a recipe could train: its kind is that with a masked language model beside it."""
    module, kind = sys.modules.get(type(model).__module__), type(model).__name__
    stem = kind.removesuffix("Model")
    if stem == kind or hasattr(module, f"{stem}ForMaskedLM"):
        return None
    return next((name for ending in _HEADS if hasattr(module, name := stem + ending)), None)


_HEADS = ("ForCausalLM", "LMHeadModel")
_TASK_NAMES: dict[Task, str] = {
    "next token": "the next token",
    "text class": "a class of a text",
    "target text": "another text",
    "image class": "a class of an image",
}
_TASKS = listed(_TASK_NAMES.values())


def check_sizes(model: nn.Module, data: Dataset) -> Iterator[Problem]:
    """Find labels and tokens that the model has no room for."""
    description = describe(model)
    outputs, vocabulary = description.num_outputs, data.num_classes or data.vocabulary
    if vocabulary is not None and vocabulary > (outputs or vocabulary):
        yield Problem(
            "D033",
            f"the model must have at least {vocabulary} outputs for the labels of the data, got {outputs}",
            f"--model.vocabulary {vocabulary} (--model.num_classes {vocabulary} of a classifier), or other data"
            if adapter_of(model) is None
            else "--data.tokenizer PATH/tokenizer.json of this model; tokens in .bin files must come from it too;"
            f" or model.resize_token_embeddings({vocabulary}) and model.save_pretrained(FOLDER) for a tokenizer with"
            " added tokens",
        )
    tokens, most = data.tokens_per_sample, description.max_tokens
    if tokens is not None and most is not None and tokens > most:
        yield Problem(
            "D034",
            f"a sample must have at most the model's {most} tokens, got {tokens}",
            f"--data.seq_len {most}" + (f", or --model.max_sequence {tokens}" if adapter_of(model) is None else ""),
        )


def _check_num_steps(recipe: Recipe, data: Dataset) -> Iterator[Problem]:
    """Find a duration in epochs or tokens of so little data that it is no step."""
    if recipe.run.duration.steps(**units(recipe, data)) == 0:
        yield no_step(recipe)


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
