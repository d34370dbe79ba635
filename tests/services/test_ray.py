"""`shoal.ray` on a real Ray 2.60: a killed worker is replaced, the size changes, and the losses are as undisturbed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.storage.locate import find

ROOT = Path(__file__).parents[2]
SITE = os.environ.get("SHOAL_RAY", "")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="needs Ray: make test-ray"),
    pytest.mark.timeout(3600),
]

MODEL = """
import time
from pathlib import Path

from shoal.models.llama import build as llama


def build(hold="", seconds=0.0):
    model = llama(preset="tiny", num_layers=2)

    def wait(*_):
        time.sleep(seconds)
        while hold and Path(hold).exists():
            time.sleep(0.05)

    model.register_forward_pre_hook(wait)
    return model
"""
RECIPE = """
model: {name: model.py:build}
data: {source: python, seq_len: 32, global_batch: 8, validation: 0.0001}
optim: {lr: 1.0e-3, warmup: 2step}
plan: auto fp64
launch: {device: cpu}
checkpoint: {every: 2step}
run: {name: small, duration: 24step}
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), SITE])
    more = {
        "RAY_raylet_start_wait_time_s": "300",  # processes start slowly on a busy machine
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",  # of waiting for a node that was just lost
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **more, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment(), stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return done


def losses(path: Path) -> dict[int, float]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_a_lost_worker_and_other_sizes_change_no_loss(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    found: dict[str, Any] = json.loads(
        python(str(ROOT / "tests/services/ray_disturbed.py"), str(tmp_path), cwd=tmp_path).stdout.splitlines()[-1]
    )
    words = ["recipe.yaml", "--run.dir", "alone", "--nproc", "1", "--plan", "fp64", "--quiet"]
    python("-m", "shoal", "train", *words, cwd=tmp_path)
    expected = losses(tmp_path / "alone" / "metrics.jsonl")
    run = tmp_path / "storage" / "disturbed" / "shoal"
    assert len(expected) == 24
    assert losses(run / "metrics.jsonl") == pytest.approx(expected, rel=1e-12)

    sizes = [2 if re.search(r"=2\b", plan) else 1 for plan in found["plans"]]
    assert sizes == [2, 2, 1, 2]
    assert found["starts"][0] == 0
    assert 0 < found["starts"][1] < found["starts"][2] < found["starts"][3] < 24
    assert found["summary"]["steps"] == 24
    assert found["summary"]["ranks"] == 2
    assert Path(found["checkpoint"]).is_relative_to(run / "checkpoints")
    assert find(Path(found["checkpoint"])).manifest.step == 24
    # Reports on their way when the workers were killed are lost; those of the last generation all arrive.
    reported = losses(tmp_path / "reported.jsonl")
    assert {step: expected[step] for step in reported} == pytest.approx(reported, rel=1e-12)
    assert reported.keys() >= set(range(found["starts"][3] + 1, 25))


START = """
import ray

ray.init(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False)
"""
REJECTED = """
try:
    other = ray.train.RunConfig(name="rejected", storage_path=trainer.run_config.storage_path)
    shoal.ray.Trainer({"data": {"source": "/nowhere.txt"}}, 1, other).fit()
except shoal.ShoalError as error:
    print("rejected", *error.codes)
"""


def test_the_scripts_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    recipe, before, after = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    short = '{"plan": "auto", "data.seq_len": 16, "run.duration": "2step", "data.validation": 0.00001}'
    recipe = recipe.replace('{"plan": "auto"}', short).replace("recipes/", f"{ROOT}/recipes/")
    script = START + "".join(part.replace("/tmp/ray-storage", str(tmp_path)) for part in (before, after))
    (tmp_path / "script.py").write_text(script + recipe.replace("/shared/ray", str(tmp_path)) + REJECTED)
    printed = python("script.py", cwd=tmp_path).stdout
    assert re.findall(r"^rejected (.*)$", printed, re.MULTILINE) == ["D001"]  # what a worker found; once
    theirs, ours = [json.loads(text) for text in re.findall(r"^loss (.*)$", printed, re.MULTILINE)]
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert find(tmp_path / "after" / "shoal").manifest.step == 12
    assert find(tmp_path / "tiny" / "shoal").manifest.step == 2
