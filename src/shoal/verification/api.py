"""Verify a recipe, or a user's own model, under a plan: `shoal verify` and `shoal.verify`."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from shoal.blueprint.plan import Plan
from shoal.blueprint.replicas.sync_words import AUTO
from shoal.blueprint.validation.check import check_plan, check_ranks, check_unread
from shoal.blueprint.validation.enumerate import legal_plans
from shoal.config.checks.arguments import check_device, check_number, check_whole
from shoal.config.recipe import ModelSection, Recipe
from shoal.data.batch import length, rows
from shoal.data.dataset import Dataset
from shoal.data.mixture import batch_ids
from shoal.data.order import sample_ids
from shoal.data.sources.open import open_datasets
from shoal.errors import Findings, Problem, listed, nearest, raise_if
from shoal.launch.local import launch
from shoal.parallel.data.shard_policy import ShardPolicy
from shoal.parallel.expert.router import routers
from shoal.parallel.pipeline.skeleton import Call, skeleton_of
from shoal.parallel.pipeline.stage_io import traced
from shoal.safe_parsing import short
from shoal.train.build_model import adapt, build_model, describe, without_memory
from shoal.train.loss.labels import needs_labels
from shoal.train.loss.objective import CrossEntropy, LabelRule, call_of, objective_of, uncallable
from shoal.train.model_prefix import function_for
from shoal.train.recipe.preflight import as_trained, check_sizes, check_task
from shoal.train.recipe.saving.start_weights import with_dimensions
from shoal.train.trace.find_blocks import attach_blocks
from shoal.verification.case import Case, in_precision, replaced_precision
from shoal.verification.compression_error import without_compression
from shoal.verification.options import (
    TOLERANCES,
    RecipeSettings,
    VerifySettings,
    check_options,
    check_verified_recipe,
    claimed_ranks,
)
from shoal.verification.random_batches import draw, random_batches, tokens_for
from shoal.verification.rank import verify_on_rank
from shoal.verification.reference import has_batch_norm
from shoal.verification.report import VerifyResult
from shoal.verification.totals import bytes_of, bytes_to_replicas, collectives_of, memory_of, replica_sync_of

VERIFIED_SHARDING = ("wrap_classes", "wrap_min_params", "forward_prefetch", "backward_prefetch")
"""Settings of `ShardPolicy` that change no number. `reduce_dtype` rounds gradients."""

LR, LR_OF_OTHERS = 1e-2, 1e-4
"""The learning rates of shoal's models and of others. T5 multiplies rounding by a thousand in a step of 1e-2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings(VerifySettings):
    """Options of the verification of a model without a recipe."""

    lr: float = 1e-2
    clip: float | None = 0.5
    seed: int = 0
    wrap_classes: tuple[str, ...] = ()
    wrap_min_params: int | None = None
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None

    @property
    def shard(self) -> ShardPolicy:
        """The units that are gathered, and how early."""
        return ShardPolicy(**{name: getattr(self, name) for name in VERIFIED_SHARDING})


OPTIONS = tuple(field.name for field in fields(ModelSettings))


class VerifyOptions(TypedDict, total=False):
    """The fields of `ModelSettings`, for type checkers: the keyword arguments of `verify`."""

    steps: int
    precision: str | None
    tolerance: float | None
    lr: float
    clip: float | None
    seed: int
    wrap_classes: tuple[str, ...]
    wrap_min_params: int | None
    forward_prefetch: int | None
    backward_prefetch: int | None


def verify(
    build_model: Callable[[], nn.Module] | nn.Module,
    batch: Any,
    plan: Plan | str | Mapping[str, Any],
    *,
    nproc: int | None = None,
    loss: Any = None,
    device: str = "cpu",
    **options: Unpack[VerifyOptions],
) -> VerifyResult:
    """Train a model for a few steps in one process and with the plan, and compare every gradient and weight by name.

    `build_model()` returns the model, the same in every process; or it is the model itself, which stays unchanged.
    `batch` is a global batch, or a list of them. `nproc` None: the product of the plan's degrees. `options`, by name:

    steps      optimizer steps to compare (3)
    lr         the learning rate (0.01)
    clip       the largest norm of gradients (0.5); None: no clipping
    seed       decides the initial weights and all randomness in the model (0)
    precision  fp64, fp32, bf16 or fp16, in place of the plan's; None: fp64 on a CPU, the plan's own on a GPU
    tolerance  the largest difference that counts as equal; None: that of the precision
    wrap_classes, wrap_min_params, forward_prefetch, backward_prefetch   as of `Run`
    """
    build = functools.partial(_copy_of, build_model) if isinstance(build_model, nn.Module) else build_model
    found = Findings()
    found += _check_names(options)
    settings = ModelSettings(**{name: value for name, value in options.items() if name in OPTIONS})  # type: ignore[arg-type]
    found += [*check_options(settings), *_check_values(settings, device, nproc), *_check_given(build_model, batch)]
    found.of(objective_of, loss)
    first = next(iter(several := _batches(batch)), batch)
    size_of_batch = None if isinstance(first, list) and not first else found.of(length, first)
    open_plan = found.of(Plan.of, plan)
    size = nproc if nproc is not None or open_plan is None else found.of(claimed_ranks, open_plan)
    if isinstance(size, int) and size > 0:
        found += check_unread(plan, size) if open_plan is None else check_ranks(open_plan, size, batch=size_of_batch)
    if open_plan is not None and isinstance(size, int) and size_of_batch is not None and callable(build):
        build = functools.partial(with_blocks, build, rows(first, 0, 2), loss, open_plan.pp)
        found += check_built(build, open_plan.fill(size), _num_tokens(first))
    raise_if((_with_nproc(problem) for problem in found.problems), title=f"plan '{plan}'")
    assert open_plan is not None
    assert size is not None
    requested = open_plan.resolve(size)
    resolved = in_precision(requested, settings.precision, device)
    exact = without_compression(resolved)
    case = Case(
        build=build,
        batches=(several * settings.steps)[: settings.steps],
        plan=exact,
        compressed=None if exact == resolved else resolved,
        loss=loss,
        seed=settings.seed,
        lr=settings.lr,
        clip=settings.clip,
        device=device,
        tolerance=TOLERANCES[resolved.precision] if settings.tolerance is None else settings.tolerance,
        replaced=replaced_precision(requested, resolved),
        shard=settings.shard,
    )
    reject_uncallable(case)
    return verify_case(case)


def _batches(batch: Any) -> list[Any]:
    """Global batches, of which one may be a list of tensors."""
    is_several = isinstance(batch, list) and not any(isinstance(part, Tensor) for part in batch)
    return batch if is_several else [batch]


def _check_values(settings: ModelSettings, device: Any, nproc: Any) -> Iterator[Problem]:
    """Find values of a wrong type or out of range."""
    yield from check_number("lr", settings.lr, above=0, usual=1e-2)
    if settings.clip is not None:
        yield from check_number("clip", settings.clip, above=0, usual=0.5)
    yield from check_whole("seed", settings.seed, usual=0)
    yield from check_device(device)
    yield from settings.shard.problems()
    if nproc is not None:
        yield from check_whole("nproc", nproc, least=1, usual=2)


def _check_given(build: Any, batch: Any) -> Iterator[Problem]:
    """Find a model that is none, and a list without a batch."""
    if not callable(build):
        what = f"build_model must be a model or a function that returns one, got {short(build)}"
        yield Problem("V051", what, "verify(lambda: Model(), batch, plan)")
    if isinstance(batch, list) and not batch:
        what = "batch must be a global batch or a list of them, got an empty list"
        yield Problem("V050", what, "verify(model, (inputs, labels), plan)")


def _with_nproc(problem: Problem) -> Problem:
    """The same problem; the number of ranks is an argument of `verify`, which starts them itself."""
    return replace(problem, fix=re.sub(r"--(?:launch\.)?nproc (?=\d)", "nproc=", problem.fix))


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy of a model; without values, where models are built without memory."""
    return skeleton_of(model) if torch.get_default_device().type == "meta" else copy.deepcopy(model)


def with_blocks(build: Callable[[], nn.Module], batch: Any, loss: Any, pp: int | None) -> nn.Module:
    """The model, with a description of its blocks if it has none."""
    model = build()
    attach_blocks(model, pp, lambda: _call(model, batch, loss))
    return model


def _call(model: nn.Module, batch: Any, loss: Any) -> Call:
    """The arguments with which a loss calls a model."""
    objective = CrossEntropy(rule=LabelRule(needs_labels(model))) if loss is None else objective_of(loss)
    return call_of(objective, batch)


def _check_names(options: Mapping[str, Any]) -> Iterator[Problem]:
    known = ["nproc", "loss", "device", *OPTIONS]
    for name, value in options.items():
        if name not in known:
            near = nearest(name, known)
            fix = f"{near}={value!r}" if near else listed(known)
            yield Problem("V005", f"verify has no argument {name} (={value!r})", fix)


def verify_case(case: Case) -> VerifyResult:
    """Run the case on the ranks of its plan."""
    start = time.monotonic()
    ranks = launch(verify_on_rank, (case,), nproc=case.world_size)
    verdict = ranks[0].verdict
    assert verdict is not None
    sent = dict(bytes_to_replicas(ranks))
    return VerifyResult(
        plan=(case.compressed or case.plan).brief(),
        world_size=case.world_size,
        verdict=verdict,
        cause=ranks[0].cause,
        seconds=time.monotonic() - start,
        bytes=bytes_of(ranks) | sent,
        collectives={axis: of for axis, of in collectives_of(ranks).items() if axis not in sent},
        memory=memory_of(ranks),
        compression_error=ranks[0].compression_error,
        replica_sync=replica_sync_of(ranks),
        notes=tuple(_notes(case)),
    )


def _notes(case: Case) -> Iterator[str]:
    """Limits of the verification."""
    layout = case.plan.layout
    if case.replaced is not None:
        more = f"; --precision {case.replaced} verifies it" if case.replaced in TOLERANCES else ""
        yield f"{case.replaced} was not verified: the layout was, in {case.plan.precision}{more}"
    if case.not_verified:
        was = "was" if len(case.not_verified) == 1 else "were"
        yield f"{' and '.join(case.not_verified)} {was} not verified: the layout was"
    if case.plan.offload != "none" and case.plan.offload_folder is None and case.device == "cpu":
        yield f"offload={case.plan.offload} was not verified: it has no effect on a CPU; --device cuda verifies it"
    if case.plan.zero and layout.dp_shard * layout.cp == 1:
        yield f"zero={case.plan.zero} shards nothing here: dp_shard and cp are 1"
    if case.compressed is not None and case.compressed.sync == AUTO:
        yield "sync=auto is resolved when `shoal train` starts; the plan was verified without it"
    if case.compressed is not None and layout.dp_replicate * layout.cp == 1:
        yield "compress and sync have no effect on one replica"
    model = without_memory(case.build)
    if model is not None and routers(model) and case.plan.precision not in ("fp64", "fp32"):
        yield (
            f"experts in {case.plan.precision}: rounding, which differs between layouts, may send a token to another"
            " expert, and then gradients differ although nothing is wrong; verify in fp64 or fp32"
        )
    if model is not None and has_batch_norm(model):
        yield "batch norm: the one process used the plan's microbatches, on which its result depends"


def check_built(build: Callable[[], nn.Module], plan: Plan, tokens: int | None) -> list[Problem]:
    """Problems of a model with a plan without open values, before a process starts.

    The plan has the requested precision: one that no run would accept is not verified either.
    """
    model = without_memory(build)
    if model is None:
        return []  # its shapes are not known here; the ranks report problems
    return check_plan(
        plan,
        description=describe(model),
        sequence=tokens,
        features={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        modules=[name for name, _ in model.named_modules()],
    )


def reject_uncallable(case: Case) -> None:
    """Raise if the model cannot be called with a batch, or be cut into stages there, before a process starts."""
    model = without_memory(case.build)
    if model is None:
        return
    if case.loss is None or case.plan.layout.pp > 1:  # else the user's loss may do more than call the model
        call = _call(model, rows(case.batches[0], 0, 2), case.loss)  # two samples: batch norm rejects one
        raise_if(uncallable(model, call))
        if case.plan.layout.pp > 1:
            description = describe(model)
            adapt(model, description, case.plan)
            traced(model, description, call)


# ---- cases from a recipe --------------------------------------------------------------------------------------------


def case_of(recipe: Recipe, world_size: int, settings: RecipeSettings) -> Case:
    """The case of a recipe's model under its plan; of a small copy, if the model has one."""
    device = "cpu" if recipe.launch.device == "auto" else recipe.launch.device
    problems, section, datasets = check_case(recipe, world_size, settings)
    raise_if(problems, title=f"plan '{recipe.plan.fill(world_size).brief()}'")
    requested = recipe.plan.resolve(world_size)
    plan = in_precision(requested, settings.precision, device)
    batches = (
        random_batches(section, plan, recipe, settings.steps)
        if datasets is None
        else _real_batches(recipe, datasets[0], settings.steps)
    )
    exact = without_compression(plan)
    case = Case(
        build=_builder(section, datasets, plan),
        batches=batches,
        plan=exact,
        compressed=None if exact == plan else plan,
        seed=recipe.run.seed,
        lr=LR if function_for("RANDOM_BATCHES", section.name) is None else LR_OF_OTHERS,
        clip=recipe.optim.clip if recipe.optim.clip is None else min(recipe.optim.clip, 0.5),
        device=device,
        tolerance=TOLERANCES[plan.precision] if settings.tolerance is None else settings.tolerance,
        replaced=replaced_precision(requested, plan),
        shard=_sharding_of(recipe, is_small=datasets is None),
        not_verified=tuple(_not_verified(recipe, is_small=datasets is None)),
    )
    reject_uncallable(case)
    return case


def check_case(
    recipe: Recipe, world_size: int, settings: RecipeSettings
) -> tuple[list[Problem], ModelSection, tuple[Dataset, Dataset] | None]:
    """All problems that would end the verification of a recipe, before anything is started.

    Returns the model to verify, too, and the data of a model that has no small copy.
    """
    found = Findings()
    found += check_verified_recipe(recipe, world_size, settings)
    plan = recipe.plan.fill(world_size)
    recipe = found.of(with_dimensions, recipe) or recipe
    small = None if settings.real else found.of(smaller_model, recipe.model, plan.with_layout())
    section, is_small = small or (recipe.model, False)
    recipe = recipe if is_small else found.of(as_trained, recipe) or recipe
    datasets = None if is_small else found.of(open_datasets, recipe.data, recipe.run.seed)
    if is_small:
        drawn = found.of(draw, section, recipe, 2, tokens_for(plan.with_layout()), torch.Generator())
        tokens: int | None = None if drawn is None else _num_tokens(drawn)
    else:
        tokens = None if datasets is None else datasets[0].tokens_per_sample
    if settings.real or small is not None:
        build = _builder(section, datasets, plan)
        found += found.of(check_built, build, plan, tokens) or ()
        model = None if datasets is None else found.of(without_memory, build)
        if model is not None and datasets is not None:
            found += [*check_task(model, datasets[0]), *check_sizes(model, datasets[0])]
    return found.problems, section, datasets


def _builder(section: ModelSection, datasets: tuple[Dataset, Dataset] | None, plan: Plan) -> Callable[[], nn.Module]:
    """A function that builds the model of a recipe."""
    build = functools.partial(build_model, section)
    if datasets is None or (plan.pp or 1) == 1:
        return build
    two = datasets[0].batch(sample_ids(0, len(datasets[0]), 0, 2))
    return functools.partial(with_blocks, build, two, None, plan.pp)


def _sharding_of(recipe: Recipe, *, is_small: bool) -> ShardPolicy:
    """The units of a recipe. A small copy of its model has none of that size."""
    names = [name for name in VERIFIED_SHARDING if not (is_small and name == "wrap_min_params")]
    return ShardPolicy(**{name: getattr(recipe.comm, name) for name in names})


def _not_verified(recipe: Recipe, *, is_small: bool) -> Iterator[str]:
    """Settings for speed that the recipe changes and a verification ignores, which the user must know."""
    settings, defaults = recipe.model_dump(), Recipe().model_dump()
    for key in (
        "run.compile",
        "run.attention",
        "run.loss",
        "run.fused_layers",
        "run.recompute_swiglu",
        "run.sync_batch_norm",
        "optim.state_dtype",
        "comm.reduce_dtype",
        *(["comm.wrap_min_params"] if is_small else []),
    ):
        section, _, name = key.partition(".")
        if (value := settings[section][name]) != defaults[section][name]:
            yield f"{key} {str(value).lower()}"


def smaller_model(section: ModelSection, plan: Plan) -> tuple[ModelSection, bool]:
    """The model section of a small copy with the same structure, and whether there is one."""
    sizes = {"num_stages": plan.layout.pp * (plan.v or 1), "ep": plan.layout.ep}
    lora = section.lora and section.lora.model_copy(update={"adapter": None})  # whose matrices have other sizes
    by_prefix = function_for("SMALLER_BY_PREFIX", section.name)
    if by_prefix is not None:
        arguments = by_prefix(section.name, section.arguments, **sizes)
        return (
            (section, False) if arguments is None else (ModelSection(name=section.name, lora=lora, **arguments), True)
        )
    functions: dict[str, str] = importlib.import_module("shoal.models").SMALLER
    if section.name not in functions:
        return section, False
    module_name, _, function = functions[section.name].partition(":")
    shrink = getattr(importlib.import_module(module_name), function)
    return ModelSection(name=section.name, lora=lora, **shrink(section.arguments, **sizes)), True


def _real_batches(recipe: Recipe, dataset: Dataset, steps: int) -> list[Any]:
    size = recipe.data.global_batch
    every, seed = slice(0, size), recipe.run.seed
    return [dataset.batch(batch_ids(dataset, seed, step * size, size, every)) for step in range(steps)]


def legal_cases(recipe: Recipe, world_size: int, settings: RecipeSettings) -> Iterator[Case]:
    """A case for every valid layout of `world_size` ranks, from simple to composed."""
    with torch.device("meta"):
        model = build_model(recipe.model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for plan in legal_plans(world_size, description=describe(model), batch=recipe.data.global_batch, features=shapes):
        yield case_of(recipe.model_copy(update={"plan": plan}), world_size, settings)


# ---- ranks and tokens ------------------------------------------------------------------------------------------------


def _num_tokens(batch: Any) -> int | None:
    """The sequence length, if the first input of a batch is a matrix of integers."""
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    first = values[0] if values else None
    is_tokens = isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_tokens and first is not None else None
