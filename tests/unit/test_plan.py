"""A plan survives printing and parsing, resolves for any number of ranks by one rule, and reports all problems."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.blueprint import Layout, Plan
from shoal.errors import ShoalError
from tests.rejects import rejects

few = settings(max_examples=60, deadline=None)
degree = st.none() | st.integers(1, 64)
plans = st.builds(
    Plan,
    dp_replicate=degree,
    dp_shard=degree,
    cp=degree,
    tp=degree,
    pp=degree,
    ep=degree,
    zero=st.none() | st.integers(0, 3),
    schedule=st.sampled_from([None, "gpipe", "1f1b", "interleaved", "looped", "zb", "zbv", "dualpipev"]),
    v=degree,
    mb=degree,
    recompute=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["fp64", "fp32", "bf16", "fp16", "fp8"]),
    offload=st.sampled_from(["none", "optimizer", "parameters"]),
    compress=st.sampled_from([None, "bf16", "int8", "1bit", "topk:0.01", "randomk:0.5", "powersgd:4"]),
    sync=st.sampled_from([None, "local:8", "diloco:50"]),
)


# ── words ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@few
@given(plans)
def test_printed_and_parsed_is_the_same_plan(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.of(plan.to_mapping()) == plan


@few
@given(plans, st.randoms(use_true_random=False))
def test_words_stand_in_any_order(plan: Plan, dice: random.Random) -> None:
    words = str(plan).split()
    dice.shuffle(words)
    assert Plan.parse("  ".join(words)) == plan


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", Plan()),
        (" auto ", Plan()),
        ("auto bf16", Plan(precision="bf16")),
        ("dp_replicate=2 dp_shard=4 cp=1 tp=8 pp=3 ep=2", Plan(dp_replicate=2, dp_shard=4, cp=1, tp=8, pp=3, ep=2)),
        ("zero=0 pp=2 1f1b v=1 mb=4", Plan(zero=0, pp=2, schedule="1f1b", v=1, mb=4)),
        (
            "recompute=selective fp8 offload=optimizer",
            Plan(recompute="selective", precision="fp8", offload="optimizer"),
        ),
        ("compress=powersgd:4", Plan(compress="powersgd:4")),
        ("schedule=zbv precision=fp64", Plan(schedule="zbv", precision="fp64")),
        ("BF16 TP=2", Plan(precision="bf16", tp=2)),
        ("NO_SHARD", Plan(zero=0)),
        ("ddp", Plan(zero=0)),
        ("shard_grad_op", Plan(zero=2)),
        ("FULL_SHARD", Plan(zero=3)),
        ("FSDP tp=2", Plan(zero=3, tp=2)),
    ],
)
def test_parse(text: str, plan: Plan) -> None:
    assert Plan.parse(text) == plan


def test_canonical_words() -> None:
    assert str(Plan()) == "auto"
    assert str(Plan.parse("bf16 mb=4 zb recompute=full pp=2 tp=1")) == "tp=1 pp=2 zb mb=4 recompute=full bf16"


def test_of_takes_plans_words_mappings_and_none() -> None:
    plan = Plan(tp=2, precision="bf16")
    assert Plan.of(plan) is plan
    assert Plan.of("tp=2 bf16") == plan
    assert Plan.of({"tp": 2, "precision": "bf16", "mb": None}) == plan
    assert Plan.of(None) == Plan.of({}) == Plan.of("auto") == Plan()


def test_mapping_holds_the_given_values() -> None:
    assert Plan().to_mapping() == {}
    assert Plan.parse("tp=1 bf16 zero=0").to_mapping() == {"tp": 1, "zero": 0, "precision": "bf16"}


def test_a_plan_is_a_value() -> None:
    plan = Plan(tp=2)
    assert {plan, Plan(tp=2), replace(plan, tp=4)} == {plan, Plan(tp=4)}
    with pytest.raises(FrozenInstanceError):
        plan.tp = 4  # type: ignore[misc]


# ── resolving ──────────────────────────────────────────────────────────────────────────────────────────────────────


@few
@given(plans, st.integers(1, 256))
def test_a_resolved_plan_fills_the_world_and_preserves_given_values(plan: Plan, world_size: int) -> None:
    try:
        resolved = plan.resolve(world_size)
    except ShoalError:
        return
    assert resolved.is_resolved
    assert resolved.layout.world_size == world_size
    assert resolved.resolve(world_size) == resolved
    assert Plan.parse(str(resolved)) == resolved
    given = plan.to_mapping()
    assert given == {key: value for key, value in resolved.to_mapping().items() if key in given}


@few
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.sampled_from([None, 0, 1, 2, 3]))
def test_ranks_that_no_axis_claims_are_data_ranks(tp: int, cp: int, pp: int, rest: int, zero: int | None) -> None:
    plan = Plan(tp=tp, cp=cp, pp=pp, zero=zero).resolve(tp * cp * pp * rest)
    sharded = zero in (1, 2, 3)
    assert plan.layout == Layout(
        tp=tp, cp=cp, pp=pp, dp_shard=rest if sharded else 1, dp_replicate=1 if sharded else rest
    )
    assert plan.zero == (zero or 0)


@pytest.mark.parametrize(
    ("text", "world_size", "resolved"),
    [
        ("auto", 1, "dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=1 ep=1 zero=0 v=1"),
        ("auto", 8, "dp_replicate=8 dp_shard=1 cp=1 tp=1 pp=1 ep=1 zero=0 v=1"),
        ("tp=2 zero=3", 8, "dp_replicate=1 dp_shard=4 cp=1 tp=2 pp=1 ep=1 zero=3 v=1"),
        ("dp_replicate=2 zero=2", 8, "dp_replicate=2 dp_shard=4 cp=1 tp=1 pp=1 ep=1 zero=2 v=1"),
        ("dp_shard=2 tp=2", 4, "dp_replicate=1 dp_shard=2 cp=1 tp=2 pp=1 ep=1 zero=3 v=1"),
        ("dp_shard=1 dp_replicate=2 zero=3", 2, "dp_replicate=2 dp_shard=1 cp=1 tp=1 pp=1 ep=1 zero=3 v=1"),
        ("dp_shard=1", 4, "dp_replicate=4 dp_shard=1 cp=1 tp=1 pp=1 ep=1 zero=0 v=1"),
        ("fsdp cp=2 ep=4", 8, "dp_replicate=1 dp_shard=4 cp=2 ring tp=1 pp=1 ep=4 zero=3 v=1"),
        ("cp=2 ulysses", 4, "dp_replicate=2 dp_shard=1 cp=2 ulysses tp=1 pp=1 ep=1 zero=0 v=1"),
        ("context=ring cp=4", 4, "dp_replicate=1 dp_shard=1 cp=4 ring tp=1 pp=1 ep=1 zero=0 v=1"),
        ("ep=2", 4, "dp_replicate=1 dp_shard=4 cp=1 tp=1 pp=1 ep=2 zero=3 v=1"),
        ("pp=2", 4, "dp_replicate=2 dp_shard=1 cp=1 tp=1 pp=2 ep=1 zero=0 1f1b v=1"),
        ("pp=2 gpipe mb=1", 2, "dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=2 ep=1 zero=0 gpipe v=1 mb=1"),
        ("pp=2 v=3", 2, "dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=2 ep=1 zero=0 interleaved v=3"),
        ("pp=2 interleaved", 2, "dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=2 ep=1 zero=0 interleaved v=2"),
        ("pp=2 zbv", 2, "dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=2 ep=1 zero=0 zbv v=2"),
        ("pp=2 zb", 2, "dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=2 ep=1 zero=0 zb v=1"),
    ],
)
def test_resolve(text: str, world_size: int, resolved: str) -> None:
    assert str(Plan.parse(text).resolve(world_size)) == resolved


@pytest.mark.parametrize(
    ("text", "world_size", "gradients", "shards", "is_sharded"),
    [
        ("zero=0", 4, "dp_replicate", "dp_shard", False),
        ("zero=3", 4, "dp_replicate", "dp_shard", True),
        ("zero=3", 1, "dp_replicate", "dp_shard", False),  # no rank to share with
        ("zero=0 cp=2", 4, "dp_cp", "dp_shard_cp", False),
        ("zero=1 cp=2", 2, "dp_cp", "dp_shard_cp", True),  # ranks of one sample share parameters, too
        ("zero=3 dp_replicate=2 dp_shard=1", 2, "dp_replicate", "dp_shard", False),
    ],
)
def test_who_shares_gradients_and_parameters(
    text: str, world_size: int, gradients: str, shards: str, is_sharded: bool
) -> None:
    plan = Plan.parse(text).resolve(world_size)
    assert (plan.gradient_axis, plan.shard_axis, plan.is_sharded) == (gradients, shards, is_sharded)


def test_a_plan_that_leaves_things_open_is_not_resolved() -> None:
    resolved = Plan(pp=2).resolve(4)
    assert resolved.is_resolved
    assert not Plan(pp=2).is_resolved
    assert not replace(resolved, schedule=None).is_resolved
    assert not replace(resolved, zero=None).is_resolved


# ── microbatches ───────────────────────────────────────────────────────────────────────────────────────────────────


@few
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_microbatches_make_up_the_batch(replicas: int, shards: int, mb: int, num_microbatches: int) -> None:
    plan = Plan(dp_replicate=replicas, dp_shard=shards, tp=2, mb=mb, zero=3).resolve(replicas * shards * 2)
    batch = replicas * shards * mb * num_microbatches
    assert (plan.microbatch_size(batch), plan.num_microbatches(batch)) == (mb, num_microbatches)
    whole = replace(plan, mb=None)
    assert (whole.microbatch_size(batch), whole.num_microbatches(batch)) == (mb * num_microbatches, 1)


# ── mistakes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def message_of(call: Any) -> list[str]:
    with pytest.raises(ShoalError) as error:
        call()
    return error.value.on_command_line().splitlines()


def test_all_problems_of_a_text_at_once() -> None:
    text = "tp=x tp=2 zero=5 bf61 fp16 bf16 mbb=3 recompute=some pp mb=-3 offload"
    assert message_of(lambda: Plan.parse(text)) == [
        f"10 problems in plan '{text}'",
        "  tp must be a whole number of at least 1, got 'x' [P005]",
        "      fix: tp=1, tp=2, ...",
        "  tp is set twice: tp=x and tp=2 [P004]",
        "      fix: tp=x or tp=2, not both",
        "  zero must be 0, 1, 2 or 3, got 5 [P006]",
        "      fix: zero=0, 1, 2 or 3",
        "  'bf61' is not a word of a plan [P001]",
        "      fix: bf16",
        "  precision is set twice: fp16 and bf16 [P004]",
        "      fix: fp16 or bf16, not both",
        "  a plan has no key 'mbb' [P002]",
        "      fix: mb=3",
        "  recompute must be none, selective or full, got 'some' [P006]",
        "      fix: recompute=none, selective or full",
        "  'pp' needs a value [P003]",
        "      fix: pp=2",
        "  mb must be a whole number of at least 1, got -3 [P005]",
        "      fix: mb=1, mb=2, ...",
        "  'offload' needs a value [P003]",
        "      fix: offload=none, optimizer or parameters",
    ]


def test_a_word_that_is_like_no_other_gets_all_words() -> None:
    what, fix = message_of(lambda: Plan.parse("hello"))[1:]
    assert what == "  'hello' is not a word of a plan [P001]"
    assert fix.startswith("      fix: one of gpipe, 1f1b, interleaved, looped, zb, zbv, dualpipev, fp64, fp32,")
    assert fix.endswith("mb, recompute, precision, offload, compress, sync")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("float8", "fp8"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("float64", "fp64"),
        ("double", "fp64"),
        ("selective", "recompute=selective"),
        ("full", "recompute=full"),
        ("rowwise", "--run.fp8 rowwise"),
        ("flash", "--run.attention flash"),
        ("fused", "--run.loss fused"),
        ("recompute_swiglu=false", "--run.recompute_swiglu false"),
    ],
)
def test_names_of_other_systems_and_of_other_sections(word: str, fix: str) -> None:
    assert message_of(lambda: Plan.parse(word))[-1] == f"      fix: {fix}"


def test_an_alias_sets_a_key_as_well() -> None:
    assert "  zero is set twice: FSDP and zero=2 [P004]" in message_of(lambda: Plan.parse("FSDP zero=2"))


def test_all_problems_of_a_mapping_at_once() -> None:
    wrong = {"dp_shrad": 2, "zero": True, "tp": "2", "mb": 1.0, "compress": " a", "precision": None, "schedule": "2f2b"}
    assert message_of(lambda: Plan.of(wrong)) == [
        "7 problems in the plan",
        "  a plan has no key 'dp_shrad' [P002]",
        "      fix: dp_shard=2",
        "  zero must be 0, 1, 2 or 3, got True [P006]",
        "      fix: zero=0, 1, 2 or 3",
        "  tp must be a whole number of at least 1, got '2' [P005]",
        "      fix: tp=1, tp=2, ...",
        "  mb must be a whole number of at least 1, got 1.0 [P005]",
        "      fix: mb=1, mb=2, ...",
        "  compress must be fp16, bf16, int8, 1bit, topk, randomk or powersgd, got ' a' [P023]",
        "      fix: compress=fp16, bf16, int8, 1bit, topk:0.01, randomk:0.1 or powersgd:4",
        "  precision must be fp64, fp32, bf16, fp16 or fp8, got None [P006]",
        "      fix: precision=fp64, fp32, bf16, fp16 or fp8",
        "  schedule must be gpipe, 1f1b, interleaved, looped, zb, zbv or dualpipev, got '2f2b' [P006]",
        "      fix: schedule=gpipe, 1f1b, interleaved, looped, zb, zbv or dualpipev",
    ]


def test_values_are_checked_however_a_plan_is_made() -> None:
    assert message_of(lambda: Plan(tp=0)) == [
        "tp must be a whole number of at least 1, got 0 [P005]",
        "    fix: tp=1, tp=2, ...",
    ]
    assert message_of(lambda: Plan(tp=0, zero=1.0))[0] == "2 problems in the plan"  # type: ignore[arg-type]
    assert (
        message_of(lambda: replace(Plan(), compress=""))[0]
        == "compress must be fp16, bf16, int8, 1bit, topk, randomk or powersgd, got '' [P023]"
    )
    assert message_of(lambda: Plan.of(["tp=2"])) == [  # type: ignore[arg-type]
        "a plan must be words or a mapping, got ['tp=2'] [P008]",
        "    fix: 'tp=2 zero=3' or {'tp': 2}",
    ]
    assert message_of(lambda: Plan.of({1: 2}))[0] == "a plan has no key '1' [P002]"  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("text", "world_size", "what", "fix"),
    [
        ("tp=3", 8, "tp=3 does not divide the number of ranks, 8 [P009]", "tp=1, 2, 4 or 8, or --nproc 6 or 9"),
        (
            "tp=4 pp=4 1f1b",
            8,
            "tp=4 x pp=4 = 16 does not divide the number of ranks, 8 [P009]",
            "tp=1 or 2, or pp=1 or 2, or --nproc 16",
        ),
        (
            "dp_replicate=2 tp=2",
            8,
            "dp_replicate=2 x tp=2 = 4 is not the number of ranks, 8 [P009]",
            "dp_replicate=4, or tp=4, or dp_shard=2, or --nproc 4",
        ),
        (
            "dp_replicate=2 zero=0",
            4,
            "dp_replicate=2 is not the number of ranks, 4 [P009]",
            "dp_replicate=4, or --nproc 2",
        ),
        (
            "dp_shard=4",
            8,
            "dp_shard=4 is not the number of ranks, 8 [P009]",
            "dp_shard=8, or dp_replicate=2, or --nproc 4",
        ),
        ("dp_shard=8", 4, "dp_shard=8 is not the number of ranks, 4 [P009]", "dp_shard=4, or --nproc 8"),
        ("auto", 0, "one rank does not divide the number of ranks, 0 [P009]", "--nproc 1"),
        (
            "dp_shard=2 ddp",
            2,
            "dp_shard=2 needs zero=1 or more, got zero=0 [P012]",
            "zero=1, 2 or 3, or dp_replicate=2 instead of dp_shard=2",
        ),
        ("1f1b", 2, "1f1b orders the stages of a pipeline, but pp=1 [P018]", "pp=2 or more, or remove 1f1b"),
        ("v=2 pp=1", 2, "v=2 orders the stages of a pipeline, but pp=1 [P018]", "pp=2 or more, or remove v=2"),
        ("1f1b v=2 pp=2", 2, "1f1b must have v=1 stages per rank, got v=2 [P019]", "v=1, or interleaved"),
        ("dualpipev v=1 pp=2", 2, "dualpipev must have v=2 stages per rank, got v=1 [P019]", "v=2, or interleaved"),
        (
            "fsdp ep=3",
            4,
            "ep=3 does not divide dp_shard=4 x cp=1 = 4 [P015]",
            "ep=1, 2 or 4, or a dp_shard x cp that 3 divides",
        ),
        ("ring tp=2", 2, "ring divides tokens among cp ranks, but cp=1 [P016]", "cp=2, or remove ring"),
        (
            "cp=2 ep=2 zero=0",
            2,
            "ep=2 shards the experts and needs zero=1 or more, got zero=0 [P014]",
            "zero=1, 2 or 3",
        ),
    ],
)
def test_a_plan_that_does_not_fit(text: str, world_size: int, what: str, fix: str) -> None:
    plan = Plan.parse(text)
    head = f"1 problem in plan '{plan}' on {world_size} ranks"
    assert message_of(lambda: plan.resolve(world_size)) == [head, f"  {what}", f"      fix: {fix}"]


def test_all_problems_of_a_plan_at_once() -> None:
    lines = message_of(lambda: Plan.parse("dp_shard=2 zero=0 tp=3 1f1b ep=3").resolve(8))
    assert lines[0] == "5 problems in plan 'dp_shard=2 tp=3 ep=3 zero=0 1f1b' on 8 ranks"


def test_a_plan_that_leaves_things_open_has_no_layout() -> None:
    expected = ["plan 'tp=2' leaves open how many ranks each axis has [P010]", "    fix: plan.resolve(world_size)"]
    assert message_of(lambda: Plan(tp=2).layout) == expected
    assert message_of(lambda: Plan(tp=2).num_microbatches(8)) == expected


@pytest.mark.parametrize(
    ("mb", "batch", "what", "fix"),
    [
        (
            None,
            10,
            "batch 10 is not divisible by dp_replicate=4 x dp_shard=1 = 4 [P011]",
            "--data.global_batch 8 or 12",
        ),
        (None, 3, "batch 3 is not divisible by dp_replicate=4 x dp_shard=1 = 4 [P011]", "--data.global_batch 4"),
        (None, 0, "batch 0 is not divisible by dp_replicate=4 x dp_shard=1 = 4 [P011]", "--data.global_batch 4"),
        (
            4,
            24,
            "batch 24 is not divisible by mb=4 x dp_replicate=4 x dp_shard=1 = 16 [P011]",
            "--data.global_batch 16 or 32, or --plan.mb 1, 2, 3 or 6",
        ),
        (
            4,
            10,
            "batch 10 is not divisible by mb=4 x dp_replicate=4 x dp_shard=1 = 16 [P011]",
            "--data.global_batch 16, or --data.global_batch 8 with --plan.mb 1 or 2",
        ),
    ],
)
def test_a_batch_that_does_not_divide(mb: int | None, batch: int, what: str, fix: str) -> None:
    plan = Plan(dp_replicate=4, mb=mb).resolve(4)
    assert message_of(lambda: plan.num_microbatches(batch)) == [what, f"    fix: {fix}"]
    assert message_of(lambda: plan.microbatch_size(batch)) == [what, f"    fix: {fix}"]


# ── paper ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_door_opens_without_torch_and_without_pydantic() -> None:
    code = (
        "import sys, shoal as door\n"
        "assert {'torch', 'pydantic'}.isdisjoint(sys.modules)\n"
        "assert door.Recipe().plan == door.Plan()\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(door, 'Receipt')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_field_documents_its_values() -> None:
    lines = [line.strip() for line in inspect.getsource(Plan).splitlines()]
    for field in fields(Plan):
        declared = next(number for number, line in enumerate(lines) if line.startswith(f"{field.name}:"))
        assert lines[declared + 1].startswith('"""'), field.name


@pytest.mark.parametrize(("word", "meant"), [("zero3", "zero=3"), ("tp2", "tp=2"), ("dp_shard4", "dp_shard=4")])
def test_a_word_without_its_equals_sign(word: str, meant: str) -> None:
    with rejects("P001", word) as caught:
        Plan.parse(word)
    assert caught.value.problems[0].fix == meant
