"""`shoal train` as a user meets it: what it prints, what it keeps, how it ends. Several ranks are real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shoal.cli import main
from shoal.comm.heartbeat import slowest
from tests.cli.host import Host, in_session, until

SHOAL = [sys.executable, "-m", "shoal"]
SMALL = [
    *["--model.num_layers", "1", "--model.hidden", "32", "--model.ffn", "48"],
    *["--data.seq_len", "32", "--data.global_batch", "4", "--data.validation", "0.0005"],
    *["--run.duration", "3step", "--device", "cpu", "--launch.threads", "1"],
]
MADE_UP = ["--data.source", "synthetic", "--data.synthetic_samples", "64", "--data.validation", "0"]

# The stable keys of the summary: what --json prints and summary.json holds. Add to them; never rename or drop one.
SUMMARY = {
    *("steps", "samples", "tokens", "unit", "loss_first", "loss_last", "eval_loss", "skipped_steps", "was_stopped"),
    *("ranks", "ranks_per_host", "plan"),
    *("parameters", "step_seconds_median", "tokens_per_s", "mfu", "data_wait_fraction", "comm_fraction", "comm_bytes"),
    *("comm_overlap_fraction", "comm_axes", "straggler", "memory_gib_max"),
    *("seconds_to_first_step", "seconds_training", "run_directory"),
    *("saves", "saves_failed", "saved_step", "save_stall_seconds", "checkpoint_dir", "resumed_from", "restarts"),
    "auto_choices",
}
# The stable keys of a step in metrics.jsonl.
STEP = {
    *("step", "loss", "grad_norm", "lr", "tokens", "epoch", "step_seconds", "data_wait_seconds", "tokens_per_s", "mfu"),
    *("memory_gib", "loss_scale", "skipped"),
}
STRAGGLER = set(slowest.METRICS)  # of runs that take some seconds


# ---- a command and what came of it -----------------------------------------------------------------------------------


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()  # one object and nothing else
        value: dict[str, Any] = json.loads(line, parse_constant=refuse_constant)
        return value


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@dataclass
class Command:
    """A running command in a session of its own, by which everything that it starts is found."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, words: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> Command:
        pipe = subprocess.PIPE
        environ = {**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})}
        return cls(
            subprocess.Popen(words, cwd=cwd, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        )

    def ended(self, timeout: float = 60) -> Ended:
        """Its end; nothing that it started may be left."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for pid in in_session(self.process.pid):
                os.kill(pid, signal.SIGABRT)  # which makes Python show where it is
            out, err = self.process.communicate()
            pytest.fail(f"no end within {timeout} s\n{out}\n{err}", pytrace=False)
        left = in_session(self.process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []
        return Ended(self.process.returncode, out, err)


def run(*words: str, cwd: Path, env: dict[str, str] | None = None) -> Ended:
    return Command.start([*SHOAL, *words], cwd=cwd, env=env).ended()


def forked(host: Host, *words: str, cwd: Path, env: dict[str, str] | None = None) -> Ended:
    """As `run`, in a fork of a process that has torch loaded."""
    started = host.run(*words, cwd=cwd, env=env)
    return Ended(started.wait(), started.told, started.said)


def records(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse_constant) for line in (directory / name).read_text().splitlines()]


def losses(directory: Path) -> list[float]:
    return [record["loss"] for record in records(directory) if "loss" in record]


Here = Callable[..., Ended]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """`shoal train` with small settings, one rank, in this process: torch is loaded once for all tests."""
    monkeypatch.chdir(tmp_path)

    def train(*words: str) -> Ended:
        code = main(["train", *SMALL, "--nproc", "1", *words])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return train


# ---- one run on two ranks, looked at from all sides ------------------------------------------------------------------


@dataclass
class Run:
    ended: Ended
    directory: Path


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("two_ranks")
    words = ["--nproc", "2", "--plan", "fp64", "--run.per_rank_metrics", "--run.evaluate_every", "2step"]
    ended = run("train", *SMALL, *words, "--run.name", "two", "--json", "--data.workers", "0", cwd=folder)
    return Run(ended, folder / "runs" / "two")


def test_json_is_the_summary_alone(two_ranks: Run) -> None:
    assert two_ranks.ended.code == 0, two_ranks.ended.err
    summary = two_ranks.ended.json
    assert set(summary) == SUMMARY
    assert (summary["steps"], summary["tokens"], summary["ranks"], summary["was_stopped"]) == (3, 3 * 4 * 32, 2, False)
    assert "dp_replicate=2" in summary["plan"]
    assert summary["run_directory"] == "runs/two"
    assert summary["loss_first"] == pytest.approx(5.6, abs=0.3)
    assert two_ranks.ended.err == ""  # --json implies --quiet


def test_run_directory_holds_what_was_asked_and_what_came_of_it(two_ranks: Run) -> None:
    names = {path.name for path in two_ranks.directory.iterdir()}
    per_rank = {"metrics.rank0.jsonl", "metrics.rank1.jsonl"}
    kept = {"recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "checkpoints", "lock"}
    kept |= {"events.jsonl", "prediction.json"}
    assert names == kept | per_rank
    assert json.loads((two_ranks.directory / "summary.json").read_text()) == two_ranks.ended.json
    environment = json.loads((two_ranks.directory / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert "--run.per_rank_metrics" in environment["command"]
    recipe = yaml.safe_load((two_ranks.directory / "recipe.yaml").read_text())
    assert recipe["model"]["hidden"] == 32
    assert "dp_replicate=2" in recipe["plan"]  # resolved, not `fp64`


def test_metrics_have_a_line_for_each_step_and_each_evaluation(two_ranks: Run) -> None:
    lines = records(two_ranks.directory)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    of_replicas = {"comm_seconds", "comm_overlap_fraction", "comm_bytes"}
    of_replicas |= {"comm_seconds_dp_replicate", "comm_overlap_fraction_dp_replicate"}
    assert all(
        set(line) - STRAGGLER == STEP | (of_replicas if line["step"] in (1, 10, 20, 30) else set()) for line in steps
    )
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 3]  # every second step, and at the end
    assert evaluations[-1]["eval_loss"] == two_ranks.ended.json["eval_loss"]
    assert evaluations[0]["eval_loss"] != evaluations[1]["eval_loss"]


def test_every_rank_writes_its_own_metrics_when_asked(two_ranks: Run) -> None:
    main_rank, other = (records(two_ranks.directory, f"metrics.rank{rank}.jsonl") for rank in (0, 1))
    assert main_rank == records(two_ranks.directory)
    assert [line.get("loss") for line in main_rank] == [line.get("loss") for line in other]
    assert [line.get("step_seconds") for line in main_rank] != [line.get("step_seconds") for line in other]


def test_one_rank_computes_what_two_do(two_ranks: Run, here: Here) -> None:
    ended = here("--plan", "fp64", "--run.evaluate_every", "2step", "--json", "--run.dir", "one")
    assert losses(Path("one")) == pytest.approx(losses(two_ranks.directory), rel=1e-13)
    assert ended.json["eval_loss"] == pytest.approx(two_ranks.ended.json["eval_loss"], rel=1e-13)


# ---- one rank, in this process ---------------------------------------------------------------------------------------


def test_plain_output_is_for_reading(here: Here) -> None:
    ended = here()
    assert ended.code == 0
    assert "\x1b" not in ended.out + ended.err  # neither is a terminal
    assert "done" in ended.out
    assert "run directory" in ended.out
    assert "runs/run" in ended.out
    assert re.search(r"^model  llama: [\d,]+ parameters, fp32$", ended.err, re.MULTILINE)
    assert re.search(r"^100%  step 3  loss \d", ended.err, re.MULTILINE)


def test_quiet_shows_no_progress(here: Here) -> None:
    ended = here("--quiet")
    assert ended.err == ""
    assert "done" in ended.out


def test_the_kept_recipe_does_it_again_bit_for_bit(here: Here) -> None:
    here("--run.dir", "first", "--plan.mb", "2")
    assert main(["train", "first/recipe.yaml", "--run.dir", "second", "--quiet"]) == 0
    assert losses(Path("second")) == losses(Path("first"))
    first, second = (yaml.safe_load(Path(name, "recipe.yaml").read_text()) for name in ("first", "second"))
    assert first.pop("run") == {**second.pop("run"), "dir": "first"}
    assert first == second


def test_another_seed_is_another_run(here: Here) -> None:
    here("--run.dir", "first")
    here("--run.dir", "second", "--run.seed", "1")
    assert losses(Path("second")) != losses(Path("first"))


def test_names_that_are_taken_are_counted_on(here: Here) -> None:
    assert [here("--json", *MADE_UP).json["run_directory"] for _ in range(3)] == [
        "runs/run",
        "runs/run-2",
        "runs/run-3",
    ]


def test_fast_dev_run_keeps_nothing(here: Here) -> None:
    ended = here("--run.fast_dev_run", "--run.duration", "1000step", "--json")
    assert (ended.json["steps"], ended.json["run_directory"]) == (3, None)
    assert ended.json["eval_loss"] is not None
    assert list(Path().iterdir()) == []


def test_a_plan_that_costs_more_than_it_must_is_said_before_the_first_step(here: Here) -> None:
    costly = ["--plan", "recompute=full", "--data.seq_len", "256", "--model.hidden", "256", "--dry-run"]
    (line,) = [line for line in here(*costly).err.splitlines() if "SH" in line]
    assert line.startswith("shoal: SH09 full recompute with memory free: ")
    assert re.search(r'fix: --plan "[^"]+", which saves \d+ % of the step', line)
    assert "SH" not in here(*costly, "--quiet").err + here(*costly, "--plan", "mb=4").err


def test_dry_run_shows_the_plan_and_touches_nothing(here: Here) -> None:
    ended = here("--dry-run", "--nproc", "2", "--plan", "mb=1")
    assert ended.code == 0
    assert "dp_replicate=2" in ended.out
    assert "num_layers: 1" in ended.out
    assert re.search(r"memory +[\d.]+ GiB on the fullest rank, predicted: .*optimizer [\d.]+ MiB", ended.out)
    as_json = here("--dry-run", "--nproc", "2", "--json").json
    predicted = as_json["predicted"]
    assert predicted["parameters"] == predicted["trained_parameters"] > 0
    assert predicted["memory"]["optimizer"] == 8 * predicted["parameters"]
    assert predicted["flops"] >= 6 * 4 * 32 * (predicted["parameters"] - 256 * 32)  # all but the embedding
    assert (as_json["ranks"], as_json["recipe"]["data"]["global_batch"]) == (2, 4)
    assert list(Path().iterdir()) == []


def test_an_average_is_evaluated_and_resumed(here: Here) -> None:
    words = [*MADE_UP, *["--optim.lr", "0.05", "--optim.schedule", "constant", "--data.validation", "0.2", "--json"]]
    averaged = [*words, "--run.ema", "0.5"]
    expected = here(*averaged, "--run.duration", "4step", "--run.dir", "one").json["eval_loss"]
    assert here(*words, "--run.duration", "4step", "--run.dir", "other").json["eval_loss"] != expected
    here(*averaged, "--run.duration", "2step", "--run.dir", "two")
    again = here(*averaged, "--run.duration", "4step", "--run.dir", "two", "--resume", "latest").json
    assert (again["resumed_from"], again["eval_loss"]) == (2, expected)
    refused = here(*averaged, "--plan", "sync=local:2", "--nproc", "2")
    assert refused.code == 2
    assert [problem["code"] for problem in refused.json["error"]["problems"]] == ["T053"]


@pytest.mark.parametrize(("duration", "steps"), [("5step", 5), ("2epoch", 32), ("300tok", 3), ("17sample", 5)])
def test_durations_that_count_work(here: Here, duration: str, steps: int) -> None:
    ended = here(*MADE_UP, "--run.duration", duration, "--json")  # 64 samples of 32 tokens, 4 a step
    assert ended.json["steps"] == steps
    assert records(Path("runs/run"))[-1]["epoch"] == pytest.approx(steps * 4 / 64)


@pytest.mark.alone
def test_duration_by_the_clock(here: Here) -> None:
    ended = here(*MADE_UP, "--run.duration", "0.5sec", "--optim.warmup", "0.1sec", "--json")
    assert ended.json["steps"] > 3
    assert 0.5 <= ended.json["seconds_training"] < 2
    rates = [record["lr"] for record in records(Path("runs/run"))]
    assert max(rates) == pytest.approx(3e-4, rel=0.2)
    assert rates[-1] < 0.5 * max(rates)  # the schedule follows the clock


def test_log_every_thins_the_metrics(here: Here) -> None:
    here(*MADE_UP, "--run.duration", "6step", "--run.log_every", "2")
    assert [record["step"] for record in records(Path("runs/run"))] == [2, 4, 6]


def test_deterministic(here: Here) -> None:
    try:
        here("--run.deterministic", "--run.dir", "first")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    here("--run.dir", "second")
    assert losses(Path("first")) == losses(Path("second"))  # on a CPU nothing else would have come out


def test_documents_do_not_see_each_other(here: Here) -> None:
    corpus = Path("corpus")
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.txt").write_text("short text " * 2)  # several in each sample of 32 bytes
    apart = here("--data.source", "corpus", "--data.mask_documents", "--json", "--data.validation", "0")
    together = here("--data.source", "corpus", "--json", "--data.validation", "0")
    assert apart.json["loss_first"] != together.json["loss_first"]


def test_one_token_is_a_token_and_no_sample(here: Here) -> None:
    ended = here("--data.seq_len", "1", *MADE_UP)
    assert ended.code == 0, ended.err
    assert "3 (12 tokens)" in ended.out
    assert " tokens/s, " in ended.out
    assert " tok/s  " in ended.err


def test_one_token_is_not_dealt_to_several_ranks(here: Here) -> None:
    ended = here("--data.seq_len", "1", *MADE_UP, "--nproc", "2", "--plan", "cp=2")
    assert ended.code == 2
    assert "which do not divide its 1 tokens" in ended.err  # said before any rank starts


def test_images(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.name", "resnet", "--model.width", "8"]
    words += ["--data.synthetic_kind", "images", "--data.image_size", "8", "--data.vocabulary", "10"]
    data = ["--data.global_batch", "4", "--run.duration", "2step", "--device", "cpu", "--json"]
    code = main(["train", *words, *MADE_UP, *data])
    assert code == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["tokens"], summary["unit"]) == (2 * 4, "samples")  # one per image


def test_a_model_of_ones_own(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(OWN_MODEL)
    words = ["--model.name", "own.py:build", "--model.width", "24", "--data.seq_len", "8", "--data.global_batch", "4"]
    assert main(["train", *words, *MADE_UP, "--run.duration", "3step", "--device", "cpu", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["parameters"] == 256 * 24 + 24 * 256 + 256
    assert summary["loss_first"] == pytest.approx(5.5, abs=0.5)


def test_tensorboard(here: Here) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert here(*MADE_UP, "--run.trackers", "[tensorboard]").code == 0
    events = EventAccumulator("runs/run")
    events.Reload()
    scalars = events.Scalars("loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3]
    assert [scalar.value for scalar in scalars] == pytest.approx(losses(Path("runs/run")))


# ---- numbers that are not finite -------------------------------------------------------------------------------------


def test_nan_ends_the_run_and_says_where(here: Here) -> None:
    Path("own.py").write_text(OWN_MODEL)
    ended = here(*MADE_UP, *own("nan_at_step_1"))
    assert ended.code == 3
    assert "step 2: the loss is not finite on rank 0, microbatch 0" in ended.err  # counted as in the metrics
    assert "--run.on_nan skip" in ended.err
    assert not Path("runs/run/summary.json").exists()  # a run that did not end well


def test_nan_is_skipped_when_asked(here: Here) -> None:
    Path("own.py").write_text(OWN_MODEL)
    ended = here(*MADE_UP, *own("nan_at_step_1"), "--run.on_nan", "skip", "--json")
    assert ended.code == 0
    assert (ended.json["steps"], ended.json["skipped_steps"]) == (3, 1)
    assert [record["skipped"] for record in records(Path("runs/run"))] == [False, True, False]
    assert ended.json["loss_last"] == "nan"  # the mean of the last ten; JSON has no other word for it
    assert "skipped: step 2" in ended.err


def own(function: str) -> list[str]:
    return ["--model", "{name: own.py:" + function + "}"]


OWN_MODEL = """
import os
import signal
import torch
import torch.distributed as dist
from torch import nn

class Bigram(nn.Module):
    def __init__(self, width=8, at_step_1=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.rates = torch.linspace(0, 1, 3).tolist()  # looks at values, which the meta device does not have
        self.at_step_1, self.calls = at_step_1, 0

    def forward(self, tokens):
        self.calls += 1
        logits = self.head(self.embedding(tokens))
        return self.at_step_1(logits) if self.calls == 2 and self.at_step_1 else logits

def build(width=8):
    return Bigram(width)

def nan_at_step_1():
    return Bigram(at_step_1=lambda logits: logits * float("nan"))

def rank_1_raises():
    def fail(logits):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the fault of rank 1")
        return logits
    return Bigram(at_step_1=fail)

def rank_1_is_killed():
    def die(logits):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return logits
    return Bigram(at_step_1=die)

def raises():
    raise KeyError("made on purpose")
"""


# ---- bad ends, with real processes -----------------------------------------------------------------------------------


def test_a_builder_that_raises_is_a_failed_run(here: Here) -> None:
    Path("own.py").write_text(OWN_MODEL)
    ended = here(*MADE_UP, *own("raises"), "--json")
    assert ended.code == 3
    assert ended.json["exit_code"] == 3
    assert "rank 0 of 1 failed: KeyError: 'made on purpose'" in ended.err
    assert 'raise KeyError("made on purpose")' in ended.err
    assert not Path("runs").exists()


def test_the_rank_that_raised_is_the_one_that_is_shown(host: Host, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    ended = forked(host, "train", *SMALL, *MADE_UP, *own("rank_1_raises"), "--nproc", "2", "--quiet", cwd=tmp_path)
    assert ended.code == 3
    assert ended.out == ""
    first = ended.err.splitlines()[0]
    assert first == "shoal: the run failed: rank 1 of 2 failed: ZeroDivisionError: the fault of rank 1 [N022]"
    assert 'raise ZeroDivisionError("the fault of rank 1")' in ended.err
    assert "rank 0" not in ended.err


def test_a_rank_that_was_killed_is_named(host: Host, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    words = [*SMALL, *MADE_UP, *own("rank_1_is_killed"), "--nproc", "2", "--launch.max_restarts", "0", "--json"]
    ended = forked(host, "train", *words, cwd=tmp_path)
    assert ended.code == 3
    assert "rank 1 of 2 was killed by signal 9 (SIGKILL)" in ended.json["error"]["problems"][0]["what"]


@pytest.fixture(params=[(signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGINT, 1)], ids=["int-2", "term-2", "int-1"])
def stopped(request: pytest.FixtureRequest, host: Host, tmp_path: Path) -> tuple[Ended, Path]:
    """A long run that is sent a signal once it is under way."""
    number, nproc = request.param
    words = ["train", *SMALL, *MADE_UP, "--run.duration", "1h", "--nproc", str(nproc), "--json"]
    started = host.start(*words, cwd=tmp_path)
    metrics = tmp_path / "runs/run/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, started)
    os.kill(started.pid, number)
    return Ended(started.wait(20), started.told, started.said), tmp_path / "runs/run"


def test_a_run_that_is_told_to_stop_ends_in_good_order(stopped: tuple[Ended, Path]) -> None:
    ended, directory = stopped
    assert ended.code == 130, ended.err
    assert ended.json["was_stopped"] is True
    assert ended.json["steps"] > 3
    assert json.loads((directory / "summary.json").read_text()) == ended.json
    assert records(directory)[-1]["step"] == ended.json["steps"]
