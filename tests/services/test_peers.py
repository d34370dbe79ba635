"""Beside Accelerate, Lightning Fabric, Megatron Core and torchtitan themselves (`make test-peers`): equal losses, their
checkpoints read, their names spelt right."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.checkpoint.formats.import_ import Foreign, ImportSettings, read
from shoal.checkpoint.formats.lazy_tensor import full
from shoal.models.llama import build
from tests.unit.test_migrate import rows

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "migrate"
SITE = os.environ.get("SHOAL_PEERS", "")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="needs the other systems: make test-peers"),
    pytest.mark.timeout(900),
]


def on_ranks(count: int, script: Path, *words: str, cwd: Path) -> str:
    """Run a script on ranks of torchrun, with the other systems at hand."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return started(*torchrun, str(script), *words, cwd=cwd).stdout


def started(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python on the CPU, with the other systems at hand."""
    path = os.pathsep.join([str(ROOT / "src"), SITE])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    env |= {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


# ---- scripts --------------------------------------------------------------------------------------------------------


def losses(path: Path, cwd: Path, **changes: tuple[str, str]) -> list[float]:
    """The losses that a script prints on two ranks. `changes`: texts that are replaced in it."""
    cwd.mkdir()
    text = path.read_text()
    for old, new in changes.values():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (cwd / path.name).write_text(text)
    found: list[float] = json.loads(on_ranks(2, cwd / path.name, cwd=cwd).partition("losses ")[2].splitlines()[0])
    return found


@pytest.mark.parametrize("system", ["accelerate", "fabric"])
def test_losses_before_and_after_are_the_same(system: str, tmp_path: Path) -> None:
    before = losses(SCRIPTS / f"{system}_before.py", tmp_path / "before")
    after = losses(SCRIPTS / f"{system}_after.py", tmp_path / "after")
    assert len(before) == 12
    assert after == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize("system", ["accelerate", "fabric"])
def test_means_of_means_differ_where_the_page_says(system: str, tmp_path: Path) -> None:
    line = "labels = (inputs.sum(1) > 0).long()\n"
    uneven = (line, f"{line}labels[torch.arange(64) % 7 < 3] = -100\n")
    as_theirs = ('"mb=4", clip=1.0', '"mb=4", clip=1.0, loss_mean="microbatch"')
    before = losses(SCRIPTS / f"{system}_before.py", tmp_path / "before", uneven=uneven)
    after = losses(SCRIPTS / f"{system}_after.py", tmp_path / "after", uneven=uneven)
    assert max(abs(ours - theirs) for ours, theirs in zip(after, before, strict=True)) > 1e-3
    if system == "accelerate":  # Fabric puts other samples into a microbatch
        same = losses(SCRIPTS / f"{system}_after.py", tmp_path / "same", uneven=uneven, as_theirs=as_theirs)
        assert same == pytest.approx(before, abs=1e-6)


# ---- accelerate launch ----------------------------------------------------------------------------------------------

ACCELERATE = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "2"]
LAUNCH = [*ACCELERATE, "--num_machines", "1", "--multi_gpu"]
"""Two ranks. `--cpu` would start one process, unless it is given hosts of MPI."""


def test_accelerate_starts_a_script(tmp_path: Path) -> None:
    by_torchrun = losses(SCRIPTS / "accelerate_after.py", tmp_path / "torchrun")
    script = tmp_path / "script.py"
    script.write_text((SCRIPTS / "accelerate_after.py").read_text() + "print('ranks', run.world.size)\n")
    printed = started(*LAUNCH, str(script), cwd=tmp_path).stdout
    assert printed.count("ranks 2") == 2
    [line] = re.findall(r"^losses (.*)$", printed, re.MULTILINE)  # of rank 0 alone
    assert json.loads(line) == by_torchrun


def test_settings_of_accelerate_that_no_plan_reads_are_said(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import shoal\nwith shoal.Run('zero=3 mb=4') as run:\n    print('ranks', run.world.size)\n")
    flags = ["--num_machines", "1", "--use_fsdp", "--mixed_precision", "bf16"]
    ended = started(*ACCELERATE, *flags, str(script), cwd=tmp_path)
    assert ended.stderr.count("--mixed_precision bf16 has no effect on shoal: the plan has fp32") == 1
    assert "--use_fsdp" not in ended.stderr  # the plan shards, too


def test_accelerate_starts_a_recipe(tmp_path: Path) -> None:
    recipe = [str(ROOT / "recipes" / "tiny.yaml"), "--run.duration", "3step", "--data.seq_len", "32", "--json"]
    expected = started("-m", "shoal", "train", *recipe, "--run.dir", "alone", cwd=tmp_path)
    found = started(*LAUNCH, "-m", "shoal", "train", *recipe, "--run.dir", "launched", cwd=tmp_path)
    [summary] = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]  # of rank 0 alone
    assert (summary["ranks"], summary["steps"]) == (2, 3)
    assert summary["plan"] == json.loads(expected.stdout)["plan"]
    assert recorded(tmp_path / "launched") == recorded(tmp_path / "alone")


def recorded(run: Path) -> list[float]:
    """The losses in the metrics of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


# ---- checkpoints of Megatron Core -----------------------------------------------------------------------------------

CASES = {
    "one rank": (1, "1", "1", "plain"),
    "tensor parallel": (2, "2", "1", "plain"),
    "pipeline": (2, "1", "2", "none"),
    "distributed optimizer": (2, "1", "1", "fully_reshardable", "bf16"),
    "buckets": (2, "1", "1", "dp_reshardable", "bf16"),
    "bf16": (1, "1", "1", "plain", "bf16"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The name of a case → the folder that Megatron Core has written."""
    folder = tmp_path_factory.mktemp("megatron")
    done: set[str] = set()

    def save(name: str) -> Path:
        if name not in done:
            count, *words = CASES[name]
            on_ranks(count, ROOT / "tests/services/megatron_save.py", str(folder / name), *words, cwd=folder)
            done.add(name)
        return folder / name

    return save


def imported(folder: Path) -> tuple[Foreign, nn.Module, dict[str, Any]]:
    """What is read from a folder, the llama with its weights, and what Megatron has said."""
    found = read(folder, ImportSettings())
    assert found.section is not None
    model = build(**{key: value for key, value in found.section.items() if key != "name"}).double()
    model.load_state_dict({name: full(tensor).double() for name, tensor in found.model.items()})
    said: dict[str, Any] = torch.load(folder / "reference.pt", weights_only=True)
    return found, model, said


@pytest.mark.parametrize("name", CASES)
def test_the_llama_answers_as_the_model_of_megatron(name: str, saved: Callable[[str], Path]) -> None:
    found, model, said = imported(saved(name))
    assert (found.format, found.num_steps) == ("megatron", 3)
    tolerance = 0.05 if "bf16" in CASES[name] else 1e-5  # of logits up to 3
    with torch.no_grad():
        torch.testing.assert_close(model(said["tokens"]), said["logits"].double(), rtol=0, atol=tolerance)
    kinds = {kind for kind, _ in found.states}
    assert kinds == (set() if name in ("pipeline", "buckets") else {"exp_avg", "exp_avg_sq", "step"})
    assert {tensor.dtype for tensor in found.model.values()} == {"BF16" if name == "buckets" else "F32"}
    assert any("bucket_idx_0.exp_avg" in one for one in found.left_out) == (name == "buckets")
    assert "opt_param_scheduler" in found.left_out


@pytest.mark.parametrize("name", ["one rank", "tensor parallel"])
def test_the_next_step_is_that_of_megatron(name: str, saved: Callable[[str], Path]) -> None:
    """Adam's moments and steps are right if they lead to the same weights."""
    found, model, said = imported(saved(name))
    parameters = dict(model.named_parameters())
    decayed = [one for one in parameters.values() if one.dim() > 1]
    others = [one for one in parameters.values() if one.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    for parameter_name, parameter in parameters.items():
        state = {kind: full(found.states[kind, parameter_name]) for kind in ("exp_avg", "exp_avg_sq", "step")}
        optimizer.state[parameter] = {kind: one.double() if one.dim() else one for kind, one in state.items()}
    tokens: Tensor = said["tokens"]
    before = {key: one.detach().clone() for key, one in parameters.items()}
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(parameters.values(), 1.0, torch.nn.utils.get_total_norm(gradients))
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), said["next_logits"].double(), rtol=0, atol=1e-4)
    assert all(not torch.equal(one, before[key]) for key, one in parameters.items())


# ---- names of torchtitan --------------------------------------------------------------------------------------------


def test_the_table_names_settings_of_torchtitan() -> None:
    """Its package needs Triton to be imported, so its source is read."""
    tree = ast.parse((Path(SITE) / "torchtitan" / "config" / "job_config.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def keys_of(name: str, prefix: str = "") -> set[str]:
        found = set()
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind, key = ast.unparse(node.annotation), prefix + node.target.id
                found |= keys_of(kind, f"{key}.") if kind in classes else {key}
        return found

    known = keys_of("JobConfig")
    assert not {key for theirs, _ in rows() for key in theirs} - known
    config = (SCRIPTS / "torchtitan_before.toml").read_text()
    section = ""
    for line in config.splitlines():
        section = (re.match(r"\[(.+)\]", line) or [section, section])[1]
        if " = " in line:
            assert f"{section}.{line.partition(' = ')[0]}" in known, line
