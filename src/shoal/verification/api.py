"""From a recipe, or a model of one's own, and a plan to a proof: `shoal verify` and `shoal.verify`."""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.blueprint.layout import GROUP_AXES
from shoal.blueprint.local_sgd import AUTO
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.check import check_plan
from shoal.blueprint.validation.context import num_chunks
from shoal.blueprint.validation.enumerate import legal_plans
from shoal.config.recipe import ModelSection, Recipe
from shoal.data.batch import length, rows
from shoal.data.order import sample_ids
from shoal.data.sources.open import open_datasets
from shoal.errors import ShoalError, raise_if
from shoal.launch.local import launch
from shoal.parallel.checks import reject_unsupported
from shoal.parallel.expert.router import routers
from shoal.parallel.pipeline.stage_io import stream_of
from shoal.train.build_model import build_model, describe, without_memory
from shoal.train.loss.objective import call_of, objective_of, uncallable
from shoal.verification.case import TOLERANCES, Case, in_precision, replaced_precision
from shoal.verification.compression_error import without_compression
from shoal.verification.rank import Findings, verify_on_rank
from shoal.verification.reference import has_batch_norm
from shoal.verification.report import Count, Proof, ReplicaSync

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
    _check_steps(steps)
    asked = Plan.of(plan)
    resolved = asked.resolve(nproc or claimed_ranks(asked))
    reject_unsupported(resolved)
    said, resolved = resolved, in_precision(resolved, precision, device)
    exact = without_compression(resolved)
    is_several = isinstance(batch, list) and not any(isinstance(part, Tensor) for part in batch)
    batches = (batch * steps)[:steps] if is_several else [batch] * steps
    case = Case(
        build=build_model,
        batches=batches,
        plan=exact,
        compressed=None if exact == resolved else resolved,
        loss=loss,
        seed=seed,
        lr=lr,
        clip=clip,
        device=device,
        tolerance=_tolerance(tolerance, resolved),
        replaced=replaced_precision(said, resolved),
    )
    check(case)
    return verify_case(case)


def _tolerance(asked: float | None, plan: Plan) -> float:
    if asked is not None and not asked >= 0:
        raise ShoalError(f"tolerance {asked} is below zero", fix="--tolerance 1e-10, or 0 for equal bits")
    return TOLERANCES[plan.precision] if asked is None else asked


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ShoalError(f"{steps} steps prove nothing", fix="--steps 3")


def verify_case(case: Case) -> Proof:
    """Run the case in as many processes as its plan has ranks."""
    began = time.monotonic()
    ranks = launch(verify_on_rank, (case,), nproc=case.world_size)
    verdict = ranks[0].verdict
    assert verdict is not None
    return Proof(
        plan=(case.compressed or case.plan).brief(),
        world_size=case.world_size,
        verdict=verdict,
        cause=ranks[0].cause,
        seconds=time.monotonic() - began,
        bytes=_bytes(ranks) | dict(_sent(ranks)),
        collectives={axis: of for axis, of in _collectives(ranks).items() if axis not in dict(_sent(ranks))},
        memory=_memory(ranks),
        bounded=ranks[0].compression_error,
        meeting=_meeting(ranks),
        notes=tuple(_notes(case)),
    )


def _notes(case: Case) -> Iterator[str]:
    """What a reader of the verdict should know."""
    layout = case.plan.layout
    if case.replaced is not None:
        more = f"; --precision {case.replaced} looks at it" if case.replaced in TOLERANCES else ""
        yield f"{case.replaced} was not looked at: this is of the layout, in {case.plan.precision}{more}"
    if case.unseen:
        was = "was" if len(case.unseen) == 1 else "were"
        yield f"{' and '.join(case.unseen)} {was} not looked at: this is of the layout"
    if case.plan.offload != "none" and case.device == "cpu":
        yield f"offload={case.plan.offload} has no effect on a CPU: not verified; --device cuda verifies it"
    if case.plan.zero and layout.dp_shard * layout.cp == 1:
        yield f"zero={case.plan.zero} divides nothing here: dp_shard and cp are 1"
    if case.compressed is not None and case.compressed.sync == AUTO:
        yield "sync=auto is chosen when `shoal train` begins; this is of the plan without it"
    if case.compressed is not None and layout.dp_replicate * layout.cp == 1:
        yield "nothing is compressed, and nobody meets, on one replica"
    model = without_memory(case.build)
    if model is not None and routers(model) and case.plan.precision not in ("fp64", "fp32"):
        yield (
            f"experts in {case.plan.precision}: rounding, which differs from layout to layout, may send a token to"
            " another expert, and then gradients differ where nothing is wrong; fp64 and fp32 decide"
        )
    if model is not None and has_batch_norm(model):
        yield "batch norm: one device was given the batch in the plan's microbatches, on which its result depends"


def check(case: Case) -> None:
    """Refuse what cannot be laid out, before a process starts."""
    model = without_memory(case.build)
    if model is None:
        return  # its shapes are not known here; the ranks will find what is wrong
    tokens = _num_tokens(case.batches[0])
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    description = describe(model)
    # In the precision that was asked for: what no run would lay out is not verified either.
    plan = case.plan if case.replaced is None else replace(case.plan, precision=case.replaced)
    found = check_plan(
        plan,
        description=description,
        batch=length(case.batches[0]),
        sequence=tokens,
        features=shapes,
        modules=[name for name, _ in model.named_modules()],
    )
    raise_if(found, title=f"plan '{plan.brief()}'")
    if case.loss is None or case.plan.layout.pp > 1:  # else a loss of the user's own may ask more of it than a call
        call = call_of(objective_of(case.loss), rows(case.batches[0], 0, 2))  # two: batch norm cannot take one
        raise_if(uncallable(model, call))
        if case.plan.layout.pp > 1:
            stream_of(model, description.blocks, call)


# ---- cases from a recipe --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySettings:
    """What a person may say about a verification, beside the recipe."""

    real: bool = False
    steps: int = STEPS
    precision: str | None = None
    tolerance: float | None = None


def case_of(recipe: Recipe, world_size: int, how: VerifySettings) -> Case:
    """A verification of the recipe's model under its plan; of a small copy, where the model knows how to shrink."""
    device = "cpu" if recipe.launch.device == "auto" else recipe.launch.device
    if recipe.optim.param_dtype == "bf16":
        what = "shoal verify compares weights number by number, and optim.param_dtype bf16 rounds them at random"
        raise ShoalError(what, fix="--optim.param_dtype fp32: gradients are computed by the same code")
    _check_steps(how.steps)
    asked = recipe.plan.resolve(world_size)
    reject_unsupported(asked)
    plan = in_precision(asked, how.precision, device)
    section, is_small = (recipe.model, False) if how.real else smaller_model(recipe.model, plan)
    batches = _random_batches(section, plan, recipe, how.steps) if is_small else _real_batches(recipe, how.steps)
    exact = without_compression(plan)
    case = Case(
        build=functools.partial(build_model, section),
        batches=batches,
        plan=exact,
        compressed=None if exact == plan else plan,
        seed=recipe.run.seed,
        clip=recipe.optim.clip if recipe.optim.clip is None else min(recipe.optim.clip, 0.5),
        device=device,
        tolerance=_tolerance(how.tolerance, plan),
        replaced=replaced_precision(asked, plan),
        unseen=tuple(_unseen(recipe)),
    )
    check(case)
    return case


def _unseen(recipe: Recipe) -> Iterator[str]:
    """What the recipe says about speed: who typed it for a verification believes that it was verified."""
    said, usual = recipe.model_dump(), Recipe().model_dump()
    for key in (
        "run.compile",
        "run.attention",
        "run.loss",
        "run.recompute_swiglu",
        "run.sync_batch_norm",
        "optim.state_dtype",
    ):
        section, _, name = key.partition(".")
        if (value := said[section][name]) != usual[section][name]:
            yield f"{key} {str(value).lower()}"


def smaller_model(section: ModelSection, plan: Plan) -> tuple[ModelSection, bool]:
    """The model section of a small copy with the same anatomy, and whether there is one."""
    functions: dict[str, str] = importlib.import_module("shoal.models").SMALLER
    if section.name not in functions:
        return section, False
    module_name, _, function = functions[section.name].partition(":")
    shrink = getattr(importlib.import_module(module_name), function)
    arguments = shrink(section.arguments, num_stages=plan.layout.pp * (plan.v or 1), ep=plan.layout.ep)
    return ModelSection(name=section.name, **arguments), True


def _random_batches(section: ModelSection, plan: Plan, recipe: Recipe, steps: int) -> list[dict[str, Tensor]]:
    """Random tokens, of which some labels do not count; few samples, but microbatches enough for any schedule. None of
    them begins with one token twice: those are two positions that no router of experts could tell apart."""
    vocabulary = int(section.arguments["vocabulary"])
    asked = plan.num_microbatches(recipe.data.global_batch)
    few = max(4, 2 * plan.layout.pp)
    num_microbatches = min(asked, few)
    size = plan.mb or min(plan.microbatch_size(recipe.data.global_batch), 2)
    batch = num_microbatches * size * plan.layout.data_degree
    num_tokens = tokens_for(plan)
    generator = torch.Generator().manual_seed(recipe.run.seed)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(vocabulary, (batch, num_tokens + 1), generator=generator)
        tokens[:, 1] = (tokens[:, 0] + 1 + tokens[:, 1] % (vocabulary - 1)) % vocabulary
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.25] = -100
        batches.append({"tokens": tokens[:, :-1].contiguous(), "labels": labels})
        if recipe.data.mask_documents:
            begins = torch.rand(labels.shape, generator=generator) < 0.2
            batches[-1]["documents"] = begins.cumsum(1).int()
    return batches


def tokens_for(plan: Plan) -> int:
    """A short sequence that the ranks of a plan can divide among them."""
    return math.lcm(TOKENS, plan.layout.tp * num_chunks(plan))


def _real_batches(recipe: Recipe, steps: int) -> list[Any]:
    dataset, _ = open_datasets(recipe.data, recipe.run.seed)
    size = recipe.data.global_batch
    return [dataset.batch(sample_ids(recipe.run.seed, len(dataset), step * size, size)) for step in range(steps)]


def legal_cases(recipe: Recipe, world_size: int, how: VerifySettings) -> Iterator[Case]:
    """A case for every legal layout of so many ranks, from simple to composed."""
    with torch.device("meta"):
        model = build_model(recipe.model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for plan in legal_plans(world_size, description=describe(model), batch=recipe.data.global_batch, features=shapes):
        yield case_of(recipe.model_copy(update={"plan": plan}), world_size, how)


# ---- what the ranks brought home ------------------------------------------------------------------------------------


def _collectives(ranks: Sequence[Findings]) -> dict[str, dict[str, Count]]:
    """Axis → operation → calls of one step, over all ranks. What is received has been sent."""
    return {
        axis: {
            name: Count(
                predicted=_sum(_predicted(rank, axis, name, "calls") for rank in ranks),
                counted=sum(_counted(rank, axis, name, "calls") for rank in ranks),
            )
            for name in names
        }
        for axis, names in _operations(ranks).items()
    }


def _bytes(ranks: Sequence[Findings]) -> dict[str, Count]:
    """Axis → bytes of one step, over all ranks."""
    return {
        axis: Count(
            predicted=_sum(_predicted(rank, axis, name, "bytes") for rank in ranks for name in names),
            counted=sum(_counted(rank, axis, name, "bytes") for rank in ranks for name in names),
        )
        for axis, names in _operations(ranks).items()
    }


def _sent(ranks: Sequence[Findings]) -> Iterator[tuple[str, Count]]:
    """Where replicas meet by a way of ours: its axis, and the bytes that all ranks send."""
    every = [rank.replica_traffic for rank in ranks if rank.replica_traffic is not None]
    if every:
        yield every[0].axis, Count(predicted=sum(m.predicted for m in every), counted=sum(m.counted for m in every))


def _meeting(ranks: Sequence[Findings]) -> ReplicaSync | None:
    every = [rank.replica_traffic for rank in ranks if rank.replica_traffic is not None]
    if not every:
        return None
    return ReplicaSync(every[0].axis, every[0].every, all(met.alike for met in every), every[0].has_islands)


def _operations(ranks: Sequence[Findings]) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for rank in ranks:
        for traffic in (rank.traffic, rank.predicted_traffic or {}):
            for axis, operations in traffic.items():
                found[axis].update(dict.fromkeys(name for name in operations if name != "recv"))
    return {axis: list(found[axis]) for axis in GROUP_AXES if axis in found}


def _counted(rank: Findings, axis: str, name: str, what: str) -> int:
    return rank.traffic.get(axis, {}).get(name, {}).get(what, 0)


def _predicted(rank: Findings, axis: str, name: str, what: str) -> int | None:
    """None: not predicted."""
    if rank.predicted_traffic is None:
        return None
    messages = rank.predicted_traffic.get(axis, {}).get(name)
    return 0 if messages is None else getattr(messages, what)


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


def _memory(ranks: Sequence[Findings]) -> dict[str, Count]:
    """Cause → bytes on the rank that holds most."""
    fullest = max(ranks, key=lambda rank: rank.memory.total if rank.memory else 0)
    counts = {
        cause: Count(
            predicted=None if fullest.predicted_memory is None else getattr(fullest.predicted_memory, cause),
            counted=getattr(fullest.memory, cause),
        )
        for cause in ("parameters", "gradients", "optimizer")
    }
    return {**counts, "peak": Count(measured=max(rank.peak for rank in ranks))}


def claimed_ranks(plan: Plan) -> int:
    """As many as the plan's degrees multiply to."""
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
