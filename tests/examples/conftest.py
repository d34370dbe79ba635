"""What an example prints on one process and on two, for all tests that look at it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.examples.host import run_examples
from tests.readme.fork_host import Ran
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# These start their ranks themselves, and are never a rank of torchrun's: test_layout_examples.py runs them.
THEIR_OWN_RANKS = ("03_fsdp.py", "05_multi_node.py", "07_pipeline.py", "10_long_context.py", "11_fault_tolerance.py")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("[0-9]*.py")) if path.name not in THEIR_OWN_RANKS]
FOR_REAL, *IN_FORKS = [path.name for path in EXAMPLES]
"""The first is started by `python` and by torchrun; the others in forks, with the variables that torchrun would set."""


@pytest.fixture(scope="session")
def one_and_two(once: Callable[..., Any]) -> Callable[[str], tuple[str, str]]:
    """The name of an example → the output of `python` and that of `torchrun --nproc-per-node 2`."""

    @cache
    def outputs(name: str) -> tuple[str, str]:
        path = str(ROOT / "examples" / name)
        if name == FOR_REAL:
            with start(sys.executable, path) as one, start(warm_python(), *TORCHRUN, path) as two:  # at the same time
                return output_of(one), output_of(two)
        ran = once(in_forks)[name]
        for each in ran:
            assert each.code == 0, each.stderr[-3000:]
        return ran[0].stdout, ran[1].stdout + ran[2].stdout

    return outputs


def in_forks() -> dict[str, list[Ran]]:
    """Every example alone, as rank 0 and as rank 1, at the same time; one example after the other."""
    return dict(zip(IN_FORKS, run_examples([(ROOT / "examples" / name, places()) for name in IN_FORKS]), strict=True))


def places() -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{}, *({**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))]


def start(*words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environ["PYTHON_EXEC"] = warm_python()  # by which torchrun starts workers
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr[-3000:]
    return stdout
