"""Lints: each rule speaks where it is broken and not next to it, and what it promises is what the planner predicts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shoal.blueprint.plan import Plan
from shoal.planner.candidates import layouts
from shoal.planner.lint.case import WORTH, Case
from shoal.planner.lint.lint import RULES, Lint, lint
from shoal.planner.search import search
from shoal.planner.task import Task
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.presets.models import MODELS
from shoal.predict.workload import Workload
from tests.cover import wide
from tests.rejects import rejects

LINTS_PAGE = Path(__file__).parents[2] / "docs/concepts/lints.md"
MEMORY_LINTS = ("SH12",)
"""Their neighbours have to be smaller, and may be slower."""

BIGSCIENCE = Workload(
    name="bigscience", hidden=13824, layers=78, heads=96, ffn=4 * 13824, gated=False, vocabulary=51200, tied=True
)
KNOWN = {
    **MODELS,
    "bigscience": BIGSCIENCE,
    "bigscience-108": replace(BIGSCIENCE, heads=128, kv_heads=128, head_dim=108),
}


@dataclass(frozen=True, kw_only=True)
class Try:
    """A plan for a model on machines."""

    model: str
    cluster: str
    sequence: int
    batch: int
    plan: str
    told: dict[str, float] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        return Task(
            workload=KNOWN[self.model],
            cluster=parse_cluster(self.cluster),
            sequence=self.sequence,
            global_batch=self.batch,
        )

    @property
    def resolved(self) -> Plan:
        return Plan.parse(self.plan).resolve(self.task.cluster.num_devices)

    def lints(self) -> dict[str, Lint]:
        return {found.code: found for found in lint(self.task, self.resolved, **self.told)}  # type: ignore[arg-type]

    def but(self, **changes: object) -> Try:
        return replace(self, **changes)  # type: ignore[arg-type]


GPT3 = Try(model="gpt3-175b", cluster="h200:8x16", sequence=2048, batch=1536, plan="tp=8 pp=8 zero=1 mb=1 bf16")
LLAMA = Try(model="llama3-8b", cluster="h100:8x16", sequence=4096, batch=1024, plan="zero=1 mb=1 bf16")
LLAMA_70B = Try(model="llama3-70b", cluster="h200:8x8", sequence=8192, batch=512, plan="tp=4 pp=4 zero=1 mb=1 bf16")
ONE_NODE = Try(model="llama3-8b", cluster="h200:8", sequence=8192, batch=64, plan="zero=3 mb=2 bf16")
MIXTRAL = Try(
    model="mixtral-8x7b", cluster="h100:8x8", sequence=4096, batch=1024, plan="zero=1 ep=8 mb=2 bf16 recompute=full"
)
L40S = Try(model="llama3-8b", cluster="l40s:8", sequence=4096, batch=64, plan="tp=8 mb=1 bf16")
WITH_RATE = ONE_NODE.but(told={"learning_rate": 3e-4, "base_batch": 64})

CASES = [
    ("SH01", GPT3.but(plan="tp=16 pp=8 zero=1 mb=1 bf16"), GPT3),
    (
        "SH02",
        LLAMA.but(cluster="h100:8x128"),
        LLAMA.but(cluster="h100:8x128", plan="zero=1 dp_replicate=32 dp_shard=32 mb=1 bf16"),
    ),
    (
        "SH03",
        LLAMA_70B.but(cluster="h100:8x64", sequence=2048, plan="zero=3 mb=1 bf16 recompute=full"),
        LLAMA_70B.but(cluster="h100:8x64", sequence=2048, batch=4096, plan="zero=3 mb=8 bf16 recompute=full"),
    ),
    (
        "SH04",
        GPT3.but(
            model="bigscience-108", cluster="a100-80:8x48", batch=2048, plan="tp=8 pp=6 zero=1 mb=4 bf16 recompute=full"
        ),
        GPT3.but(
            model="bigscience", cluster="a100-80:8x48", batch=2048, plan="tp=8 pp=6 zero=1 mb=4 bf16 recompute=full"
        ),
    ),
    ("SH05", LLAMA_70B.but(plan="tp=4 pp=16 mb=1 bf16"), LLAMA_70B.but(plan="tp=4 pp=2 zero=1 mb=1 bf16")),
    ("SH06", GPT3.but(batch=8), GPT3.but(batch=16)),
    ("SH06", GPT3.but(batch=20, plan=f"{GPT3.plan} interleaved"), GPT3.but(batch=32, plan=f"{GPT3.plan} interleaved")),
    (
        "SH07",
        LLAMA.but(cluster="h200:8", plan="zero=1 mb=1 bf16 recompute=full"),
        LLAMA.but(cluster="h200:8", plan="zero=1 mb=8 bf16 recompute=full"),
    ),
    ("SH08", LLAMA_70B.but(plan="tp=8 zero=3 mb=1 bf16"), LLAMA_70B.but(plan="tp=8 zero=1 mb=1 bf16")),
    ("SH09", ONE_NODE.but(plan=f"{ONE_NODE.plan} recompute=full"), ONE_NODE),
    ("SH10", LLAMA.but(batch=128), LLAMA),
    ("SH11", MIXTRAL, MIXTRAL.but(plan="zero=3 mb=1 bf16 recompute=full")),
    (
        "SH12",
        ONE_NODE.but(model="llama3-1b", cluster="a100-40:8", plan="tp=2 zero=1 mb=4 bf16"),
        ONE_NODE.but(model="llama3-1b", cluster="a100-40:8", plan="tp=2 zero=1 mb=1 bf16"),
    ),
    ("SH13", L40S, L40S.but(cluster="a100-40:8")),
    ("SH14", LLAMA.but(cluster="h100:8x2", batch=12), LLAMA.but(cluster="h100:8x2", batch=16)),
    ("SH15", MIXTRAL.but(plan=f"tp=2 {MIXTRAL.plan}"), MIXTRAL),
    ("SH16", GPT3.but(batch=32), GPT3.but(batch=192)),
    (
        "SH17",
        Try(model="resnet50", cluster="h100:8", sequence=1, batch=1024, plan="mb=2 bf16"),
        Try(model="resnet50", cluster="h100:8", sequence=1, batch=1024, plan="mb=128 bf16"),
    ),
    ("SH18", GPT3.but(plan="tp=8 pp=8 zero=1 mb=2 bf16"), GPT3.but(plan="tp=4 pp=16 zero=1 mb=2 bf16")),
    ("SH19", ONE_NODE.but(plan=f"{ONE_NODE.plan} offload=optimizer"), ONE_NODE),
    ("SH20", WITH_RATE.but(batch=512), WITH_RATE),
]
"""Code, a plan that breaks the rule, and one next to it that does not."""

SANE = [
    ONE_NODE,
    LLAMA_70B,
    GPT3.but(plan="tp=4 pp=16 zero=1 mb=2 bf16"),
    MIXTRAL.but(plan="zero=1 ep=8 mb=4 bf16 recompute=full"),
    LLAMA.but(plan="zero=3 mb=2 bf16"),
    Try(
        model="llama3-405b",
        cluster="h100:8x256",
        sequence=8192,
        batch=2048,
        plan="tp=8 pp=16 zero=1 mb=1 bf16 recompute=full",
    ),
    Try(model="llama3-1b", cluster="h100:8", sequence=4096, batch=256, plan="mb=8 bf16"),
    Try(model="gpt3-125m", cluster="a100-40:8", sequence=1024, batch=512, plan="mb=16 bf16"),
    Try(model="qwen3-32b", cluster="h200:8x4", sequence=4096, batch=512, plan="zero=3 mb=2 bf16"),
    Try(
        model="deepseek-v3",
        cluster="h200:8x32",
        sequence=4096,
        batch=4096,
        plan="pp=8 ep=32 zero=1 mb=1 bf16 recompute=full",
    ),
    Try(model="resnet50", cluster="a100-80:8", sequence=1, batch=2048, plan="mb=256 bf16"),
]
"""Plans that somebody who knows the rules would write."""


@pytest.mark.parametrize(("code", "broken", "kept"), CASES, ids=[f"{code}-{at}" for at, (code, *_) in enumerate(CASES)])
def test_a_rule_speaks_where_it_is_broken_and_not_next_to_it(code: str, broken: Try, kept: Try) -> None:
    assert code in broken.lints()
    assert code not in kept.lints()


def test_every_rule_is_tried() -> None:
    assert [rule.code for rule in RULES] == [f"SH{number:02}" for number in range(1, 21)]
    assert {code for code, *_ in CASES} == {rule.code for rule in RULES}
    assert {code for rule in RULES for code in rule.unless} < {rule.code for rule in RULES}


def promised(broken: Try, found: Lint) -> Plan:
    """The plan that one gets by typing the fix behind the plan."""
    said = {**broken.resolved.to_mapping(), **Plan.parse(found.fix).to_mapping()}
    words = [word.partition("=") for word in found.fix.split()]
    said |= {
        key: value for key, _, value in words if key in ("recompute", "offload")
    }  # `none` says nothing in a mapping
    said |= {"schedule": None, "v": None} if said["pp"] == 1 else {}
    said |= {"context": None} if said["cp"] == 1 else {}
    return Plan.of(said).resolve(broken.task.cluster.num_devices)


@pytest.mark.parametrize(("code", "broken"), [case[:2] for case in CASES])
def test_what_a_fix_promises_is_what_the_planner_predicts(code: str, broken: Try) -> None:
    check_promises(broken)


def check_promises(broken: Try) -> None:
    task, before = broken.task, broken.task.predict(broken.resolved)
    for found in broken.lints().values():
        if found.saves is None:
            continue
        after = task.predict(promised(broken, found))
        assert after.plan == found.saves.plan
        assert task.fits(after.memory)
        check_that_it_divides(task, after.plan)
        assert found.saves.seconds == pytest.approx(before.time.total - after.time.total)
        assert found.saves.part == pytest.approx(1 - after.time.total / before.time.total)
        assert found.saves.bytes == pytest.approx(before.memory.total - after.memory.total)
        if found.code in MEMORY_LINTS:
            assert found.saves.bytes > 0
            assert found.saves.part > -0.1
        else:
            assert found.saves.part >= WORTH


def check_that_it_divides(task: Task, plan: Plan) -> None:
    """What a run would refuse, by arithmetic of the test's own."""
    model, layout = task.workload, plan.layout
    assert layout.world_size == task.cluster.num_devices
    assert task.global_batch % (layout.data_degree * (plan.mb or 1)) == 0
    assert model.heads % layout.tp == model.kv_heads % layout.tp == model.experts % layout.ep == 0
    assert layout.pp * (plan.v or 1) <= (model.layers or len(model.blocks))
    assert layout.pp == 1 or task.global_batch // layout.data_degree // (plan.mb or 1) >= layout.pp


@pytest.mark.parametrize("broken", [case[1] for case in CASES])
def test_a_lint_is_one_line_for_people_and_a_mapping_for_machines(broken: Try) -> None:
    for found in broken.lints().values():
        line = str(found)
        assert "\n" not in line
        assert all(part in line for part in (found.code, found.title, found.numbers, found.fix, found.evidence))
        assert json.loads(json.dumps(found.to_mapping()))["code"] == found.code


def test_what_a_line_looks_like() -> None:
    found = GPT3.but(plan="tp=16 pp=8 zero=1 mb=1 bf16").lints()["SH01"]
    assert found.numbers.startswith("tp=16 spans 2 nodes of 8, its messages take ")
    assert str(found).startswith("SH01 tp between nodes: tp=16 spans 2 nodes of 8")
    assert "vTrain" in str(found)
    assert found.saves is not None
    assert set(found.to_mapping()["saves"]) == {"plan", "step_s", "part", "memory_gib"}
    assert str(found.saves).startswith("saves ")


@pytest.mark.parametrize("sane", SANE, ids=[sane.model for sane in SANE])
def test_plans_that_people_are_content_with_are_left_alone(sane: Try) -> None:
    assert sane.task.fits(sane.task.memory(sane.resolved))
    assert len(sane.lints()) <= 2 + (sane.model == "deepseek-v3")  # whose experts talk over the network


@pytest.mark.parametrize(
    "sane",
    [sane if sane.model in ("llama3-8b", "mixtral-8x7b") else wide(sane) for sane in SANE[:5]],
    ids=[sane.model for sane in SANE[:5]],
)
def test_the_best_plan_of_a_search_has_no_neighbour_that_is_much_better(sane: Try) -> None:
    best = search(sane.task).best[0]
    found = lint(sane.task, best.plan)
    assert len(found) <= 2
    assert all(one.saves is None or one.saves.part < 0.05 for one in found)


@pytest.mark.parametrize("sane", SANE, ids=[sane.model for sane in SANE])
def test_any_plan_can_be_looked_at(sane: Try) -> None:
    degrees = list(layouts(sane.task, Plan()))
    for number, layout in enumerate(degrees[:: max(1, len(degrees) // 6)]):
        words = "bf16 recompute=full offload=optimizer" if number % 2 else "mb=1 bf16"
        check_promises(sane.but(plan=str(Plan.of({**Plan.parse(words).to_mapping(), **layout}))))


# ---- single rules ---------------------------------------------------------------------------------------------------


def test_the_special_rule_speaks_and_the_general_one_does_not() -> None:
    found = GPT3.but(plan="tp=16 pp=8 zero=1 mb=1 bf16").lints()
    assert "SH01" in found
    assert "SH18" not in found
    few = GPT3.but(batch=8).lints()
    assert "SH06" in few
    assert not {"SH10", "SH16"} & set(few)


def test_the_fastest_of_all_that_fit_is_named() -> None:
    full = ONE_NODE.but(plan=f"{ONE_NODE.plan} recompute=full")
    assert full.lints()["SH09"].fix == "recompute=none"
    none, selective = (full.task.memory(replace(full.resolved, recompute=mode)).total for mode in ("none", "selective"))
    assert none > selective
    tight = replace(full.task, max_memory=(none + selective) / 2)
    assert [found.fix for found in lint(tight, full.resolved) if found.code == "SH09"] == ["recompute=selective"]


def test_recompute_that_is_needed_is_left_alone() -> None:
    full = LLAMA_70B.but(plan="zero=3 mb=1 bf16 recompute=full")
    tight = replace(full.task, max_memory=1.1 * full.task.memory(full.resolved).total)
    assert "SH09" not in {found.code for found in lint(tight, full.resolved)}


def test_recompute_in_a_device_that_is_nearly_full_is_left_alone() -> None:
    full = ONE_NODE.but(plan="zero=1 mb=1 bf16 recompute=full")
    less = full.task.memory(replace(full.resolved, recompute="selective"))
    task = replace(full.task, max_memory=1.01 * less.total)
    assert 0.7 < full.task.memory(full.resolved).total / task.memory_limit < 1
    assert "SH09" not in {found.code for found in lint(task, full.resolved)}


def test_against_large_logits_the_fastest_plan_is_no_help_if_it_is_larger() -> None:
    plan = Plan.parse("tp=4 zero=1 mb=8 bf16").resolve(8)
    task = replace(ONE_NODE.task, workload=MODELS["llama3-1b"])
    task = replace(task, max_memory=1.4 * task.memory(plan).total)
    (found,) = [one for one in lint(task, plan) if one.code == "SH12"]
    assert found.saves is not None
    assert found.saves.bytes > 0.05 * task.memory(plan).total


def test_logits_are_not_made_smaller_at_any_price() -> None:
    """Half the microbatch would halve them, and take more than half as long again."""
    plan = Plan.parse("tp=8 mb=2 bf16").resolve(8)
    task = replace(ONE_NODE.task, workload=MODELS["qwen3-0.6b"])
    task = replace(task, max_memory=1.4 * task.memory(plan).total)
    (found,) = [one for one in lint(task, plan) if one.code == "SH12"]
    assert task.memory(replace(plan, mb=1)).total < 0.95 * task.memory(plan).total
    assert task.time(replace(plan, mb=1)).total > 1.5 * task.time(plan).total
    assert found.fix == "a loss that is fused or computed in chunks"


def test_logits_that_exist_in_chunks_are_left_alone() -> None:
    plan = Plan.parse("zero=3 mb=1 bf16 recompute=full").resolve(8)
    task = replace(ONE_NODE.task, workload=MODELS["qwen3-0.6b"])
    held = task.memory(plan)
    assert held.logits > 0.2 * held.total
    assert "SH12" not in {found.code for found in lint(replace(task, max_memory=1.2 * held.total), plan)}


@pytest.mark.parametrize(
    ("change", "tokens", "ffn", "can_run"),
    [
        ({"dp_shard": 4, "cp": 4}, 4096, 8192, True),
        ({"dp_shard": 4, "cp": 4}, 1024, 8192, False),
        ({"dp_shard": 4, "tp": 4}, 4096, 8192, True),
        ({"dp_shard": 4, "tp": 4}, 4096, 8202, False),
        ({"dp_shard": 4, "tp": 8}, 4096, 8192, False),
    ],
)
def test_changes_that_cannot_run_are_passed_over(change: dict[str, int], tokens: int, ffn: int, can_run: bool) -> None:
    """Sequences are not cut into crumbs, features come out even, and the ranks are those of the cluster."""
    model = replace(MODELS["gpt3-1.3b"], ffn=ffn)
    task = replace(LLAMA.task, workload=model, cluster=parse_cluster("h100:8x2"), sequence=tokens, global_batch=64)
    plan = Plan.parse("zero=1 mb=1 bf16").resolve(16)
    assert (Case(task, task.predict(plan)).changed(change) is not None) == can_run


def test_copies_that_do_not_fit_are_sharded() -> None:
    copies = LLAMA.but(model="gpt3-6.7b", cluster="h100:8x2", sequence=2048, batch=64, plan="tp=16 mb=1 bf16")
    assert copies.lints()["SH01"].fix == "dp_shard=16 tp=1 zero=3"


def test_a_small_batch_is_not_blamed_on_one_device_nor_where_a_larger_one_does_not_help() -> None:
    alone = Try(model="gpt3-125m", cluster="h100:1", sequence=512, batch=1, plan="mb=1 bf16")
    assert alone.task.time(alone.resolved).fixed > 0.1 * alone.task.time(alone.resolved).total
    assert "SH10" not in alone.lints()
    slow = Try(model="llama3-8b", cluster="rtx4090:1x4", sequence=4096, batch=4, plan="zero=3 mb=1 bf16")
    assert slow.task.time(slow.resolved).dp > 0.1 * slow.task.time(slow.resolved).total
    assert "SH10" not in slow.lints()


def test_offload_that_is_needed_is_left_alone() -> None:
    plan = Plan.parse("zero=1 mb=1 bf16 recompute=full offload=optimizer").resolve(8)
    task = replace(ONE_NODE.task, max_memory=1.05 * ONE_NODE.task.memory(plan).total)
    assert "SH19" not in {found.code for found in lint(task, plan)}


def test_a_plan_that_divides_tokens_has_neighbours_too() -> None:
    found = GPT3.but(plan="tp=16 pp=8 zero=1 mb=1 bf16 sp=on")
    saves = found.lints()["SH01"].saves
    assert saves is not None
    assert saves.plan.sp
    check_promises(found)


def test_tp_inside_a_node_with_nvlink_is_left_alone() -> None:
    assert not {"SH01", "SH13"} & set(LLAMA.but(plan="tp=8 zero=1 mb=1 bf16").lints())


def test_heads_are_rounded_to_both_sides_and_features_of_tp_ranks_count() -> None:
    found = CASES[3][1].lints()["SH04"]
    assert found.numbers == "head_dim=108: no multiple of 8"
    assert found.fix == "head_dim=104 or 112"
    odd = replace(MODELS["gpt3-1.3b"], name="odd", ffn=8208)  # 8208 / 4 = 2052
    task = replace(ONE_NODE.task, workload=odd, sequence=2048)
    (found,) = [one for one in lint(task, Plan.parse("tp=4 mb=8 bf16").resolve(8)) if one.code == "SH04"]
    assert found.fix == "tp=1 or 2, or ffn=8192 or 8224"
    assert "SH04" not in {one.code for one in lint(task, Plan.parse("tp=2 mb=8 bf16").resolve(8))}
    host = replace(task, cluster=parse_cluster("cpu:8"))
    assert "SH04" not in {one.code for one in lint(host, Plan.parse("tp=4 mb=8 bf16").resolve(8))}


@pytest.mark.parametrize(
    ("layers", "fix"), [(18, "16 layers instead of 18"), (21, "fewer stages, beside which the head weighs less")]
)
def test_layers_that_come_out_even_are_named_where_no_plan_does(layers: int, fix: str) -> None:
    """BigScience took two layers less. Here all devices are in the pipeline, and nothing next to it fits."""
    model, cluster = BIGSCIENCE.resized(layers=layers), parse_cluster("h100:1x8")
    task = Task(workload=model, cluster=cluster, sequence=2048, global_batch=512)
    found = {one.code: one for one in lint(task, Plan.parse("pp=8 mb=1 bf16").resolve(8))}
    assert found["SH05"].saves is None
    assert found["SH05"].fix == fix


def test_stages_are_not_blamed_for_what_other_plans_gain_elsewhere() -> None:
    faster = GPT3.but(plan="tp=4 pp=16 zero=1 mb=1 bf16")  # with stages that are less equal
    assert faster.task.time(faster.resolved).total < 0.95 * GPT3.task.time(GPT3.resolved).total
    assert "SH05" not in GPT3.lints()


def test_groups_that_leave_a_node_are_brought_back_not_dissolved() -> None:
    long = LLAMA.but(cluster="h100:8x8", sequence=32768, batch=64, plan="zero=3 cp=8 ulysses tp=2 mb=1 bf16")
    saves = long.lints()["SH15"].saves
    assert saves is not None
    assert saves.plan.cp in (2, 4, 8)
    assert 8 % (saves.plan.layout.cp * saves.plan.layout.tp) == 0


def test_a_group_that_straddles_two_nodes_is_told_which_degrees_do_not() -> None:
    found = LLAMA.but(cluster="h100:8x6", batch=384, plan="zero=1 dp_replicate=16 dp_shard=3 mb=1 bf16").lints()["SH15"]
    assert "dp_shard=3 reaches over 3 ranks, and a node has 8" in found.numbers


def test_few_microbatches_are_told_the_batch_that_would_do() -> None:
    assert GPT3.but(batch=8).lints()["SH06"].fix == "8 microbatches: a global batch of 16"
    assert (
        GPT3.but(batch=20, plan=f"{GPT3.plan} interleaved").lints()["SH06"].fix
        == "16 microbatches: a global batch of 32"
    )


def test_a_batch_that_cannot_be_dealt_names_one_that_can() -> None:
    task = replace(LLAMA.task, cluster=parse_cluster("h100:8x2"), global_batch=13)
    (found,) = [one for one in lint(task, Plan.parse("zero=3 mb=1 bf16").resolve(16)) if one.code == "SH14"]
    assert found.saves is not None or found.fix == "a global batch of 16"
    assert "19 % of their places stay empty" in found.numbers


def test_busy_experts_that_would_not_fit_are_told() -> None:
    held = MIXTRAL.task.memory(MIXTRAL.resolved)
    task = replace(MIXTRAL.task, max_memory=held.total + 0.1 * held.activations)
    (found,) = [one for one in lint(task, MIXTRAL.resolved) if one.code == "SH11"]
    assert found.fix == "smaller microbatches, or recompute"


def test_a_learning_rate_is_scaled_by_the_root_for_adam() -> None:
    found = WITH_RATE.but(batch=1024).lints()["SH20"]
    assert found.fix == "0.0012 with Adam, 0.0048 with SGD, after a warm-up"
    assert "SH20" in WITH_RATE.but(batch=16).lints()
    for told in ({}, {"learning_rate": 3e-4}, {"base_batch": 64}):
        assert "SH20" not in WITH_RATE.but(batch=1024, told=told).lints()


@pytest.mark.parametrize("told", [{"learning_rate": 0.0, "base_batch": 64}, {"learning_rate": 3e-4, "base_batch": 0}])
def test_a_learning_rate_or_batch_of_nothing_is_refused(told: dict[str, float]) -> None:
    with rejects("Q001", match="fix: "):
        ONE_NODE.but(told=told).lints()


def test_a_plan_of_other_ranks_than_the_cluster_has_is_refused() -> None:
    with rejects("P009", "8"):
        lint(ONE_NODE.task, Plan.parse("zero=3 bf16").resolve(16))


def test_the_page_has_a_section_for_every_code() -> None:
    page = LINTS_PAGE.read_text()
    for rule in RULES:
        assert f'<a id="{rule.code}"></a>\n\n## {rule.code} {rule.title}\n' in page
    assert page.count("<a id=") == len(RULES)
