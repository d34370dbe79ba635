"""What a person can get wrong: exit code 2, every problem with its fix on stderr, nothing started, nothing touched."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli import main
from tests.cli.host import Host
from tests.cli.test_train import MADE_UP, SMALL, forked, run

FILES = {
    "empty.txt": "",
    "short.txt": "hello",
    "typos.yaml": "optim: {learning_rate: 1, weigth_decay: 0}\nspeed: 9\n",
    "list.yaml": "- model\n",
    "broken.yaml": "model: [1\n",
    "tiny.yaml": "run: {name: tiny}\n",
    "own.py": "def build(width=3): return 3\n",
    "syntax.py": "def build(:\n",
    "imports.py": "import surely_not_there\n",
    "divides.py": "x = 0\n1 / x\n",
    "taken/notes.txt": "mine",
}

# words → the code, what must be said of them, and what must be in the fix
CASES = {
    "no such verb": ("trian", "R001", "unknown verb 'trian'", "shoal train"),
    "no such recipe": ("train tinny.yaml", "R006", "there is no recipe 'tinny.yaml'", "tiny.yaml"),
    "no such recipe of another verb": ("verify tinny.yaml", "R006", "no recipe 'tinny.yaml'", "shoal verify tiny.yaml"),
    "two recipes": ("train tiny.yaml other.yaml", "R002", "unknown argument 'other.yaml'", "shoal train tiny.yaml"),
    "an option that is no number": ("plan --top two", "R053", "--top must be a whole number, got 'two'", "--top 5"),
    "an option of no verb": ("plan --foo 3", "R002", "unknown option --foo", "shoal plan --help"),
    "a mistyped option": ("plan llama3-8b --clster h100:8", "R002", "unknown option --clster", "--cluster"),
    "a mistyped option of explain": ("explain --josn", "R002", "unknown option --josn", "--json"),
    "a word too many": ("plan llama3-8b h100:8", "R002", "unknown argument 'h100:8'", "shoal plan llama3-8b"),
    "no value of an option": ("plan llama3-8b --cluster", "R003", "--cluster has no value", "--cluster here"),
    "a word of another option": (
        "calibrate --device gpu",
        "R053",
        "--device must be auto, cpu or cuda",
        "--device auto",
    ),
    "a format in short": (
        "checkpoint export run out --format hf",
        "R053",
        "--format must be safetensors, huggingface",
        "--format huggingface",
    ),
    "folders that are missing": (
        "checkpoint diff",
        "R054",
        "needs FIRST and SECOND",
        "shoal checkpoint diff FIRST SECOND",
    ),
    "steps in words": ("verify --steps two", "R053", "--steps must be a whole number, got 'two'", "--steps 3"),
    "one dash": ("train -quiet", "R002", "unknown argument '-quiet'", "--quiet"),
    "a flag with a value": ("train --json=yes", "R004", "--json takes no value", "--json"),
    "a setting without a value": ("train --optim.lr --quiet", "R003", "--optim.lr has no value", "--optim.lr VALUE"),
    "recipe is a folder": ("train taken", "R009", "got 'taken': it is a folder", "--data.source taken"),
    "recipe is a list": ("train list.yaml", "R010", "must hold a mapping, got a list", "model:"),
    "recipe is no YAML": ("train broken.yaml", "R021", "broken.yaml is not valid YAML", "correct the line"),
    "unknown keys in YAML": ("train typos.yaml", "R011", "3 problems in typos.yaml", "optim.weight_decay"),
    "unknown key": ("train --optim.lrr 3", "R011", "unknown key 'optim.lrr'", "optim.lr"),
    "an option of another verb": ("verify --deepspeed ds.json", "R005", "no option --deepspeed", "for the verb train"),
    "a key of other systems": ("train --learning-rate 3", "R005", "there is no option --learning-rate", "optim.lr"),
    "lr -1": ("train --optim.lr -1", "R013", "optim.lr must be greater than 0, got -1", "optim.lr"),
    "lr is a word": ("train --optim.lr=fast", "R013", "got 'fast'", "optim.lr"),
    "batch 0": (
        "train --data.global_batch 0",
        "R013",
        "data.global_batch must be greater than 0, got 0",
        "data.global_batch",
    ),
    "nproc 0": ("train --nproc 0", "R013", "launch.nproc must be greater than 0, got 0", "launch.nproc"),
    "tp=0": ("train --plan tp=0", "P005", "tp must be a whole number of at least 1, got 0", "tp=1"),
    "two at once": (
        "train --optim.lr -1 --data.global_batch 0",
        "R013",
        "2 problems in the settings",
        "data.global_batch",
    ),
    "no such plan word": ("train --plan tpp=2", "P002", "no key 'tpp'", "tp"),
    "no such unit": ("train --run.duration 3furlong", "R016", "got '3furlong'", "1000step"),
    "no step": (
        "train --run.duration 0step",
        "R028",
        "run.duration must be at least one step, got 0step",
        "--run.duration 100step",
    ),
    "evaluation by the clock": (
        "train --run.evaluate_every 2min",
        "R029",
        "got the time 2min",
        "--run.evaluate_every 100step",
    ),
    "warm-up by another clock": (
        "train --optim.warmup 9sec",
        "R031",
        "got the time 9sec",
        "--optim.warmup 20step",
    ),
    "batch over ranks": (
        "train --data.global_batch 10 --nproc 4",
        "P011",
        "batch 10 is not divisible by",
        "--data.global_batch 8 or 12",
    ),
    "batch over mb": (
        "train --data.global_batch 10 --plan mb=3 --nproc 2",
        "P011",
        "by mb=3 x dp_replicate=2",
        "--plan.mb 1 or 5",
    ),
    "plan of 3 on 2": ("train --plan dp_replicate=3 --nproc 2", "P009", "not the number of ranks, 2", "--nproc 3"),
    "compress misspelled": ("train --plan compress=int9", "P023", "or powersgd, got 'int9'", "compress=int8"),
    "compress too much": (
        "train --plan compress=topk:2",
        "P024",
        "at most 1, got '2'",
        "compress=topk:0.01",
    ),
    "sync without a number": (
        "train --plan sync=diloco",
        "P025",
        "needs a number of local steps",
        "sync=diloco:50",
    ),
    "compress in capitals": ("train --plan compress=INT8", "P023", "or powersgd, got 'INT8'", "compress=int8"),
    "an infinite rank": (
        "train --plan compress=powersgd:inf",
        "P024",
        "at least 1, got 'inf'",
        "powersgd:4",
    ),
    "a method without its key": ("train --plan in8", "P001", "'in8' is not a word of a plan", "compress=int8"),
    "sync without its key": ("train --plan local", "P003", "'local' needs its key", "sync=local:8"),
    "no local step": ("train --plan sync=diloco:0", "P025", "at least 1, got '0'", "sync=diloco:50"),
    "a number that is none": (
        "train --plan sync=diloco:H",
        "P025",
        "at least 1, got 'H'",
        "sync=diloco:50",
    ),
    "compress shards": (
        "train --nproc 2 --plan.zero 3 --plan.compress int8",
        "P021",
        "compress=int8 changes the traffic between replicas, but dp_replicate=1",
        "dp_replicate=2 or more, or remove compress=int8",
    ),
    "fragments of nothing": (
        "train --nproc 2 --comm.fragments 4",
        "R022",
        "4 has no effect without sync=",
        "sync=diloco",
    ),
    "a delay of nothing": (
        "train --nproc 2 --comm.outer_delay 2",
        "R022",
        "comm.outer_delay 2 has no effect without sync=",
        "--comm.outer_delay 0",
    ),
    "an outer step of nothing": (
        "train --plan.compress int8 --nproc 2 --comm.outer_lr 0.5 --comm.outer_momentum 0.8",
        "R022",
        "comm.outer_lr 0.5 and comm.outer_momentum 0.8 have no effect without sync=",
        "--comm.outer_lr 0.7 --comm.outer_momentum 0.9",
    ),
    "an outer step of a mean": (
        "train --plan.sync local:4 --nproc 2 --comm.outer_lr 0.5",
        "R022",
        "comm.outer_lr 0.5 has no effect under sync=local:4",
        "sync=diloco:4",
    ),
    "a stretched step of an optimizer of its own": (
        "train --plan.sync diloco:4 --nproc 2 --comm.rescale false",
        "R022",
        "comm.rescale False has no effect under sync=diloco:4",
        "sync=local:4",
    ),
    "exact first steps of all": (
        "train --nproc 2 --comm.warmup_steps 5",
        "R022",
        "comm.warmup_steps 5 has no effect without compress= or sync=",
        "--comm.warmup_steps None",
    ),
    "a carrier of nothing": (
        "train --nproc 2 --plan.zero 3 --comm.algorithm ring",
        "R023",
        "comm.algorithm ring has no effect with one replica",
        "--comm.algorithm builtin",
    ),
    "fragments do not fit": (
        "train --nproc 2 --plan sync=diloco:4 --comm.fragments 8",
        "P026",
        "comm.fragments must be from 1 to 4, the local steps of sync=, got 8",
        "--comm.fragments 1, 2 or 4",
    ),
    "1bit with fp16": (
        "train --nproc 2 --plan.precision fp16 --plan.compress 1bit",
        "P050",
        "the changing loss scale of fp16",
        "bf16 in place of fp16",
    ),
    "cp=2, 33 tokens": (
        "train --plan cp=2 --nproc 2 --data.seq_len 33",
        "P036",
        "cp=2 cuts a sequence into 4",
        "32 or 36",
    ),
    "ep=2, no experts": ("train --plan ep=2 --nproc 2", "P038", "but the model describes none", "remove ep"),
    "tp=4, 2 kv heads": ("train --plan tp=4 --nproc 4", "P029", "tp=4 does not divide num_kv_heads=2", "tp=1 or 2"),
    "tp=2, 33 tokens": (
        "train --plan tp=2 --nproc 2 --data.seq_len 33",
        "P032",
        "the 33 tokens of a sequence",
        "sp=off",
    ),
    "sp without tp": (
        "train --plan sp --nproc 1",
        "P017",
        "sp divides tokens among tp ranks, but tp=1",
        "tp=2 or more",
    ),
    "sp of what": ("train --plan sp=maybe", "P006", "sp must be on or off, got maybe", "sp=on or sp=off"),
    "more stages than layers": (
        "train --plan pp=5 --nproc 5",
        "P042",
        "pp=5 stages are more than the 4 blocks",
        "pp=1, 2",
    ),
    "fewer microbatches than stages": (
        "train --plan.pp 4 --plan.schedule 1f1b --plan.mb 4 --nproc 4 --data.global_batch 8",
        "P020",
        "2 microbatches",
        "mb",
    ),
    "hybrid of what": ("train --plan hybrid_shard", "P007", "no degree is set", "dp_replicate="),
    "bf16 states of sgd": (
        "train --optim.state_dtype bf16 --optim.name sgd",
        "R024",
        "is for adamw",
        "--optim.state_dtype fp32",
    ),
    "bf16 states in fp64": (
        "train --optim.state_dtype bf16 --plan.precision fp64",
        "R025",
        "optim.state_dtype must be fp32 under the precision fp64, got bf16",
        "--optim.state_dtype fp32, or another --plan.precision",
    ),
    "fp8 with tp": (
        "train --plan.precision fp8 --plan.tp 2 --nproc 2",
        "P044",
        "tp=2 splits them",
        "bf16 instead of fp8",
    ),
    "fp8 of small layers": ("train --plan.precision fp8", "P060", "at least 512 features", "--run.fp8_min_features 16"),
    "fp8 by rows, in fp32": (
        "train --run.fp8 rowwise",
        "R026",
        "run.fp8 rowwise needs the precision fp8, got fp32",
        "--plan.precision fp8, or --run.fp8 tensorwise",
    ),
    "fp8 of narrow layers, in bf16": (
        "train --plan.precision bf16 --run.fp8_min_features 16 --run.fp8_head none",
        "R026",
        "run.fp8_min_features 16 and run.fp8_head none need the precision fp8, got bf16",
        "--plan.precision fp8, or --run.fp8_min_features null --run.fp8_head gradients",
    ),
    "a loss in a head that is split": (
        "train --run.loss fused --plan.tp 2 --nproc 2",
        "M024",
        "the loss cannot be computed inside the model: tp=2 splits its head",
        "--run.loss auto",
    ),
    "a loss in the head of a pipeline": (
        "train --run.loss fused --plan.pp 2 --plan.mb 1 --nproc 2",
        "M024",
        "a pipeline computes it from the output of its last stage",
        "--run.loss auto",
    ),
    "a loss in no head": ("train --model.name mlp --run.loss fused", "M024", "names no head", "--run.loss auto"),
    "unused parameters of shards": (
        "train --run.find_unused_parameters true --plan.zero 3 --nproc 2",
        "P059",
        "find_unused_parameters needs replicas with full parameters",
        "zero=0 instead of zero=3",
    ),
    "no such data": ("train --data.source shrot.txt", "D001", "no such file or folder", "short.txt"),
    "empty corpus": ("train --data.source empty.txt", "D007", "empty.txt must have text in it", "with text in it"),
    "corpus too short": ("train --data.source short.txt", "D014", "take 514 tokens", "--data.seq_len 2"),
    "no tokenizer there": ("train --data.tokenizer missing.json", "D001", "missing.json", "data.tokenizer"),
    "no such model": ("train --model.name lama", "M001", "there is no model 'lama'", "llama"),
    "no such preset": ("train --model.preset tinny", "M006", "unknown preset 'tinny'", "tiny"),
    "no such argument": ("train --model.num_layerz 2", "M006", "unknown setting 'num_layerz'", "num_layers"),
    "vocabulary too small": ("train --model.vocabulary 100", "D033", "the model must have at least 257 outputs", "257"),
    "no such file of a model": (
        "train --model.name new.py:build",
        "M001",
        "there is no file 'new.py'",
        "file.py:function",
    ),
    "no such function": ("train --model.name own.py:biuld", "M001", "that file has no function 'biuld'", "build"),
    "not a function's argument": ("train --model.name own.py:build --model.depth 2", "M003", "'depth'", "width"),
    "returns no model": (
        "train --model.name own.py:build",
        "M004",
        "returned int, not an nn.Module",
        "return the model",
    ),
    "file has a typo": ("train --model.name syntax.py:build", "M002", "SyntaxError", "python syntax.py"),
    "file imports too much": ("train --model.name imports.py:build", "M002", "'surely_not_there'", "python imports.py"),
    "file raises": (
        "train --model.name divides.py:build",
        "M002",
        "division by zero (line 2: 1 / x)",
        "python divides.py",
    ),
    "no such device": (
        "train --device tpu",
        "R012",
        "launch.device must be auto, cpu or cuda, got 'tpu'",
        "launch.device",
    ),
    "memory by the clock": ("train --checkpoint.memory_every 5min", "R029", "got the time 5min", "memory_every 1step"),
    "failures by the step": (
        "train --checkpoint.mtbf 5step",
        "R030",
        "checkpoint.mtbf must be a time, got 5step",
        "--checkpoint.mtbf 24h",
    ),
    "no interval": ("train --checkpoint.every often", "R016", "got 'often'", "1000step"),
    "resume from nowhere": (
        "train --resume sometimes",
        "R032",
        "--resume must be auto, latest, fresh or a step, got 'sometimes'",
        "--resume auto",
    ),
    "directory is a file": (
        "train --run.dir short.txt",
        "C022",
        "must be a directory, got the file 'short.txt'",
        "--run.dir",
    ),
    "directory under a file": (
        "train --run.dir short.txt/run",
        "C026",
        "cannot be written: Not a directory",
        "--run.dir",
    ),
    "directory on a read-only system": (
        "train --run.dir /proc/run",
        "C026",
        "'/proc/run' cannot be written",
        "--run.dir",
    ),
    "directory is taken": (
        "train --run.dir taken",
        "C024",
        "'taken' is not empty and holds no run",
        "--run.dir SOMEWHERE",
    ),
    "words for schema": ("schema please", "R002", "schema takes no arguments, got 'please'", "shoal schema"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Refused = Callable[..., str]


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Checks everything that all refusals have in common; returns the message."""

    def refuse(*words: str, what: str, fix: str) -> str:
        monkeypatch.setattr("shoal.train.recipe.loop._steps", lambda *_: pytest.fail("it trains"))
        before = contents(folder)
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("shoal: bad input: ")
        assert what in err
        assert fix in err[err.index("fix: ") :]
        assert "Traceback" not in err
        assert main([*words, "--json"]) == 2
        out, err_again = capsys.readouterr()
        assert err_again == err
        error = json.loads(out)
        assert error["exit_code"] == 2
        assert all(problem["what"] and problem["fix"] for problem in error["error"]["problems"])
        assert all(f"[{problem['code']}]" in err for problem in error["error"]["problems"])
        assert contents(folder) == before
        return err

    return refuse


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, but what Python itself keeps of a user's model."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, refused: Refused) -> None:
    words, code, what, fix = CASES[case]
    assert f"[{code}]" in refused(*words.split(), what=what, fix=fix)


TOLD_WHEN_MADE = {"directory on a read-only system"}
"""What a system says only when something is made, and a dry run makes nothing."""


@pytest.mark.parametrize(
    "case", [case for case, (words, *_) in CASES.items() if words.startswith("train ") and case not in TOLD_WHEN_MADE]
)
def test_refused_by_a_dry_run_too(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, code, _, _ = CASES[case]
    before = contents(folder)
    assert main([*words.split(), "--dry-run"]) == 2
    assert f"[{code}]" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize(
    "words",
    [
        "--nproc 1 --plan.compress powersgd --comm.algorithm ring --comm.warmup_steps 3",
        "--nproc 1 --plan.sync diloco:4 --comm.fragments 2 --comm.outer_lr 0.5",
        "--nproc 2 --plan.sync auto --comm.fragments 2 --comm.warmup_steps 3 --comm.algorithm auto",
        "--nproc 2 --plan.zero 3 --comm.algorithm auto",
        "--nproc 2 --plan.compress int8 --comm.warmup_steps 3",
    ],
)
def test_settings_that_come_to_something_elsewhere_are_not_refused(words: str) -> None:
    """On one rank, a recipe of several; and what is left to be chosen."""
    assert main(["train", "--dry-run", "--json", "--device", "cpu", *words.split()]) == 0


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("wandb", "--run.trackers [wandb]", "[wandb]'"),
        ("mlflow", "--run.trackers [mlflow]", "[mlflow]'"),
        ("tensorboard", "--run.trackers [tensorboard]", "[tensorboard]'"),
        ("tokenizers", "--data.tokenizer tokenizer.json", "[hf]'"),
        ("datasets", "--data.source hf:wikitext", "[hf]'"),
        ("torchao", "--plan.precision fp8 --run.fp8 rowwise --run.fp8_min_features 16 --dry-run", "[fp8]'"),
    ],
)
def test_a_package_that_is_not_installed(
    package: str, words: str, extra: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks what cannot be imported
    refused("train", *words.split(), what=f"needs the package {package}, which is not installed", fix=extra)


def test_no_such_device_here(refused: Refused) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    refused("train", *MADE_UP, "--device", "cuda", "--nproc", "1", what="no CUDA device", fix="--launch.device cpu")


@pytest.fixture
def earlier(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["train", *SMALL, *MADE_UP, "--nproc", "1", "--run.dir", "earlier", "--quiet"]) == 0
    capsys.readouterr()
    return folder / "earlier"


def test_a_run_is_never_written_over(earlier: Path, refused: Refused) -> None:
    again = ["train", *SMALL, *MADE_UP, "--nproc", "1", "--run.dir", "earlier"]
    refused(*again, what="'earlier' already holds a finished run of this recipe", fix="--resume fresh")
    other = "a run of another recipe: optim.lr: 0.0003 → 0.001; nothing was touched"
    refused(*again, "--optim.lr", "1e-3", what=other, fix="--run.dir SOMEWHERE_ELSE")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--resume latest --plan.precision bf16", "plan.precision: fp32 → bf16"),
        ("--resume latest --run.seed 5", "run.seed: 0 → 5"),
        ("--resume 77", "there is no checkpoint of step 77"),
        ("", "already holds a finished run of this recipe"),
        ("--run.dir elsewhere --resume latest", "there is no run to resume in 'elsewhere'"),
        ("--run.dir new --checkpoint.dir earlier/checkpoints --optim.lr 1", "optim.lr: 0.0003 → 1.0"),
        ("--run.dir new --checkpoint.dir none --resume latest", "there is no checkpoint in none to resume from"),
        ("--run.dir new --run.start_from taken", "there is no checkpoint in 'taken' to start from"),
    ],
)
def test_a_dry_run_looks_at_what_is_there(
    earlier: Path, folder: Path, words: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["train", *SMALL, *MADE_UP, "--nproc", "1", "--run.dir", "earlier", *words.split()]
    before = contents(folder)
    assert main([*again, "--dry-run"]) == 2
    assert contents(folder) == before
    told = capsys.readouterr().err
    assert what in told
    assert main(again) == 2
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("words", ["--resume latest", "--resume fresh", "--resume 3", "--run.fast_dev_run"])
def test_a_dry_run_that_may_go_on_leaves_what_is_there(earlier: Path, folder: Path, words: str) -> None:
    before = contents(folder)
    assert main(["train", *SMALL, *MADE_UP, "--nproc", "1", "--run.dir", "earlier", *words.split(), "--dry-run"]) == 0
    assert contents(folder) == before


def test_a_run_is_removed_when_asked(earlier: Path, folder: Path) -> None:
    again = ["train", *SMALL, *MADE_UP, "--nproc", "1", "--quiet", "--run.overwrite"]
    assert main([*again, "--run.dir", "earlier", "--run.duration", "1step"]) == 0
    assert len((earlier / "metrics.jsonl").read_text().splitlines()) == 1
    assert main([*again, "--run.dir", "taken"]) == 2  # but nothing that is not a run
    assert (folder / "taken" / "notes.txt").read_text() == "mine"


# ---- with real processes ---------------------------------------------------------------------------------------------


def test_a_port_that_is_taken(host: Host, folder: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        env = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ended = forked(host, "train", *SMALL, *MADE_UP, "--json", cwd=folder, env=env)
    assert ended.code == 2
    assert f"shoal: bad input: port {port} on this host is taken" in ended.err
    assert "MASTER_PORT" in ended.json["error"]["problems"][0]["fix"]
    assert "Traceback" not in ended.err
    assert not (folder / "runs").exists()


def test_workers_that_refuse_leave_no_process_and_no_trace(host: Host, folder: Path) -> None:
    before = contents(folder)
    ended = forked(host, "train", *SMALL, *MADE_UP, "--nproc", "2", "--run.dir", "taken", cwd=folder)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        "shoal: bad input: 'taken' is not empty and holds no run of shoal; nothing was touched [C024]",
        "    fix: --run.dir SOMEWHERE_ELSE",
        "shoal explain C024 says more",
    ]
    assert contents(folder) == before


def test_an_unknown_key_in_a_process(folder: Path) -> None:
    ended = run("train", "tiny.yaml", "--optim.lrr", "1", cwd=folder)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        "shoal: bad input: 1 problem in tiny.yaml",
        "  unknown key 'optim.lrr' [R011]",
        "      fix: --optim.lr 1",
        "shoal explain R011 says more",
    ]


OWN = """
from torch import nn
class Own(nn.Module):
    def __init__(self, rows, outputs):
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, 8), nn.Linear(8, outputs)
    def forward(self, tokens):
        return self.head(self.embed(tokens))
"""


@pytest.mark.parametrize(
    ("rows", "outputs", "codes"),
    [(257, 257, []), (50, 257, ["T056"]), (257, 100, ["D033"]), (50, 100, ["T056", "D033"])],
)
def test_a_model_of_ones_own_that_is_too_small(
    folder: Path, capsys: pytest.CaptureFixture[str], rows: int, outputs: int, codes: list[str]
) -> None:
    Path("own.py").write_text(OWN)
    words = ["--model.name", "own.py:Own", f"--model.rows={rows}", f"--model.outputs={outputs}", "--device", "cpu"]
    assert main(["train", *words, "--dry-run", "--json"]) == (2 if codes else 0)
    found = json.loads(capsys.readouterr().out)
    assert [problem["code"] for problem in found.get("error", {"problems": []})["problems"]] == codes
