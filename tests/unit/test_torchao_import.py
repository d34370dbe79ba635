"""shoal imports torchao for rowwise fp8 alone, and the warnings of that import do not reach the user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORT_ALL_AND_TRAIN_TENSORWISE = """
import importlib, pkgutil, sys
import torch
import shoal
from shoal.cli import main
from shoal.models.llama import Llama, LlamaConfig

for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
    if not module.name.endswith("__main__") and ".kernels." not in module.name:  # kernels need triton
        importlib.import_module(module.name)
model = Llama(LlamaConfig(hidden=64, ffn=128, num_layers=1, vocabulary=97))
tokens = torch.randint(0, 97, (2, 17))
with shoal.Run("fp8", device="cpu", fp8="tensorwise", fp8_min_features=16) as run:
    run.prepare(model, torch.optim.AdamW(model.parameters()))
    run.step({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
words = "--plan.precision fp8 --run.fp8_min_features 16 --nproc 1 --device cpu --dry-run --json"
assert main(["train", *words.split()]) == 0
assert "torchao" not in sys.modules, "only rowwise fp8 needs torchao"
"""

CONVERT_ROWWISE = """
import sys, tempfile
import torch, torch._dynamo
from shoal.numerics.fp8.convert import to_fp8

sys.pycache_prefix = tempfile.gettempdir() + "/no-such-cache"  # so that torchao is compiled, as on its first import
sys.dont_write_bytecode = True
layer = torch.nn.Linear(32, 48)
to_fp8(layer, "rowwise", torch.device("cpu"), min_features=16)
assert "torchao" in sys.modules
"""


def stderr_of(code: str, folder: Path) -> str:
    """Run code with every warning an error."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.wide
def test_tensorwise_fp8_does_not_import_torchao(tmp_path: Path) -> None:
    assert stderr_of(IMPORT_ALL_AND_TRAIN_TENSORWISE, tmp_path) == ""


@pytest.mark.wide
def test_rowwise_fp8_hides_the_warnings_of_torchao(tmp_path: Path) -> None:
    """Python warns of torchao's docstrings when it compiles them, and torchao logs which libraries it cannot load."""
    assert stderr_of(CONVERT_ROWWISE, tmp_path) == ""
