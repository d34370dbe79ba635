"""The arithmetic of benchmarks of training: turns, ratios, losses and the rows that mean nothing."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from shoal.bench.training import data_parallel, step, turns
from shoal.bench.training.anchor import Anchors, alone
from shoal.bench.training.cases import Ranks, checked_case, checked_job, microbatch_of, with_plan, with_settings
from shoal.bench.training.data_parallel import time_data_parallel
from shoal.bench.training.machine import CalibrationTurns
from shoal.bench.training.predicted import Predicted, predict_case, typical
from shoal.bench.training.scale import (
    BASE,
    Row,
    ScaleRequest,
    ScaleTable,
    losses_of,
    measure_scale,
    row_mapping,
    table_of,
    to_mapping,
)
from shoal.bench.training.time_steps import RankSteps, time_steps
from shoal.bench.training.turns import (
    WARMUP_STEPS,
    Case,
    Spread,
    Turn,
    differences,
    joined,
    measure_in_turns,
    ratios,
)
from shoal.cli.reports import bench_memory, bench_scale, bench_step
from shoal.config.recipe import DataSection, LaunchSection, ModelSection, Recipe
from shoal.errors import ShoalError
from shoal.launch.local import launch
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.exact.state_memory import Memory
from shoal.train.recipe.preflight import Job
from tests import bench_results

DIMENSIONS = {"num_layers": 1, "hidden": 16, "num_heads": 2, "num_kv_heads": 2, "ffn": 32}
TINY = Recipe(
    model=ModelSection(name="llama", **DIMENSIONS),  # type: ignore[arg-type]
    data=DataSection(source="synthetic", seq_len=8, global_batch=8),
    launch=LaunchSection(device="cpu", threads=1),
)


def rank_steps(
    seconds: list[float], *, losses: list[float] | None = None, norm: float = 1.0, peak: int = 100
) -> RankSteps:
    return RankSteps(
        seconds=tuple(seconds), waited=(0.5,) * len(seconds), losses=tuple(losses or [1.0] * len(seconds)),
        norms=(norm,) * len(seconds), peak=peak, process=10, states=Memory(peak, 0, 0),
    )  # fmt: skip


def case(
    name: str, medians: list[float], losses: list[float] | None = None, job: Any = None, norm: float = 1.0
) -> Case:
    made = Case(name, job)
    made.turns = [Turn.of([rank_steps([9.0] * WARMUP_STEPS + [each], losses=losses, norm=norm)]) for each in medians]
    return made


def request_of(nproc: tuple[int, ...]) -> ScaleRequest:
    ranks = Ranks(nproc=nproc, threads=1, cores=2, device="cpu")
    return ScaleRequest(ranks=ranks, plans=(), modes=("strong",), steps=1, rounds=1)


def test_the_slowest_rank_counts_and_the_first_steps_do_not() -> None:
    warm = [9.0] * WARMUP_STEPS
    turn = Turn.of([rank_steps([*warm, 1.0, 4.0], peak=5), rank_steps([*warm, 2.0, 3.0], peak=7)])
    assert turn.seconds == (2.0, 4.0)
    assert (turn.median, turn.peak, turn.states.parameters) == (3.0, 7, 7)
    assert turn.wait_fraction == pytest.approx(1.0 / 6.0)


def test_a_turn_is_the_same_whether_its_ranks_are_joined_before_or_not() -> None:
    """Those of several hosts are joined into one message. Who waits while it warms up waits in no timed step."""
    warm, none = [9.0] * WARMUP_STEPS, (0.0,) * WARMUP_STEPS
    slow_start = replace(rank_steps([*warm, 1.0, 4.0], peak=5), waited=(*warm, 0.5, 0.5))
    ranks = [slow_start, replace(rank_steps([*warm, 2.0, 3.0], peak=7), waited=(*none, 1.0, 1.0))]
    assert Turn.of([joined(ranks)]) == Turn.of(ranks)
    assert Turn.of(ranks).wait_fraction == pytest.approx(2.0 / 6.0)


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that is three times as slow in the second round changes no ratio."""
    assert ratios(case("a", [1.0, 3.0]), case("b", [2.0, 6.0])) == Spread(0.5, 0.5, 0.5)


def test_turns_alternate_and_a_failure_ends_its_case() -> None:
    order: list[str] = []

    def measured(name: str) -> turns.Measure:
        def measure(job: Job, num_steps: int) -> list[RankSteps]:
            order.append(name)
            if name == "b":
                raise ShoalError("out of memory", fix="less", code="N023")
            return [rank_steps([1.0] * num_steps)]

        return measure

    job: Any = object()
    cases = [Case(name, job, measure=measured(name)) for name in "abc"] + [Case("d", None, "illegal")]
    measure_in_turns(cases, steps=3, rounds=2)
    assert order == ["a", "b", "c", "c", "a"]
    assert [len(each.turns) for each in cases] == [2, 0, 2, 0]
    assert len(cases[0].turns[0].seconds) == 2
    assert cases[1].reason == "out of memory [N023]"


def test_efficiency_is_divided_by_ranks_in_strong_mode_alone() -> None:
    job: Any = type("Job", (), {"recipe": TINY.model_copy(update={"plan": TINY.plan.resolve(1)})})
    job.training = type("Data", (), {"tokens_per_sample": 8})
    base = Row(mode="strong", plan=BASE, ranks=1, batch=8, case=case("base", [4.0, 4.0], job=job))
    for mode, expected in (("strong", 0.5), ("weak", 1.0)):
        row = Row(mode=mode, plan="x", ranks=2, batch=8, case=case("row", [4.0, 4.0], job=job), base=base)  # type: ignore[arg-type]
        assert row_mapping(row, {})["efficiency"]["median"] == expected
    shared = Row(mode="strong", plan="x", ranks=2, batch=8, case=case("row", [4.0], job=job), base=base, note="shared")
    assert "efficiency" not in row_mapping(shared, {})


def predicted(seconds: float) -> Predicted:
    return Predicted(seconds=seconds, low=0.0, high=1.0, peak=8.0, memory={}, is_calibrated=True)


def test_predictions_are_compared_with_the_round_in_which_the_machine_was_measured() -> None:
    """A machine that is three times as slow in the second round changes no error: all figures of a row are of one
    round, here of the second one, whose efficiency is the median."""
    job: Any = type("Job", (), {"recipe": TINY.model_copy(update={"plan": TINY.plan.resolve(1)})})
    job.training = type("Data", (), {"tokens_per_sample": 8})
    base = Row(mode="strong", plan=BASE, ranks=1, batch=8, case=case("base", [4.0, 12.0, 4.0], job=job))
    row = Row(mode="strong", plan="x", ranks=2, batch=8, case=case("row", [1.6, 6.0, 2.5], job=job), base=base)
    rounds = {
        "base": [predicted(each) for each in (4.4, 13.2, 4.4)],
        "row": [predicted(each) for each in (2.2, 6.6, 2.2)],
    }
    found = row_mapping(row, rounds)
    assert (found["round"], found["step_seconds"]) == (1, {"median": 6.0, "low": 1.6, "high": 6.0})
    assert found["predicted"]["seconds"] == 6.6
    assert found["step_error"] == pytest.approx(0.1)
    assert found["efficiency"] == pytest.approx({"median": 1.0, "low": 0.8, "high": 1.25})
    assert found["efficiency_error"] == pytest.approx(0.0)
    two = row_mapping(replace(row, case=case("row", [1.6, 6.6], job=job)), rounds)
    assert (two["round"], two["step_seconds"]["median"], two["predicted"]["seconds"]) == (1, 6.6, 6.6)
    assert typical([]) is None
    assert typical([predicted(3.0), None, predicted(1.0)]) == predicted(1.0)


def test_data_parallel_is_not_predicted() -> None:
    """The planner knows no such plan; the job is that of one rank, whose prediction is another one's."""
    job: Any = type("Job", (), {"recipe": TINY.model_copy(update={"plan": TINY.plan.resolve(1)})})
    job.training = type("Data", (), {"tokens_per_sample": 8})
    base = Row(mode="strong", plan=BASE, ranks=1, batch=8, case=case("base", [4.0], job=job))
    row = Row(mode="strong", plan=data_parallel.NAME, ranks=2, batch=8, case=case("row", [8.0], job=job), base=base)
    found = row_mapping(row, {"base": [predicted(4.0)], "row": [predicted(4.0)]}, is_anchored=True)
    assert found["efficiency"]["median"] == 0.25
    assert not [key for key in found if "error" in key or "predicted" in key]


def test_computation_is_taken_as_measured_and_messages_as_predicted() -> None:
    """One rank computes three times as long as predicted, two at once six times; each round has its own factor."""
    one, two = (type("Job", (), {"recipe": TINY.model_copy(update={"plan": TINY.plan.resolve(n)})}) for n in (1, 2))
    base, both = case("base", [3.0, 6.0], job=one), case("two alone", [6.0, 12.0], job=two)
    row, stages = case("row", [7.0, 13.0], job=two), case("stages", [7.0, 7.0], job=two)
    anchors = Anchors({2: both}, base)
    known = {
        "base": [predicted(1.0)] * 2,
        "two alone": [predicted(1.0)] * 2,
        "row": [replace(predicted(1.5), messages=0.5)] * 2,
        "stages": [replace(predicted(3.0), waiting=1.0)] * 2,
    }
    assert [each and each.seconds for each in anchors.anchored(base, known)] == [3.0, 6.0], "what was measured"
    assert [each and each.seconds for each in anchors.anchored(row, known)] == [6.5, 12.5]
    # Two of three thirds have one rank that computes while the other one waits: 2 x 3 s and 1 x 6 s.
    assert [each and each.seconds for each in anchors.anchored(stages, known)] == [12.0, 24.0]
    assert Anchors().anchored(row, known) == known["row"], "of a named cluster"
    both.reason = "illegal"
    assert anchors.anchored(row, known) == (), "the base was measured: a prediction alone cannot be compared with it"
    found = {"alone": anchors.to_mapping()}
    assert found["alone"] == [{"ranks": 2, "reason": "illegal"}]
    assert ["illegal" in line for line in bench_scale.alone(found)] == [True]


def test_ranks_of_two_hosts_are_predicted_with_the_link_between_them() -> None:
    recipe = TINY.model_copy(update={"plan": TINY.plan.parse("dp_replicate=16 mb=1").resolve(16)})
    recipe = recipe.model_copy(update={"data": TINY.data.model_copy(update={"global_batch": 16})})
    one, two = (predict_case(recipe, parse_cluster("h100:8x2"), num_hosts) for num_hosts in (1, 2))
    assert one is not None
    assert two is not None
    assert two.messages > one.messages


def test_ranks_that_send_nothing_are_measured_beside_the_rows() -> None:
    """With the batch of the rows, and not where ranks share cores."""
    request = request_of((1, 2, 4))
    table = table_of(TINY, replace(request, plans=("ddp",)))
    assert [(ranks, case.reason) for ranks, case in table.anchors.cases.items()] == [(2, "")]
    alone = table.anchors.cases[2]
    assert alone in table.cases
    assert alone.job is not None
    assert (str(alone.job.recipe.plan.sync), alone.job.recipe.data.global_batch) == ("local:1000000", 8)
    assert {row.case.name for row in table.rows}.isdisjoint({alone.name})
    alone.turns = table.rows[0].case.turns = case("any", [1.0]).turns
    (base, *_) = to_mapping(table, [parse_cluster("cpu:2")])["rows"]
    assert base["predicted"]["seconds"] is base["step_error"] is None
    assert base["peak_error"] is not None
    named = table_of(TINY, replace(request, plans=("ddp",), is_anchored=False))
    assert named.anchors == Anchors()


@pytest.mark.parametrize(
    ("section", "values", "code"),
    [("comm", {"forward_prefetch": 2}, ""), ("run", {"sync_batch_norm": True}, ""),
     ("optim", {"param_dtype": "bf16"}, "P048")],
)  # fmt: skip
def test_settings_of_messages_do_not_concern_ranks_that_send_nothing(
    section: str, values: dict[str, Any], code: str
) -> None:
    plan = TINY.plan.parse("bf16") if code else TINY.plan
    recipe = with_settings(TINY, **{section: values}).model_copy(update={"plan": plan})
    ranks = Ranks(nproc=(1, 2), threads=1, cores=2, device="cpu")
    reason = alone(recipe, ranks, 2, 8).reason
    assert code in reason if code else not reason


def test_the_machine_is_measured_before_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    machine = CalibrationTurns(2, 1, "cpu", "fp32", rounds=2)
    monkeypatch.setattr(
        CalibrationTurns, "take", lambda self: (order.append("machine"), self.clusters.append(parse_cluster("cpu:2")))
    )
    job: Any = type("Job", (), {})

    def measure(job: Job, num_steps: int) -> list[RankSteps]:
        order.append("row")
        return [rank_steps([1.0] * num_steps)]

    table = ScaleTable(recipe=TINY, request=request_of((1,)), rows=[], cases=[Case("a", job, measure=measure)])
    table = replace(table, request=replace(table.request, rounds=2))
    measure_scale(table, lambda *_: None, machine)
    assert order == ["machine", "row", "machine", "row"]
    assert not machine.is_needed
    assert not CalibrationTurns.named(parse_cluster("cpu:2"), 3).is_needed


def test_ranks_beyond_the_cores_say_so() -> None:
    ranks = Ranks(nproc=(1, 2, 4), threads=1, cores=2, device="cpu")
    assert ranks.shared(2) == ""
    assert ranks.shared(4) == "4 ranks share 2 cores: not a measure of scaling"
    assert Ranks(nproc=(4,), threads=1, cores=2, device="cuda").shared(4) == ""


def row_with_losses(name: str, last: float, words: str = "ddp", norm: float = 1.0) -> Row:
    plan = TINY.plan.parse(words).resolve(2)
    job: Any = type("Job", (), {"recipe": TINY.model_copy(update={"plan": plan})})
    return Row(mode="strong", plan=name, ranks=2, batch=8, case=case(name, [1.0], [2.0, 1.9, 1.8, last], job, norm))


def test_a_plan_that_computes_something_else_is_not_compared() -> None:
    base = row_with_losses("base", 1.7)
    for words, has_dropout in (("compress=int8", False), ("sync=diloco:5", False), ("bf16", False), ("tp=2", True)):
        table = ScaleTable(recipe=TINY, request=request_of((1,)), rows=[base, row_with_losses("other", 1.8, words)],
                           has_dropout=has_dropout)  # fmt: skip
        assert losses_of(table) == [], words
        (found,) = losses_of(replace(table, rows=[*table.rows, row_with_losses("ddp", 1.8)]))
        assert set(found["differences"]) == {"ddp"}


def test_a_plan_with_an_open_choice_has_a_reason() -> None:
    recipe = with_plan(TINY, "sync=auto", ranks=2, batch=8, mb=2, threads=1)
    assert checked_case("open", recipe, 2).reason.startswith("sync=auto is chosen when a run begins")


def test_a_plan_with_other_losses_is_found() -> None:
    rows = [row_with_losses(name, last) for name, last in (("base", 1.7), ("same", 1.7 + 1e-6), ("wrong", 1.71))]
    request = request_of((1,))
    (found,) = losses_of(ScaleTable(recipe=TINY, request=request, rows=rows))
    assert not found["are_equal"]
    assert found["largest"] == found["differences"]["wrong"] == pytest.approx(0.01 / 1.7)
    (found,) = losses_of(ScaleTable(recipe=TINY, request=request, rows=rows[:2]))
    assert found["are_equal"]
    rows[2] = row_with_losses("doubled", 1.7, norm=2.0)
    (found,) = losses_of(ScaleTable(recipe=TINY, request=request, rows=rows))
    assert not found["are_equal"], "Adam divides a factor of the gradient out, so that losses do not show it"
    assert (found["largest"], found["largest_of_norm"]) == (pytest.approx(1e-6 / 1.7), 1.0)
    said = [line for line in bench_scale.sentences({**bench_results.scale(), "losses": [found]}) if "DIFFER" in line]
    assert [line.partition(", and")[0] for line in said] == ["norms of gradients of batch 8 DIFFER: doubled by 1.0e+00"]
    assert differences({"a": [2.0, 1.0]}, [1.0, 1.0]) == {"a": 1.0}
    lost = {"a": [1.0, math.nan], "b": [1.0, math.inf]}
    assert differences(lost, [1.0, 1.0]) == {"a": math.inf, "b": math.inf}
    assert differences({"a": [1.0, 1.0]}, [1.0, math.nan]) == {"a": math.inf}


def shown(render: Callable[[Console, Any], None], found: dict[str, Any]) -> str:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as drawn:
        render(console, found)
    return drawn.get()


def test_tables_have_every_row_its_reason_and_the_load() -> None:
    text = shown(bench_scale.render, bench_results.scale("tp=2"))
    assert "tp=2 on 4 ranks: tp=2" in text
    assert "losses of 13 steps of batch 16 are equal over all plans, to 1e-07 (rounding), and norms" in text
    assert "load 0.1 before and 2.1 after" in text
    text = shown(bench_step.render, bench_results.step("recompute full"))
    assert "fastest: recompute full. Paste: recompute full" in text
    assert "less memory: recompute full" in text
    assert "predicted peaks are off by 2 % at worst" in shown(bench_memory.render, bench_results.memory())


def test_the_recipe_of_a_plan_keeps_its_precision_and_no_degree() -> None:
    recipe = TINY.model_copy(update={"plan": TINY.plan.parse("tp=2 bf16 mb=2")})
    assert microbatch_of(recipe, 4) == 2
    assert microbatch_of(TINY, 4) == 2
    changed = with_plan(recipe, "zero=3", ranks=2, batch=8, mb=2, threads=1)
    assert changed.plan.to_mapping() == {"zero": 3, "mb": 2, "precision": "bf16"}
    assert with_plan(recipe, "fp32", ranks=2, batch=8, mb=2, threads=1).plan.precision == "fp32"


def test_rows_share_their_data() -> None:
    """Ranks are forked with all that this process holds: with data of its own, each row would enlarge all others."""
    rows = [with_plan(TINY, plan, ranks=2, batch=batch, mb=2, threads=1) for plan, batch in (("ddp", 8), ("tp=2", 16))]
    first, second = (checked_job(row, 2)[1] for row in rows)
    assert first is not None
    assert second is not None
    assert first.training is second.training
    assert (first.recipe.data.global_batch, second.recipe.data.global_batch) == (8, 16)
    other = rows[0].model_copy(update={"data": TINY.data.model_copy(update={"seq_len": 4})})
    third = checked_job(other, 2)[1]
    assert third is not None
    assert third.training is not first.training


def test_changes_of_a_recipe_are_those_that_have_an_effect() -> None:
    every = ("microbatch", "buckets", "recompute", "precision", "compile")
    two = TINY.model_copy(update={"plan": TINY.plan.parse("ddp mb=2")})
    names = [change.name for change in step.changes_of(two, 2, every)]
    assert names == [
        "microbatch of 1", "microbatch of 4", "buckets of 1 MB", "buckets of 100 MB", "recompute selective",
        "recompute full", "precision bf16", "compile",
    ]  # fmt: skip
    assert "buckets of 1 MB" not in [change.name for change in step.changes_of(two, 1, every)], "nothing is reduced"
    (change, *_) = step.changes_of(two, 2, ("recompute",))
    assert change.overrides == ["--plan.recompute", "selective"]
    assert change.applied(two).plan.recompute == "selective"
    assert change.applied(two).plan.mb == 2


def test_a_change_is_faster_only_if_it_was_in_every_round() -> None:
    assert step.is_faster(Spread(0.9, 0.8, 0.95))
    assert not step.is_faster(Spread(0.9, 0.8, 1.01))
    assert not step.is_faster(Spread(0.99, 0.98, 0.995))
    assert step.is_smaller(Spread(1.05, 1.0, 1.2), 0.7)
    assert not step.is_smaller(Spread(1.2, 1.0, 1.3), 0.7)


def test_faster_changes_are_combined_the_best_of_each_kind() -> None:
    def row(name: str, path: tuple[str, str], value: Any, medians: list[float]) -> step.StepRow:
        job: Any = object()
        return step.StepRow(step.Change(name, {path: value}), case(name, medians, job=job))

    base = step.StepRow(step.Change("the recipe", {}), case("base", [1.0, 1.0]))
    rows = [
        base,
        row("a", ("plan", "mb"), 1, [0.9, 0.9]),
        row("b", ("plan", "mb"), 2, [0.8, 0.8]),
        row("c", ("run", "compile"), True, [0.7, 0.7]),
        row("d", ("plan", "recompute"), "full", [0.9, 1.1]),
    ]
    found = step.together(rows)
    assert found is not None
    assert found.settings == {("plan", "mb"): 2, ("run", "compile"): True}
    assert step.together(rows[:2]) is None


def test_the_loop_of_data_parallel_computes_the_same_losses() -> None:
    """On a CPU torch calls the plain module, so the loop itself can be compared with a rank of shoal."""
    job = table_of(TINY, request_of((1, 2))).rows[0].case.job
    (ours,) = launch(time_steps, (job, 4), nproc=1)
    (other,) = launch(time_data_parallel, (job, 4, 0), nproc=1)
    assert other.losses == pytest.approx(ours.losses, rel=1e-5)
    assert other.norms == pytest.approx(ours.norms, rel=1e-4)
    assert other.states == ours.states
    assert ours.losses[0] != ours.losses[3]
