"""Every benchmark still runs: each has a smoke mode of seconds, and `--help` measures nothing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.host import run_scripts
from tests.readme.fork_host import ROOT, Ran

RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "benchmarks").glob("*/*.py")
    if "__main__" in path.read_text() and "argparse" in path.read_text()
)
WORDS = {
    "benchmarks/h200/hf.py": ["shoal"],
    "benchmarks/h200/lora.py": ["shoal"],
    "benchmarks/h200/systems.py": ["shoal"],
}
"""What a script has to be given beside --smoke."""
WITHOUT = {
    "benchmarks/faults/lost_host.py": "needs root, for network namespaces, and minutes",
    "benchmarks/faults/mistakes.py": "needs root, for network namespaces, and a minute",
    "benchmarks/h200/run.py": "starts the other scripts of its folder on a GPU, beside peers that CI does not have",
    "benchmarks/h200/roofline.py": "reads the trace of a GPU",
    "benchmarks/object_store/run.py": "needs s3fs and a server of S3; `make test-s3` runs its smoke mode",
    "benchmarks/offload/deepspeed_peer.py": "needs a GPU and DeepSpeed; run.py --peer starts it",
    "benchmarks/planner/floor.py": "reads a table of runs; tests/unit/test_floor.py has its arithmetic",
}
"""Scripts without a smoke mode, and why."""
OWN_PROCESS = {
    "benchmarks/checkpoint/run.py",  # torch's asynchronous save starts a process from __main__
    "benchmarks/context/run.py",  # starts its process anew, with another allocator
}


DEAR = {
    "benchmarks/checkpoint/gpu.py",
    "benchmarks/checkpoint/run.py",
    "benchmarks/context/run.py",
    "benchmarks/faults/drills.py",
    "benchmarks/faults/restart.py",
    "benchmarks/h200/hf.py",
    "benchmarks/h200/images.py",
    "benchmarks/h200/lora.py",
    "benchmarks/layouts/run.py",
    "benchmarks/overhead/run.py",
    "benchmarks/planner/run.py",
    "benchmarks/precision/run.py",
    "benchmarks/pretrained/run.py",
    "benchmarks/profile/causes.py",
    "benchmarks/profile/cost.py",
    "benchmarks/watch/cost.py",
    "benchmarks/profile/gpu.py",
    "benchmarks/replica_sync/run.py",
    "benchmarks/scaling/run.py",
    "benchmarks/verify/huggingface.py",
    "benchmarks/verify/run.py",
}
"""Take seconds even so; `make test-all` runs them."""

SMOKED = [script for script in SCRIPTS if script not in WITHOUT and (script not in DEAR or os.environ.get("SHOAL_ALL"))]


def run_all() -> tuple[dict[str, Ran], set[Path]]:
    """What became of each script, and the results that are there and were not before."""
    before = set(RESULTS.iterdir())
    words = {script: [script, *WORDS.get(script, []), "--smoke"] for script in SMOKED}
    ran = {script: in_own_process(words[script]) for script in SMOKED if script in OWN_PROCESS}
    others = [script for script in SMOKED if script not in OWN_PROCESS]
    ran |= zip(others, run_scripts([words[script] for script in others], timeout=500), strict=True)
    return ran, set(RESULTS.iterdir()) - before


def in_own_process(words: list[str]) -> Ran:
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return Ran(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.timeout(600)  # the first one waits for all
@pytest.mark.parametrize("script", SMOKED)
def test_smoke(script: str, once: Callable[..., Any]) -> None:
    ran, written = once(run_all)
    assert ran[script].code == 0, ran[script].stderr
    assert ran[script].stdout.strip()
    assert written == set(), "the numbers of a smoke run are no result"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_measures_nothing(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.process_time()
    with pytest.raises(SystemExit) as ended:
        call(script, ["--help"], monkeypatch)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage:")
    assert time.process_time() - began < 5, "of which most is the import of what the script needs"


def call(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: to start Python and torch for each script would take longer than all of them."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str((ROOT / script).parent))  # as for a script that is started by its path
    monkeypatch.setattr(sys, "argv", [script, *words])
    importlib.import_module(script.removesuffix(".py").replace("/", ".")).main()
