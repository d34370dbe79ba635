"""Pages of runs: what they say of sound, dead, running and hostile runs, and that nothing in them can act."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal.blueprint.plan import Plan
from shoal.cli import main
from shoal.comm.heartbeat import slowest
from shoal.comm.heartbeat.arrivals import Straggler
from shoal.config.load import build_recipe
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.observe import failure_event
from shoal.observe.events import append_event, append_failure
from shoal.observe.failure_event import note_failure
from shoal.observe.run_directory import RunDirectory
from shoal.pages.curves import MOST_POINTS, downsample
from shoal.pages.html import ASSETS, data
from shoal.pages.report import make_report, write_page
from shoal.pages.run.find_runs import find_runs, newest_run
from shoal.pages.run.findings import findings
from shoal.pages.run.read_run import read_run
from shoal.pages.run.time_parts import hidden_by_axis, over_time, whole_run
from shoal.pages.run.verdict import REASON, facts, verdict_of
from shoal.pages.sections.time_spent import ranks, time_spent
from tests.rejects import rejects
from tests.run_directories import EVIL, make_hostile_run, make_run, record, write_lines

ENDED = {"was_stopped": False, "seconds_training": 40.0}


class Tags(HTMLParser):
    """The elements and the handlers of a page, and whether each element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.images: list[str] = []
        self.handlers: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.handlers += [name for name in found if name.startswith("on")]
        self.outside += [
            str(found[name])
            for name in ("src", "href", "action")
            if not str(found.get(name, "data:")).startswith("data:")
        ]
        self.scripts += [found.get("type") or "script"] if tag == "script" else []
        self.images += [tag] if tag == "img" else []
        if tag not in ("meta", "link", "img", "path", "rect") and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "rect"):
            assert self.open.pop() == tag


def page_of(path: Path) -> str:
    return make_report([read_run(path)])


# ---- states and verdicts ---------------------------------------------------------------------------------------------


def test_a_dead_run_says_why_and_from_where_it_resumes(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", 70))
    assert run.state == "dead"
    assert verdict_of(run).headline == "Died at step 70 of 400"
    assert verdict_of(run).reason == "rank 1 of 2 was killed by signal 9"
    first = findings(run)[0]
    assert (first.what, first.next) == ("The same command resumes from step 50", "shoal explain N024")
    assert first.evidence.startswith("20 steps ")


def test_the_reason_of_an_earlier_failure_is_not_that_of_a_later_death(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 70)
    append_event(path, "resumed", 50)
    assert verdict_of(read_run(path)).reason == REASON


def test_ended_stopped_and_running(tmp_path: Path) -> None:
    assert read_run(make_run(tmp_path / "a", 5, summary=ENDED)).state == "ended"
    stopped = read_run(make_run(tmp_path / "b", 5, summary={"was_stopped": True}))
    assert (stopped.state, verdict_of(stopped).headline) == ("stopped", "Stopped at step 5 of 400")
    path = make_run(tmp_path / "c", 5)
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(path).state == "running"
        assert "Running, at step 5 of 400" in page_of(path)
    assert read_run(path).state == "dead"
    append_event(path, "failed", 5)
    with open(path / "events.jsonl", "rb") as events:  # as its launcher does until new ranks train
        fcntl.flock(events, fcntl.LOCK_EX)
        assert read_run(path).state == "running"
    assert read_run(path).state == "dead"


def test_a_run_lives_while_the_launcher_lives_that_has_noted_a_failure(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 5)
    (path / "lock").write_text("4711\nbegun\n")
    note_failure(Recipe.model_validate({"run": {"dir": str(path)}}), "4711", ShoalError("rank 1 was lost", code="N024"))
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["code"]) == ("failed", "N024")
    assert read_run(path).state == "running"
    os.close(failure_event._held.popitem()[1])  # as the kernel does when the launcher ends
    assert read_run(path).state == "dead"


def test_events_of_a_failure_have_its_step_reason_and_code(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 12)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "lo')
    append_failure(path, ShoalError("loss is nan\n  Traceback", code="T001"))
    event = json.loads((path / "events.jsonl").read_text().splitlines()[-1])
    assert {key: event[key] for key in ("event", "step", "reason", "code")} == {
        "event": "failed", "step": 12, "reason": "loss is nan", "code": "T001",
    }  # fmt: skip


def test_a_torn_line_loses_nothing_else_and_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1)
    lines = [json.dumps(record(step, loss=float(step))) for step in range(1, 2501)]
    lines[1200] = lines[1200][:40]
    lines += [json.dumps(record(7, loss=99, lr=None)), "", json.dumps({"step": 3000, "loss": 2**2000, "skipped": True})]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    table = read_run(path).metrics
    assert table.steps == [*range(1, 1201), *range(1202, 2501), 3000]
    assert (table.column("loss")[6], table.column("loss")[7], table.column("loss")[1200]) == (99.0, 8.0, 1202.0)
    assert math.isnan(table.column("lr")[6])
    assert math.isnan(table.column("loss")[-1])
    assert math.isnan(table.column("lr")[-1])
    assert table.skipped == [3000]
    assert "mfu" not in table.columns


def test_the_parts_of_the_time_add_to_one(tmp_path: Path) -> None:
    parts = whole_run(read_run(make_run(tmp_path / "run", 100)).metrics)
    assert parts is not None
    assert parts.data == pytest.approx(0.1)
    assert parts.comm == pytest.approx(0.1)  # a fifth of a step, half of it hidden
    assert parts.other + parts.data + (parts.comm or 0) == pytest.approx(1)


def test_communication_is_shown_by_axis(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1, summary=ENDED)
    axes = {"comm_seconds_tp": 0.1, "comm_overlap_fraction_tp": 0.25, "comm_seconds_dp_shard": 0.05}
    timed = {**axes, "comm_overlap_fraction_dp_shard": 1.0, "step_seconds": 0.5}
    write_lines(path / "metrics.jsonl", [record(step, **(timed if step % 10 == 0 else {})) for step in range(1, 101)])
    run = read_run(path)
    assert hidden_by_axis(run.metrics) == {"tp": pytest.approx((0.1, 0.25)), "dp_shard": pytest.approx((0.05, 1.0))}
    page = time_spent(run)
    assert "Hidden by axis: tp 25" in page


def test_stretches_reach_as_far_as_a_step_that_times_communication(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1)
    lines = [record(step) for step in range(1, 108)]
    for line in lines:
        if line["step"] % 20:
            del line["comm_seconds"], line["comm_overlap_fraction"]
    write_lines(path / "metrics.jsonl", lines)
    stretches = over_time(read_run(path).metrics)
    assert [each.first for each in stretches] == [1, *(each.last + 1 for each in stretches[:-1])]
    assert (len(stretches), stretches[-1].last) == (5, 107)
    assert [each.comm for each in stretches] == [pytest.approx(0.1, rel=0.2)] * 5


def test_time_on_a_rank_that_waits_for_no_other_says_so(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1)
    for slow, is_said in ((0, True), (1, False)):
        lines = (
            record(step, straggler_rank=slow, straggler_cost_fraction=0.6, straggler_stands_out=True)
            for step in range(1, 31)
        )
        write_lines(path / "metrics.jsonl", lines)
        assert ("the other ranks wait for it 60 % of theirs" in time_spent(read_run(path))) is is_said


def test_the_training_time_of_a_dead_run_counts_steps_that_were_not_logged(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1)
    write_lines(path / "metrics.jsonl", [record(step, step_seconds=0.5) for step in range(10, 101, 10)])
    assert dict(fact[:2] for fact in facts(read_run(path)))["Training time"] == "50 s"


CAUSES: dict[str, dict[str, Any]] = {
    "Steps wait for data": {"data_wait_seconds": 0.3},
    "Steps wait for communication": {"comm_seconds": 0.3, "comm_overlap_fraction": 0.0},
    "All wait for rank 3": {
        "straggler_rank": 3, "straggler_late_seconds": 0.1, "straggler_cost_fraction": 0.2,
        "straggler_stands_out": True,
    },
    "The loss is not finite": {"loss": "nan"},
    "Updates were skipped: gradients were not finite": {"skipped": True},
}  # fmt: skip


@pytest.mark.parametrize("what", CAUSES)
def test_what_to_look_at_follows_from_the_metrics(tmp_path: Path, what: str) -> None:
    path = make_run(tmp_path / "run", 1, summary=ENDED)
    quiet = {"data_wait_seconds": 0.0, "comm_seconds": 0.01, "comm_overlap_fraction": 1.0}
    write_lines(path / "metrics.jsonl", [record(step, **quiet) for step in range(1, 101)])
    assert findings(read_run(path)) == []
    write_lines(path / "metrics.jsonl", [record(step, **{**quiet, **CAUSES[what]}) for step in range(1, 101)])
    assert what in [finding.what for finding in findings(read_run(path))]


@pytest.mark.parametrize("is_summary", [False, True])
def test_ranks_that_are_late_in_turns_are_no_stragglers(tmp_path: Path, is_summary: bool) -> None:
    """Of several that are late in turns, one always costs most: no page may name it."""
    for stands_out in (True, False):
        found = Straggler(0, 0.5, 0.1, 0.4, 100, stands_out)
        summary = {**ENDED, "straggler": asdict(found)} if is_summary else None
        path = make_run(tmp_path / str(stands_out), 1, ranks=2, summary=summary)
        more = {} if is_summary else slowest.to_metrics(found)
        write_lines(path / "metrics.jsonl", [record(step, **more) for step in range(1, 101)])
        run = read_run(path)
        assert ("All wait for rank 0" in [each.what for each in findings(run)]) is stands_out
        assert ("the other ranks wait for it" in time_spent(run)) is stands_out
        assert ("Straggler: rank 0" in ranks(run)) is stands_out
        assert ("ranks are late in turns" in ranks(run)) is not stands_out


# ---- the page --------------------------------------------------------------------------------------------------------


def test_a_page_has_every_part_and_needs_nothing_else(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 100, ranks=2)
    (path / "prediction.json").write_text(json.dumps({"step_seconds": 0.5, "memory_gib": 1.0, "is_calibrated": False}))
    parts = [("forward", 0.1, 0.05), ("tp.late", 0.06, None), ("tp.wire", 0.04, 0.02)]
    keys = ("part", "seconds", "predicted_seconds")
    verdict = {"title": "link-bound on tp", "evidence": "tp waits", "next": "--plan.tp 1"}
    found = {"steps": 5, "parts": [dict(zip(keys, each, strict=True)) for each in parts], "verdict": verdict}
    (path / "profile.json").write_text(json.dumps(found))
    page = page_of(path)
    tags = Tags(page)
    assert [*tags.open, *tags.outside, *tags.handlers] == []
    assert tags.scripts == ["application/json", "script", "script"]
    profile = page.split("<section id=profile>")[1].split("</section>")[0]
    assert "<td>tp, for a late rank</td><td>60&nbsp;ms</td><td>30&nbsp;%</td><td>–</td>" in profile
    assert "link-bound on tp" in profile
    names = re.findall(r"<section id=(\w+)>", page)
    assert names == ["next", "curves", "time", "profile", "ranks", "history", "predicted", "layout", "reproduce"]
    assert "shoal train &#x27;a b.yaml&#x27;" in page
    assert "'unsafe-inline'" not in page.split("script-src")[1].split(";")[0]
    assert page.count('class="fallback"') == len(json.loads(payload_of(page))["charts"]) == 5


def payload_of(page: str) -> str:
    return page.split('id="data">')[1].split("</script>")[0]


def profile_of_a_gpu() -> dict[str, Any]:
    """A profile with everything that one can have, of 70 ranks."""
    ranks = [
        {"rank": rank, "name": f"rank {rank} (dp {rank})", "step_seconds": 0.2, "core_wait_fraction": 0.25,
         "parts": {"forward": 0.05, "backward": 0.05, "dp.late": 0.06, "dp.wire": 0.03, "tp.wait": 0.01},
         "waited_for": {"3": 0.06, "5": 0.001}}
        for rank in range(70)
    ]  # fmt: skip
    after = {"part": "backward", "total": 400 << 20, "parameters": 100 << 20, "gradients": 100 << 20, "optimizer": 0,
             "other": 200 << 20}  # fmt: skip
    predicted = {"total": 300 << 20, "parameters": 100 << 20, "activations": 200 << 20}
    gpu = {"utilization": 0.61, "busy_seconds": 0.12, "kernels_per_step": 370, "mfu": 0.21, "clock_mhz": 1980.0,
           "clock_mhz_max": 1980.0, "power_watts": 141.0, "power_watts_limit": 700.0, "temperature_celsius": 41.0,
           "communication_seconds": 0.1, "exposed_seconds": 0.04,
           "kernels": [{"kernel": "nvjet", "calls": 10, "fraction": 0.4}]}  # fmt: skip
    return {
        "steps": 5, "step_seconds": 0.2, "step_seconds_median": 0.19, "step_seconds_p95": 0.3, "ranks": ranks,
        "parts": [{"part": "forward", "seconds": 0.2}], "overlap": {"dp": 0.4}, "gpu": gpu,
        "memory": {"measured_peak": 420 << 20, "predicted": predicted, "over_time": [after]},
        "operators": [{"operator": "mm", "calls": 172, "fraction": 0.324}],
    }  # fmt: skip


def test_a_profile_shows_ranks_memory_operators_and_the_gpu(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 5)
    (path / "profile.json").write_text(json.dumps(profile_of_a_gpu()))
    shown = page_of(path).split("<section id=profile>")[1].split("</section>")[0]
    assert re.findall("<h3>(.*?)</h3>", shown) == ["Every rank", "Memory over a step", "Operators", "GPU of rank 0"]
    assert "a step takes 200 ms, median 190 ms, 95th percentile 300 ms; 40 % of the communication of dp" in shown
    assert "The first 64 of 70 ranks." in shown
    rank = shown.split("<td>rank 1 (dp 1)</td>")[1].split("</tr>")[0]
    assert re.findall("<title>(.*?)</title>", rank) == [
        "rank 1 (dp 1): computation, 50%", "rank 1 (dp 1): waiting for data, 0%",
        "rank 1 (dp 1): waiting for a late rank, 30%", "rank 1 (dp 1): communication, 20%",
        "rank 1 (dp 1): pipeline bubble, 0%", "rank 1 (dp 1): saving and other, 0%",
    ]  # fmt: skip
    assert rank.endswith("<td>200 ms</td><td>rank 3, 60 ms</td><td>25 %</td>")
    memory = shown.split("Memory over a step")[1].split("<h3>")[0]
    assert "The measured peak of the run is 420.0 MiB." in memory
    assert re.findall(r"<td>([\d.]+ MiB)</td>", memory) == ["400.0 MiB", "300.0 MiB"]
    assert "after backward: gradients, 25%" in memory
    assert "peak, predicted: other, 67%" in memory
    assert "<td>mm</td>" in shown
    assert "<td>32 %</td><td>172</td>" in shown
    gpu = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown.split("GPU of rank 0")[1]))
    assert gpu == {"kernels run": "61 %", "kernels": "370", "MFU": "21 %", "clock": "1,980 MHz", "power": "141 W",
                   "temperature": "41 °C", "NCCL": "100 ms"}  # fmt: skip


@pytest.mark.parametrize(("kind", "is_named"), [("link", True), ("compute", False)])
def test_the_verdict_of_a_profile_is_looked_at_next(tmp_path: Path, kind: str, is_named: bool) -> None:
    path = make_run(tmp_path / "run", 5, summary=ENDED)
    verdict = {"kind": kind, "title": "link-bound on tp", "cost": 0.4, "evidence": "tp waits", "next": "--plan.tp 1"}
    (path / "profile.json").write_text(json.dumps({"verdict": verdict}))
    found = [each for each in findings(read_run(path)) if each.what == "Profile: link-bound on tp"]
    assert [(each.evidence, each.next, each.weight) for each in found] == [("tp waits", "--plan.tp 1", 0.4)] * is_named


def test_a_run_that_resumes_under_another_plan_shows_nothing_of_the_plan_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verdict = {"kind": "link", "title": "link-bound on dp", "cost": 0.4, "evidence": "dp waits", "next": "--plan.tp 1"}
    made = {"plan": "dp_replicate=2 zero=0", "parts": [{"part": "forward", "seconds": 0.2}], "verdict": verdict}
    for plan in ("dp_replicate=2 zero=0", "tp=2"):
        recipe = build_recipe({"run": {"dir": "run"}, "plan": str(Plan.parse(plan).resolve(2))}, title="test")
        directory = RunDirectory.claim(recipe)
        directory.begin(recipe)
        directory.close()
        write_lines(Path("run/metrics.jsonl"), map(record, range(1, 31)))
        names = re.findall(r"<section id=(\w+)>", page_of(Path("run")))
        assert {"profile", "predicted"} & set(names) == set()
        for name, found in (("profile", made), ("prediction", {"step_seconds": 0.5}), ("trace", {})):
            assert not Path(f"run/{name}.json").exists()
            Path(f"run/{name}.json").write_text(json.dumps(found))
    run = read_run(Path("run"))  # the profile is that of the first plan: a run before this version resumed
    assert "Profile: link-bound on dp" not in [each.what for each in findings(run)]
    assert "<section id=profile>" not in make_report([run])
    (tmp_path / "run/profile.json").write_text(json.dumps({**made, "plan": "tp=2 zero=0"}))
    assert "<section id=profile>" in page_of(Path("run"))


def test_profiles_of_several_runs_are_side_by_side_and_every_section_has_one_name(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, 30, ranks=2) for name in "ab"]
    for path, seconds in zip(paths, (0.1, 0.3), strict=True):
        parts = [{"part": "forward", "seconds": seconds}, {"part": "tp.wire", "seconds": 0.1}]
        (path / "profile.json").write_text(json.dumps({"parts": parts, "verdict": {"title": f"verdict {seconds}"}}))
    page = make_report([read_run(path) for path in paths])
    together = page.split("<section id=profiles>")[1].split("</section>")[0]
    assert "<td>forward</td><td>100 ms, 50 %</td><td>300 ms, 75 %</td>" in together
    assert "<td>verdict</td><td>verdict 0.1</td><td>verdict 0.3</td>" in together
    names = re.findall(r"<section id=(\w+)>", page)
    assert sorted(names) == sorted(set(names))
    for name in ("profile", "ranks", "history", "time"):
        assert page.count(f"<section data-part={name}>") == 2, name


def test_a_hostile_run_is_inert(tmp_path: Path) -> None:
    path = make_hostile_run(tmp_path)
    for runs in ([path], [path, make_run(tmp_path / "other")]):
        page = make_report([read_run(each) for each in runs])
        tags = Tags(page)
        assert [*tags.open, *tags.outside, *tags.handlers] == []
        assert tags.scripts == ["application/json", "script", "script"]
        assert "<img src=x" not in page
        json.loads(payload_of(page))
    assert json.loads(data({"a": EVIL})) == {"a": EVIL}
    assert "<" not in data({"a": EVIL})


def test_a_torn_line_long_lines_and_missing_files(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 10)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "junk": "' + "x" * 100_000 + '"}\n[1]\n{"step": true}\n{"step": -1}\n{"step": 12, "lo')
    assert read_run(path).metrics.steps == list(range(1, 11))
    for name in ("metrics.jsonl", "events.jsonl"):
        (path / name).unlink()
    assert "Died at step 0" in page_of(path)
    (path / "recipe.yaml").write_text("a: [" * 5000)
    (path / "environment.json").write_text("[" * 100_000)
    assert "Died at step 0" in page_of(path)


def test_what_is_damaged_is_said(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 30)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "lo')  # torn by a crash
    assert read_run(path).damaged == []
    (path / "summary.json").write_text("[[[")
    (path / "recipe.yaml").write_bytes(bytes(range(128, 200)))
    (path / "metrics.jsonl").write_text("\n".join([json.dumps(record(1)), "x", "", '{"step": "1"}', "y"]))
    (path / "events.jsonl").unlink()
    (path / "events.jsonl").symlink_to("/etc/hostname")
    run = read_run(path)
    assert run.damaged == ["recipe.yaml", "summary.json", "3 lines of metrics.jsonl", "events.jsonl is a link"]
    assert "Files of the run are damaged" in make_report([run])


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path) -> None:
    path, secret = make_run(tmp_path / "run", 3), make_run(tmp_path / "secret", 9, summary=ENDED)
    for name in ("metrics.jsonl", "summary.json", "events.jsonl"):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(secret / name)
    (path / "checkpoints").symlink_to(tmp_path)
    (path / "lock").symlink_to(secret / "metrics.jsonl")
    os.mkfifo(path / "metrics.rank0.jsonl")
    run = read_run(path)
    assert (run.step, run.summary, run.events, run.state, run.saved_steps) == (0, {}, [], "dead", [])
    (path / "report.html").symlink_to(secret / "recipe.yaml")
    write_page(path / "report.html", "page")
    assert (path / "report.html").read_text() == "page"
    assert (secret / "recipe.yaml").read_text() != "page"


def test_downsampling_keeps_the_extremes_and_the_gaps() -> None:
    values = [math.sin(step / 1000) for step in range(100_000)]
    values[77_777], values[33_333] = 9.0, -9.0
    values[50_000:60_000] = [math.nan] * 10_000
    steps, kept = downsample(range(100_000), values)
    assert len(steps) <= MOST_POINTS
    assert (steps[kept.index(9.0)], steps[kept.index(-9.0)]) == (77_777, 33_333)
    assert steps == sorted(set(steps))
    assert any(math.isnan(value) for value in kept)


def test_several_runs_are_compared(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second", summary=ENDED)
    (second / "recipe.yaml").write_text((second / "recipe.yaml").read_text().replace("0.003", "0.006"))
    page = make_report([read_run(first), read_run(second)])
    part = page.split("<section id=differences>")[1].split("</section>")[0]
    assert re.findall(r"<td>([^<]*)</td>", part) == ["optim.lr", "0.003", "0.006"]
    assert [run["name"] for run in json.loads(payload_of(page))["runs"]] == ["first", "second"]


def test_runs_that_count_samples_and_tokens_share_no_axis_and_no_speed(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, 30) for name in ("tokens", "samples")]
    write_lines(paths[1] / "metrics.jsonl", [record(step, tokens=step * 16) for step in range(1, 31)])
    for chosen, unit, speeds in (
        (paths, "", ["tokens_per_s", "samples_per_s"]),
        (paths[:1], "tokens", ["tokens_per_s"]),
        (paths[1:], "samples", ["tokens_per_s"]),
    ):
        page = make_report([read_run(path) for path in chosen])
        found = json.loads(payload_of(page))
        assert found["unit"] == unit
        assert re.findall(r'data-axis="tokens"[^>]*>(\w+)<', page) == ([unit] if unit else [])
        assert [chart["key"] for chart in found["charts"] if chart["title"] == "Speed"] == speeds
        if not unit:
            assert [chart["unit"] for chart in found["charts"][1:3]] == ["tokens per second", "samples per second"]
            assert [set(speeds) & set(run["curves"]) for run in found["runs"]] == [{speeds[0]}, {speeds[1]}]


VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files in the npm package uplot 1.6.32; docs/decisions/0030-pages.md."""


def test_the_vendored_files_are_those_of_the_package() -> None:
    assert {name: hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() for name in VENDORED} == VENDORED


# ---- commands --------------------------------------------------------------------------------------------------------


def test_report_without_a_run_takes_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "[R071]" in capsys.readouterr().err
    make_run(tmp_path / "runs/new")
    assert main(["report"]) == 0
    assert capsys.readouterr().out.split() == ["runs/new/report.html"]


def test_report_writes_into_the_run_or_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run")
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path / "report.html")
    assert main(["report", str(path), str(path), "-o", str(tmp_path / "both.html"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["path"], said["bytes"]) == (str(tmp_path / "both.html"), (tmp_path / "both.html").stat().st_size)
    assert [run["state"] for run in said["runs"]] == ["dead", "dead"]


def test_ls_lists_runs_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs" / "a", 30, summary={**ENDED, "loss_last": 2.5, "tokens_per_s": 10.0})
    make_run(tmp_path / "runs" / "deep" / "b\x1b[31m", 20)
    assert main(["ls", str(tmp_path), "--json"]) == 0
    found = {line["path"]: line for line in json.loads(capsys.readouterr().out)["runs"]}
    shown = {(Path(path).name, line["state"], line["step"]) for path, line in found.items()}
    assert shown == {("a", "ended", 30), ("b\x1b[31m", "dead", 20)}
    assert main(["ls", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_no_run_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without RUN, the newest below this folder is taken
    with rejects("R060"):
        read_run(tmp_path)
    with rejects("R060"):
        read_run(tmp_path / "missing")
    with rejects("R061"):
        write_page(tmp_path / "missing" / "page.html", "")
    assert main(["report", *["run"] * 13]) == main(["ls", str(tmp_path / "missing")]) == main(["report"]) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="it becomes another user, which needs root")
def test_a_folder_that_the_user_may_not_enter_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path / "closed" / "runs" / "a")
    recipe = build_recipe({"run": {"name": "a"}}, title="test")
    monkeypatch.chdir(path.parents[1])
    (tmp_path / "closed").chmod(0o700)
    os.seteuid(65534)
    try:
        with rejects("R063", path, "Permission denied"):
            find_runs(path)
        with rejects("R060", path, "Permission denied"):
            read_run(path)
        with rejects("R071"):
            newest_run(path, fix="shoal ls")
        with rejects("C026", "Permission denied"):
            RunDirectory.claim(recipe)
    finally:
        os.seteuid(0)


def test_pages_need_no_torch(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 20)
    code = f"import sys; from shoal.cli import main; main(['report', {str(path)!r}]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
