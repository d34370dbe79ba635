"""Verify a recipe, or a user's own model, under a plan: `shoal verify` and `shoal.verify`."""

from __future__ import annotations

import copy
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
from shoal.blueprint.plan import Plan
from shoal.blueprint.replicas.local_sgd import AUTO
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
from shoal.parallel.pipeline.skeleton import skeleton_of
from shoal.parallel.pipeline.stage_io import stream_of
from shoal.train.build_model import adapt, build_model, describe, without_memory
from shoal.train.loss.objective import call_of, objective_of, uncallable
from shoal.verification.case import TOLERANCES, Case, in_precision, replaced_precision
from shoal.verification.compression_error import without_compression
from shoal.verification.rank import Findings, verify_on_rank
from shoal.verification.reference import has_batch_norm
from shoal.verification.report import Count, ReplicaSync, VerifyResult

STEPS = 3
TOKENS = 24
"""Tokens of a sequence for a small copy of a model; divisible by 2, 3, 4, 6 and 8 ranks."""


def verify(
    build_model: Callable[[], nn.Module] | nn.Module,
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
) -> VerifyResult:
    """Train a model for a few steps in one process and with the plan, and compare every gradient and weight by name.

    `build_model()` returns the model, the same in every process; or it is the model itself, which stays unchanged.
    `batch` is a global batch, or a list of them.
    `nproc` None: the product of the plan's degrees.
    """
    _check_steps(steps)
    requested = Plan.of(plan)
    requested = requested.resolve(nproc or claimed_ranks(requested))
    reject_unsupported(requested)
    resolved = in_precision(requested, precision, device)
    exact = without_compression(resolved)
    is_several = isinstance(batch, list) and not any(isinstance(part, Tensor) for part in batch)
    batches = (batch * steps)[:steps] if is_several else [batch] * steps
    case = Case(
        build=functools.partial(_copy_of, build_model) if isinstance(build_model, nn.Module) else build_model,
        batches=batches,
        plan=exact,
        compressed=None if exact == resolved else resolved,
        loss=loss,
        seed=seed,
        lr=lr,
        clip=clip,
        device=device,
        tolerance=_tolerance(tolerance, resolved),
        replaced=replaced_precision(requested, resolved),
    )
    check(case)
    return verify_case(case)


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy of a model; without values, where models are built without memory."""
    return skeleton_of(model) if torch.get_default_device().type == "meta" else copy.deepcopy(model)


def _tolerance(requested: float | None, plan: Plan) -> float:
    if requested is not None and not requested >= 0:
        what = f"--tolerance must be 0 or more, got {requested}"
        raise ShoalError(what, fix="--tolerance 1e-10, or 0 for equal bits")
    return TOLERANCES[plan.precision] if requested is None else requested


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ShoalError(f"--steps must be 1 or more, got {steps}", fix="--steps 3")


def verify_case(case: Case) -> VerifyResult:
    """Run the case on the ranks of its plan."""
    start = time.monotonic()
    ranks = launch(verify_on_rank, (case,), nproc=case.world_size)
    verdict = ranks[0].verdict
    assert verdict is not None
    return VerifyResult(
        plan=(case.compressed or case.plan).brief(),
        world_size=case.world_size,
        verdict=verdict,
        cause=ranks[0].cause,
        seconds=time.monotonic() - start,
        bytes=_bytes(ranks) | dict(_sent(ranks)),
        collectives={axis: of for axis, of in _collectives(ranks).items() if axis not in dict(_sent(ranks))},
        memory=_memory(ranks),
        compression_error=ranks[0].compression_error,
        replica_sync=_replica_sync(ranks),
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
    if case.plan.offload != "none" and case.device == "cpu":
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


def check(case: Case) -> None:
    """Raise if the plan does not fit the model, before a process starts."""
    model = without_memory(case.build)
    if model is None:
        return  # its shapes are not known here; the ranks report problems
    tokens = _num_tokens(case.batches[0])
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    description = describe(model)
    # In the requested precision: a plan that no run would accept is not verified either.
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
    if case.loss is None or case.plan.layout.pp > 1:  # else the user's loss may do more than call the model
        call = call_of(objective_of(case.loss), rows(case.batches[0], 0, 2))  # two samples: batch norm rejects one
        raise_if(uncallable(model, call))
        if case.plan.layout.pp > 1:
            adapt(model, description, case.plan)
            stream_of(model, description.blocks, call)


# ---- cases from a recipe --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySettings:
    """Options of a verification beside the recipe."""

    real: bool = False
    steps: int = STEPS
    precision: str | None = None
    tolerance: float | None = None


def case_of(recipe: Recipe, world_size: int, settings: VerifySettings) -> Case:
    """The case of a recipe's model under its plan; of a small copy, if the model has one."""
    device = "cpu" if recipe.launch.device == "auto" else recipe.launch.device
    if recipe.optim.param_dtype == "bf16":
        what = "optim.param_dtype must be fp32 for shoal verify, got bf16, which rounds weights at random"
        raise ShoalError(what, fix="--optim.param_dtype fp32, which computes gradients with the same code")
    _check_steps(settings.steps)
    requested = recipe.plan.resolve(world_size)
    reject_unsupported(requested)
    plan = in_precision(requested, settings.precision, device)
    section, is_small = (recipe.model, False) if settings.real else smaller_model(recipe.model, plan)
    batches = (
        _random_batches(section, plan, recipe, settings.steps) if is_small else _real_batches(recipe, settings.steps)
    )
    exact = without_compression(plan)
    case = Case(
        build=functools.partial(build_model, section),
        batches=batches,
        plan=exact,
        compressed=None if exact == plan else plan,
        seed=recipe.run.seed,
        clip=recipe.optim.clip if recipe.optim.clip is None else min(recipe.optim.clip, 0.5),
        device=device,
        tolerance=_tolerance(settings.tolerance, plan),
        replaced=replaced_precision(requested, plan),
        not_verified=tuple(_not_verified(recipe)),
    )
    check(case)
    return case


def _not_verified(recipe: Recipe) -> Iterator[str]:
    """Settings for speed that the recipe changes and a verification ignores, which the user must know."""
    settings, defaults = recipe.model_dump(), Recipe().model_dump()
    for key in (
        "run.compile",
        "run.attention",
        "run.loss",
        "run.recompute_swiglu",
        "run.sync_batch_norm",
        "optim.state_dtype",
    ):
        section, _, name = key.partition(".")
        if (value := settings[section][name]) != defaults[section][name]:
            yield f"{key} {str(value).lower()}"


def smaller_model(section: ModelSection, plan: Plan) -> tuple[ModelSection, bool]:
    """The model section of a small copy with the same structure, and whether there is one."""
    functions: dict[str, str] = importlib.import_module("shoal.models").SMALLER
    if section.name not in functions:
        return section, False
    module_name, _, function = functions[section.name].partition(":")
    shrink = getattr(importlib.import_module(module_name), function)
    arguments = shrink(section.arguments, num_stages=plan.layout.pp * (plan.v or 1), ep=plan.layout.ep)
    return ModelSection(name=section.name, **arguments), True


def _random_batches(section: ModelSection, plan: Plan, recipe: Recipe, steps: int) -> list[dict[str, Tensor]]:
    """Random tokens with some ignored labels; few samples, but enough microbatches for any schedule. No sample starts
    with the same token twice, since a router of experts cannot distinguish those two positions."""
    vocabulary = int(section.arguments["vocabulary"])
    requested = plan.num_microbatches(recipe.data.global_batch)
    few = max(4, 2 * plan.layout.pp)
    num_microbatches = min(requested, few)
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
    """A short sequence length that the ranks of a plan can divide."""
    return math.lcm(TOKENS, plan.layout.tp * num_chunks(plan))


def _real_batches(recipe: Recipe, steps: int) -> list[Any]:
    dataset, _ = open_datasets(recipe.data, recipe.run.seed)
    size = recipe.data.global_batch
    return [dataset.batch(sample_ids(recipe.run.seed, len(dataset), step * size, size)) for step in range(steps)]


def legal_cases(recipe: Recipe, world_size: int, settings: VerifySettings) -> Iterator[Case]:
    """A case for every valid layout of `world_size` ranks, from simple to composed."""
    with torch.device("meta"):
        model = build_model(recipe.model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for plan in legal_plans(world_size, description=describe(model), batch=recipe.data.global_batch, features=shapes):
        yield case_of(recipe.model_copy(update={"plan": plan}), world_size, settings)


# ---- sums over the ranks' findings ----------------------------------------------------------------------------------


def _collectives(ranks: Sequence[Findings]) -> dict[str, dict[str, Count]]:
    """Axis → operation → calls of one step, over all ranks. Receives are not counted, only sends."""
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
    """Under compression or local SGD: the axis of replicas, and the bytes that all ranks send."""
    every = [rank.replica_traffic for rank in ranks if rank.replica_traffic is not None]
    if every:
        yield every[0].axis, Count(predicted=sum(m.predicted for m in every), counted=sum(m.counted for m in every))


def _replica_sync(ranks: Sequence[Findings]) -> ReplicaSync | None:
    every = [rank.replica_traffic for rank in ranks if rank.replica_traffic is not None]
    if not every:
        return None
    are_equal = all(traffic.has_equal_weights for traffic in every)
    return ReplicaSync(every[0].axis, every[0].every, are_equal, every[0].sends_weights)


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
    """The predicted number; None: not predicted."""
    if rank.predicted_traffic is None:
        return None
    messages = rank.predicted_traffic.get(axis, {}).get(name)
    return 0 if messages is None else getattr(messages, what)


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


def _memory(ranks: Sequence[Findings]) -> dict[str, Count]:
    """Kind → bytes on the rank that holds most."""
    largest = max(ranks, key=lambda rank: rank.memory.total if rank.memory else 0)
    counts = {
        kind: Count(
            predicted=None if largest.predicted_memory is None else getattr(largest.predicted_memory, kind),
            counted=getattr(largest.memory, kind),
        )
        for kind in ("parameters", "gradients", "optimizer")
    }
    return {**counts, "peak": Count(measured=max(rank.peak for rank in ranks))}


def claimed_ranks(plan: Plan) -> int:
    """The product of the plan's degrees."""
    degrees = (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp)
    if not any(degrees):
        what = f"the plan must have a degree, or nproc must be set, got plan '{plan}'"
        raise ShoalError(what, fix="verify(..., nproc=4), or a plan such as tp=2")
    number = 1
    for degree in degrees:
        number *= degree or 1
    return number


def _num_tokens(batch: Any) -> int | None:
    """The sequence length, if the first input of a batch is a matrix of integers."""
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    first = values[0] if values else None
    is_tokens = isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_tokens and first is not None else None
