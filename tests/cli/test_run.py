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


REPLACED = """
import json, os, pathlib, sys, time
me = os.environ
if me["TORCHELASTIC_RESTART_COUNT"] == "0":
    if me["RANK"] == "0":
        sys.exit(1)
    path = pathlib.Path(me["SHOAL_RUN_FOLDER"]) / "generation-1.json"
    while not path.exists():
        time.sleep(0.01)
    old = me["RANK"], me["MASTER_PORT"]
    me.update(json.loads(path.read_text())[me["SHOAL_RUN_PROCESS"]])
    assert me["MASTER_PORT"] != old[1]
else:
    old = ("new",)
sys.stdout.write(f"{old[0]} -> {me['RANK']} of {me['WORLD_SIZE']}, slot {me['LOCAL_RANK']}" + chr(10))
"""


def test_a_failed_rank_is_replaced_and_survivors_come_first(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", "-np", "3", "--restarts", "1", PYTHON, "-c", REPLACED]) == 0
    out, err = capfd.readouterr()
    *lines, answer = out.splitlines()
    assert sorted(lines) == ["1 -> 0 of 3, slot 1", "2 -> 1 of 3, slot 2", "new -> 2 of 3, slot 0"]
    assert (json.loads(answer)["exit_codes"], json.loads(answer)["restarts"]) == ([0, 0, 0], 1)
    assert "rank 0 ended with exit code 1, and is replaced" in err


ELASTIC = """
import os, signal, sys, torch
import shoal.horovod as hvd
hvd.init()
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
state = hvd.elastic.TorchState(model=model, epoch=0)

@hvd.elastic.run
def train(state):
    while state.epoch < 4:
        if state.epoch == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        step = hvd.allreduce(torch.full((1, 2), float(hvd.rank() + 1)), op=hvd.Sum, name="step")
        with torch.no_grad():
            model.weight.add_(step)
        state.epoch += 1
        state.commit()

train(state)
sys.stdout.write(f"{hvd.rank()} {state.epoch} {model.weight.tolist()}" + chr(10))
"""


@pytest.mark.wide
def test_elastic_training_survives_the_loss_of_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    """The new rank 0 is the survivor, and the replacement gets its weights of epoch 2."""
    assert main(["run", "-np", "2", "--restarts", "1", PYTHON, "-c", ELASTIC]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 4 [[12.0, 12.0]]", "1 4 [[12.0, 12.0]]"]


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (["run", "-np", "0", PYTHON], ["N120"]),
        (["run", "-np", "2", "--restarts", "-1", PYTHON], ["N120"]),
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
