"""Every problem of a command is reported at once, each once, and its fix can be typed.

One rule limits this: while a value cannot be read, nothing is checked that needs torch. A mistyped key is then reported
in a fraction of a second, and problems of the model and of the data when all settings can be read.

`MISTAKES` has one entry for each mistake: settings, words of a plan, and a part of the message. They are combined to
commands of two to five (`ROWS`), and every two of them that do not touch the same value (`test_every_two`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.cli import main
from shoal.errors import ShoalError
from shoal.train.run import Run
from shoal.verification.api import verify

BASE = {
    "launch.nproc": "48",
    "launch.device": "cpu",
    "data.source": "synthetic",
    "data.seq_len": "240",
    "data.global_batch": "96",
}
"""The command that has no problem: 48 ranks, so that several degrees fit."""


@dataclass(frozen=True)
class Mistake:
    """What a user types, and what has to be said about it."""

    said: str
    plan: tuple[str, ...]
    settings: dict[str, str]
    beside: frozenset[str]
    """Mistakes that decide whether this one is one, or whether there is another."""


def mistake(said: str, plan: str = "", *, beside: str = "", **settings: str) -> Mistake:
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return Mistake(said, tuple(plan.split()), dotted, frozenset(beside.split()))


MISTAKES = {
    # values that cannot be read, and keys that do not exist
    "rate": mistake("optim.lr must be greater than 0, got -1", optim__lr="-1"),
    "key": mistake("unknown key 'optim.epss'", optim__epss="1e-8"),
    "switch": mistake("run.deterministic must be true or false, got 'perhaps'", run__deterministic="perhaps"),
    "resume": mistake("--resume must be auto, latest, fresh or a step, got 'sometimes'", resume="sometimes"),
    "word": mistake("plan: a plan has no key 'recompue'", "recompue=none"),
    "precision": mistake("plan: precision must be fp64, fp32, bf16, fp16 or fp8, got 'bf61'", "precision=bf61"),
    # the plan
    "ranks": mistake("does not divide the number of ranks, 48", "cp=5"),
    "order": mistake("gpipe orders the stages of a pipeline, but pp=1", "gpipe", beside="stages"),
    "offload": mistake("diloco:8 exchanges weights on the device", "sync=diloco:8 offload=optimizer", beside="ranks"),
    # the batch
    "batch": mistake("batch 96 is not divisible by mb=5", "mb=5", beside="ranks"),
    # comm
    "fragments": mistake("comm.fragments 4 has no effect without sync=", comm__fragments="4", beside="offload"),
    "warmup": mistake("comm.warmup_steps 5 has no effect without", comm__warmup_steps="5", beside="offload"),
    # optim
    "moments": mistake("optim.state_dtype bf16 is for adamw", optim__name="sgd", optim__state_dtype="bf16"),
    "weights": mistake(
        "weights in bf16 need the precision bf16 or fp8, got fp32",
        optim__param_dtype="bf16",
        beside="precision offload moments",
    ),
    # the model
    "stages": mistake("pp=4 stages are more than the 2 blocks", "pp=4", model__num_layers="2"),
    "splits": mistake("tp=4 does not divide num_kv_heads=2", "tp=4"),
    "norm": mistake("sync_batch_norm needs a batch norm in the model", run__sync_batch_norm="true"),
    "argument": mistake("unknown setting 'hiden'", model__hiden="64", beside="stages splits norm outputs"),
    # the data
    "source": mistake("no such file or folder", data__source="nowhere"),
    "outputs": mistake("the model must have at least 256 outputs", model__vocabulary="100", beside="source"),
    # durations
    "duration": mistake("run.duration must be at least one step, got 0step", run__duration="0step"),
    "interval": mistake("run.evaluate_every must be a number of steps", run__evaluate_every="2min"),
    "failures": mistake("checkpoint.mtbf must be a time, got 5step", checkpoint__mtbf="5step"),
    # packages
    "tracker": mistake("the tracker wandb needs the package wandb", run__trackers="[wandb]"),
}


UNREADABLE = {"rate", "key", "switch", "resume", "word", "precision"}
NEEDS_TORCH = {"stages", "splits", "norm", "argument", "source", "outputs"}


def reported(names: tuple[str, ...]) -> tuple[str, ...]:
    """The mistakes that are reported at once."""
    return tuple(name for name in names if name not in NEEDS_TORCH) if UNREADABLE & set(names) else names


def are_independent(one: str, other: str) -> bool:
    return other not in MISTAKES[one].beside and one not in MISTAKES[other].beside


@dataclass
class Command:
    """`shoal train --dry-run` with settings and words of a plan."""

    settings: dict[str, str]
    plan: list[str]

    @classmethod
    def with_mistakes(cls, *names: str) -> Command:
        settings = dict(BASE)
        for name in names:
            settings |= MISTAKES[name].settings
        return cls(settings, [word for name in names for word in MISTAKES[name].plan])

    def words(self) -> list[str]:
        settings = [word for key, value in self.settings.items() for word in (f"--{key}", value)]
        return ["train", "--dry-run", "--json", *settings, "--plan", " ".join(self.plan)]

    def fix(self, problem: dict[str, str]) -> None:
        """Type the first fix of a problem."""
        if meant := re.fullmatch(r"unknown (?:key|setting) '(.+)'", problem["what"]):
            del self.settings[next(key for key in self.settings if key.endswith(meant[1]))]
        if meant := re.fullmatch(r"plan: a plan has no key '(.+)'", problem["what"]):
            self.plan = [word for word in self.plan if not word.startswith(f"{meant[1]}=")]
        flag = re.match(r"--([a-z_.]+) ([^\s,:]+)", problem["fix"])
        word = re.match(r"([a-z_0-9]+)=([^\s,]+)", problem["fix"])
        if flag:
            self.settings[flag[1]] = flag[2]
        elif word:
            self.plan = [each for each in self.plan if not each.startswith(f"{word[1]}=")] + [word[0]]
        else:
            pytest.fail(f"nothing to type: {problem['fix']}")


Problems = list[dict[str, str]]


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in a folder of its own; returns its problems, none where it is accepted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed

    def of(words: list[str]) -> Problems:
        code = main(words)
        out = capsys.readouterr().out
        found: Problems = json.loads(out)["error"]["problems"] if code else []
        assert code == (2 if found else 0)
        return found

    return of


def assert_each_once(found: Problems, names: tuple[str, ...]) -> None:
    messages = [problem["what"] for problem in found]
    for name in names:
        assert [MISTAKES[name].said in what for what in messages].count(True) == 1, (name, messages)
    assert len(messages) == len(names), messages


ROWS = [
    ("splits", "rate"),
    ("splits", "duration", "moments"),
    ("ranks", "splits", "fragments"),
    ("batch", "norm", "warmup", "failures"),
    ("offload", "outputs", "interval"),
    ("order", "key", "source", "moments", "duration"),
    ("word", "rate", "resume", "splits"),
    ("precision", "ranks", "fragments", "interval"),
    ("stages", "batch", "moments", "warmup"),
    ("stages", "splits", "weights", "outputs", "failures"),
    ("source", "splits", "duration", "switch"),
    ("argument", "batch", "weights"),
    ("offload", "batch", "splits", "norm", "rate"),
    ("weights", "fragments", "source"),
    ("tracker", "ranks", "moments", "key"),
    ("norm", "resume", "offload", "precision", "source"),
]


@pytest.mark.parametrize("names", ROWS, ids="-".join)
def test_each_problem_is_reported_once(names: tuple[str, ...], problems: Any) -> None:
    assert_each_once(problems(Command.with_mistakes(*names).words()), reported(names))


NO_SETTING = {"tracker"}
"""Its fix is a command of pip."""


@pytest.mark.parametrize("names", [names for names in ROWS if not NO_SETTING & set(names)], ids="-".join)
def test_typing_all_fixes_gives_a_command_that_is_accepted(names: tuple[str, ...], problems: Any) -> None:
    command = Command.with_mistakes(*names)
    for _ in range(1 if reported(names) == names else 2):
        for problem in problems(command.words()):
            command.fix(problem)
    assert problems(command.words()) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_each_alone(name: str, problems: Any) -> None:
    assert_each_once(problems(Command.with_mistakes(name).words()), (name,))


@pytest.mark.parametrize("name", MISTAKES)
def test_every_two(name: str, problems: Any) -> None:
    """Each mistake beside every other that does not decide whether it is one."""
    for one, other in combinations(MISTAKES, 2):
        if one == name and are_independent(one, other):
            assert_each_once(problems(Command.with_mistakes(one, other).words()), reported((one, other)))


def test_no_mistake(problems: Any) -> None:
    assert problems(Command.with_mistakes().words()) == []


def test_a_mistyped_key_is_reported_without_torch() -> None:
    code = """
import sys
from shoal.cli import main
for verb in ("train", "verify", "bench compress"):
    assert main([*verb.split(), "--optim.lrr", "3", "--run.duration", "0step"]) == 2
assert "torch" not in sys.modules
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (ended.stderr.count("[R011]"), ended.stderr.count("[R028]")) == (3, 2)  # verify has a duration of its own


# ---- values that could not be read ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "plan"),
    [
        ({"data.global_batch": "0"}, ""),
        ({"launch.nproc": "0"}, "tp=2"),
        ({}, "tp=x sp"),
        ({}, "pp=x gpipe"),
        ({}, "ppp=2 gpipe"),
        ({}, "cp=0 ulysses"),
        ({"comm.fragments": "2"}, "sync=diloco"),
        ({"comm.warmup_steps": "2"}, "compress=int9"),
        ({"optim.state_dtype": "bf16"}, "precision=fp65"),
        ({"optim.param_dtype": "bf16"}, "precision=bf61"),
        ({}, "zero=7 dp_shard=2 dp_replicate=24"),
        ({"model.hidden": "99999999999"}, "tp=2"),
        ({"run.duration": "soon", "optim.warmup": "9sec"}, ""),
        ({"data.seq_len": "-3"}, "cp=2"),
    ],
)
def test_a_value_that_cannot_be_read_is_the_only_problem(settings: dict[str, str], plan: str, problems: Any) -> None:
    """Nothing is said about what follows from the default that stands in its place."""
    found = problems(Command({**BASE, **settings}, plan.split()).words())
    assert len(found) == 1, found


def test_a_recipe_that_does_not_exist_does_not_hide_mistyped_settings(problems: Any) -> None:
    found = problems(["train", "gone.yaml", "--json", "--optim.lr", "-1", "--resume", "x", "--quiet=1"])
    assert [problem["what"].split()[0] for problem in found] == ["--quiet", "there", "optim.lr", "--resume"]


def test_the_directory_of_a_run_is_checked_with_the_rest(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes").write_text("mine")
    command = Command.with_mistakes("splits")
    command.settings["run.dir"] = "taken"
    messages = [problem["what"] for problem in problems(command.words())]
    assert len(messages) == 2
    assert "'taken' is not empty and holds no run of shoal" in messages[1]


def test_a_plan_that_the_planner_cannot_complete_does_not_hide_the_rest(problems: Any) -> None:
    command = Command.with_mistakes("moments", "source", "interval")
    command.settings["launch.nproc"] = "2"
    command.plan = ["auto", "tp=3"]
    messages = [problem["what"] for problem in problems(command.words())]
    assert len(messages) == 4, messages
    assert messages[0] == "no plan for llama on cpu:2x1 has tp=3"


# ---- other commands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "verify --nproc 8 --plan tp=3",
            ["tp=3 does not divide the number of ranks, 8", "tp=3 does not divide num_heads"],
        ),
        (
            "verify --nproc 4 --plan tp=4_mb=5 --steps 0 --tolerance -1 --precision fp7",
            [
                "steps must",
                "tolerance must",
                "precision must",
                "batch 32 is not divisible by mb=5",
                "tp=4 does not divide",
            ],
        ),
        (
            "verify --nproc 2 --plan sync=local:4_offload=optimizer --optim.param_dtype bf16 --optim.lr -1",
            ["optim.lr must be", "optim.param_dtype must be fp32", "sync=local:4 exchanges weights"],
        ),
        (
            "verify --nproc 2 --real --data.source nowhere --plan tp=2_mb=5",
            ["batch 32 is not divisible", "no such file or folder"],
        ),
        ("verify --nproc 2 --real --model.vocabulary 10", ["the model must have at least 257 outputs"]),
        (
            "plan llama3-8b --cluster h200:8 --plan gpipe_pp=1_tp=x --cp 3 --top 0 --price -1",
            ["--top 0", "--price -1.0", "tp must be a whole number", "gpipe orders the stages"],
        ),
        (
            "plan llama3-8b --cluster h200:8 --plan gpipe_pp=1_sync=local:4_dp_replicate=1 --cp 3 --param-dtype bf16",
            ["sync=local:4 changes the traffic", "gpipe orders", "weights in bf16 do not support sync", "has cp=3"],
        ),
        (
            "plan llama9-8b --cluster h999:8 --plan tp=x --max-memory much --base-batch 3",
            ["h999", "llama9-8b", "tp must be a whole number", "much", "--learning-rate and --base-batch"],
        ),
        (
            "bench compress --nproc 2 --steps 1 --methods tp=2 --optim.lr -1 --data.global_batch 7",
            ["optim.lr must be", "--methods must have", "--steps must be 2 or more", "batch 7 is not divisible"],
        ),
    ],
)
def test_other_commands(words: str, said: list[str], problems: Any) -> None:
    """An underscore before a word of a plan stands for a space."""
    plan = [re.sub(r"_(?=\w+[=:]|gpipe)(?!replicate|dtype)", " ", word) for word in words.split()]
    messages = [problem["what"] for problem in problems([*plan, "--json"])]
    assert len(messages) == len(said), messages
    assert all(sum(part in what for what in messages) == 1 for part in said), messages


def message(call: Any) -> list[str]:
    with pytest.raises(ShoalError) as caught:
        call()
    return [problem.what for problem in caught.value.problems]


def test_arguments_of_a_run() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.zeros(())

    wrong: dict[str, Any] = {"clip": -1.0, "clipp": 1.0, "mixed_precision": "bf16"}
    messages = message(lambda: Run("tp=3 gpipe sync=auto", loss=loss, device="cpu", **wrong))
    said = [
        "no argument clipp",
        "no argument mixed_precision",
        "clip must be a number above 0, got -1.0",
        "sync=auto is",
        "tp=3 does",
        "gpipe",
    ]
    assert len(messages) == len(said), messages
    assert all(part in what for part, what in zip(said, messages, strict=True)), messages
    messages = message(lambda: Run("fp32 sync=local:4", loss=loss, device="cpu", fused_loss=True, param_dtype="bf16"))
    assert len(messages) == 3, messages


def test_a_word_that_no_plan_has_does_not_hide_the_ranks() -> None:
    assert [what.split()[0] for what in message(lambda: Run("tp=2 pp=3 zz=1", device="cpu"))] == ["a", "tp=2"]
    assert len(message(lambda: Run("pp=x gpipe", device="cpu"))) == 1  # whether gpipe has stages is not known


BATCH = (torch.ones(4, 4), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({"steps": "3"}, ("V002",)),
        ({"tolerance": "x", "precision": 3}, ("V001", "R050")),
        ({"lr": "x", "clip": -1, "seed": "x"}, ("R048",)),
        ({"nproc": 0}, ("R048",)),
        ({"nproc": "2"}, ("R048",)),
        ({"build_model": 3, "plan": "dp_replicate=3"}, ("V051", "P011")),
        ({"steps": "3", "batch": [], "loss": 3, "device": "gpu"}, ("V002", "R049", "V050", "T018")),
        ({"batch": 3, "plan": "tp=2 zz=1"}, ("D024", "P002")),
    ],
)
def test_arguments_of_verify(options: dict[str, Any], codes: tuple[str, ...]) -> None:
    given = {"build_model": nn.Linear(4, 4), "batch": BATCH, "plan": "dp_replicate=2", **options}
    with pytest.raises(ShoalError) as caught:
        verify(**given)
    assert caught.value.codes == codes
    assert "--" not in str(caught.value)


def test_things_to_prepare() -> None:
    with Run("bf16", device="cpu", param_dtype="bf16") as run:
        model = nn.Linear(2, 2)
        wrapped = nn.DataParallel(model)
        messages = message(lambda: run.prepare(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), 3))
        assert len(messages) == 3, messages
        run.prepare(model)  # nothing was placed


def test_all_problems_of_a_model_of_ones_own() -> None:
    """Problems of its description and of its modules."""
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with Run("recompute=full", device="cpu", sync_batch_norm=True, fused_loss=True) as run:
        messages = message(lambda: run.prepare(tied))
    assert len(messages) == 3, messages
