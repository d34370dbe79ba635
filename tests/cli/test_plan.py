"""`shoal plan`: fast, without torch, in JSON as promised, and kind to mistakes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.blueprint.plan import Plan
from shoal.cli import main
from shoal.cli.overrides import parse
from shoal.cli.train import Train
from shoal.planner.commands import commands
from shoal.planner.request import PlanRequest
from shoal.planner.task import Task
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.presets.models import find_model
from shoal.predict.workload import Workload
from tests.cli.host import Host, Started
from tests.cover import wide
from tests.speed import processor_seconds, slowness

COMMAND = Path(sys.executable).with_name("shoal")


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, "plan", *words], capture_output=True, text=True, check=False)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


LARGE = "llama3-405b --cluster h100:8x2048 --seq-len 8192 --global-batch 2048 --json"
SMALL = "llama3-8b --cluster h200:8 --seq-len 8192 --global-batch 64"
CHEAP = "llama3-1b --cluster h100:8x4 --seq-len 2048 --global-batch 128 --by money --json"
LLAMA = "--hidden 4096 --layers 32 --heads 32 --kv-heads 8 --ffn 14336 --vocabulary 128256"
TOO_LARGE = "llama3-70b --cluster h100:8 --seq-len 8192 --global-batch 64"


@pytest.mark.parametrize(("words", "bound"), [wide(LARGE, 3.0), (SMALL, 1.0)])
def test_it_is_fast(words: str, bound: float) -> None:
    """At the latest when it is tried for the third time, and on a slow machine by as much later as Python is slow."""
    command = [COMMAND, "plan", *words.split()]
    assert any(processor_seconds(command)[0] <= bound * slowness() for _ in range(3))


def test_torch_stays_away() -> None:
    code = (
        f"from shoal.cli import main; import sys; main(['plan', *{SMALL.split()!r}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_json_is_as_promised(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asked(capsys, *SMALL.split(), "--json", "--explain", "--tokens", "1T", "--price", "2")
    assert code == 0
    told = json.loads(out)
    assert len(told["plans"]) == 5
    for one in told["plans"]:
        memory, step = one["memory_gib"], one["step_s"]
        assert set(one) >= {"plan", "memory_gib", "step_s", "mfu", "tokens_per_s_per_device"}
        causes = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "logits", "allocator")
        assert memory["total"] == pytest.approx(sum(memory[cause] for cause in causes) + memory["context"], abs=0.01)
        seconds = [value for cause, value in step.items() if cause not in ("total", "low", "high")]
        assert step["total"] == pytest.approx(sum(seconds), abs=1e-3)
        assert step["low"] < step["total"] < step["high"]
        assert 0 < one["mfu"] < 1
    assert all(set(one) == {"move", "plan", "reason"} for one in told["rejected"])
    assert isinstance(told["lint"], list)
    assert told["explain"][0]["move"] == "one device"
    assert told["run"]["cost"] == pytest.approx(2 * told["run"]["device_hours"])
    assert told["run"]["days"] * 24 * 8 == pytest.approx(told["run"]["device_hours"])


def test_people_see_plans_causes_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asked(capsys, *SMALL.split(), "--explain")
    assert code == 0
    for words in (
        "all numbers predicted",
        "dp_shard=8",
        "activations",
        "matmul",
        "80 % interval",
        "alternatives",
        "rule of thumb",
        "from one device",
        "Amdahl",
    ):
        assert words in out
    assert "shoal train --model.name llama --model.preset" in out


NARROW = "--cluster h200:1 --seq-len 4096 --global-batch 2 --precision fp8 --param-dtype bf16 --state-dtype bf16"


@pytest.mark.parametrize("how", ["", "--eager"])
def test_the_command_trains_what_was_judged(capsys: pytest.CaptureFixture[str], how: str) -> None:
    words = ["llama3-8b", *NARROW.split(), *how.split()]
    _, out, _ = asked(capsys, *words)
    host, torchrun, slurm = out.splitlines()[-5::2]
    command, words_of = host, shlex.split(host)
    recipe = parse(Train, words_of[2:], prog="shoal train")[1].complete()
    assert (recipe.model.name, recipe.model.preset) == ("llama", "llama3-8b")
    assert shlex.split(torchrun)[:6] == ["torchrun", "--standalone", "--nproc-per-node", "1", "-m", "shoal"]
    assert slurm.startswith("srun --nodes 1 --ntasks-per-node 1 --gpus-per-node 1 shoal train ")
    for each in (torchrun, slurm):  # the same settings; the launcher has the number of processes
        assert each.endswith(f" shoal train {shlex.join(words_of[2:-2])}")
    assert (recipe.optim.param_dtype, recipe.optim.state_dtype, recipe.run.compile) == ("bf16", "bf16", not how)
    assert (recipe.data.seq_len, recipe.data.global_batch, recipe.launch.nproc) == (4096, 2, 1)
    _, out, _ = asked(capsys, *words, "--json")
    told = json.loads(out)
    assert told["command"] == command
    assert str(recipe.plan.resolve(1)) == told["plans"][0]["plan"]


def test_the_command_has_as_many_processes_as_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(capsys, *CHEAP.split())
    told = json.loads(out)
    assert told["command"].endswith(f"--nproc {told['plans'][0]['devices']}")
    _, out, _ = asked(capsys, "gpt3-6.7b", "--cluster", "h100:8x8", "--json")
    found = json.loads(out)["commands"]
    assert list(found) == ["8 hosts, by ssh", "torchrun, on each host", "Slurm"]
    assert found["8 hosts, by ssh"].startswith("shoal train RECIPE.yaml --plan ")
    assert "--nnodes 8 --nproc-per-node 8 --rdzv-backend c10d" in found["torchrun, on each host"]


def test_words_are_constraints(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3-70b", "--cluster", "h100:8x8", "--seq-len", "8192", "--global-batch", "128", "--json"]
    _, out, _ = asked(capsys, *words, "--tp", "8", "--plan", "zero=1 recompute=full", "--max-memory", "70GiB")
    for one in json.loads(out)["plans"]:
        assert {"tp=8", "zero=1", "recompute=full"} <= set(one["plan"].split())
        assert one["memory_gib"]["total"] <= 70


def test_words_that_say_a_default_are_constraints_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3-70b", "--cluster", "h100:8x8", "--seq-len", "8192", "--global-batch", "512", "--json"]
    _, free, _ = asked(capsys, *words)
    assert any("recompute=" in one["plan"] for one in json.loads(free)["plans"])
    for said in (["--recompute", "none"], ["--plan", "recompute=none"]):
        _, out, _ = asked(capsys, *words, *said)
        assert not any("recompute=" in one["plan"] for one in json.loads(out)["plans"])
    _, out, _ = asked(capsys, *SMALL.split(), "--plan", "fp32", "--json")
    assert not any("bf16" in one["plan"] for one in json.loads(out)["plans"])
    _, out, _ = asked(capsys, *SMALL.split(), "--schedule", "interleaved", "--json")
    assert all("interleaved" in one["plan"] for one in json.loads(out)["plans"])


def test_what_a_run_would_reject_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asked(capsys, *SMALL.split(), "--pp", "2", "--schedule", "zbv")
    assert code == 1
    assert "rejected: zbv splits each backward in two" in out
    assert "--eager" in out
    code, out, _ = asked(capsys, *SMALL.split(), "--pp", "2", "--schedule", "zbv", "--eager")
    assert code == 0


def test_money_may_want_fewer_devices(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(capsys, *CHEAP.split())
    plans = json.loads(out)["plans"]
    assert plans[0]["devices"] < 32
    costs = [plan["cost_of_billion_tokens"] for plan in plans]
    assert costs == sorted(costs)
    first = plans[0]  # what a device does in an hour, at the preset's price
    assert costs[0] == pytest.approx(1e9 / first["tokens_per_s_per_device"] / 3600 * 6.88, rel=1e-3)


def test_who_asks_for_the_cheapest_sees_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3-1b", "--seq-len", "2048", "--global-batch", "64", "--by", "money", "--cluster"]
    for more, column, least, most in (
        (["h100:4", "--price", "3600"], "money/B tokens", 5e3, 1e5),
        (["h100-96:4"], "device-hours/B tokens", 1, 1e4),
    ):
        _, out, _ = asked(capsys, *words, *more)
        lines = out.splitlines()
        head = next(number for number, line in enumerate(lines) if line.startswith("plan "))
        assert lines[head].rstrip().endswith(column)
        assert least < float(lines[head + 1].split()[-1].replace(",", "")) < most
        assert ("at 3600 for one device and one hour" in out) == ("--price" in more)


def test_dimensions_and_configs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = asked(capsys, *LLAMA.split(), *SMALL.split()[1:], "--json")
    _, named, _ = asked(capsys, *SMALL.split(), "--json")
    ours, theirs = json.loads(out), json.loads(named)
    assert ours["parameters"] == theirs["parameters"]
    assert ours["plans"] == theirs["plans"]
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "model_type": "llama", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = asked(capsys, str(tmp_path / "config.json"), *SMALL.split()[1:], "--json")
    assert json.loads(out)["plans"] == theirs["plans"]


def test_any_module_is_traced(host: Host, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build():\n"
        "    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]\n"
        "    return nn.Sequential(*layers), torch.zeros(4, 512)\n"
    )
    words = ["net.py:build", "--cluster", "h100:8", "--global-batch", "4096", "--json"]
    ended = host.run("plan", *words, cwd=tmp_path)
    assert ended.code == 0, ended.said
    told = ended.json
    assert told["parameters"] == 6 * (2 * 512 * 2048 + 2048 + 512)
    assert {"tp=1", "pp=1", "cp=1", "mb=512"} <= set(told["plans"][0]["plan"].split())


@pytest.mark.parametrize(("sequence", "is_said"), [(64, True), (1, False)])
def test_commands_of_a_traced_model_have_the_length_of_its_samples(sequence: int, is_said: bool) -> None:
    task = Task(
        workload=find_model("resnet50"), cluster=parse_cluster("h100:8"), sequence=sequence, global_batch=8
    )  # no transformer, as most traced models
    request = PlanRequest(model="net.py:build", cluster="h100:8", seq_len=sequence, global_batch=8)
    made = commands(task, Plan.parse("mb=1").resolve(8), request)["one host"]
    assert ("--data.seq_len 64" in made) is is_said
    assert "--model.name net.py:build" in made


def test_what_fits_nowhere_ends_with_1_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asked(capsys, *TOO_LARGE.split())
    assert code == 1
    assert "no plan fits: the smallest, " in out
    assert "changes that would fit:" in out
    assert "--cluster h100:8x2" in out
    code, out, _ = asked(capsys, *TOO_LARGE.split(), "--json")
    assert code == 1
    assert json.loads(out)["plans"] == []
    assert json.loads(out)["suggestions"]


WRONG = {
    "an unknown model": ("lama3-8b --cluster h100:8", "no model 'lama3-8b'", "llama3-8b"),
    "an unknown device": ("llama3-8b --cluster h1000:8", "no preset of a device 'h1000'", "h100:8"),
    "no size": ("llama3-8b --cluster h100:zero", "'zero' is not a number of devices", "h100:8 for one node"),
    "no model": ("--cluster h100:8 --hidden 512", "which model?", "--layers 32"),
    "a tp that is none": ("llama3-70b --cluster h100:8x8 --tp 3", "has tp=3", "--tp 1, 2, 4 or 8"),
    "two that exclude each other": (
        "llama3-70b --cluster h100:8x8 --tp 8 --pp 16",
        "all of tp=8 pp=16",
        "leave out --tp or --pp",
    ),
    "a device of two sizes": ("llama3-8b --cluster a100:8", "no preset of a device 'a100'", "a100-40:8 or a100-80:8"),
    "an mb that divides nothing": (
        "llama3-8b --cluster h100:8 --global-batch 64 --mb 3",
        "mb=3 divides no",
        "--mb 1, 2",
    ),
    "a sequence of nothing": ("llama3-8b --cluster h100:8 --seq-len 0", "--seq-len 0", "1 or more"),
    "more memory than there is": ("llama3-8b --cluster h100:8 --max-memory 200GiB", "has 79.1 GiB", "75GiB"),
    "a price below 0": ("llama3-8b --cluster h100:8 --price -1", "--price -1.0 is below 0", "--price 2.5"),
    "a file without a function": ("net.py --cluster h100:8", "which function of it?", "net.py:function"),
    "given twice": ("llama3-8b --cluster h100:8 --plan tp=2 --tp 4", "tp is given twice", '--plan "auto"'),
    "no amount": ("llama3-8b --cluster h100:8 --max-memory lots", "got 'lots'", "70GiB"),
    "no config": ("nowhere/config.json --cluster h100:8", "cannot be read", "config.json"),
    "no file": ("llama3-8b --cluster nowhere.yaml", "cannot be read", "shoal calibrate"),
    "weights in less than products see": (
        "llama3-8b --cluster h100:8 --precision fp32 --param-dtype bf16",
        "weights in bf16 need the precision bf16 or fp8, got fp32",
        "--param-dtype fp32, or --precision bf16",
    ),
    "no batch": ("llama3-8b --cluster h100:8 --global-batch -1", "--global-batch -1", "1 or more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_get_one_message(capsys: pytest.CaptureFixture[str], name: str) -> None:
    words, what, fix = WRONG[name]
    code, out, err = asked(capsys, *words.split())
    assert code == 2
    assert out == ""
    assert what in err
    assert fix in err.split("fix:")[1]


# ---- `plan: auto` ---------------------------------------------------------------------------------------------------

QUICK = ["--data.source", "synthetic", "--data.seq_len", "32", "--data.global_batch", "8", "--run.duration", "2step"]


def train(host: Host, cwd: Path, *words: str) -> Started:
    return host.run("train", *QUICK, "--nproc", "2", "--device", "cpu", *words, cwd=cwd)


def test_a_checkpoint_is_as_large_as_was_said(host: Host, tmp_path: Path) -> None:
    ended = train(host, tmp_path, "--run.dir", "kept/saved", "--plan", "zero=3", "--json")
    assert ended.code == 0, ended.said
    files = list((tmp_path / "kept/saved/checkpoints").glob("step-*/*.safetensors"))
    task = Task(
        workload=Workload(name="x", hidden=8, layers=1, heads=1, kv_heads=1, ffn=8, vocabulary=9),
        cluster=parse_cluster("cpu:2"), sequence=8, global_batch=2,
    )  # fmt: skip
    per_parameter = task.saved(Plan.parse("zero=3").resolve(2)).total / task.workload.parameters
    newest = max(path.parent for path in files)
    assert sum(path.stat().st_size for path in files if path.parent == newest) == pytest.approx(
        per_parameter * ended.json["parameters"], rel=0.02
    )


def test_auto_is_filled_in_by_the_planner_and_leaves_a_row(host: Host, tmp_path: Path) -> None:
    ended = train(host, tmp_path, "--plan", "auto zero=3", "--run.dir", "kept/one", "--json")
    assert ended.code == 0, ended.said
    words = ended.json["plan"].split()
    assert {"zero=3", "dp_shard=2"} <= set(words)
    assert any(word.startswith("mb=") for word in words)  # which no word has said
    ended = train(host, tmp_path, "--plan", "auto", "--plan.zero", "1", "--run.dir", "kept/two")
    assert ended.code == 0, ended.said
    assert "plan: auto is dp_shard=2 zero=1 mb=" in ended.said
    back = host.run("backtest", "kept/measured.csv", "--json", cwd=tmp_path)
    assert back.code == 0, back.said
    rows = (tmp_path / "kept" / "measured.csv").read_text().splitlines()
    assert len(rows) == 3
    assert rows[1].startswith("shoal,llama,")


def test_auto_that_cannot_be_is_refused(host: Host, tmp_path: Path) -> None:
    ended = train(host, tmp_path, "--plan", "auto tp=3")
    assert ended.code == 2
    assert "has tp=3" in ended.said
    assert "fix: tp=1 or 2" in ended.said


def test_auto_does_not_plan_for_weights_that_it_would_refuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "base.yaml"
    recipe.write_text("plan: {precision: bf16}\noptim: {param_dtype: bf16}\n")
    words = ["train", str(recipe), *QUICK, "--nproc", "1", "--device", "cpu", "--dry-run"]
    assert main([*words, "--plan", "auto mb=2"]) == 2
    err = capsys.readouterr().err
    assert "weights in bf16 need the precision bf16 or fp8" in err
    assert 'fix: --optim.param_dtype fp32, or --plan "auto mb=2 bf16"' in err
    assert "plan: auto is" not in err
    assert main([*words, "--plan", "auto mb=2 bf16"]) == 0
    assert "plan: auto is zero=0 mb=2 bf16" in capsys.readouterr().err
