"""Every reason why a plan cannot run a model, found before a process starts, with the legal values.

`Plan.resolve` checks ranks. Torch checks the degrees against a *model* (its heads, features, blocks, sequence and
batch) inside a started run, one problem at a time and seldom by name. Here the same rules are pure functions of the
plan and the model's description. Each axis has a file.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.batch import check_batch
from shoal.blueprint.validation.context import check_context
from shoal.blueprint.validation.description import Shapes, check_blocks, check_coverage, check_names, check_reasons
from shoal.blueprint.validation.expert import check_experts
from shoal.blueprint.validation.pipeline import check_compile, check_pipeline, check_precision
from shoal.blueprint.validation.tensor import check_tensor
from shoal.errors import Problem


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
    """All problems of a resolved plan with this model. Empty: it can run.

    `batch` are the samples of a step, `sequence` the tokens per sample, `features` the shapes of all parameters and
    `modules` the names of all submodules. None: not known, not checked. `is_split_by_hand`: the model brings its own
    split layers. `compiles`: torch.compile captures its blocks.
    """
    if modules is not None and (wrong := list(check_names(description, modules))):
        return wrong  # other checks would only report consequences of a wrong description
    if not is_split_by_hand and (known := list(check_reasons(plan, description))):
        return known
    return [
        *(() if is_split_by_hand else check_tensor(plan, description, sequence, features or {})),
        *check_context(plan, description, sequence),
        *check_experts(plan, description),
        *check_coverage(plan, description, features or {}),
        *check_blocks(plan, description),
        *check_pipeline(plan, description),
        *(check_compile(plan, description) if compiles else ()),
        *check_precision(plan, description),
        *(check_batch(plan, batch) if batch is not None else ()),
    ]
