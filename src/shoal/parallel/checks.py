"""Checks of a plan against a model, before anything is laid out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn

from shoal.blueprint.description import Description, Split, matches
from shoal.blueprint.placement import is_inside, named
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.check import check_plan
from shoal.blueprint.validation.description import check_names
from shoal.comm.collectives import all_gather_plain
from shoal.errors import Problem, ShoalError, nearest, raise_if
from shoal.numerics.fp8.convert import MIN_FEATURES, is_fit_for_fp8
from shoal.parallel.batch_norm import batch_norms, can_share
from shoal.parallel.context.attention import Attention, DocumentMask
from shoal.parallel.data.fsdp_units import check_units
from shoal.parallel.expert.experts import experts_in
from shoal.parallel.expert.router import routers
from shoal.parallel.fused_loss_head import why_not_fused
from shoal.parallel.lora.checks import check_adapters
from shoal.parallel.policies import Policies, SyncPolicy
from shoal.parallel.replica_sync import uses_own_reducer
from shoal.parallel.split_layers import WHOLE
from shoal.parallel.tensor import TensorParallel


def validate_model(
    model: nn.Module,
    plan: Plan,
    description: Description,
    tensor: TensorParallel,
    shapes: dict[str, tuple[int, ...]],
    policies: Policies,
    *,
    is_split_by_hand: bool,
) -> None:
    """Raise with all problems of a model under a plan. `shapes` are the full shapes of all parameters."""
    names = [name for name, _ in model.named_modules()]
    found = check_plan(
        plan,
        description=description,
        features=shapes,
        modules=names,
        is_split_by_hand=is_split_by_hand,
        compiles=bool(policies.compute.compile),
    )
    found += check_model(model, plan, description, policies)
    raise_if(found, title=f"plan '{plan.brief()}'")
    _reject_unequal_models(model, plan, tensor)


def check_model(model: nn.Module, plan: Plan, description: Description, policies: Policies) -> list[Problem]:
    """Problems of the modules of a model, built or without memory, with a plan, and of the settings of a run with
    either. None if the description names modules that the model lacks, which `check_plan` reports."""
    if any(check_names(description, [name for name, _ in model.named_modules()])):
        return []
    ep, plan, compute = plan.ep or 1, plan.with_layout(), policies.compute
    divided = tuple(experts_in(model)) if ep > 1 else ()
    return [
        *_without_attention(model, plan, description),
        *_missing_arguments(model, plan, description),
        *_without_experts(model, ep, description),
        *_undescribed_documents(model, plan, description),
        *_other_experts(model, ep, description),
        *_ties_that_break(model, plan, description),
        *(_unshared_batch_norm(model, plan) if compute.sync_batch_norm else ()),
        *_unused_with_shards(plan, finds_unused=policies.sync.find_unused_parameters),
        *_hooks_of_replaced(model, plan),
        *_numbers_with_shards(model, plan, policies.sync, divided),
        *_no_layer_for_fp8(model, plan, description, compute.fp8_min_features),
        *(_not_fused(model, plan, description) if compute.fused_loss else ()),
        *check_units(
            model,
            plan,
            policies.shard,
            blocks=description.blocks,
            experts=divided,
            compiles=bool(compute.compile),
        ),
        *check_adapters(model, plan, description, compiles=bool(compute.compile)),
    ]


def _unshared_batch_norm(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    off = "--run.sync_batch_norm false"
    norms = batch_norms(model)
    if not norms:
        yield Problem("M025", "sync_batch_norm needs a batch norm in the model, got none", off)
    for name, norm in norms.items():
        if not can_share(norm):
            what = f"sync_batch_norm replaces torch's batch norm, and {name} is a {type(norm).__name__}"
            yield Problem("M025", what, f"nn.BatchNorm1d, 2d or 3d in its place; or {off}")
    if norms and plan.layout.pp > 1:
        what = (
            f"sync_batch_norm makes ranks wait for each other in every batch norm, and pp={plan.layout.pp} has an order"
        )
        yield Problem("P061", f"{what} of microbatches of its own", f"{off}; or pp=1")
    if norms and plan.sync:
        what = f"sync_batch_norm shares statistics in every step, and under sync={plan.sync} replicas train alone"
        yield Problem("P062", what, f"{off}; or a plan without sync=")
    if norms and plan.layout.tp > 1 and plan.sp:
        what = f"sync_batch_norm shares statistics over samples, and tp={plan.layout.tp} with sp divides tokens"
        yield Problem("P063", what, f"{off}; or sp=off")


def _unused_with_shards(plan: Plan, *, finds_unused: bool) -> Iterator[Problem]:
    if plan.is_sharded and finds_unused:
        yield Problem(
            "P059",
            "find_unused_parameters needs replicas with full parameters, got shards: all ranks reduce every gradient",
            f"zero=0 instead of zero={plan.zero}, or a forward that uses the same parameters on every rank",
        )


def _numbers_with_shards(model: nn.Module, plan: Plan, sync: SyncPolicy, experts: Sequence[str]) -> Iterator[Problem]:
    """Find parameters of shape () whose gradients `FSDPSync` does not average. `experts`: those that `ep` divides."""
    numbers = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if plan.is_sharded and plan.layout.dp_replicate > 1 and uses_own_reducer(plan, sync):
        settings = {"sync": plan.sync, "compress": plan.compress, "algorithm": sync.algorithm}
        setting = next(f"{key}={value}" for key, value in settings.items() if value)
    elif plan.zero and plan.offloaded == "parameters":
        setting = f"offload={plan.offload}"
    else:
        setting = f"ep={plan.ep}"
        numbers = [name for name in numbers if plan.is_sharded and is_inside(name, experts)]
    if numbers:
        yield Problem(
            "M150",
            f"under zero={plan.zero} with {setting} every parameter must have a dim to cut,"
            f" got {', '.join(numbers[:4])} of shape ()",
            "nn.Parameter(torch.ones(1)) in place of torch.ones(()), zero=0, or a plan without"
            f" {setting.partition('=')[0]}",
        )


def _hooks_of_replaced(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Hooks of parameters that a layout replaces by pieces, which have no hooks."""
    degrees = {"zero": (plan.zero or 0) * plan.is_sharded, "tp": plan.layout.tp - 1, "ep": plan.layout.ep - 1}
    replacing = [f"{word}={degree + (word != 'zero')}" for word, degree in degrees.items() if degree]
    hooked = [name for name, parameter in model.named_parameters() if _has_hooks(parameter)]
    if replacing and hooked:
        yield Problem(
            "M151",
            f"{replacing[0]} replaces parameters by pieces of them, and hooks of gradients would be lost, got hooks of"
            f" {', '.join(hooked[:4])}",
            "run.on_gradients, a function that is called when a step's gradients are complete; or zero=0 tp=1 ep=1",
        )


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a script has called `register_hook` or `register_post_accumulate_grad_hook` of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _no_layer_for_fp8(
    model: nn.Module, plan: Plan, description: Description, min_features: int | None
) -> Iterator[Problem]:
    if plan.precision != "fp8" or not description.blocks:  # `check_precision` reports fp8 without blocks
        return
    least = MIN_FEATURES if min_features is None else min_features
    blocks = [model.get_submodule(name) for name in description.blocks]
    layers = [layer for block in blocks for layer in block.modules()]
    if any(is_fit_for_fp8(layer, least) for layer in layers):
        return
    if any(is_fit_for_fp8(layer, 1) for layer in layers):
        what = f"fp8 needs a linear layer of at least {least} features in the model's blocks, got none"
        yield Problem("P060", what, "--plan.precision bf16; or --run.fp8_min_features 16")
    else:
        what = "fp8 needs a linear layer whose features are multiples of 16 in the model's blocks, got none"
        yield Problem("P060", what, "--plan.precision bf16; or sizes that are multiples of 16")


def _not_fused(model: nn.Module, plan: Plan, description: Description) -> Iterator[Problem]:
    if (why := why_loss_not_fused(model, plan, description)) is not None:
        fix = "--run.loss auto"
        if description.head is None:
            fix += "; or Description(head=...), where the model's last layer is a product without a bias"
        yield Problem("M024", f"the loss cannot be computed inside the model: {why}", fix)


def why_loss_not_fused(model: nn.Module, plan: Plan, description: Description) -> str | None:
    """Return why the last layer of a model cannot compute the loss; None: it can."""
    head = description.head
    if head is None:
        return "the model's description names no head"
    if (layer := dict(model.named_modules()).get(head)) is None:
        return f"the model has no {head!r}, which its description names as its head"
    if plan.layout.pp > 1:
        return "a pipeline computes it from the output of its last stage"
    split = next((kind for pattern, kind in description.splits.items() if matches(pattern, head)), None)
    if plan.layout.tp > 1 and split is not None and split not in WHOLE:
        return f"tp={plan.layout.tp} splits its head"
    return why_not_fused(layer)


def _without_attention(model: nn.Module, plan: Plan, description: Description) -> Iterator[Problem]:
    if "cp" in description.why_not:  # `check_plan` reports it
        return
    if plan.layout.cp > 1 and not any(isinstance(module, Attention) for module in model.modules()):
        yield Problem(
            "M017",
            f"cp={plan.layout.cp} needs a shoal.Attention in the model, got none",
            "self.attention = shoal.Attention(), called as self.attention(q, k, v) in place of"
            " scaled_dot_product_attention",
        )


def _missing_arguments(model: nn.Module, plan: Plan, description: Description) -> Iterator[Problem]:
    """Yield arguments that the description names and the forward does not have."""
    parameters = inspect.signature(model.forward).parameters
    if plan.layout.cp == 1 or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for what in ("positions", "documents"):
        name = getattr(description, what)
        if name is not None and name not in parameters:
            near = nearest(name, parameters)
            yield Problem(
                "M018",
                f"describe() names {name!r} as the argument for {what}, and forward has no such argument",
                f'Description(..., {what}="{near}")' if near else f"def forward(self, tokens, {name}=None): ...",
            )


def _without_experts(model: nn.Module, ep: int, description: Description) -> Iterator[Problem]:
    """The problem of a description with experts that the model lacks; `check_experts` reports one without experts."""
    if ep > 1 and description.num_experts and not experts_in(model):
        yield Problem(
            "M019",
            f"ep={ep} needs a shoal.Experts in the model, got none",
            "shoal.Experts in place of experts of your own, or ep=1",
        )


def _undescribed_documents(model: nn.Module, plan: Plan, description: Description) -> Iterator[Problem]:
    has_mask = any(isinstance(module, DocumentMask) for module in model.modules())
    if plan.layout.cp > 1 and has_mask and description.documents is None:
        yield Problem(
            "M020",
            "the model has a shoal.DocumentMask, and describe() does not name the argument with the documents: cp would"
            " cut them",
            'Description(..., documents="documents")',
        )


def _other_experts(model: nn.Module, ep: int, description: Description) -> Iterator[Problem]:
    """Yield numbers that differ between the description and the modules."""
    facts = [("num_experts", description.num_experts, e.num_experts) for e in experts_in(model).values()]
    facts += [
        ("active_experts", description.active_experts, router.top_k)
        for router in routers(model).values()
        if router.choice == "token"
    ]
    for name, said, is_so in dict.fromkeys(facts):
        if ep > 1 and said is not None and said != is_so:
            yield Problem("M021", f"describe() says {name}={said}, and the model has {is_so}", f"{name}={is_so}")


def _ties_that_break(model: nn.Module, plan: Plan, description: Description) -> Iterator[Problem]:
    """Yield parameters with several names, which a layout would turn into several parameters."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    layout, sides = plan.layout, (description.before_blocks, description.after_blocks)
    is_divided = layout.pp > 1 or (plan.is_sharded and bool(description.blocks))
    for shared in (shared for shared in names.values() if len(shared) > 1):
        kinds = {description.split_of(name.rpartition(".")[0]) for name in shared} if layout.tp > 1 else set()
        is_cut = bool(kinds - {*WHOLE})
        is_one_vocabulary = kinds == {Split.VOCABULARY}  # `split` makes one piece of it
        if (not is_cut or is_one_vocabulary) and _is_on_one_side(shared, description, is_pipeline=layout.pp > 1):
            continue
        if not is_cut and not is_divided:
            continue
        before, after = ([n for n in shared if is_inside(n, part)] for part in sides)
        is_known = (*before[:1], *after[:1]) in description.tied and shared[:1] == before[:1]
        if not is_known or len(before) + len(after) < len(shared) or (is_cut and len(shared) > 2):
            yield Problem(
                "M022",
                f"{' and '.join(shared)} are one parameter, and this plan would make several of it",
                f"describe() with tied=(({', '.join(map(repr, shared[:2]))}),), the first in before_blocks and the"
                " second in after_blocks; other ties need tp=1, pp=1 and zero=0",
            )


def _is_on_one_side(shared: Sequence[str], description: Description, *, is_pipeline: bool) -> bool:
    """Whether all names of a parameter are before the blocks, or all after them, or all in no module of the
    description: one stage and one unit has them."""
    owners = [name.rpartition(".")[0] for name in shared]
    sides = (description.before_blocks, description.after_blocks)
    is_beside = not any(is_inside(owner, named(description)) for owner in owners)  # without a pipeline, the root has it
    return (is_beside and not is_pipeline) or any(all(is_inside(owner, side) for owner in owners) for side in sides)


def _reject_unequal_models(model: nn.Module, plan: Plan, tensor: TensorParallel) -> None:
    """Reject models that differ between ranks: each rank would keep a piece of another model. DDP broadcasts rank
    0's."""
    layout = plan.layout
    if layout.world_size in (1, layout.dp_replicate) or any(p.is_meta for p in model.parameters()):
        return
    sums = {n: float(p.detach().double().sum()) for n, p in model.named_parameters() if n not in tensor.cuts}
    every = all_gather_plain(sums, dist.group.WORLD)
    unlike = next((name for name in sums if any(repr(other.get(name)) != repr(sums[name]) for other in every)), None)
    if unlike is not None:
        raise ShoalError(
            f"{unlike} must have the same values on every rank before it is laid out",
            fix="torch.manual_seed(0) on every rank before the model is built, and weights loaded on every rank",
            code="M023",
        )
