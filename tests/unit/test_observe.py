"""What a run shows of itself: the directory, the sinks, the line for a person."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from shoal.config.load import build_recipe
from shoal.errors import needs
from shoal.observe import progress
from shoal.observe.events import append_failure
from shoal.observe.metrics import TRACKERS, JsonLines, numbers, peak_memory_gib
from shoal.observe.progress import Live, Plain, Quiet, human, progress_line, status, time_left
from shoal.observe.run_directory import RunDirectory
from tests.rejects import rejects

RECORD = {"step": 3, "loss": 5.125, "tokens_per_s": 18312.0, "mfu": None, "memory_gib": 1.3, "skipped": False}


# ---- the run directory -----------------------------------------------------------------------------------------------


def recipe(**run: Any) -> Any:
    return build_recipe({"run": run}, title="test")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def claimed(resume: str = "auto", *, ended: bool = False, command: str = "", **run: Any) -> RunDirectory:
    """A directory that a process had, and that it has left."""
    directory = RunDirectory.claim(recipe(**run), resume, command=command)
    directory.begin(recipe(**run))
    if ended:
        directory.write_summary({"steps": 2, "was_stopped": False})
    directory.close()
    return directory


def test_the_first_free_name_is_taken() -> None:
    assert [claimed(name="a", ended=True).path.name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_the_last_name_resumes_unless_it_is_finished_or_of_another_recipe() -> None:
    assert not claimed(name="a").resumes
    again = claimed(name="a")
    assert (again.path, again.resumes) == (Path("runs/a"), True)
    other = claimed(name="a", seed=7)
    assert (other.path, other.resumes) == (Path("runs/a-2"), False)
    assert other.beside == "'runs/a' has other settings: run.seed: 0 → 7"
    assert claimed(name="a").path == Path("runs/a")  # its own, although another came after it
    assert claimed("fresh", name="a").path == Path("runs/a-3")


def test_a_restart_finds_the_directory_of_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a second run of the same recipe: without its mark it would begin a third one, at step 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.observe.run_lock.LOCK_TIMEOUT", 0.0)
    mine = RunDirectory.claim(recipe(name="a"), command="mine")
    mine.begin(recipe(name="a"))
    other = RunDirectory.claim(recipe(name="a"), command="other")
    other.begin(recipe(name="a"))
    assert (mine.path, other.path) == (Path("runs/a"), Path("runs/a-2"))
    mine.close()  # its workers have died
    again = RunDirectory.claim(recipe(name="a"), command="mine", is_restart=True)
    assert (again.path, again.resumes) == (mine.path, True)
    with rejects("C027", "runs/a-2"):  # of a command that left no mark, which must not begin beside what it may own
        RunDirectory.claim(recipe(name="a"), is_restart=True)
    again.close()
    other.close()


@pytest.mark.parametrize(
    ("command", "again", "another"),
    [("slurm-7/", "slurm-7/", "slurm-8/"), ("torchrun/1a", "torchrun/2b", "3c"), ("", "", "4d")],
)
def test_a_command_has_begun_when_its_run_was_begun(command: str, again: str, another: str) -> None:
    """Before that, a restart has to do again what the command says. torchrun tells no command from another."""
    of = recipe(dir="mine")
    claimed(dir="mine", command="an earlier one")
    assert not RunDirectory.has_begun(of, again)
    first = RunDirectory.claim(of, "fresh", command=command)
    assert not RunDirectory.has_begun(of, again)
    first.close()  # killed before its first step
    second = RunDirectory.claim(of, "fresh", command=again, is_restart=True)
    assert not RunDirectory.has_begun(of, again)
    second.begin(of)
    assert RunDirectory.has_begun(of, again)
    assert not RunDirectory.has_begun(of, another)
    second.close()
    RunDirectory.claim(of, command=again, is_restart=True).close()
    assert RunDirectory.has_begun(of, again)  # a third generation, which was killed before its first step, too
    RunDirectory.claim(of, command=again).close()
    assert not RunDirectory.has_begun(of, again)  # no restart: the command is given once more


@pytest.mark.parametrize(("command", "may_be_elsewhere"), [("5e", False), ("slurm-7/", True), ("torchrun/1a", True)])
def test_steps_of_a_run_that_began_on_another_machine_are_not_given_up(command: str, may_be_elsewhere: bool) -> None:
    """Other launchers may restart rank 0 on a machine that has no run directory, but the same `checkpoint.dir`."""
    of = build_recipe({"run": {"dir": "mine"}, "checkpoint": {"dir": "s3://saves"}}, title="test")
    assert RunDirectory.has_begun(of, command) is may_be_elsewhere
    assert not RunDirectory.has_begun(recipe(dir="mine"), command)  # its steps would be in the run directory
    RunDirectory.claim(of, command=command).close()
    assert not RunDirectory.has_begun(of, command)


def test_a_command_that_has_begun_is_found_among_numbered_runs() -> None:
    claimed(name="a", command="first")
    second = RunDirectory.claim(recipe(name="a"), "fresh", command="second")
    assert not RunDirectory.has_begun(recipe(name="a"), "second")
    second.begin(recipe(name="a"))
    second.close()
    claimed("fresh", name="a", command="third")
    assert RunDirectory.has_begun(recipe(name="a"), "second")
    again = RunDirectory.claim(recipe(name="a"), command="second", is_restart=True)
    assert again.path == Path("runs/a-2")
    again.close()


@pytest.mark.parametrize("resume", ["auto", "fresh"])
@pytest.mark.parametrize("run", [{"dir": "mine"}, {"name": "a"}])
def test_a_restart_uses_a_directory_in_which_nothing_was_begun(run: dict[str, str], resume: str) -> None:
    first = RunDirectory.claim(recipe(**run), resume, command="one")
    (first.path / "checkpoints").mkdir()
    append_failure(first.path, RuntimeError("rank 0 was killed"))
    first.close()
    again = RunDirectory.claim(recipe(**run), resume, command="one", is_restart=True)
    assert (again.path, again.resumes) == (first.path, False)
    again.close()
    (first.path / "checkpoints" / "step-00000001").mkdir()
    with rejects("C024"):
        RunDirectory.claim(recipe(**run), resume, command="one", is_restart=True)


def test_a_folder_with_a_file_named_lock_is_not_taken_for_one() -> None:
    Path("other").mkdir()
    for name in ("lock", "notes.txt"):
        Path("other", name).touch()
    with rejects("C024"):
        RunDirectory.claim(recipe(dir="other"))


def test_a_directory_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.observe.run_lock.LOCK_TIMEOUT", 0.1)
    held = RunDirectory.claim(recipe(name="a"))
    held.begin(recipe(name="a"))
    assert claimed(name="a").path == Path("runs/a-2")
    for resume in ("auto", "latest", "fresh"):
        with rejects("C027"):
            RunDirectory.claim(recipe(dir="runs/a"), resume)
    held.close()
    assert claimed(dir="runs/a").resumes


def test_an_empty_folder_may_be_used() -> None:
    Path("mine").mkdir()
    assert claimed(dir="mine").path == Path("mine")
    assert yaml.safe_load(Path("mine/recipe.yaml").read_text())["run"]["dir"] == "mine"


def test_the_difference_to_the_earlier_run_is_reported() -> None:
    claimed(dir="mine", seed=1, ended=True)
    before = Path("mine/recipe.yaml").read_bytes()
    for resume in ("auto", "latest", "7"):
        with rejects("C021", "run.seed: 1 → 2"):
            RunDirectory.claim(recipe(dir="mine", seed=2), resume)
    with rejects("C025"):
        RunDirectory.claim(recipe(dir="./mine", seed=1))
    assert Path("mine/recipe.yaml").read_bytes() == before
    assert claimed("latest", dir="mine", seed=1, duration="900step", log_every=5).resumes
    assert not Path("mine/summary.json").exists()


def test_fresh_removes_a_run_and_nothing_else() -> None:
    claimed(dir="mine")
    Path("mine/metrics.jsonl").write_text("old")
    Path("mine/checkpoints").mkdir()
    assert not claimed("fresh", dir="mine").resumes
    assert not Path("mine/metrics.jsonl").exists()
    assert not Path("mine/checkpoints").exists()
    Path("other").mkdir()
    Path("other/notes.txt").write_text("precious")
    with rejects("C024"):
        RunDirectory.claim(recipe(dir="other"), "fresh")
    assert Path("other/notes.txt").read_text() == "precious"


def test_metrics_of_later_steps_are_dropped() -> None:
    directory = claimed(dir="mine")
    lines = ['{"step": 1, "loss": 2.5}', '{"step": 2, "loss": 2.0}', '{"step": 2, "eval_loss": 2.1}', '{"step": 3}']
    Path("mine/metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    directory.drop_metrics_after(2)
    assert Path("mine/metrics.jsonl").read_text().splitlines() == lines[:3]


def test_a_summary_is_json_whatever_the_loss() -> None:
    directory = claimed(dir="mine")
    directory.write_summary({"steps": 2, "loss_last": float("nan"), "mfu": None})
    assert json.loads(Path("mine/summary.json").read_text()) == {"steps": 2, "loss_last": "nan", "mfu": None}


# ---- sinks -----------------------------------------------------------------------------------------------------------


def test_json_lines_are_there_at_once_and_are_json() -> None:
    sink = JsonLines(Path("metrics.jsonl"))
    sink.write({"step": 1, "loss": float("inf")})
    assert json.loads(Path("metrics.jsonl").read_text()) == {"step": 1, "loss": "inf"}
    sink.write({"step": 2, "loss": 1.5})
    sink.close()
    assert len(Path("metrics.jsonl").read_text().splitlines()) == 2


def test_numbers_are_what_a_tracker_can_plot() -> None:
    assert numbers({**RECORD, "note": "x"}) == {"loss": 5.125, "tokens_per_s": 18312.0, "memory_gib": 1.3}


def test_every_tracker_has_a_package_and_is_selected_by_name() -> None:
    assert set(TRACKERS) == {"tensorboard", "wandb", "mlflow"}
    with rejects("R027", match=r"\[wandb\]"):
        needs("surely_not_there", what="a test", extra="wandb")


class Recorder(types.ModuleType):
    """Stands in for a tracker's package and keeps the calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Recorder:
            self.calls.append((name, args, options))
            return self

        return call


@pytest.mark.parametrize(
    ("tracker", "expected"),
    [
        ("wandb", ["init", "log", "finish"]),
        ("mlflow", ["start_run", "log_dict", "log_metrics", "end_run"]),
    ],
)
def test_trackers_get_numbers_at_their_step(
    tracker: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = Recorder(tracker)
    monkeypatch.setitem(sys.modules, tracker, package)
    sink = TRACKERS[tracker](tmp_path, "a run", {"optim": {"lr": 1}})
    sink.write(RECORD)
    sink.close()
    assert [name for name, _, _ in package.calls] == expected
    assert package.calls[-2][1:] == ((numbers(RECORD),), {"step": 3})
    assert any("a run" in options.values() for _, _, options in package.calls)


def test_memory_is_measured() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    held = torch.ones(2**28, dtype=torch.uint8)  # a quarter GiB
    assert held[-1] == 1
    assert 0.05 < before < 100
    assert peak_memory_gib(torch.device("cpu")) >= before


# ---- the line for a person -------------------------------------------------------------------------------------------


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, _environ={}), out


def test_the_line_fits_where_it_goes() -> None:
    assert isinstance(progress_line(console(terminal=False)[0], quiet=False), Plain)
    assert type(progress_line(console(terminal=True)[0], quiet=True)) is Quiet
    live = progress_line(console(terminal=True)[0], quiet=False)
    assert isinstance(live, Live)
    live.close()


def test_a_log_file_gets_few_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    target, out = console(terminal=False)
    line = Plain(target)
    for step in range(1, 101):
        now += 1.0
        line.show({**RECORD, "step": step}, step / 100)
    line.say("a [note] that is long: " + "x" * 200)
    lines = out.getvalue().splitlines()
    steps = [text.split()[2] for text in lines[:-1]]
    assert steps == ["1", "11", "21", "31", "41", "51", "61", "71", "81", "91", "100"]
    assert lines[5] == " 51%  step 51  loss 5.1250  18.3k tok/s  1.30 GiB  0:49 left"
    assert lines[-1] == "a [note] that is long: " + "x" * 200  # not wrapped, and brackets are no markup
    assert "\x1b" not in out.getvalue()


def test_what_is_left_is_reckoned_by_the_steps_that_were_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a first step that compiles, nor by steps that an earlier run has made."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    target, out = console(terminal=False)
    line = Plain(target)
    now += 60.0
    for step in range(51, 101):
        line.show({**RECORD, "step": step}, step / 100)
        now += 1.0
    assert [text.partition("GiB")[2].strip() for text in out.getvalue().splitlines()[:3]] == [
        "",
        "0:39 left",
        "0:29 left",
    ]


def test_a_log_file_shows_a_long_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    target, out = console(terminal=False)
    line = Plain(target)
    for seconds in (0.01, 0.5):  # the first one is over before the first line
        for done in range(0, 3423, 100):
            line.evaluating(done, 3423)
            now += seconds
    assert out.getvalue().splitlines() == [
        "  6%  evaluating 200 of 3,423 samples  0:16 left",
        " 64%  evaluating 2,200 of 3,423 samples  0:06 left",
    ]


def test_a_bar_is_redrawn_and_taken_away() -> None:
    target, out = console(terminal=True)
    line = Live(target)
    line.show(RECORD, 0.5)
    line.say("dropped: step 3")
    line.close()
    assert "step 3  loss 5.1250" in out.getvalue()
    assert "dropped: step 3" in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_the_bar_is_that_of_an_evaluation_while_it_lasts() -> None:
    target, out = console(terminal=True)
    line = Live(target)
    line.show(RECORD, 0.5)
    line.evaluating(0, 3423)
    line.evaluating(1200, 3423)
    line.close()
    assert " 35% evaluating 1,200 of 3,423 samples" in out.getvalue()


def test_quiet_prints_only_messages_that_must_not_be_missed() -> None:
    target, out = console(terminal=False)
    line = Quiet(target)
    line.show(RECORD, 0.5)
    line.evaluating(0, 8)
    line.say("dropped: step 3")
    line.close()
    assert out.getvalue() == "dropped: step 3\n"


def test_words() -> None:
    assert status({**RECORD, "mfu": 0.412}) == "step 3  loss 5.1250  18.3k tok/s  MFU 41.2%  1.30 GiB"
    assert [time_left(10.0, done) for done in (0.0, 0.5, 1.0)] == ["", "  0:10 left", ""]
    assert time_left(3600.0, 0.25) == "  3:00:00 left"
    assert [human(number) for number in (999, 1000, 2.5e6, 3e12)] == ["999", "1k", "2.5M", "3T"]
