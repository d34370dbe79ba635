"""Drills: a schedule follows from its seed, and the oracle notices whatever a fault has cost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.blueprint.faults import DRILL
from shoal.chaos.journal import Commit, Journal, Line, Made, Step
from shoal.chaos.kinds import KINDS, names_it
from shoal.chaos.measure import goodput, outcomes
from shoal.chaos.oracle import committed_steps_lost, compare_runs
from shoal.chaos.report import Report
from shoal.chaos.schedule import Injection, draw_schedule
from shoal.train.recipe.fault_injection.drill import join_drill


def drawn(seed: int, faults: int = 30) -> list[Injection]:
    return draw_schedule(seed, faults=faults, seconds=510, kinds=list(KINDS), ranks=4)


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert drawn(7) == drawn(7)
    assert len({tuple(drawn(seed)) for seed in range(20)}) == 20
    schedule = drawn(7)
    assert [each.number for each in schedule] == list(range(1, 31))
    assert [each.at for each in schedule] == sorted(each.at for each in schedule)
    counts = {kind: sum(each.kind == kind for each in schedule) for kind in KINDS}
    assert set(counts.values()) <= {2, 3}  # each kind as often as any other
    assert {each.rank for seed in range(9) for each in drawn(seed) if KINDS[each.kind].needs_hosts} == {0, 1, 2, 3}
    assert {each.rank for seed in range(5) for each in drawn(seed) if each.kind == "kill"} == {0, 1, 2, 3}
    assert any(each.is_double for seed in range(5) for each in drawn(seed))


def test_only_the_right_rank_counts_as_named() -> None:
    said = "shoal: rank 1 of 4 (host b) was killed by signal 9 (SIGKILL) [N024]"
    assert names_it("kill", said, rank=1, ranks=4, host="")
    assert not names_it("kill", said, rank=2, ranks=4, host="")
    assert not names_it("stop", said, rank=1, ranks=4, host="")
    assert not names_it("clock", said, rank=1, ranks=4, host="")
    assert names_it("partition", "host b-1 (ranks 2 to 3) is lost: ...", rank=2, ranks=4, host="b-1")


# ---- the oracle -----------------------------------------------------------------------------------------------------


def write_run(folder: Path, steps: list[tuple[int, float, list[str]]], rank: int = 0, pid: int = 5) -> None:
    """Losses and samples of a run: step, loss, and the samples of a rank."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    with (
        (folder / "metrics.jsonl").open("a") as metrics,
        (folder / "samples" / f"{rank}-{pid}.jsonl").open("a") as seen,
    ):
        for step, loss, samples in steps:
            metrics.write(json.dumps({"step": step, "loss": loss}) + "\n")
            seen.write(json.dumps({"step": step, "at": pid + step / 100, "samples": samples}) + "\n")


PLAIN = [(1, 3.0, ["a", "b"]), (2, 2.5, ["c", "d"]), (3, 2.25, ["e", "f"])]


@pytest.mark.parametrize(
    ("steps", "lost", "doubled", "missing", "others"),
    [
        (PLAIN, 0, 0, [], []),
        ([*PLAIN[:2], (3, 2.25, ["e", "d"])], 1, 1, [], []),  # d twice, f never
        ([*PLAIN[:2], (3, 2.25, ["e"])], 1, 0, [], []),
        ([*PLAIN[:2], (3, 2.25, ["e", "f", "f"])], 0, 1, [], []),
        (PLAIN[:2], 2, 0, [3], []),
        ([*PLAIN[:2], (3, 2.2500000000000004, ["e", "f"])], 0, 0, [], [3]),
    ],
)
def test_lost_and_doubled_samples_and_other_losses(
    tmp_path: Path,
    steps: list[tuple[int, float, list[str]]],
    lost: int,
    doubled: int,
    missing: list[int],
    others: list[int],
) -> None:
    write_run(tmp_path / "plain", PLAIN)
    write_run(tmp_path / "run", steps[:1], pid=5)
    write_run(tmp_path / "run", [(2, 2.5, ["x", "y"])], pid=6)  # a step that a killed rank made, and made again
    (tmp_path / "run" / "metrics.jsonl").unlink()
    write_run(tmp_path / "run", steps, pid=7)
    runs = [(tmp_path / name, tmp_path / name) for name in ("run", "plain")]
    found = compare_runs(runs[0], runs[1], steps=3, tensors_different=0)
    assert (found.samples_lost, found.samples_doubled) == (lost, doubled)
    assert (found.missing_steps, found.other_losses) == (missing, others)
    assert found.is_equal == (steps is PLAIN)


def journal(*steps: tuple[float, int, int], commits: list[tuple[float, int]], made: list[Made]) -> Journal:
    return Journal(
        Path(),
        Path(),
        steps=[Step(at, step, str(worker)) for at, step, worker in steps],
        commits=[Commit(*each) for each in commits],
        made=made,
    )


def kill(at: float, *, damaged: int | None = None, is_double: bool = False) -> Made:
    injection = Injection(number=1, at=at, kind="kill", rank=1, is_double=is_double)
    return Made(injection, at, damaged=damaged)


def test_a_committed_step_that_a_restart_does_not_find_is_lost() -> None:
    steps = [(1.0, 10, 5), (2.0, 11, 5), (4.0, 11, 6)]
    assert committed_steps_lost(journal(*steps, commits=[(1.5, 10)], made=[kill(2.5)])) == (0, 0)
    assert committed_steps_lost(journal(*steps, commits=[(1.5, 10), (2.2, 12)], made=[kill(2.5)])) == (2, 0)
    assert committed_steps_lost(journal(*steps, commits=[(2.2, 12)], made=[kill(2.5, damaged=12)])) == (0, 2)


def test_only_the_steps_of_a_damaged_checkpoint_are_excused() -> None:
    commits, made = [(1.5, 10), (2.2, 12)], [kill(2.5, damaged=12)]
    before = [(1.0, 10, 5), (2.0, 12, 5)]
    from_the_good_one = journal(*before, (4.0, 11, 6), commits=commits, made=made)
    assert committed_steps_lost(from_the_good_one) == (0, 2)
    from_nothing = journal(*before, (4.0, 1, 6), commits=commits, made=made)
    assert committed_steps_lost(from_nothing) == (10, 2)
    both_damaged = journal(*before, (4.0, 1, 6), commits=commits, made=[kill(2.4, damaged=10), *made])
    assert committed_steps_lost(both_damaged) == (0, 12)
    again = [(4.0, 11, 6), (5.0, 12, 6), (7.0, 1, 7)]  # the damaged step was made and saved once more, and lost then
    saved_again = journal(*before, *again, commits=[*commits, (4.5, 10), (5.5, 12)], made=made)
    assert committed_steps_lost(saved_again) == (12, 2)
    seen_late = journal(*before, (4.0, 1, 6), commits=[(1.5, 10), (2.6, 12)], made=made)  # after it was damaged
    assert committed_steps_lost(seen_late) == (10, 2)


def test_a_fault_is_over_when_the_run_is_further_than_before() -> None:
    made = kill(2.5)
    seen = journal((1, 10, 5), (2, 11, 5), (2.6, 12, 5), (4, 11, 6), (5, 12, 6), (6, 13, 6), commits=[], made=[made])
    assert seen.recovered(made) == 6.0  # step 12 was under way, and was not completed by the old processes
    clock = Made(Injection(number=1, at=2.5, kind="clock", rank=0), 2.5)
    assert seen.recovered(clock) == 6.0
    seen.steps = seen.steps[:4]
    assert seen.recovered(made) is None


def test_a_fault_has_to_be_named_unless_another_one_hides_it() -> None:
    first, second = kill(2.5), kill(2.6, is_double=True)
    seen = journal((1, 1, 5), (2, 2, 5), (4, 2, 6), (5, 3, 6), commits=[], made=[first, second])
    assert [each.is_right for each in outcomes(seen, ranks=2)] == [False, True]
    seen.lines = [Line(2.9, "shoal: rank 1 of 2 was killed by signal 9 (SIGKILL)")]
    assert [each.is_right for each in outcomes(seen, ranks=2)] == [True, True]
    assert outcomes(seen, ranks=2)[0].named == pytest.approx(0.4)
    stopped = Made(Injection(number=1, at=2.4, kind="stop", rank=0), 2.4)
    seen.made = [stopped, second]  # the second ends the ranks before the first is noticed
    assert [each.is_right for each in outcomes(seen, ranks=2)] == [True, True]
    seen.made = [stopped]
    assert [each.is_right for each in outcomes(seen, ranks=2)] == [False]


def test_the_ratio_of_useful_time() -> None:
    steps = [(float(at), at + 1, 5) for at in range(11)] + [(14.0 + at, 10 + at, 6) for at in range(12)]
    found = goodput(journal(*steps, commits=[(9.0, 9)], made=[kill(10.5)]))
    assert found is not None
    assert (found.wall, found.step, found.again) == (25.0, 1.0, 2)
    assert found.ettr == pytest.approx(20 / 25)  # 4 s of pause instead of one, and two steps made again
    assert found.pauses == pytest.approx(3.0)
    assert found.predicted == pytest.approx(0.88, abs=0.03)  # one pause of 3 s in 25 s


def test_a_broken_promise_is_in_the_report(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", PLAIN)
    write_run(tmp_path / "run", PLAIN[:2])
    runs = [(tmp_path / name, tmp_path / name) for name in ("run", "plain")]
    seen = journal((1, 1, 5), (2, 2, 5), (4, 1, 6), commits=[(2.5, 2)], made=[kill(3.0)])
    report = Report(
        seed=0,
        schedule=[seen.made[0].injection],
        left_out={},
        journal=seen,
        outcomes=outcomes(seen, ranks=2),
        goodput=goodput(seen),
        agreement=compare_runs(runs[0], runs[1], steps=3, tensors_different=1),
    )
    broken = list(report.broken())
    assert len(broken) == 7
    assert "2 committed steps were lost" in broken
    assert "2 samples were lost, and 0 doubled" in broken
    assert report.to_mapping()["holds"] is False


# ---- inside a rank --------------------------------------------------------------------------------------------------


def test_a_rank_takes_no_orders_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRILL, raising=False)
    run = SimpleNamespace(on_gradients=None)
    join_drill(run, 0)  # type: ignore[arg-type]
    assert run.on_gradients is None


def test_a_rank_records_its_samples_and_takes_an_order_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ranks", "orders", "samples"):
        (tmp_path / name).mkdir()
    (tmp_path / "settings.json").write_text('{"pace": 0.0}')
    monkeypatch.setenv(DRILL, str(tmp_path))
    monkeypatch.setattr(time, "time", time.time)  # restored after the clock has jumped
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    batch = {"tokens": torch.tensor([[1, 2], [3, 4], [1, 2]])}
    opened = SimpleNamespace(given=batch)
    called: list[int] = []
    run = SimpleNamespace(
        on_gradients=lambda: called.append(1),
        world=SimpleNamespace(rank=3),
        steps_done=6,
        is_main=True,
        open_step=opened,
    )
    join_drill(run, 2)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "ranks" / "3.json").read_text())["generation"] == 2
    (tmp_path / "orders" / "3.json").write_text('{"do": "jump_clock", "seconds": 5000}')
    before = time.time()
    run.on_gradients()
    assert time.time() - before >= 5000
    assert not list((tmp_path / "orders").iterdir())
    (samples,) = (tmp_path / "samples").iterdir()
    seen = json.loads(samples.read_text())
    assert seen["step"] == json.loads((tmp_path / "steps.jsonl").read_text())["step"] == 7
    first, second, third = seen["samples"]
    assert first == third != second
    assert called == [1]  # what was there before happens too
