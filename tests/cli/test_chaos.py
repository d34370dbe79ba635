"""`shoal chaos`: a real run, disturbed by a seeded schedule, ends as the undisturbed one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.host import Host, until, wait_until

TIMES = int(os.environ.get("SHOAL_DRILL", "1"))
"""How many times longer drills are: 5 for 200 kills, 16 for half an hour of hosts that come and go."""
SHORT = ["chaos", "--steps", "40", "--pace", "0.06", "--minutes", "0.05", "--nproc", "2", "--json"]


def test_two_faults_cost_nothing(host: Host, tmp_path: Path) -> None:
    ended = host.run(*SHORT, "--faults", "2", "--kinds", "kill,clock", "--seed", "1", cwd=tmp_path)
    assert ended.code == 0, ended.said
    found = ended.json
    assert (found["holds"], found["broken"]) == (True, []), found
    assert found["faults"] == {"scheduled": 2, "made": 2, "left_out": {}}
    assert (found["restarts"], found["commands"], found["steps"]) == (1, 1, 40)
    assert (found["committed_steps_lost"], found["samples_lost"], found["samples_doubled"]) == (0, 0, 0)
    kill = found["kinds"]["kill"]
    assert (kill["named"], kill["recovered"]) == (1, 1)
    assert 0.1 < found["goodput"]["ettr"] <= 1.0
    assert "fault 2 of 2" in ended.said


def test_interrupted_it_leaves_nothing(host: Host, tmp_path: Path) -> None:
    started = host.start(*SHORT, "--steps", "100000", "--faults", "1", "--kinds", "stop", cwd=tmp_path)
    pattern = f"shoal-chaos-{started.pid}-*"
    until(lambda: any(Path("/tmp").glob(f"{pattern}/disturbed/steps.jsonl")), started)
    os.kill(started.pid, signal.SIGINT)
    assert started.wait() == 130, started.said
    assert not any(Path("/tmp").glob(pattern))
    wait_until(lambda: not _commands(tmp_path), 5)


def test_killed_it_leaves_no_run(host: Host, tmp_path: Path) -> None:
    started = host.start(*SHORT, "--steps", "100000", "--faults", "1", "--kinds", "stop", cwd=tmp_path)
    pattern = f"shoal-chaos-{started.pid}-*"
    until(lambda: any(Path("/tmp").glob(f"{pattern}/disturbed/steps.jsonl")), started)
    (folder,) = Path("/tmp").glob(pattern)
    assert len(_commands(tmp_path)) > 1
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: not _commands(tmp_path), 20)
    assert started.wait() == -signal.SIGKILL
    shutil.rmtree(folder)


def _commands(folder: Path) -> list[str]:
    """Processes that work in a folder."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            found += [str(link)] if os.readlink(link) == str(folder) else []
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--kinds", "kil"], "N080", "--kinds has an unknown fault 'kil'"),
        (["--faults", "0"], "N080", "--faults must be 1 or more, got 0"),
        (["--kinds", "slow"], "N084", "none of --kinds slow can be made here: slow needs --hosts 2"),
        (["--optim.lr", "hot"], "R", "optim.lr"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    host: Host, tmp_path: Path, words: list[str], code: str, said: str
) -> None:
    ended = host.run("chaos", *words, cwd=tmp_path)
    assert ended.code == 2
    assert code in ended.said
    assert said in ended.said


def test_a_dry_run_prints_the_schedule(host: Host, tmp_path: Path) -> None:
    words = ["chaos", "--dry-run", "--faults", "3", "--seed", "9", "--kinds", "kill,stop"]
    first, second = host.run(*words, cwd=tmp_path), host.run(*words, cwd=tmp_path)
    assert first.code == 0, first.said
    assert first.told == second.told
    assert len(first.told.splitlines()) == 3


@pytest.mark.wide
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a disk and a control group")
@pytest.mark.timeout(300)
def test_every_fault_of_one_host(host: Host, tmp_path: Path) -> None:
    words = ["chaos", "--faults", "8", "--minutes", "1", "--seed", "2", "--nproc", "2", "--json"]
    ended = host.start(*words, cwd=tmp_path)
    assert ended.wait(280) == 0, ended.said
    assert ended.json["holds"], ended.json
    mounted = subprocess.run(["mount"], capture_output=True, text=True, check=True).stdout
    assert f"shoal-chaos-{ended.pid}" not in mounted


@pytest.mark.wide
@pytest.mark.timeout(400 * TIMES)
def test_many_kills(host: Host, tmp_path: Path) -> None:
    words = ["chaos", "--faults", str(40 * TIMES), "--minutes", str(2.5 * TIMES), "--kinds", "kill", "--nproc", "2"]
    words += ["--seed", "8", "--checkpoint.every", "2step", "--launch.max_restarts", "20", "--json"]
    ended = host.start(*words, cwd=tmp_path)
    assert ended.wait(380 * TIMES) == 0, ended.said
    assert ended.json["faults"]["made"] == 40 * TIMES, ended.json


@pytest.mark.wide
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
@pytest.mark.timeout(400 * TIMES)
def test_hosts_and_ranks_come_and_go(host: Host, tmp_path: Path) -> None:
    """One rank on each host. The useful part of the time is compared with its prediction."""
    words = ["chaos", "--faults", str(4 * TIMES), "--minutes", str(2 * TIMES), "--hosts", "2", "--nproc", "1"]
    words += ["--kinds", "kill,agent,partition,oneway,flap,stop", "--pace", "0.4", "--seed", "43"]
    ended = host.start(*words, "--checkpoint.every", "2step", "--json", cwd=tmp_path)
    assert ended.wait(380 * TIMES) == 0, ended.said
    goodput = ended.json["goodput"]
    assert goodput["ettr"] == pytest.approx(goodput["ettr_predicted"], abs=0.3), ended.json


@pytest.mark.wide
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
@pytest.mark.timeout(600)
def test_every_fault_of_two_hosts(host: Host, tmp_path: Path) -> None:
    words = ["chaos", "--faults", "13", "--minutes", "3", "--seed", "4", "--hosts", "2", "--nproc", "2", "--json"]
    ended = host.start(*words, cwd=tmp_path)
    assert ended.wait(580) == 0, ended.said
    assert len(ended.json["kinds"]) == 13, ended.json
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"shoal-chaos-{ended.pid}" not in namespaces
