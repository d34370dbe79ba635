"""The search: it finds what trying everything would find, and says why nothing else was taken."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.schedule_orders import check_schedule
from shoal.blueprint.validation.pipeline import SPLIT_BACKWARD
from shoal.planner.candidates import check_candidate
from shoal.planner.changes.alternatives import alternatives
from shoal.planner.explain import laws, moves, rules_of_thumb, scaling
from shoal.planner.search import EQUAL, SearchResult, search
from shoal.planner.suggestions import reject_contradictions, smallest_changes
from shoal.planner.task import Task
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.estimate.peak_memory import peak_memory
from shoal.predict.presets.models import find_model
from shoal.predict.workload import Workload
from tests.cover import wide
from tests.rejects import rejects


def task(model: str = "llama3-8b", cluster: str = "h100:8", sequence: int = 8192, batch: int = 64) -> Task:
    return Task(
        workload=find_model(model), cluster=parse_cluster(cluster), sequence=sequence, global_batch=batch
    )  # fmt: skip


@cache
def searched(*said: Any) -> SearchResult:
    """What the search finds of a task that several tests look at."""
    return search(task(*said))


def everything(work: Task) -> list[Plan]:
    """Every plan of 8 devices, by brute force: no thought is given to what could be left out."""
    found = []
    divisors = (1, 2, 4, 8)
    schedules = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zb", 1), ("zbv", 2)]
    for tp, pp, cp, replicate in itertools.product(divisors, repeat=4):
        if 8 % (tp * pp * cp * replicate):
            continue
        shard = 8 // (tp * pp * cp * replicate)
        for zero, recompute, mb in itertools.product((0, 1, 2, 3), ("none", "selective", "full"), (1, 2, 4, 8, 16, 32)):
            share, rest = divmod(work.global_batch, replicate * shard)
            if rest or share % mb or (zero == 0 and shard > 1) or (zero and shard * cp == 1):
                continue
            for schedule, v in schedules if pp > 1 else [(None, 1)]:
                if schedule and check_schedule(schedule, num_ranks=pp, v=v, num_microbatches=share // mb):
                    continue
                plan = Plan(
                    dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=1, zero=zero, v=v, mb=mb,
                    schedule=schedule, context="ring" if cp > 1 else None, recompute=recompute, precision="bf16",
                )  # type: ignore[arg-type] # fmt: skip
                if not check_candidate(work, plan):
                    found.append(plan)
    return found


@pytest.mark.parametrize(
    ("model", "device", "batch", "compiles"),
    [("llama3-8b", "h100:8", 64, True), ("llama3-8b", "a100-40:8", 32, False), ("llama3-70b", "b200:8", 16, True)],
)
def test_nothing_is_left_out_that_would_be_faster(model: str, device: str, batch: int, compiles: bool) -> None:
    work = replace(task(model, device, batch=batch), compiles=compiles)
    fitting = [plan for plan in everything(work) if work.fits(work.memory(plan))]
    assert len(fitting) > 50
    fastest = min(work.time(plan).total for plan in fitting)
    best = search(work).best[0]
    assert best.time.total <= fastest * EQUAL


@pytest.mark.parametrize(
    ("model", "cluster", "sequence", "batch"),
    [
        ("llama3-8b", "h100:8x4", 8192, 256),
        ("llama3-70b", "h100:8x32", 8192, 512),
        wide("llama3-405b", "h100:8x256", 8192, 1024),
        ("mixtral-8x7b", "h100:8x4", 4096, 256),
        ("llama3-8b", "h100:8x8", 131072, 32),
        ("resnet50", "h100:8", 1, 2048),
        wide("gpt3-175b", "a100-80:8x128", 2048, 1536),
    ],
)
def test_plans_are_legal_and_fit_and_no_neighbour_is_faster(
    model: str, cluster: str, sequence: int, batch: int
) -> None:
    work = task(model, cluster, sequence, batch)
    found = searched(model, cluster, sequence, batch)
    assert found.best
    for prediction in [*found.best, *found.frontier]:
        plan = prediction.plan
        assert plan == plan.resolve(work.cluster.num_devices)
        assert check_candidate(work, plan) == []
        assert prediction.memory.total <= work.memory_limit
        assert plan.num_microbatches(batch) >= 1
        assert plan.schedule not in SPLIT_BACKWARD
    rejected = alternatives(work, found.best[0])
    assert len(rejected) > 5
    assert all(one.reason for one in rejected)
    assert not [one for one in rejected if one.reason.startswith("faster")]
    frontier = [(prediction.time.total, prediction.memory.total) for prediction in found.frontier]
    assert frontier == sorted(frontier, key=lambda both: (both[0], -both[1]))
    assert [memory for _, memory in frontier] == sorted((memory for _, memory in frontier), reverse=True)


def test_constraints_are_kept() -> None:
    work = task("llama3-70b", "h100:8x8", batch=128)
    required = Plan.parse("tp=8 zero=1 pp=4 recompute=full mb=2 interleaved v=2 bf16")
    for prediction in search(work, required).best:
        said = required.to_mapping()
        assert {key: getattr(prediction.plan, key) for key in said} == said
    roomy, tight = search(work).best[0], search(replace(work, max_memory=40 * 2**30)).best[0]
    assert roomy.memory.total > 40 * 2**30 >= tight.memory.total
    assert tight.time.total > roomy.time.total
    smallest = search(work, by="memory").best[0]
    assert smallest.memory.total < tight.memory.total


@pytest.mark.parametrize(("cluster", "batch"), [("cpu:2", 256), ("h100:1", 512), ("h100:8", 2048)])
def test_no_microbatch_of_a_tiny_model_is_faster_than_the_chosen_one(cluster: str, batch: int) -> None:
    """Not even one of more than 128 short sequences."""
    tiny = Workload(name="tiny", hidden=64, layers=2, heads=2, vocabulary=256)
    work = Task(workload=tiny, cluster=parse_cluster(cluster), sequence=64, global_batch=batch)
    for prediction in search(work, keep=20).best:
        ranks = (prediction.plan.dp_replicate or 1) * (prediction.plan.dp_shard or 1)
        plans = [replace(prediction.plan, mb=2**power) for power in range((batch // ranks).bit_length())]
        times = [work.time(plan).total for plan in plans if work.fits(work.memory(plan))]
        assert prediction.time.total <= 1.0101 * min(times), prediction.plan


def test_heads_that_are_not_known_are_said_to_be_so() -> None:
    work = Task(workload=find_model("resnet50"), cluster=parse_cluster("h100:8"), sequence=1, global_batch=256)
    rejected = alternatives(work, search(work).best[0])
    assert not [one for one in rejected if "divide its heads" in one.reason]
    assert [one.reason for one in rejected if one.move == "tp, cp"] == [
        "left out: a trace does not show what each head costs, so it is not known what divides"
    ]


def test_the_simpler_of_equals_comes_first() -> None:
    plan = search(task("llama3-8b", "h200:8")).best[0].plan
    assert (plan.cp, plan.tp, plan.pp) == (1, 1, 1)  # cp=2 is predicted within a part in a thousand of it


def test_the_first_is_never_slower_and_larger_than_another() -> None:
    for cluster in ("mi300x:8", "gb200:72", "h100:8x4", "a100-80:8"):
        best = search(task("llama3-8b", cluster, batch=72 * 8)).best
        first = best[0]
        assert not [o for o in best if o.time.total < first.time.total and o.memory.total < first.memory.total], cluster


def test_what_fits_in_one_microbatch_alone_is_found() -> None:
    """Gradients of a single microbatch never meet all of its activations: the largest mb takes least memory."""
    work = task("llama3-3b", "h100:8", 2048, 16)
    required = {"zero": 0, "tp": 1, "pp": 1, "cp": 1, "recompute": "none", "precision": "bf16"}
    sizes = {mb: work.memory(Plan.of({**required, "mb": mb}).resolve(8)).total for mb in (1, 2)}
    assert sizes[2] < sizes[1]
    found = search(replace(work, max_memory=(sizes[1] + sizes[2]) / 2), required).best
    assert [prediction.plan.mb for prediction in found] == [2]


@pytest.mark.parametrize(
    "words", ["dp_replicate=2 dp_shard=4 zero=3", "dp_shard=2 dp_replicate=4 zero=1", "mb=2 zero=3"]
)
def test_any_legal_words_can_be_asked_for(words: str) -> None:
    found = search(task("llama3-8b", "h200:8", batch=64), Plan.parse(f"{words} bf16")).best
    assert found
    assert all(word in str(found[0].plan).split() for word in words.split())


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "qwen2.5-7b", "gpt-oss-20b"])
@pytest.mark.parametrize("words", ["pp=16 1f1b", "pp=8 zb", "pp=8 gpipe", "pp=8 interleaved v=2", "pp=8 zbv"])
def test_the_fullest_rank_of_a_pipeline_is_found(model: str, words: str) -> None:
    work = task(model, "h100:8x8", batch=256)
    plan = Plan.parse(f"{words} mb=1 bf16 zero=0").resolve(64)
    said = work.memory(plan).allocated
    each = [
        peak_memory(
            work.workload, plan, work.cluster, sequence=work.sequence, global_batch=work.global_batch, stage=stage
        ).allocated
        for stage in range(plan.pp or 1)
    ]
    assert said == max(each)


def test_experts_of_other_nodes_are_reached_by_one_share_of_the_network() -> None:
    cluster = parse_cluster("h100:8x8")
    seconds = cluster.link(64, 1).exchange(1e9)
    assert seconds == pytest.approx(56 / 64 * 1e9 / cluster.between.bandwidth, rel=0.05)
    assert cluster.link(8, 1).exchange(1e9) < seconds / 4


def test_as_fast_in_fewer_microbatches_is_better() -> None:
    plan = search(task("resnet50", "a100-80:1", 1, 256)).best[0].plan
    assert plan.mb == 256


def test_contradictions_are_refused_with_what_could_be() -> None:
    work = task("llama3-70b", "h100:8x8", batch=512)
    with rejects("Q008", "tp=3", "tp=1, 2, 4 or 8"):
        reject_contradictions(work, Plan.parse("tp=3"))
    with rejects("Q009", "tp=8", "pp=16"):
        reject_contradictions(work, Plan.parse("tp=8 pp=16"))
    with rejects("Q010", "of 7"):
        reject_contradictions(task("resnet50", "h100:8", 1, 7), Plan())


def test_what_fits_nowhere_is_told_what_would_help() -> None:
    work = task("llama3-70b", "h100:8")
    found = search(work)
    assert found.best == []
    assert found.smallest is not None
    assert found.smallest.memory.total > work.memory_limit
    helps = list(smallest_changes(work, Plan(precision="bf16")))
    assert {"state_dtype": "bf16"} in helps
    assert {"offload": "optimizer"} in helps


def test_the_way_ends_at_the_plan() -> None:
    work = task("llama3-70b", "h100:8x32", 8192, 512)
    best = searched("llama3-70b", "h100:8x32", 8192, 512).best[0]
    way = moves(work, best.plan)
    assert way[0].name == "one device"
    assert not way[0].fits
    assert way[-1].plan == best.plan.brief()
    assert way[-1].fits
    assert way[-1].seconds == pytest.approx(best.time.total)
    told = scaling(work, best.plan)
    assert told[-1].devices == work.cluster.num_devices
    assert told[0].efficiency == 1.0
    assert all(one.efficiency >= other.efficiency - 0.02 for one, other in itertools.pairwise(told))
    law = laws(work, best)
    alone = Plan(mb=best.plan.mb, precision="bf16", recompute=best.plan.recompute).resolve(1)
    one = replace(work, cluster=work.cluster.resized(1)).time(alone).total
    count = work.cluster.num_devices
    assert best.time.total == pytest.approx(one * (law.serial_part + (1 - law.serial_part) / count))


@pytest.mark.parametrize(
    ("model", "cluster", "sequence", "batch", "rule"),
    [
        ("gpt3-1.3b", "h100:8", 2048, 512, "copied"),
        ("llama3-8b", "h100:8", 8192, 64, "sharded"),
        ("llama3-405b", "h100:8x256", 8192, 1024, "several axes"),
        ("llama3-405b", "h100:8x256", 8192, 1024, "inside a node"),
        ("llama3-8b", "h100:8x8", 131072, 32, "long sequences"),
        ("mixtral-8x7b", "h100:8x4", 4096, 256, "experts"),
    ],
)
def test_rules_of_thumb_come_out_of_the_search(model: str, cluster: str, sequence: int, batch: int, rule: str) -> None:
    work = task(model, cluster, sequence, batch)
    told = {one.rule: one for one in rules_of_thumb(work, searched(model, cluster, sequence, batch).best[0])}
    found = [one for name, one in told.items() if rule in name]
    assert found
    assert found[0].agrees or found[0].why
