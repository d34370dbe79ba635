"""`shoal run -np N COMMAND`: the variables of each rank, failures, and what it rejects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.cli import main

PYTHON = sys.executable


def codes_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([*words, "--json"] if "--json" in words else ["run", "--json", *words[1:]]) == 2
    return [problem["code"] for problem in json.loads(capsys.readouterr().out)["error"]["problems"]]


def test_every_rank_has_its_variables(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK")
    script = f"import os, sys; sys.stdout.write(' '.join(os.environ[n] for n in {names}) + chr(10))"
    assert main(["run", "-np", "2", "-H", "localhost:2", PYTHON, "-c", script]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["0 2 0 127.0.0.1 0 2 0", "1 2 1 127.0.0.1 1 2 1"]


def test_all_ranks_share_a_port_and_a_key(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import os, sys; sys.stdout.write(os.environ['MASTER_PORT'] + os.environ['SHOAL_KEY'] + chr(10))"
    assert main(["run", "--np", "2", "--", PYTHON, "-c", script]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == second
    assert len(first) > 64


def test_a_failed_rank_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert main(["run", "--json", "-np", "2", PYTHON, "-c", script]) == 3
    out, err = capfd.readouterr()
    assert "rank 1 of 2 ended with exit code 7; the others were ended [N123]" in err
    assert json.loads(out.splitlines()[0])["exit_codes"] == [-signal.SIGTERM, 7]


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    script = f"import os, time; open('{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(600)"
    run = subprocess.Popen([PYTHON, "-m", "shoal", "run", "-np", "2", PYTHON, "-c", script])
    while len(list(tmp_path.glob("[01]"))) < 2 or not all(path.read_text() for path in tmp_path.glob("[01]")):
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 128 + signal.SIGTERM
    for path in tmp_path.glob("[01]"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (["run", "-np", "0", PYTHON], ["N120"]),
        (["run", "-np", "2"], ["N121"]),
        (["run", "-np", "2", "no-such-command-anywhere"], ["N121"]),
        (["run", "-np", "8", "-H", "a:4,b:4", PYTHON], ["N122"]),
        (["run", "-np", "2", "-H", "localhost", PYTHON], ["N122"]),
        (["run", "-np", "0", "-H", "a:4"], ["N120", "N121", "N122"]),
    ],
)
def test_bad_input_is_rejected_before_anything_starts(
    words: list[str], codes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert codes_of(words, capsys) == codes
