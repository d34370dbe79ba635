"""What an example prints on one process and on two, for all tests that look at it: most of it is loading torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="session")
def one_and_two() -> Callable[[str], tuple[str, str]]:
    """The name of an example → the output of `python` and that of `torchrun --nproc-per-node 2`."""

    @cache
    def outputs(name: str) -> tuple[str, str]:
        path = str(ROOT / "examples" / name)
        with start(path) as one, start(*TORCHRUN, path) as two:  # at the same time
            return output_of(one), output_of(two)

    return outputs


def start(*words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr[-3000:]
    return stdout
