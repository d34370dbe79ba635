"""The planner predicts what `verify` proves: for every proven composition and every rank, states and messages that come
from the dimensions alone equal those that come from the built model. `verify` and tests/dist hold the latter against
what a run counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import cache

import pytest
import torch

from shoal.blueprint.model_shapes import ModelShapes
from shoal.blueprint.plan import Plan
from shoal.parallel.inspect.trace_shapes import trace_shapes
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.estimate.communication import exact_messages, num_exchanges
from shoal.predict.estimate.rank_share import Degrees
from shoal.predict.estimate.work import Work
from shoal.predict.exact.cached_states import exact_exchange
from shoal.predict.exact.state_memory import memory
from shoal.predict.exact.traffic import traffic
from shoal.predict.predict import messages, predict, states
from shoal.predict.presets.frameworks import SHOAL
from shoal.predict.presets.models import MODELS
from shoal.predict.workload import Workload
from shoal.train.recipe.auto_plan import dimensions_of
from tests.dist.compositions import Proven, num_layers_for, proven
from tests.dist.test_compositions import BATCH, TOKENS, build


@cache
def both(kind: str, num_layers: int) -> tuple[ModelShapes, Workload]:
    """The shapes of a built model, and the model as the planner knows it."""
    with torch.device("meta"):
        model = build(kind, num_layers)
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    dimensions = dimensions_of(model)
    assert dimensions is not None
    return trace_shapes(model, model.describe(), ((tokens,), {})), Workload(name=kind, **dimensions)  # type: ignore[operator]


@pytest.mark.parametrize("case", proven(), ids=lambda case: f"{case.num_ranks}-{case.words}-{case.model}")
def test_states_and_messages_are_those_of_the_built_model(case: Proven) -> None:
    shapes, workload = both(case.model, num_layers_for(case.words, case.num_ranks))
    plan = Plan.parse(f"{case.words} fp64").resolve(case.num_ranks)
    for rank in range(case.num_ranks):
        assert states(plan, workload, rank=rank) == memory(plan, shapes, rank=rank)
        expected = traffic(plan, shapes, batch=BATCH, rank=rank)
        assert messages(plan, workload, rank=rank, seq_len=TOKENS, global_batch=BATCH) == expected


@pytest.mark.parametrize("case", proven(), ids=lambda case: f"{case.num_ranks}-{case.words}-{case.model}")
def test_the_peak_stands_on_these_states(case: Proven) -> None:
    """Of the fullest rank. Gradients count from the second microbatch on, when they lie between two backwards."""
    shapes, workload = both(case.model, num_layers_for(case.words, case.num_ranks))
    plan = replace(Plan.parse(f"{case.words} fp64").resolve(case.num_ranks), offload="none", mb=1)
    cluster = parse_cluster(f"h100:{case.num_ranks}")
    found = predict(plan, workload, cluster, seq_len=TOKENS, global_batch=BATCH * case.num_ranks).memory
    rank = plan.layout.rank(pp=found.stage)
    counted = memory(plan, shapes, rank=rank)
    assert (found.parameters, found.gradients, found.optimizer) == (
        counted.parameters,
        counted.gradients,
        counted.optimizer,
    )


class Sent(Counter[tuple[str, str]]):
    """Axis and operation → bytes."""


@pytest.mark.parametrize("case", proven(), ids=lambda case: f"{case.num_ranks}-{case.words}-{case.model}")
def test_seconds_between_layers_stand_on_these_messages(case: Proven) -> None:
    """Over tp, cp and ep, by operation, summed over all ranks: a microbatch in a layer, as many times as there are."""
    shapes, workload = both(case.model, num_layers_for(case.words, case.num_ranks))
    plan = Plan.parse(f"{case.words} fp64").resolve(case.num_ranks)
    on, samples, m = Degrees.of(plan, SHOAL), plan.microbatch_size(BATCH), plan.num_microbatches(BATCH)
    precision, recompute = plan.precision, plan.recompute
    work = Work(on.tp, on.cp, on.ep, on.splits_tokens, samples, TOKENS, precision, recompute, plan.context)
    estimated = Sent()
    for axis, operation, calls, size, _ in exact_messages(workload, work):
        estimated[axis, operation] += round(calls * workload.layers) * int(size) * m * (case.num_ranks // on.pp)
    counted = Sent()
    for rank in range(case.num_ranks):
        counted.update(sent(plan, shapes, rank))
        counted.subtract(sent(plan, outside_of_blocks(shapes), rank))
    if workload.routes_by_sequence:  # capacity and expert choice: the rows that travel depend on values
        estimated.pop(("ep", "all_to_all"), None)
        counted.pop(("ep", "all_to_all"), None)
    assert +estimated == +counted


@pytest.mark.parametrize("case", proven(), ids=lambda case: f"{case.num_ranks}-{case.words}-{case.model}")
def test_seconds_of_gradients_and_parameters_stand_on_these_messages(case: Proven) -> None:
    """By axis and operation, for the first rank of every place of the pipeline."""
    shapes, workload = both(case.model, num_layers_for(case.words, case.num_ranks))
    plan = Plan.parse(f"{case.words} fp64").resolve(case.num_ranks)
    on, m, layout = Degrees.of(plan, SHOAL), plan.num_microbatches(BATCH), plan.layout
    for place in range(on.pp):
        numel = exact_exchange(workload, plan, num_microbatches=m, place=place)
        calls, estimated = num_exchanges(on, m), Sent()
        assert numel.regathered == 0, "of at most three stages on a rank"
        for axis, elements, last in ((plan.shard_axis, numel.dense, numel.last), ("edp", numel.experts, 0)):
            if plan.is_sharded and layout.degree(axis) > 1:
                estimated[axis, "all_gather"] += 8 * (calls.gather * elements + calls.again * (elements - last))
                estimated[axis, "reduce_scatter"] += 8 * calls.scatter * elements
            if plan.is_sharded and layout.dp_replicate > 1:
                estimated["dp_replicate", "all_reduce"] += 8 * elements // layout.degree(axis)
        if not plan.is_sharded and layout.degree(plan.gradient_axis) > 1:
            estimated[plan.gradient_axis, "all_reduce"] += 8 * (numel.dense + numel.experts)
        counted = sent(
            plan, shapes, layout.rank(pp=place), {"dp_replicate", "edp", plan.shard_axis, plan.gradient_axis}
        )
        assert +estimated == +counted, place


def sent(plan: Plan, shapes: ModelShapes, rank: int, axes: Collection[str] = ("tp", "cp", "ep")) -> Sent:
    """What a rank sends over some axes in a step, without what routers compare."""
    found = Sent()
    for axis, operations in traffic(plan, replace(shapes, routers=()), batch=BATCH, rank=rank).items():
        if axis in axes:
            found.update({(axis, name): each.bytes or 0 for name, each in operations.items() if name != "recv"})
    return found


def outside_of_blocks(shapes: ModelShapes) -> ModelShapes:
    """The same model, of which blocks exchange nothing."""
    blocks = tuple(f"{block}." for block in shapes.description.blocks)
    boundaries = tuple(boundary for boundary in shapes.tp_boundaries if not boundary.module.startswith(blocks))
    return replace(shapes, tp_boundaries=boundaries, attentions=(), dispatches=())


@pytest.mark.parametrize("words", ["interleaved v=4", "looped v=4", "zb v=5"])
def test_stages_that_torch_lets_go_are_gathered_again(words: str) -> None:
    """More than three stages on a rank: gathered several times in a step, most of it behind computing."""
    workload = MODELS["llama3-8b"].resized(layers=20)
    plan = Plan.parse(f"pp=2 {words} dp_shard=2 zero=1 mb=1 bf16").resolve(4)
    for place in range(2):
        numel = exact_exchange(workload, plan, num_microbatches=8, place=place)
        rank = plan.layout.rank(pp=place)
        counted = messages(plan, workload, rank=rank, seq_len=256, global_batch=16)["dp_shard"]["all_gather"].bytes
        assert numel.regathered > 0
        assert 2 * (numel.dense + numel.regathered) == counted


def test_a_latent_attention_sends_keys_and_values_too() -> None:
    work = Work(1, 2, 1, False, 1, 4096, "bf16", "none", "ring")
    assert MODELS["deepseek-v3"].latent is not None
    assert [each.axis for each in exact_messages(MODELS["deepseek-v3"], work)] == ["cp"]
