"""Every benchmark still runs: each has a smoke mode of seconds, and `--help` measures nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "benchmarks").glob("*/*.py")
    if "__main__" in path.read_text() and "argparse" in path.read_text()
)
WORDS = {"benchmarks/h200/systems.py": ["shoal"]}
"""What a script has to be given beside --smoke."""
WITHOUT = {
    "benchmarks/h200/run.py": "starts the other scripts of its folder on a GPU, beside peers that CI does not have",
    "benchmarks/h200/roofline.py": "reads the trace of a GPU",
    "benchmarks/planner/floor.py": "reads a table of runs; tests/unit/test_floor.py has its arithmetic",
}
"""Scripts without a smoke mode, and why."""
OWN_PROCESS = {
    "benchmarks/checkpoint/run.py",  # torch's asynchronous save starts a process from __main__
    "benchmarks/context/run.py",  # starts its process anew, with another allocator
}


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in WITHOUT])
def test_smoke(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = set(RESULTS.iterdir())
    words = [*WORDS.get(script, []), "--smoke"]
    if script in OWN_PROCESS:
        subprocess.run([sys.executable, script, *words], check=True, cwd=ROOT)
    else:
        call(script, words, monkeypatch)
        assert capsys.readouterr().out.strip()
    assert set(RESULTS.iterdir()) == results, "the numbers of a smoke run are no result"


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
