"""A plan that cannot run a model is rejected on paper, with the legal values; every plan that is offered can run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch

from shoal.blueprint import Description, Plan, Split
from shoal.blueprint.validation.check import check_plan
from shoal.blueprint.validation.context import POSITIONS_ESSAY
from shoal.blueprint.validation.description import BLOCKS_ESSAY
from shoal.blueprint.validation.enumerate import legal_plans
from shoal.blueprint.validation.expert import EXPERTS_ESSAY
from shoal.blueprint.validation.tensor import SPLITS_ESSAY
from shoal.errors import Problem
from shoal.models import moe
from shoal.models.llama import build

# Two blocks of norm, up (8 → 12), down (12 → 8); four heads, two of them for keys; 10 tokens.
DESCRIPTION = Description(
    before_blocks=("embedding",),
    blocks=("blocks.0", "blocks.1"),
    after_blocks=("head",),
    splits={
        "embedding": Split.VOCABULARY,
        "blocks.*.norm": Split.SEQUENCE,
        "blocks.*.up": Split.COLUMN,
        "blocks.*.down": Split.ROW,
        "head": Split.VOCABULARY,
    },
    num_heads=4,
    num_kv_heads=2,
)
BLOCK = {"norm.weight": (8,), "up.weight": (12, 8), "up.bias": (12,), "down.weight": (8, 12), "down.bias": (8,)}
FEATURES = {
    "embedding.weight": (10, 8),
    **{f"blocks.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()},
    "head.weight": (10, 8),
}
NO_HEADS = replace(DESCRIPTION, num_heads=None, num_kv_heads=None)


def found(
    words: str,
    world_size: int,
    description: Description = DESCRIPTION,
    batch: int = 8,
    sequence: int | None = 24,
    features: dict[str, tuple[int, ...]] | None = FEATURES,
) -> list[Problem]:
    plan = Plan.parse(words).resolve(world_size)
    return check_plan(plan, description=description, batch=batch, sequence=sequence, features=features)


def only(code: str, problems: list[Problem]) -> Problem:
    assert [problem.code for problem in problems] == [code], problems
    return problems[0]


@pytest.mark.parametrize(
    ("words", "world_size"),
    [("tp=2", 2), ("tp=2 pp=2 1f1b mb=1", 4), ("zero=3", 8), ("pp=2", 2), ("dp_replicate=2 dp_shard=2 tp=2", 8)],
)
def test_what_fits_is_not_complained_about(words: str, world_size: int) -> None:
    assert found(words, world_size) == []


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


def test_tp_divides_the_kv_heads_and_the_legal_degrees_are_listed() -> None:
    problem = only("P029", found("tp=4", 4))
    assert "tp=4 does not divide num_kv_heads=2" in problem.what
    assert problem.fix == "tp=1 or 2"


def test_tp_divides_what_columns_and_rows_split() -> None:
    problem = only("P029", found("tp=8", 8, NO_HEADS, features={k: v for k, v in FEATURES.items() if v[0] != 10}))
    assert "the 12 output features of blocks.*.up, the 12 input features of blocks.*.down" in problem.what
    assert problem.fix == "tp=1, 2, 3, 4 or 6"


def test_shapes_that_are_not_known_are_not_checked() -> None:
    assert found("tp=8", 8, NO_HEADS, features=None) == []


@pytest.mark.parametrize(("tp", "fits"), [(3, True), (4, True), (6, False), (12, False)])
def test_a_vocabulary_may_be_uneven_as_long_as_every_rank_has_a_token(tp: int, fits: bool) -> None:
    parts = [len(part) for part in torch.arange(10).chunk(tp)]
    assert (len(parts) == tp) is fits
    problems = found(f"tp={tp}", tp, NO_HEADS)
    assert problems == [] if fits else "no token of the 10 of embedding to the last rank" in problems[0].what


def test_every_parameter_needs_a_split_under_tp_alone() -> None:
    features = {**FEATURES, "blocks.0.gate.weight": (8, 8), "blocks.1.gate.weight": (8, 8)}
    problem = only("P033", found("tp=2", 2, features=features))
    assert "describes no split of blocks.*.gate" in problem.what
    assert 'splits={"blocks.*.gate": Split.SEQUENCE}' in problem.fix
    assert found("zero=3", 2, features=features) == []


def test_a_split_by_sequence_covers_all_inside() -> None:
    features = {**FEATURES, "blocks.0.norm.inner.weight": (8,)}
    assert found("tp=2", 2, features=features) == []
    assert found("tp=2", 2, features={**FEATURES, "blocks.0.up.inner.weight": (8,)}) != []


def test_a_parameter_of_the_model_itself_has_to_move() -> None:
    assert "move scale into a submodule" in only("P034", found("tp=2", 2, features={**FEATURES, "scale": (8,)})).fix


def test_sequence_parallelism_divides_the_tokens() -> None:
    problem = only("P032", found("tp=2 sp=on", 2, sequence=15))
    assert "tp=2 does not divide the 15 tokens of a sequence" in problem.what
    assert problem.fix == "sp=off, or --data.seq_len 14 or 16, or tp=1"
    assert found("tp=2 sp=off", 2, sequence=15) == []
    assert found("tp=2 sp=on", 2, sequence=None) == []


def test_open_sequence_parallelism_is_on_where_the_model_allows_it() -> None:
    without = {name: split for name, split in DESCRIPTION.splits.items() if split is not Split.SEQUENCE}
    shapes = {name: shape for name, shape in FEATURES.items() if "norm" not in name}
    assert len(found("tp=2", 2, sequence=15)) == 1
    assert found("tp=2", 2, replace(DESCRIPTION, splits=without), sequence=15, features=shapes) == []


# ---- context and expert parallelism ---------------------------------------------------------------------------------

PLACED = replace(DESCRIPTION, positions="positions")
MIXTURE = replace(PLACED, num_experts=6, splits={**DESCRIPTION.splits, "blocks.*.experts": Split.EXPERTS})


def test_a_ring_cuts_a_sequence_into_twice_as_many_chunks_as_ranks() -> None:
    problem = only("P036", found("cp=4", 4, PLACED, sequence=12))
    assert all(value in problem.what for value in ("cp=4", "8 chunks", "12 tokens"))
    assert problem.fix == "--data.seq_len 8 or 16, or cp=1 or 2"
    assert found("cp=4 ulysses", 4, PLACED, sequence=12) == []
    assert "into 4 chunks" in only("P036", found("cp=4 ulysses", 4, PLACED, sequence=10)).what
    assert found("cp=4", 4, PLACED, sequence=None) == []
    assert found("cp=4", 4, PLACED, sequence=24) == []


def test_both_divide_tokens() -> None:
    assert found("cp=2 tp=2 sp=on", 4, PLACED, sequence=8) == []
    assert (
        "tp=2 x cp=3"
        in only("P032", found("cp=3 tp=2 sp=on ulysses", 6, replace(PLACED, num_heads=6), sequence=9)).what
    )


def test_ulysses_divides_heads() -> None:
    problem = only("P037", found("cp=8 ulysses", 8, PLACED))
    assert all(value in problem.what for value in ("cp=8", "num_heads=4"))
    assert problem.fix == "ring instead of ulysses, or cp=1, 2 or 4"
    assert found("cp=4 ulysses", 4, PLACED) == []
    assert "num_heads=4 / tp=2 = 2" in only("P037", found("cp=4 tp=2 ulysses", 8, PLACED)).what
    assert found("cp=8", 8, PLACED, sequence=32) == []


def test_cp_needs_a_model_that_takes_positions() -> None:
    problem = only("P035", found("cp=2", 2))
    assert "cp=2" in problem.what
    assert problem.fix == POSITIONS_ESSAY


def test_ep_divides_the_experts() -> None:
    assert found("ep=2 zero=3", 4, MIXTURE) == []
    problem = only("P039", found("ep=4 zero=3", 4, MIXTURE))
    assert all(value in problem.what for value in ("ep=4", "num_experts=6"))
    assert problem.fix == "ep=1 or 2"


@pytest.mark.parametrize(
    ("silent", "why"),
    [
        (PLACED, "the model describes none"),
        (replace(PLACED, num_experts=8), "the model's describe() has no Split.EXPERTS in its splits"),
        (replace(PLACED, splits={"experts": Split.EXPERTS}), "the model's describe() has no num_experts"),
    ],
)
def test_a_model_without_experts_gets_the_code_to_declare_them(silent: Description, why: str) -> None:
    problem = only("P038", found("ep=2 zero=3", 4, silent))
    assert problem.what == f"ep=2 divides experts, but {why}"
    assert problem.fix == EXPERTS_ESSAY


def test_experts_that_are_gathered_inside_of_a_block_cannot_be_recomputed_in_part() -> None:
    assert "selective" in only("P040", found("ep=2 zero=3 recompute=selective", 4, MIXTURE)).what
    assert found("ep=2 zero=3 recompute=full", 4, MIXTURE) == []


def test_compiled_blocks_have_one_backward() -> None:
    zbv, mixed = (Plan.parse(f"pp=2 {words} mb=1").resolve(2) for words in ("zbv", "1f1b recompute=full"))
    large = replace(MIXTURE, blocks=tuple(f"blocks.{i}" for i in range(4)))
    assert check_plan(zbv, description=large, batch=8) == []
    assert "zbv splits each backward" in only("P045", check_plan(zbv, description=large, batch=8, compiles=True)).what
    assert "router" in only("P046", check_plan(mixed, description=large, batch=8, compiles=True)).what
    assert check_plan(mixed, description=large, batch=8) == []


def test_tp_leaves_experts_whole() -> None:
    features = {**FEATURES, "blocks.0.experts.up": (21, 5), "blocks.1.experts.deeper.up": (21, 5)}
    assert found("tp=2", 2, MIXTURE, features=features) == []
    assert found("tp=2", 2, PLACED, features=features) != []


# ---- descriptions that know why not ---------------------------------------------------------------------------------


def test_a_derived_description_says_why_an_axis_is_impossible() -> None:
    derived = replace(PLACED, why_not={"cp": "Net mixes tokens in conv", "sp": "Net mixes tokens in conv"})
    problem = only("P065", found("cp=2", 2, derived))
    assert problem.what == "cp=2 cannot divide this model: Net mixes tokens in conv"
    assert problem.fix.startswith("cp=1, or ")
    model = SimpleNamespace()
    exec(dedent(problem.fix.partition("\n")[2]), {"model": model})
    assert model.describe() == replace(derived, why_not={})  # it can be pasted
    assert only("P065", found("tp=2 sp=on", 2, derived)).fix == "sp=off"
    assert found("tp=2 sp=off", 2, derived) == found("tp=2", 2, derived) == []
    assert found("zero=3", 2, derived) == []


def test_layers_of_unknown_split_are_whole_in_the_description_to_paste() -> None:
    derived = replace(PLACED, splits={}, why_not={"tp": "Net mixes features", "cp": "Net mixes tokens"})
    first, second = sorted(found("tp=2 cp=2", 4, derived, features=FEATURES), key=lambda problem: -len(problem.fix))
    patterns = {re.sub(r"\d+", "*", name.rpartition(".")[0]) for name in FEATURES}
    assert all(f'"{pattern}": Split.SEQUENCE,' in first.fix for pattern in patterns)
    assert first.fix.count("Description(") == 1
    assert "Description(" not in second.fix


def test_other_problems_stand_beside_an_impossible_axis() -> None:
    derived = replace(MIXTURE, why_not={"cp": "it mixes tokens", "ep": "6 and 8 experts"})
    problems = found("cp=2 pp=3 1f1b zero=3 ep=4 dp_shard=4", 24, derived, batch=7, sequence=23)
    assert [problem.code for problem in problems] == ["P065", "P065", "P042", "P011"]


def test_tp_by_hand_needs_no_declaration_but_cp_does() -> None:
    derived = replace(PLACED, why_not=dict.fromkeys(("tp", "sp", "cp"), "it declares no plan"))
    plan = Plan.parse("tp=2 sp=on cp=2").resolve(4)
    problems = check_plan(plan, description=derived, is_split_by_hand=True)
    assert "cp=2" in only("P065", problems).what


# ---- pipelines and batches ------------------------------------------------------------------------------------------


def test_there_is_a_block_for_every_stage() -> None:
    problem = only("P042", found("pp=4 mb=1", 4))
    assert all(value in problem.what for value in ("pp=4 stages", "2 blocks"))
    assert problem.fix == "pp=1 or 2, or --model.num_layers 4"
    problem = only("P042", found("pp=2 interleaved mb=1", 2))
    assert all(value in problem.what for value in ("pp=2 x v=2 = 4 stages", "2 blocks"))
    assert problem.fix == "pp=1, or v=1 with 1f1b or gpipe, or --model.num_layers 4"


def test_every_parameter_is_on_a_stage() -> None:
    problem = only("M016", found("pp=2", 2, features={**FEATURES, "norm.weight": (8,)}))
    assert "norm.weight is in no part of the description" in problem.what
    assert '"norm"' in problem.fix


def test_too_few_microbatches_for_a_schedule() -> None:
    blocks = replace(DESCRIPTION, blocks=tuple(f"blocks.{i}" for i in range(4)))
    assert "2 microbatches" in only("P020", found("pp=4 1f1b mb=4", 4, blocks)).what
    assert found("pp=4 1f1b", 4, blocks) == []  # one microbatch: plain model parallelism


def test_a_batch_that_does_not_divide_is_reported_once() -> None:
    assert "batch 9 is not divisible by" in only("P011", found("pp=2 dp_replicate=2 zero=0 mb=1", 4, batch=9)).what


def test_all_problems_are_reported_at_once() -> None:
    problems = found("tp=4 pp=4 1f1b mb=3", 16, sequence=15)
    assert len(problems) == 4  # kv heads, tokens, blocks, batch


# ---- models without a description -----------------------------------------------------------------------------------


def test_a_model_without_a_description_can_be_replicated_and_sharded() -> None:
    assert found("zero=3", 4, Description()) == []
    assert found("zero=0", 4, Description()) == []


def test_a_model_without_a_description_gets_the_code_to_declare_one() -> None:
    tensor, pipeline = found("tp=2 pp=2 1f1b mb=1", 4, Description())
    assert "tp=2" in tensor.what
    assert "pp=2" in pipeline.what
    assert "Split.COLUMN" in tensor.fix
    assert "before_blocks" in pipeline.fix


@pytest.mark.parametrize("essay", [SPLITS_ESSAY, BLOCKS_ESSAY, POSITIONS_ESSAY, EXPERTS_ESSAY])
def test_the_code_to_declare_runs_as_it_is_printed(essay: str) -> None:
    code = dedent("\n".join(essay.splitlines()[1:-1]))
    ast.parse(code)
    scope: dict[str, object] = {}
    exec(code, scope)

    class Model:
        blocks = ("first", "second")

    description = scope["describe"](Model())  # type: ignore[operator]
    assert isinstance(description, Description)
    assert description != Description()
    assert description.blocks in ((), ("blocks.0", "blocks.1"))


# ---- every legal plan -----------------------------------------------------------------------------------------------


def llama_plans(world_size: int, num_layers: int = 4) -> list[Plan]:
    with torch.device("meta"):
        model = build(num_layers=num_layers)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return list(legal_plans(world_size, description=model.describe(), batch=8, sequence=16, features=shapes))


def moe_plans(world_size: int) -> list[Plan]:
    with torch.device("meta"):
        model = moe.build(num_experts=4, num_layers=2)
    return list(legal_plans(world_size, description=model.describe(), batch=8, sequence=16))


def test_two_ranks() -> None:
    assert [plan.brief() for plan in llama_plans(2)] == [
        "dp_replicate=2 zero=0 mb=1",
        "dp_shard=2 zero=1 mb=1",
        "dp_shard=2 zero=2 mb=1",
        "dp_shard=2 zero=3 mb=1",
        *(f"cp=2 {context} zero={zero} mb=1" for zero in range(4) for context in ("ring", "ulysses")),
        "tp=2 zero=0 sp=off mb=1",
        "tp=2 zero=0 sp=on mb=1",
        "pp=2 zero=0 gpipe mb=1",
        "pp=2 zero=0 1f1b mb=1",
        "pp=2 zero=0 interleaved v=2 mb=1",
        "pp=2 zero=0 looped v=2 mb=1",
        "pp=2 zero=0 zb mb=1",
        "pp=2 zero=0 zb v=2 mb=1",
        "pp=2 zero=0 zbv v=2 mb=1",
        "pp=2 zero=0 dualpipev v=2 mb=1",
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_legal_plans_are_resolved_different_and_fill_the_world(world_size: int) -> None:
    plans = llama_plans(world_size)
    assert plans
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert plan.is_resolved
        assert plan.layout.world_size == world_size
        assert bool(plan.zero) == plan.is_sharded
        assert plan.zero or plan.dp_shard == 1
        assert plan.layout.ep == 1  # there are no experts
        assert plan.layout.tp in (1, 2)  # there are two kv heads
        assert (plan.context is None) == (plan.layout.cp == 1)


def test_legal_plans_go_from_simple_to_composed_and_reach_every_combination() -> None:
    plans = llama_plans(8)
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    used = [[axis for axis in axes if plan.layout.degree(axis) > 1] for plan in plans]
    assert all(len(a) <= len(b) for a, b in pairwise(used))
    assert ["dp_shard", "tp", "pp"] in used
    assert ["dp_shard", "cp", "tp"] in used
    assert {plan.schedule for plan in plans} >= {"gpipe", "1f1b", "interleaved", "looped", "zb", "zbv", "dualpipev"}
    assert {plan.zero for plan in plans if plan.layout.dp_replicate == 2 == plan.layout.dp_shard} == {1, 2, 3}
    assert {plan.zero for plan in plans if plan.layout.cp == 8} == {0, 1, 2, 3}


def test_legal_plans_of_a_mixture_divide_its_experts() -> None:
    plans = [plan for plan in moe_plans(8) if plan.layout.ep > 1]
    assert {plan.layout.ep for plan in plans} == {2, 4}  # of four experts
    assert all(plan.zero for plan in plans)
    assert any(plan.layout.cp == plan.layout.ep == plan.layout.pp == 2 for plan in plans)
    assert {plan.layout.degree("edp") for plan in plans} == {1, 2, 4}


def test_without_a_description_only_data_parallel_plans_are_legal() -> None:
    plans = list(legal_plans(4, description=Description(), batch=8))
    assert all(plan.layout.data_degree == 4 for plan in plans)
    assert len(plans) == 7


def test_paper_needs_no_torch() -> None:
    code = "import sys, shoal.blueprint.validation.enumerate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_head_that_the_model_does_not_have_is_named() -> None:
    """It was ignored: all logits were held, without a message."""
    plan, modules = Plan().resolve(1), ["", "table", "lm_head"]
    problem = only("M013", check_plan(plan, description=Description(head="lm_haed"), modules=modules))
    assert all(value in problem.what for value in ("'lm_haed'", "in head"))
    assert problem.fix == "'lm_head' in its place"
    assert check_plan(plan, description=Description(head="lm_head"), modules=modules) == []
