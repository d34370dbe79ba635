"""Runs of known values: the page, the list, the live figures and the doctor say these, and the same."""

from __future__ import annotations

import fcntl
import io
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.reports.profile import show_profile
from shoal.comm.profile.timer import Span, Step
from shoal.doctor.live import check_run
from shoal.observe.profile.profile import Profile
from shoal.observe.profile.record import RankRecord
from shoal.observe.progress import human
from shoal.pages.live.now import now_of
from shoal.pages.report import make_report
from shoal.pages.run.find_runs import find_runs
from shoal.pages.run.findings import findings
from shoal.pages.run.own_files import tail_records
from shoal.pages.run.read_run import read_run
from shoal.pages.run.verdict import facts, verdict_of
from shoal.pages.sections.profile import profile
from shoal.pages.words import duration, large
from tests.run_directories import make_run, record, write_lines

SUMMARY = {"was_stopped": False, "loss_first": 3.0, "step_seconds_median": 0.5, "tokens_per_s": 2048.0}


def known_run(
    path: Path,
    losses: Iterable[Any],
    *,
    every: int = 1,
    summary: Mapping[str, Any] | None = None,
    events: Iterable[Mapping[str, Any]] = (),
    host: str | None = None,
) -> Path:
    """A run of steps of half a second, of which every so many are logged."""
    make_run(path, 1)
    lines = [
        record(number * every, loss=loss, step_seconds=0.5, tokens_per_s=2048.0)
        for number, loss in enumerate(losses, 1)
    ]
    write_lines(path / "metrics.jsonl", lines)
    write_lines(path / "events.jsonl", events)
    (path / "environment.json").write_text(json.dumps({"command": ["shoal", "train"], "host": host}))
    if summary is not None:
        made = {"steps": lines[-1]["step"], "saved_step": lines[-1]["step"]}
        (path / "summary.json").write_text(json.dumps({**made, **SUMMARY, **summary}))
    return path


def event(kind: str, step: int) -> dict[str, Any]:
    return {"event": kind, "step": step, "time": 1.79e9 + step}


def fact(path: Path, name: str) -> str:
    return {what: value for what, value, _ in facts(read_run(path))}[name]


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ended", [False, True])
@pytest.mark.parametrize(("written", "shown"), [("nan", "NaN"), ("inf", "∞")])
def test_a_run_that_has_diverged_shows_no_loss_of_before(
    tmp_path: Path, written: str, shown: str, is_ended: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"loss_last": written} if is_ended else None
    path = known_run(tmp_path / "run", [3.0] * 50 + [written] * 5, summary=summary)
    assert fact(path, "Loss") == shown
    now = now_of(tail_records(path / "metrics.jsonl"), {})
    assert now.words()[1][1] == shown
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["loss"] == written
    assert main(["ls", str(tmp_path)]) == 0
    assert f" {shown} " in capsys.readouterr().out
    assert main(["watch", str(path), "--tui", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == written
    assert main(["watch", str(path), "--tui"]) == 0
    assert "▁▁▁×××××" in capsys.readouterr().out
    assert any(f"loss {written}" in found.evidence for found in check_run(path))


@pytest.mark.parametrize("every", [1, 10])
def test_the_loss_is_the_mean_of_the_last_ten_steps_everywhere(tmp_path: Path, every: int) -> None:
    """With `run.log_every`, the last ten lines are more than the last ten steps; the summary knows these."""
    losses = [10 - number * every / 100 for number in range(1, 1000 // every + 1)]
    path = known_run(tmp_path / "run", losses, every=every, summary={"loss_last": 0.045})
    (line,) = find_runs(tmp_path)
    assert (fact(path, "Loss"), line.loss) == ("0.045", 0.045)
    (path / "summary.json").unlink()
    (line,) = find_runs(tmp_path)
    assert line.loss == pytest.approx(sum(losses[-10:]) / 10)
    assert fact(path, "Loss") == ("0.045" if every == 1 else "0.45")


def test_a_few_lines_are_not_called_twenty() -> None:
    remarks = [now_of([record(step) for step in range(1, last + 1)], {}).words()[1][2] for last in (1, 3, 30)]
    assert remarks == ["mean of 1 line", "mean of 3 lines", "mean of 20 lines"]


# ---- saves -----------------------------------------------------------------------------------------------------------


def test_a_save_that_a_resume_has_archived_is_none(tmp_path: Path) -> None:
    """`--resume 50` archives later steps, so that the run that died at step 60 does not resume from step 100."""
    events = [event("started", 0), event("saved", 50), event("saved", 100), event("resumed", 50)]
    path = known_run(tmp_path / "run", [3.0] * 60, events=events)
    death = findings(read_run(path))[0]
    assert (death.what, death.evidence) == (
        "The same command resumes from step 50", "10 steps since then will be repeated",
    )  # fmt: skip
    path = known_run(tmp_path / "again", [3.0] * 60, events=[*events, event("saved", 60), event("started", 0)])
    assert findings(read_run(path))[0].what == "No step was saved"


def test_the_time_of_saves_is_compared_with_that_of_the_part_that_made_them(tmp_path: Path) -> None:
    """Both are of the last command: the time before its resume had saves of its own, which the summary leaves out."""
    more = {"seconds_training": 500.0, "save_stall_seconds": 9.0, "loss_last": 3.0}
    path = known_run(tmp_path / "whole", [3.0] * 1000, summary={**more, "resumed_from": None})
    assert "Training waits for saves" not in [each.what for each in findings(read_run(path))]
    path = known_run(tmp_path / "resumed", [3.0] * 1000, summary={**more, "resumed_from": 960})
    found = {each.what: each.evidence for each in findings(read_run(path))}
    assert found["Training waits for saves"].startswith("9 s, 45 % ")


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [(999.4, "999"), (9_999.0, "9,999"), (12_345.0, "12.3 k"), (999_499.0, "999 k"), (999_700.0, "1 M"),
     (999.7e6, "1 B"), (999.7e9, "1 T"), (2e15, "2,000 T")],
)  # fmt: skip
def test_a_figure_is_never_an_exponent(value: float, words: str) -> None:
    assert large(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.9994e-3, "999 µs"), (0.9997e-3, "1 ms"), (0.9994, "999 ms"), (0.9997, "1 s"), (59.9, "59.9 s"),
     (59.97, "1 min 0 s"), (3599.7, "1 h 0 min")],
)  # fmt: skip
def test_a_time_is_never_an_exponent(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_progress_line_has_no_exponents() -> None:
    assert [human(each) for each in (999.4, 999.7, 999_700, 999.7e6)] == ["999", "1k", "1M", "1G"]


# ---- runs of other hosts ---------------------------------------------------------------------------------------------


def aged(path: Path, seconds: float) -> None:
    when = time.time() - seconds
    for file in path.iterdir():
        os.utime(file, (when, when))


def test_a_silent_run_of_another_host_is_not_called_dead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock may not be seen here, and its steps may be long."""
    path = known_run(tmp_path / "run", [3.0] * 40, host="gpu7")
    assert read_run(path).state == "running"
    aged(path, 300)
    run = read_run(path)
    assert (run.state, verdict_of(run).headline) == ("silent", "Silent since step 40 of 400")
    assert "gpu7" in verdict_of(run).reason
    assert findings(run)[0].next == f"shoal doctor {path}   # on gpu7"
    assert find_runs(tmp_path)[0].state == "silent"
    assert 'class="verdict silent"' in make_report([run])
    monkeypatch.chdir(tmp_path)  # a long path would take the width of the terminal
    assert main(["ls", "."]) == main(["watch", "run", "--tui"]) == 0
    assert capsys.readouterr().out.count("  silent") == 2
    with open(path / "events.jsonl", "a") as file:  # its launcher has written why it ended
        file.write(json.dumps({**event("failed", 40), "reason": "rank 1 was killed by signal 9"}) + "\n")
    aged(path, 300)
    assert (read_run(path).state, verdict_of(read_run(path)).headline) == ("dead", "Died at step 40 of 400")


def test_a_run_of_another_host_with_long_steps_runs(tmp_path: Path) -> None:
    path = known_run(tmp_path / "run", [3.0] * 4, host="gpu7", every=300)  # a line every 150 s
    aged(path, 300)
    assert read_run(path).state == "running"
    aged(path, 600)
    assert read_run(path).state == "silent"


def test_a_silent_run_of_this_host_is_dead(tmp_path: Path) -> None:
    path = known_run(tmp_path / "run", [3.0] * 40, host=os.uname().nodename)
    assert read_run(path).state == "dead"
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(path).state == "running"


def test_communication_that_was_timed_in_the_first_step_alone_is_not_called_untimed(tmp_path: Path) -> None:
    path = known_run(tmp_path / "run", [3.0] * 8)
    for timed, words in ((1, "was timed in its first fifth alone"), (0, "was not timed under this plan")):
        lines = [record(step) for step in range(1, 9)]
        for line in lines:
            if line["step"] != timed:
                del line["comm_seconds"], line["comm_overlap_fraction"]
        write_lines(path / "metrics.jsonl", lines)
        assert words in make_report([read_run(path)])


def test_known_values_are_those_of_every_reader(tmp_path: Path) -> None:
    """Steps of 0.5 s with 0.1 s for data, and a fifth of a step in communication of which half is hidden."""
    path = known_run(tmp_path / "run", [3.0] * 100, summary={"loss_last": 3.0, "seconds_training": 50.0})
    write_lines(
        path / "metrics.jsonl",
        [record(step, loss=3.0, step_seconds=0.5, tokens_per_s=2048.0, data_wait_seconds=0.1, comm_seconds=0.1,
                comm_overlap_fraction=0.5) for step in range(1, 101)],
    )  # fmt: skip
    known = {name: (value, remark) for name, value, remark in facts(read_run(path))}
    assert known["Loss"] == ("3", "from 3")
    assert known["Speed"] == ("2,048 tokens/s", "500 ms a step")
    assert known["Training time"][0] == "50 s"
    evidence = {each.what: each.evidence for each in findings(read_run(path))}
    assert evidence["Steps wait for data"].startswith("20 % ")
    assert evidence["Steps wait for communication"].startswith("10.0 % ")
    (line,) = find_runs(tmp_path)
    assert (line.step, line.loss, line.tokens_per_s) == (100, 3.0, 2048.0)
    now = now_of(tail_records(path / "metrics.jsonl"), read_run(path).recipe)
    assert (now.step, now.loss, now.speed, now.step_seconds) == (100, 3.0, 2048.0, 0.5)
    assert (now.left_seconds, now.done) == pytest.approx((150, 0.25))
    assert {each.evidence.split(";")[-1].strip() for each in check_run(path)} >= {"loss 3"}


# ---- a profile -------------------------------------------------------------------------------------------------------


def profiled_rank(rank: int, forward: int) -> RankRecord:
    """Five steps of 400 ms: a forward, and a wait for the other rank, the last 50 ms of it for bytes."""
    steps, entered = [], {}
    for number in range(5):
        begin, end = 400 * number * 10**6, 400 * (number + 1) * 10**6
        arrived = begin + forward * 10**6
        spans = [
            Span("forward", begin, None, False, arrived),
            Span("dp_replicate", arrived, f"sum {number}", True, end),
            Span("other", begin, None, False, end, 400 * 10**6),
        ]
        entered[f"sum {number}"] = arrived
        steps.append(Step(spans, 0.0))
    return RankRecord(rank, "host", {}, 1, 2, steps, entered, peak=(rank + 1) * 2**20)


def test_a_profile_of_known_waits_is_the_same_in_the_terminal_and_on_the_page(tmp_path: Path) -> None:
    """Rank 1 computes for 350 ms and rank 0 for 100, so that rank 0 waits for it 250 of 400 ms."""
    path = known_run(tmp_path / "run", [3.0] * 9)
    plan = "dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=2 ep=1 zero=0 v=1 1f1b mb=2"
    known = {"forward": 0.2, "dp_replicate.wire": 0.05}
    records = [profiled_rank(0, 100), profiled_rank(1, 350)]
    found = Profile.of(records, plan=plan, predicted=known, more={"memory": {}}).to_mapping()
    assert {each["part"]: each["seconds"] for each in found["parts"]} == pytest.approx(
        {"forward": 0.225, "dp_replicate.late": 0.125, "dp_replicate.wire": 0.05, "other": 0.0}
    )
    verdict = found["verdict"]
    assert (verdict["title"], verdict["cost"]) == ("waiting for rank 1", pytest.approx(0.625))
    assert found["memory"] == {"measured_peak": 2 * 2**20, "fullest_rank": 1}
    (path / "profile.json").write_text(json.dumps(found))
    shown = io.StringIO()
    show_profile({**found, "ranks_count": 2, "trace": None}, as_json=False, out=shown)
    page = profile(read_run(path)).replace("&nbsp;", " ")
    for words in (verdict["title"], verdict["evidence"]):
        assert words in shown.getvalue()
        assert words in page
    for terminal, of_page in (
        ("225.0 ms", "225 ms"),
        ("125.0 ms", "125 ms"),
        ("250.0 ms", "250 ms"),
        ("56.2%", "56 %"),
    ):
        assert terminal in shown.getvalue()
        assert f">{of_page}<" in page
    assert "waiting for a late rank, 62%" in page
    assert "rank 1, 250 ms" in page
