"""Verify a model under a plan: `shoal.verify`. `recipe.cases` has the models of recipes."""

from __future__ import annotations

import copy
import functools
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
from shoal.config.checks.arguments import check_device, check_number, check_whole
from shoal.data.batch import length, rows
from shoal.errors import Findings, Problem, listed, nearest, raise_if
from shoal.launch.local import launch
from shoal.parallel.data.shard_policy import ShardPolicy
from shoal.parallel.expert.router import routers
from shoal.parallel.pipeline.skeleton import Call, skeleton_of
from shoal.parallel.pipeline.stage_io import traced
from shoal.safe_parsing import short
from shoal.train.build_model import adapt, describe, from_pretrained, is_name, without_memory
from shoal.train.loss.labels import needs_labels
from shoal.train.loss.objective import CrossEntropy, LabelRule, call_of, objective_of, uncallable
from shoal.train.trace.find_blocks import attach_blocks
from shoal.verification.case import Case, in_precision, replaced_precision
from shoal.verification.compression_error import without_compression
from shoal.verification.options import (
    TOLERANCES,
    VerifySettings,
    check_options,
    claimed_ranks,
)
from shoal.verification.rank import verify_on_rank
from shoal.verification.recipe.random_batches import random_batch_of
from shoal.verification.reference import has_batch_norm
from shoal.verification.report import VerifyResult
from shoal.verification.totals import bytes_of, bytes_to_replicas, collectives_of, memory_of, replica_sync_of

VERIFIED_SHARDING = ("wrap_classes", "wrap_min_params", "forward_prefetch", "backward_prefetch")
"""Settings of `ShardPolicy` that change no number. `reduce_dtype` rounds gradients."""

LR_OF_OTHERS = 1e-4
"""The learning rate of models of others. T5 multiplies rounding by a thousand in a step of 1e-2."""


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
    build_model: Callable[[], nn.Module] | nn.Module | str,
    batch: Any = None,
    plan: Plan | str | Mapping[str, Any] = "auto",
    *,
    nproc: int | None = None,
    loss: Any = None,
    device: str = "cpu",
    **options: Unpack[VerifyOptions],
) -> VerifyResult:
    """Train a model for a few steps in one process and with the plan, and compare every gradient and weight by name.

    `build_model()` returns the model, the same in every process; or it is the model itself, which stays unchanged; or
    "hf:FOLDER", a model of transformers with its weights. `batch` is a global batch, or a list of them; None: inputs
    and labels are drawn at random, for a model of transformers. `nproc` None: the product of the plan's degrees.
    `options`, by name:

    steps      optimizer steps to compare (3)
    lr         the learning rate (0.01; of "hf:FOLDER" 0.0001)
    clip       the largest norm of gradients (0.5); None: no clipping
    seed       decides the initial weights and all randomness in the model (0)
    precision  fp64, fp32, bf16 or fp16, in place of the plan's; None: fp64 on a CPU, the plan's own on a GPU
    tolerance  the largest difference that counts as equal; None: that of the precision
    wrap_classes, wrap_min_params, forward_prefetch, backward_prefetch   as of `Run`
    """
    found = Findings()
    found += _check_names(options)
    known: dict[str, Any] = {name: value for name, value in options.items() if name in OPTIONS}
    if isinstance(build_model, str):
        known.setdefault("lr", LR_OF_OTHERS)
    settings = ModelSettings(**known)
    build = found.of(_builder, build_model)
    found += [*check_options(settings), *_check_values(settings, device, nproc), *_check_given(build_model, batch)]
    found.of(objective_of, loss)
    first = next(iter(several := _batches(batch)), batch)
    size_of_batch = None if batch is None or (isinstance(first, list) and not first) else found.of(length, first)
    open_plan = found.of(Plan.of, plan)
    size = nproc if nproc is not None or open_plan is None else found.of(claimed_ranks, open_plan)
    if batch is None and callable(build) and open_plan is not None and isinstance(size, int) and size > 0:
        first = found.of(random_batch_of, build, open_plan, size, settings.seed)
        several, size_of_batch = [first], None if first is None else length(first)
    if isinstance(size, int) and size > 0:
        found += check_unread(plan, size) if open_plan is None else check_ranks(open_plan, size, batch=size_of_batch)
    if open_plan is not None and isinstance(size, int) and size_of_batch is not None and callable(build):
        build = functools.partial(with_blocks, build, rows(first, 0, 2), loss, open_plan.pp)
        found += check_built(build, open_plan.fill(size), num_tokens(first))
    raise_if((_with_nproc(problem) for problem in found.problems), title=f"plan '{plan}'")
    assert build is not None
    assert open_plan is not None
    assert size is not None
    case = _case_of(
        build, (several * settings.steps)[: settings.steps], open_plan.resolve(size), settings, loss, device
    )
    reject_uncallable(case)
    return verify_case(case)


def _case_of(
    build: Callable[[], nn.Module],
    batches: list[Any],
    requested: Plan,
    settings: ModelSettings,
    loss: Any,
    device: str,
) -> Case:
    """The case of a resolved plan."""
    resolved = in_precision(requested, settings.precision, device)
    exact = without_compression(resolved)
    return Case(
        build=build,
        batches=batches,
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
    if not callable(build) and not is_name(build):
        what = f"build_model must be a model or a function that returns one, got {short(build)}"
        fix = "verify('hf:FOLDER', batch, plan)" if isinstance(build, str) else "verify(lambda: Model(), batch, plan)"
        yield Problem("V051", what, fix)
    if isinstance(batch, list) and not batch:
        what = "batch must be a global batch or a list of them, got an empty list"
        yield Problem("V050", what, "verify(model, (inputs, labels), plan)")


def _with_nproc(problem: Problem) -> Problem:
    """The same problem; the number of ranks is an argument of `verify`, which starts them itself."""
    return replace(problem, fix=re.sub(r"--(?:launch\.)?nproc (?=\d)", "nproc=", problem.fix))


def _builder(given: Any) -> Any:
    """A function that builds what is verified; None: it is no model."""
    if isinstance(given, str):
        given = from_pretrained(given) if is_name(given) else None
    return functools.partial(_copy_of, given) if isinstance(given, nn.Module) else given


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


def num_tokens(batch: Any) -> int | None:
    """The sequence length, if the first input of a batch is a matrix of integers."""
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    first = values[0] if values else None
    is_tokens = isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_tokens and first is not None else None
