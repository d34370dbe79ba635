"""From a recipe, or a model of one's own, and a plan to a proof: `shoal verify` and `shoal.verify`."""

from __future__ import annotations

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.blueprint.legality import legal_plans, misfits
from shoal.blueprint.plan import Plan
from shoal.blueprint.recipe import ModelSection, Recipe
from shoal.data.batch import length
from shoal.data.open import open_datasets
from shoal.data.order import sample_ids
from shoal.errors import ShoalError, raise_if
from shoal.launch.local import launch
from shoal.parallel.compose import refuse_unbuilt
from shoal.train.build import build_model, describe, without_memory
from shoal.verify.candidate import Findings, verify_on_rank
from shoal.verify.case import TOLERANCES, Case, in_precision
from shoal.verify.report import Count, Proof

STEPS = 3
TOKENS = 24
"""Tokens of a sequence for a small copy: divisible by 2, 3, 4, 6, 8 ranks."""


def verify(
    build_model: Callable[[], nn.Module],
    batch: Any,
    plan: Plan | str | Mapping[str, Any],
    *,
    nproc: int | None = None,
    loss: Any = None,
    steps: int = STEPS,
    lr: float = 1e-2,
    clip: float | None = 0.5,
    seed: int = 0,
    device: str = "cpu",
    precision: str | None = None,
    tolerance: float | None = None,
) -> Proof:
    """Train a model for a few steps on one process and on the plan's, and compare every gradient and weight by name.

    `build_model()` returns the model, the same one in every process; `batch` is a global batch, or a list of them.
    `nproc` None: as many processes as the plan's degrees multiply to.
    """
    asked = Plan.of(plan)
    resolved = in_precision(asked.resolve(nproc or _claimed(asked)), precision, device)
    batches = [batch] * steps if not isinstance(batch, list) else (batch * steps)[:steps]
    case = Case(
        build=build_model,
        batches=batches,
        plan=resolved,
        loss=loss,
        seed=seed,
        lr=lr,
        clip=clip,
        device=device,
        tolerance=tolerance or TOLERANCES[resolved.precision],
    )
    check(case)
    return prove(case)


def prove(case: Case) -> Proof:
    """Run the case in as many processes as its plan has ranks."""
    began = time.monotonic()
    ranks = launch(verify_on_rank, (case,), nproc=case.world_size)
    verdict = ranks[0].verdict
    assert verdict is not None
    return Proof(
        plan=case.plan.brief(),
        world_size=case.world_size,
        verdict=verdict,
        cause=ranks[0].cause,
        seconds=time.monotonic() - began,
        bytes=_bytes(ranks),
        collectives=_calls(ranks),
    )


def check(case: Case) -> None:
    """Refuse what cannot be laid out, before a process starts."""
    refuse_unbuilt(case.plan)
    model = without_memory(case.build)
    if model is None:
        return  # its shapes are not known here; the ranks will find what is wrong
    tokens = _num_tokens(case.batches[0])
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = misfits(
        case.plan, description=describe(model), batch=length(case.batches[0]), sequence=tokens, features=shapes
    )
    raise_if(found, title=f"plan '{case.plan.brief()}'")


# ---- cases from a recipe --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """What a person may say about a verification, beside the recipe."""

    real: bool = False
    steps: int = STEPS
    precision: str | None = None
    tolerance: float | None = None


def case_of(recipe: Recipe, world_size: int, how: How) -> Case:
    """A verification of the recipe's model under its plan; of a small copy, where the model knows how to shrink."""
    device = "cpu" if recipe.launch.device == "auto" else recipe.launch.device
    plan = in_precision(recipe.plan.resolve(world_size), how.precision, device)
    section, is_small = (recipe.model, False) if how.real else smaller_model(recipe.model, plan)
    batches = _random_batches(section, plan, recipe, how.steps) if is_small else _real_batches(recipe, how.steps)
    case = Case(
        build=functools.partial(build_model, section),
        batches=batches,
        plan=plan,
        seed=recipe.run.seed,
        clip=recipe.optim.clip if recipe.optim.clip is None else min(recipe.optim.clip, 0.5),
        device=device,
        tolerance=how.tolerance or TOLERANCES[plan.precision],
    )
    check(case)
    return case


def smaller_model(section: ModelSection, plan: Plan) -> tuple[ModelSection, bool]:
    """The model section of a small copy with the same anatomy, and whether there is one."""
    functions: dict[str, str] = importlib.import_module("shoal.models").SMALLER
    if section.name not in functions:
        return section, False
    module_name, _, function = functions[section.name].partition(":")
    shrink = getattr(importlib.import_module(module_name), function)
    arguments = shrink(section.arguments, num_stages=plan.layout.pp * (plan.v or 1))
    return ModelSection(name=section.name, **arguments), True


def _random_batches(section: ModelSection, plan: Plan, recipe: Recipe, steps: int) -> list[dict[str, Tensor]]:
    """Random tokens, of which some labels do not count; few samples, but microbatches enough for any schedule."""
    vocabulary = int(section.arguments["vocabulary"])
    asked = plan.num_microbatches(recipe.data.batch)
    few = max(4, 2 * plan.layout.pp)
    num_microbatches = min(asked, few)
    size = min(plan.mb or plan.microbatch_size(recipe.data.batch), 2)
    batch = num_microbatches * size * plan.layout.data_degree
    generator = torch.Generator().manual_seed(recipe.run.seed)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(vocabulary, (batch, TOKENS + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.25] = -100
        batches.append({"tokens": tokens[:, :-1].contiguous(), "labels": labels})
    return batches


def _real_batches(recipe: Recipe, steps: int) -> list[Any]:
    dataset, _ = open_datasets(recipe.data, recipe.run.seed)
    size = recipe.data.batch
    return [dataset.batch(sample_ids(recipe.run.seed, len(dataset), step * size, size)) for step in range(steps)]


def legal_cases(recipe: Recipe, world_size: int, how: How) -> Iterator[Case]:
    """A case for every legal layout of so many ranks, from simple to composed."""
    section, _ = smaller_model(recipe.model, Plan().resolve(1))
    with torch.device("meta"):
        model = build_model(section)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    plans = legal_plans(
        world_size, description=describe(model), batch=recipe.data.batch, sequence=TOKENS, features=shapes
    )
    for plan in plans:
        yield case_of(recipe.model_copy(update={"plan": plan}), world_size, how)


# ---- what the ranks brought home ------------------------------------------------------------------------------------


def _bytes(ranks: Sequence[Findings]) -> dict[str, Count]:
    counted: dict[str, int] = defaultdict(int)
    for rank in ranks:
        for axis, operations in rank.traffic.items():
            counted[axis] += sum(told["bytes"] for name, told in operations.items() if name != "recv")
    return {axis: Count(counted=number) for axis, number in counted.items() if axis not in ("world", "other")}


def _calls(ranks: Sequence[Findings]) -> dict[str, dict[str, Count]]:
    counted: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for rank in ranks:
        for axis, operations in rank.traffic.items():
            for name, told in operations.items():
                if name != "recv" and axis not in ("world", "other"):
                    counted[axis][name] += told["calls"]
    return {axis: {name: Count(counted=number) for name, number in calls.items()} for axis, calls in counted.items()}


def _claimed(plan: Plan) -> int:
    degrees = (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp)
    if not any(degrees):
        raise ShoalError(f"plan '{plan}' does not say on how many ranks", fix="verify(..., nproc=4), or tp=2, ...")
    number = 1
    for degree in degrees:
        number *= degree or 1
    return number


def _num_tokens(batch: Any) -> int | None:
    """The length of a sequence, if the first input of a batch is whole numbers in rows."""
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    first = values[0] if values else None
    is_tokens = isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_tokens and first is not None else None
