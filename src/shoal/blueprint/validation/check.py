"""Every reason why a plan cannot run a model, found before a process starts, with the legal values.

`Plan.resolve` checks ranks. Torch checks the degrees against a *model* (its heads, features, blocks, sequence and
batch) inside a started run, one problem at a time and seldom by name. Here the same rules are pure functions of the
plan and the model's description. Each axis has a file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from shoal.blueprint.description import Description
from shoal.blueprint.plan import DEGREES, Plan
from shoal.blueprint.plan_parser import read_mapping, read_words
from shoal.blueprint.validation.batch import check_batch
from shoal.blueprint.validation.context import check_context
from shoal.blueprint.validation.description import (
    Shapes,
    check_blocks,
    check_coverage,
    check_names,
    check_reasons,
    impossible_axes,
)
from shoal.blueprint.validation.expert import check_experts
from shoal.blueprint.validation.pipeline import check_compile, check_pipeline, check_precision
from shoal.blueprint.validation.tensor import check_tensor
from shoal.blueprint.validation.unsupported import check_unsupported
from shoal.errors import Problem

OTHER_PLAN_VALUES: Mapping[str, Any] = {
    **dict.fromkeys(DEGREES, 2),
    **{"zero": 3, "schedule": "gpipe", "v": 2, "context": "ulysses", "sp": True},
    **{"mb": 1, "precision": "bf16", "compress": "int8", "sync": "local:8"},
}
"""Key → a valid value that leads to other problems than the default does. Problems under both do not depend on it."""


def check_plan(
    plan: Plan,
    *,
    description: Description,
    batch: int | None = None,
    sequence: int | None = None,
    features: Shapes | None = None,
    modules: Collection[str] | None = None,
    is_split_by_hand: bool = False,
    compiles: bool = False,
) -> list[Problem]:
    """All problems of a plan without open values with this model. Empty: it can run.

    The plan may be one that `Plan.check` rejects: each of its degrees is still checked against the model.
    `batch` are the samples of a step, `sequence` the tokens per sample, `features` the shapes of all parameters and
    `modules` the names of all submodules. None: not known, not checked. `is_split_by_hand`: the model brings its own
    split layers. `compiles`: torch.compile captures its blocks.
    """
    impossible = impossible_axes(plan, description, is_split_by_hand=is_split_by_hand)
    known = check_reasons(plan, description, impossible, features or {})
    experts = () if "ep" in impossible else check_experts(plan, description)
    wrong_batch = check_batch(plan.with_layout(), batch) if batch is not None else []
    if modules is not None and (wrong := list(check_names(description, modules))):
        return [*wrong, *wrong_batch]  # other checks would only report consequences of a wrong description
    # The rest is checked without the axes that are known to be impossible: more of these would be consequences.
    off: dict[str, Any] = {axis: False if axis == "sp" else 1 for axis in impossible}
    plan = replace(plan, **off).with_layout()
    return [
        *known,
        *(() if is_split_by_hand else check_tensor(plan, description, sequence, features or {})),
        *check_context(plan, description, sequence),
        *experts,
        *check_coverage(plan, description, features or {}),
        *check_blocks(plan, description),
        *check_pipeline(plan, description),
        *(check_compile(plan, description) if compiles else ()),
        *check_precision(plan, description),
        *wrong_batch,
    ]


def check_ranks(plan: Plan, world_size: int, *, batch: int | None = None, has_to_change: bool = False) -> list[Problem]:
    """All problems of a plan, open or resolved, on a number of ranks, whatever the model is.

    `batch` are the samples of a step; None: not checked. It is not checked either where the degrees do not fit the
    ranks: then it is not known how many ranks share it. `has_to_change`: other checks have rejected the plan, so that
    the batch to type has to suit any layout of the ranks.
    """
    filled = plan.fill(world_size).with_layout()
    is_known = batch is not None and filled.layout.world_size == world_size
    found = [*plan.check(world_size), *check_unsupported(filled)]
    for_any_layout = has_to_change or bool(found)
    return [*found, *(check_batch(filled, batch or 0, for_any_layout=for_any_layout) if is_known else ())]


def check_unread(value: object, world_size: int) -> list[Problem]:
    """Further problems of a plan of which `Plan.of` could not read all words, on a number of ranks.

    A problem that depends on the value of an unread word is left out.
    """
    if not isinstance(value, Mapping | str):
        return []
    read = read_mapping(value) if isinstance(value, Mapping) else read_words(value)
    found = check_ranks(Plan(**read.values), world_size)
    instead = {key: OTHER_PLAN_VALUES[key] for key in read.unread if key in OTHER_PLAN_VALUES}
    certain = {problem.what for problem in check_ranks(Plan(**read.values, **instead), world_size)}
    return [problem for problem in found if problem.what in certain]
