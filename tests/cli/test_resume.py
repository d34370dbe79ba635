"""An interrupted run resumes as if it had not been interrupted: the same command, real signals, on any rank."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.host import Host, Started, in_session, until
from tests.cli.test_train import MADE_UP, losses, records
from tests.cover import covered, wide

WORDS = [
    *["train", "--model.num_layers", "1", "--model.hidden", "32", "--model.ffn", "48", *MADE_UP, "--plan", "fp64"],
    *[
        "--data.seq_len",
        "32",
        "--data.global_batch",
        "12",
        "--data.workers",
        "0",
        "--device",
        "cpu",
        "--launch.threads",
        "1",
    ],
    *["--optim.warmup", "5step", "--json"],
]
ALL = [*WORDS, "--run.duration", "24step", "--run.dir", "run"]
MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def undisturbed(host: Host, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = host.run(*ALL, "--nproc", "2", cwd=folder)
    assert ended.code == 0, ended.said
    found = losses(folder / "run")
    assert len(found) == 24
    return found


def in_memory_of_runs() -> set[Path]:
    """What runs have there. What belongs to no run may come and go."""
    return {path for path in MEMORY.glob("shoal-*") if not path.name.startswith("shoal-test-")}


def left_in_memory() -> set[Path]:
    """What has stayed there after its run."""
    return {path for path in in_memory_of_runs() if not _is_held(path)}


def _is_held(folder: Path) -> bool:
    """Whether a process has locked a folder: a run of another checkout may be under way."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@pytest.fixture(autouse=True)
def _nothing_is_left(host: Host) -> Iterator[None]:
    before = left_in_memory()
    yield
    host.kill_what_runs()
    assert left_in_memory() - before == set()


def committed(folder: Path) -> int:
    """The newest step that is there; -1: none is."""
    try:
        return int((folder / "latest").read_text().split("-")[1])
    except (FileNotFoundError, NotADirectoryError):
        return -1


def hexed(numbers: list[float]) -> list[str]:
    return [number.hex() for number in numbers]


def saves(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def test_a_run_that_lost_its_power_goes_on_bit_for_bit(host: Host, undisturbed: list[float], tmp_path: Path) -> None:
    words = [*ALL, "--nproc", "2", "--checkpoint.every", "2step"]
    for step in (5, 13):
        started = host.start(*words, cwd=tmp_path)
        until(lambda step=step: committed(saves(tmp_path)) >= step, started)  # type: ignore[misc]
        started.kill_all()
    ended = host.run(*words, cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert ended.json["resumed_from"] >= 12
    assert hexed(losses(tmp_path / "run")) == hexed(undisturbed)
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 25))
    assert ended.json["loss_first"] == undisturbed[0]
    assert committed(saves(tmp_path)) == 24  # the end is kept too
    assert len(list(saves(tmp_path).glob("step-*"))) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, wide(signal.SIGUSR1), wide(signal.SIGINT)])
def test_who_is_asked_to_stop_saves_and_goes_on(
    host: Host, undisturbed: list[float], tmp_path: Path, number: signal.Signals
) -> None:
    words = [*ALL, "--nproc", "2", "--checkpoint.every", "0step", "--run.duration", "24step"]
    started = host.start(*words, cwd=tmp_path)
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(losses(tmp_path / "run")) > 3, started)
    os.kill(started.pid, number)
    began = time.monotonic()
    assert started.wait() == 130, started.said
    assert time.monotonic() - began < 5
    done = started.json["steps"]
    assert 3 < done < 24
    assert committed(saves(tmp_path)) == done == started.json["saved_step"]
    ended = host.run(*words, cwd=tmp_path)
    assert (ended.code, ended.json["resumed_from"]) == (0, done)
    assert hexed(losses(tmp_path / "run")) == hexed(undisturbed)


def test_a_signal_to_every_process_at_once(host: Host, undisturbed: list[float], tmp_path: Path) -> None:
    """As Slurm sends it: to the workers, and to the processes that make their batches, too."""
    words = [*ALL, "--nproc", "2", "--checkpoint.every", "0step", "--data.workers", "1"]
    started = host.start(*words, cwd=tmp_path)
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(losses(tmp_path / "run")) > 3, started)
    for pid in in_session(started.pid):
        os.kill(pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
    assert committed(saves(tmp_path)) == started.json["steps"] > 3
    ended = host.run(*words, cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert hexed(losses(tmp_path / "run")) == hexed(undisturbed)


@pytest.mark.alone
@pytest.mark.parametrize("rank", [wide(0), 1])
def test_a_worker_that_is_killed_costs_no_committed_step(
    host: Host, undisturbed: list[float], tmp_path: Path, rank: int
) -> None:
    """With the memory tier: nothing is read from a disk, because nothing is on one."""
    before = in_memory_of_runs()
    words = [*ALL, "--nproc", "2", "--checkpoint.every", "0step", "--checkpoint.memory_every", "1step"]
    started = host.start(*words, cwd=tmp_path)
    root: list[Path] = []

    def in_memory() -> int:
        root[:] = in_memory_of_runs() - before
        return committed(root[0]) if root else -1

    until(lambda: in_memory() >= 8, started)
    os.kill(started.workers[rank], signal.SIGKILL)
    began, known = time.monotonic(), in_memory()
    assert committed(saves(tmp_path)) == -1
    until(lambda: in_memory() > known + 1, started)
    assert time.monotonic() - began < 3
    assert started.wait() == 0, started.said
    assert started.json["restarts"] == 1
    assert started.json["resumed_from"] >= known
    assert f"rank {rank} of 2 was killed by signal 9 (SIGKILL)" in started.said
    assert hexed(losses(tmp_path / "run")) == hexed(undisturbed)
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 25))


@pytest.mark.parametrize("fresh", [["--run.overwrite"], wide(["--resume", "fresh"])])
def test_who_begins_anew_does_so_once(host: Host, tmp_path: Path, fresh: list[str]) -> None:
    """A restart goes on; and what is saved elsewhere is not taken for this run's."""
    words = [
        *ALL,
        "--nproc",
        "2",
        "--run.duration",
        "6step",
        "--checkpoint.every",
        "1step",
        "--checkpoint.dir",
        "saves",
    ]
    assert host.run(*words, "--run.duration", "9step", cwd=tmp_path).code == 0
    ended = host.run(*words, *fresh, cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=rank:0,step:4"})
    assert (ended.code, ended.json["restarts"], ended.json["resumed_from"] in (2, 3)) == (0, 1, True), ended.said
    assert committed(tmp_path / "saves") == 6
    assert len(losses(tmp_path / "run")) == 6


KILLED = """
import multiprocessing, os
from torch import nn
from shoal.train.recipe.saving import run_storage

def end(*args):
    os.kill(os.getpid(), 9)

def build(vocabulary=4096, hidden=16):
    if multiprocessing.current_process().name == "rank 0" and os.path.exists("kill"):
        moment = open("kill").read()
        os.remove("kill")
        if moment == "builds":
            end()
        run_storage.load_first_weights = end
    return Model(vocabulary, hidden)

class Model(nn.Module):
    num_outputs = 4096
    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.out = nn.Linear(hidden, vocabulary)
    def forward(self, tokens):
        return self.out(self.embed(tokens))
"""
"""A model with which rank 0 is killed once: while it builds, or after it has claimed the run directory."""


def killed(folder: Path, moment: str, *words: str) -> list[str]:
    """Words of a command whose rank 0 is killed at a moment of its start."""
    (folder / "own.py").write_text(KILLED)
    (folder / "kill").write_text(moment)
    plain = WORDS[WORDS.index("--data.source") :]
    return ["train", "--model.name", "own.py:build", *plain, "--nproc", "2", "--checkpoint.every", "1step", *words]


@pytest.mark.parametrize(
    ("asked", "moment", "resumed_from"),
    [
        (["--resume", "4"], "builds", 4),
        (["--run.overwrite"], "builds", None),
        (["--run.overwrite"], "loads weights", None),
        wide(["--resume", "fresh"], "loads weights", None),
    ],
)
def test_a_restart_before_the_first_step_does_what_the_command_says(
    host: Host, tmp_path: Path, asked: list[str], moment: str, resumed_from: int | None
) -> None:
    """It went on from the newest step of the run before."""
    words = killed(tmp_path, moment, "--run.dir", "run", "--run.duration", "9step", "--checkpoint.keep", "9")
    (tmp_path / "kill").unlink()
    assert host.run(*words, cwd=tmp_path).code == 0
    (tmp_path / "run" / "summary.json").unlink()  # as of a run that has not ended
    (tmp_path / "kill").write_text(moment)
    ended = host.run(*words, *asked, cwd=tmp_path)
    assert (ended.code, ended.json["restarts"], ended.json["resumed_from"]) == (0, 1, resumed_from), ended.said
    assert "rank 0 of 2 was killed by signal 9" in ended.said
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 10))


@pytest.mark.parametrize("where", [["--run.dir", "run"], ["--run.name", "one"]])
def test_a_rank_that_is_killed_before_it_has_written_anything(host: Host, tmp_path: Path, where: list[str]) -> None:
    """The run directory has nothing but a lock, which was taken for files of the user."""
    ended = host.run(*killed(tmp_path, "loads weights", "--run.duration", "3step", *where), cwd=tmp_path)
    assert (ended.code, ended.json["restarts"], ended.json["steps"]) == (0, 1, 3), ended.said
    assert ended.json["run_directory"] == ("run" if where == ["--run.dir", "run"] else "runs/one")


def test_restarts_go_on_from_the_disk(host: Host, undisturbed: list[float], tmp_path: Path) -> None:
    words = [*ALL, "--nproc", "2", "--checkpoint.every", "1step", "--launch.max_restarts", "1"]
    started = host.start(*words, cwd=tmp_path)
    for step in (5, 12):
        until(lambda step=step: committed(saves(tmp_path)) >= step, started)  # type: ignore[misc]
        os.kill(started.workers[1], signal.SIGKILL)
    assert started.wait() == 0, started.said
    assert started.said.count("restart 1 of 1 since step") == 2  # progress in between: the budget is full again
    assert started.said.count("rank 1 of 2 was killed by signal 9") == 2
    assert (started.json["restarts"], started.json["resumed_from"] >= 12) == (2, True)
    assert hexed(losses(tmp_path / "run")) == hexed(undisturbed)


def test_who_gives_up_brings_what_is_in_memory_to_the_disk(
    host: Host, undisturbed: list[float], tmp_path: Path
) -> None:
    words = [*ALL, "--nproc", "2", "--checkpoint.every", "0step", "--checkpoint.memory_every", "1step"]
    fault = {"SHOAL_FAULTS": "kill_at=rank:1,step:9"}
    ended = host.run(*words, "--launch.max_restarts", "0", cwd=tmp_path, env=fault)
    assert ended.code == 3
    assert "was saved from memory to disk" in ended.said
    assert committed(saves(tmp_path)) in (7, 8)
    again = host.run(*words, cwd=tmp_path)
    assert (again.code, again.json["resumed_from"] in (7, 8)) == (0, True), again.said
    assert hexed(losses(tmp_path / "run")) == hexed(undisturbed)


def test_an_end_that_could_not_be_saved_is_not_the_end(host: Host, tmp_path: Path) -> None:
    """It is told, nothing claims it, and the same command brings it from memory to the disk."""
    words = short("--run.dir", "run", "--checkpoint.every", "0step", "--checkpoint.memory_every", "1step")
    ended = host.run(*words, cwd=tmp_path, env={"SHOAL_FAULTS": "disk_full_at=step:6,write:4"})
    assert (ended.code, ended.json["saved_step"], ended.json["saves_failed"]) == (3, None, 1), ended.said
    assert "the last step is not saved" in ended.said
    again = host.run(*words, cwd=tmp_path)
    assert (again.code, again.json["resumed_from"] in (4, 5), again.json["saved_step"]) == (0, True, 6), again.said
    assert committed(saves(tmp_path)) == 6
    assert len(records(tmp_path / "run")) == 6


def test_a_run_at_its_end_has_nothing_to_do_and_a_shorter_one_is_refused(host: Host, tmp_path: Path) -> None:
    words = short("--run.dir", "run")
    assert host.run(*words, cwd=tmp_path).code == 0
    told = records(tmp_path / "run")
    again = host.run(*[word for word in words if word != "--json"], "--resume", "latest", cwd=tmp_path)
    assert again.code == 0, again.said
    assert "all made before" in again.out.read_text()
    assert (tmp_path / "measured.csv").read_text().count("\n") == 2  # a title and one run: nothing was measured again
    assert records(tmp_path / "run") == told
    shorter = host.run(*words, "--resume", "latest", "--run.duration", "3step", cwd=tmp_path)
    assert shorter.code == 2
    assert "has made, got 3" in shorter.said
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.alone
def test_the_clock_saves_once_an_interval(host: Host, tmp_path: Path) -> None:
    words = short(
        "--run.dir", "run", "--checkpoint.every", "0.25sec", "--checkpoint.keep", "99", "--run.duration", "1.5sec"
    )
    assert host.run(*words, cwd=tmp_path).code == 0
    steps = sorted(int(path.name.split("-")[1]) for path in saves(tmp_path).glob("step-*"))
    assert 3 <= len(steps) <= 7
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(steps[:-1]))


def test_what_is_not_finite_does_not_stop_saving(host: Host, tmp_path: Path) -> None:
    words = short("--run.dir", "run", "--run.on_nan", "skip", "--optim.lr", "1e300")
    ended = host.run(*words, cwd=tmp_path)
    assert (ended.json["saves_failed"], ended.json["saves"]) == (0, 3), ended.said


def test_what_is_begun_anew_is_not_taken_up_from_memory(host: Host, tmp_path: Path) -> None:
    words = short("--run.dir", "run", "--checkpoint.every", "0step", "--checkpoint.memory_every", "1step")
    words += ["--run.duration", "12step"]
    assert host.run(*words, cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=step:10"}).code != 0
    assert host.run(*words, "--resume", "fresh", cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=step:4"}).code != 0
    ended = host.run(*words, cwd=tmp_path)
    assert (ended.code, ended.json["resumed_from"] in (2, 3)) == (0, True), ended.said
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 13))


def test_a_damaged_step_in_memory_does_not_hide_that_on_the_disk(host: Host, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    words = short("--run.dir", "run", "--checkpoint.every", "3step")
    assert host.run(*words, "--run.duration", "3step", cwd=tmp_path).code == 0  # so that step 3 is surely on the disk
    words += ["--checkpoint.memory_every", "1step", "--checkpoint.memory_dir", str(memory)]
    killed = host.run(*words, "--resume", "latest", cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=step:6"})
    assert killed.code == -signal.SIGKILL, killed.said
    (root,) = memory.glob(f"shoal-run-{os.getuid()}-*")
    shards = list(root.glob("step-*/*.safetensors"))
    assert shards
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[-3] ^= 1
        shard.write_bytes(data)
    ended = host.run(*words, cwd=tmp_path)
    assert (ended.code, ended.json["resumed_from"]) == (0, 3), ended.said
    assert f"of {memory}" in ended.said


def test_memory_that_others_can_write_to_is_not_used(host: Host, tmp_path: Path) -> None:
    words = short("--run.dir", "run", "--checkpoint.memory_every", "1step", "--checkpoint.memory_dir", str(tmp_path))
    words += ["--checkpoint.every", "0step"]
    assert host.run(*words, cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=step:3"}).code != 0
    (root,) = tmp_path.glob("shoal-run-*")
    root.chmod(0o777)
    ended = host.run(*words, cwd=tmp_path)
    assert (ended.code, ended.json["resumed_from"]) == (0, None), ended.said
    assert "not a private folder of this user (its mode is 0777, not 0700)" in ended.said
    assert list(tmp_path.glob("shoal-run-*")) == [root]
    nowhere = host.run(*words, "--checkpoint.memory_dir", "/nowhere", "--resume", "fresh", cwd=tmp_path)
    assert nowhere.code == 2
    assert "'/nowhere' cannot hold the state of this run" in nowhere.said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_weights_that_another_user_has_put_into_memory_are_not_resumed_from(host: Host, tmp_path: Path) -> None:
    """A folder in /dev/shm with the name of ours and a step that is newer than those on the disk: the run took it."""
    words = [*ALL, "--nproc", "2", "--run.duration", "4step", "--checkpoint.every", "2step"]
    assert host.run(*words, "--run.duration", "6step", "--run.dir", "other", cwd=tmp_path).code == 0
    # Step 2 is on the disk before the kill, also where the disk is slow.
    fault = {"SHOAL_FAULTS": "sleep_at=rank:1,step:3,seconds:1 kill_at=rank:1,step:4"}
    assert host.run(*words, "--launch.max_restarts", "0", cwd=tmp_path, env=fault).code == 3
    hostile = MEMORY / f"shoal-tier-{os.geteuid()}-hostile"
    try:
        shutil.copytree(tmp_path / "other" / "checkpoints", hostile)
        (hostile / "lock").touch()
        (hostile / "disk").write_text("run/checkpoints")
        for path in (hostile, *hostile.rglob("*")):
            os.chown(path, 12345, 12345)
        ended = host.run(*words, "--checkpoint.memory_every", "1step", cwd=tmp_path)
        assert (ended.code, ended.json["resumed_from"]) == (0, 2), ended.said
        assert "not a private folder of this user (it belongs to user 12345)" in ended.said
        assert hostile.is_dir()
    finally:
        shutil.rmtree(hostile)


@pytest.mark.parametrize("number", [wide(signal.SIGTERM), signal.SIGKILL])
def test_who_is_ended_between_two_generations_loses_nothing(host: Host, tmp_path: Path, number: signal.Signals) -> None:
    words = [*ALL, "--nproc", "2", "--checkpoint.every", "0step", "--checkpoint.memory_every", "1step"]
    fault = {"SHOAL_FAULTS": "kill_at=rank:1,step:6 kill_at=rank:1,step:9,generation:1"}
    started = host.start(*words, "--launch.recovery", "restart", cwd=tmp_path, env=fault)
    until(lambda: started.said.count("restarting all workers") == 2, started)  # a second of pause begins
    os.kill(started.pid, number)
    assert started.wait() != 0
    ended = host.run(*words, cwd=tmp_path)
    assert (ended.code, ended.json["resumed_from"] in (7, 8)) == (0, True), ended.said


def test_memory_that_nobody_watches_over_is_found_again(host: Host, tmp_path: Path) -> None:
    """One process, or one of another's launcher: what it kept in memory is there for the same command."""
    words = short("--run.dir", "run", "--checkpoint.every", "0step", "--checkpoint.memory_every", "1step")
    died = host.run(*words, cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=step:4"})
    assert died.code != 0
    assert committed(saves(tmp_path)) == -1
    again = host.run(*words, cwd=tmp_path)
    assert (again.code, again.json["resumed_from"] in (2, 3)) == (0, True), again.said


def test_memory_that_is_too_small_is_refused_before_the_first_step(host: Host, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("a small memory file system cannot be mounted here: not root")
    try:
        words = [*ALL, "--nproc", "2", "--checkpoint.memory_every", "1step", "--checkpoint.memory_dir", str(small)]
        ended = host.run(*words, cwd=tmp_path)
        assert ended.code == 2
        assert "GiB free for the state of this run in memory, got 0.0 GiB" in ended.said
        assert not list(small.iterdir())
        full = host.run(*ALL, "--nproc", "2", "--checkpoint.dir", str(small / "saves"), cwd=tmp_path)
        assert full.code == 2
        assert "--checkpoint.dir" in full.said
    finally:
        subprocess.run(["umount", str(small)], check=True)


# ---- which run goes on -----------------------------------------------------------------------------------------------


def short(*words: str) -> list[str]:
    return [*WORDS, "--nproc", "1", "--run.duration", "6step", "--checkpoint.every", "2step", *words]


def interrupted(host: Host, *words: str, cwd: Path, path: str = "run") -> int:
    """A run that was asked to stop; the step that it had made."""
    started = host.start(*short("--run.duration", "100000step", *words), cwd=cwd)
    until(lambda: committed(cwd / path / "checkpoints") >= 2, started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130
    return int(started.json["steps"])


def test_without_a_directory_the_last_run_that_has_not_ended_goes_on(host: Host, tmp_path: Path) -> None:
    done = interrupted(host, "--run.name", "one", cwd=tmp_path, path="runs/one")
    again = host.run(*short("--run.name", "one", "--run.duration", f"{done + 1}step"), cwd=tmp_path)
    assert (again.json["resumed_from"], again.json["steps"], again.json["run_directory"]) == (
        done,
        done + 1,
        "runs/one",
    )
    another = host.run(*short("--run.name", "one"), cwd=tmp_path)  # that one has ended
    assert (another.json["resumed_from"], another.json["run_directory"]) == (None, "runs/one-2")


def test_another_recipe_is_refused_with_the_difference(host: Host, tmp_path: Path) -> None:
    interrupted(host, "--run.dir", "run", cwd=tmp_path)
    refused = host.run(*short("--run.dir", "run", "--optim.lr", "0.5", "--plan", "fp32"), cwd=tmp_path)
    assert refused.code == 2
    assert "optim.lr: 0.0003 → 0.5; plan.precision: fp64 → fp32" in refused.said
    assert "--resume fresh" in refused.said
    fresh = host.run(*short("--run.dir", "run", "--optim.lr", "0.5", "--resume", "fresh"), cwd=tmp_path)
    assert (fresh.code, fresh.json["resumed_from"], fresh.json["steps"]) == (0, None, 6), fresh.said


def test_from_a_step_from_the_end_and_from_nothing(host: Host, tmp_path: Path) -> None:
    words = short("--run.dir", "run", "--checkpoint.keep", "9")
    assert host.run(*words, cwd=tmp_path).code == 0
    whole = losses(tmp_path / "run")
    ended = host.run(*words, cwd=tmp_path)
    assert ended.code == 2
    assert "already holds a finished run of this recipe" in ended.said
    longer = host.run(*words, "--resume", "latest", "--run.duration", "8step", cwd=tmp_path)
    assert (longer.json["resumed_from"], longer.json["steps"]) == (6, 8)
    from_two = host.run(*words, "--resume", "2", cwd=tmp_path)
    assert (from_two.json["resumed_from"], from_two.json["steps"]) == (2, 6)
    assert losses(tmp_path / "run") == whole
    assert committed(saves(tmp_path)) == 6
    assert sorted(path.name for path in saves(tmp_path).glob("aside-*"))  # what came after it is not lost
    missing = host.run(*words, "--resume", "77", cwd=tmp_path)
    assert missing.code == 2
    assert "there is no checkpoint of step 77" in missing.said
    nothing = host.run(*short("--run.dir", "new", "--resume", "latest"), cwd=tmp_path)
    assert nothing.code == 2
    assert "no checkpoint" in nothing.said
    assert not (tmp_path / "new").exists()


def test_a_run_begins_with_the_weights_of_another(host: Host, tmp_path: Path) -> None:
    assert host.run(*short("--run.dir", "first"), cwd=tmp_path).code == 0
    words = short("--run.dir", "second", "--run.duration", "1step", "--optim.lr", "1e-30", "--nproc", "2")
    ended = host.run(*words, "--plan", "fp64 zero=3", "--run.start_from", "first", cwd=tmp_path)
    assert (ended.code, ended.json["resumed_from"], ended.json["steps"]) == (0, None, 1), ended.said
    assert host.run("checkpoint", "diff", "first", "second", "--weights", cwd=tmp_path).code == 0
    assert host.run("checkpoint", "diff", "first", "second", cwd=tmp_path).code == 1  # the optimizer began anew
    other = short("--run.dir", "other", "--model.hidden", "16")
    assert host.run(*other, cwd=tmp_path).code == 0
    for where, what in (
        ("nowhere", "there is no checkpoint in 'nowhere'"),
        ("first", "would remove 'first'"),
        ("other", "is of another model"),
    ):
        lost = host.run(*short("--run.dir", "first", "--run.start_from", where, "--resume", "fresh"), cwd=tmp_path)
        assert lost.code == 2
        assert what in lost.said
        assert committed(tmp_path / "first" / "checkpoints") == 6  # nothing was removed
    one = host.run(
        *words[:-1], "1", "--run.dir", "third", "--run.start_from", "first/checkpoints/step-00000004", cwd=tmp_path
    )
    assert one.code == 0, one.said


def test_two_processes_never_train_in_one_directory(host: Host, tmp_path: Path) -> None:
    first = host.start(*short("--run.dir", "run", "--run.duration", "100000step"), cwd=tmp_path)
    until(lambda: committed(saves(tmp_path)) >= 2, first)
    seconds = [
        host.start(*short("--run.dir", "run", *words), cwd=tmp_path) for words in ([], ["--resume", "fresh"])
    ]  # at the same time: each waits some seconds for the first to be gone
    for second in seconds:
        assert second.wait() == 2
        assert "another process is training in 'run'" in second.said
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait() == 130


def test_a_damaged_step_is_told_and_the_one_before_it_is_used(host: Host, tmp_path: Path) -> None:
    words = short("--run.dir", "run", "--run.duration", "6step", "--checkpoint.keep", "2")
    assert host.run(*words, cwd=tmp_path).code == 0
    whole = losses(tmp_path / "run")
    path = saves(tmp_path) / "step-00000006" / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    again = host.run(*words, "--resume", "latest", cwd=tmp_path)
    assert (again.code, again.json["resumed_from"]) == (0, 4), again.said
    assert "cannot be used, trying the next one" in again.said
    assert "shard-00000.safetensors" in again.said
    assert losses(tmp_path / "run") == whole
    assert committed(saves(tmp_path)) == 6


# ---- another number of ranks -----------------------------------------------------------------------------------------

LEDGER = """
import json, os
import torch
from torch import nn

def build(vocabulary=4096, hidden=16):
    return Model(vocabulary, hidden)

class Model(nn.Module):
    num_outputs = 4096
    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.out = nn.Linear(hidden, vocabulary)
    def forward(self, tokens):
        if self.training:
            with open(f"seen-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(tokens[:, 0].tolist()) + "\\n")
        return self.out(self.embed(tokens))
"""


@pytest.mark.parametrize("time", [1, wide(2), wide(3)])
def test_four_three_two_four_ranks_in_one_epoch(host: Host, tmp_path: Path, time: int) -> None:
    """The model writes down which samples it is shown. Those of committed steps are each sample of the epoch, once."""
    import numpy as np

    (tmp_path / "own.py").write_text(LEDGER)
    tokens = np.random.default_rng(0).integers(0, 4096, (145, 16), dtype=np.uint16)  # the last one has no labels
    tokens[:, 0] = np.arange(145) + 1000
    tokens.tofile(tmp_path / "data.bin")
    words = [
        *["train", "--model.name", "own.py:build", "--data.source", "data.bin", "--data.seq_len", "16"],
        *["--data.global_batch", "12", "--data.validation", "0", "--plan", "fp64 mb=1", "--device", "cpu", "--json"],
        *["--run.duration", "12step", "--launch.threads", "1", "--checkpoint.every", "1step", "--data.workers", "1"],
        *["--run.seed", str(time)],
    ]
    plain = host.run(*words, "--run.dir", "plain", "--nproc", "1", cwd=tmp_path)
    assert plain.code == 0, plain.said
    for seen in tmp_path.glob("seen-*"):
        seen.unlink()
    ledger: dict[int, list[int]] = {}
    begun = 0
    for nproc, until_step in ((4, 3), (3, 6), (2, 9), (4, 12)):
        started = host.start(*words, "--run.dir", "run", "--nproc", str(nproc), cwd=tmp_path)
        if until_step < 12:
            until(lambda until_step=until_step: committed(saves(tmp_path)) >= until_step, started)  # type: ignore[misc]
            started.kill_all()
        else:
            assert started.wait() == 0, started.said
        done = committed(saves(tmp_path))
        note_seen(ledger, tmp_path, begun, done, per_step=12 // nproc)
        begun = done
    assert sorted(ledger) == list(range(1, 13))
    shown = [sample for step in sorted(ledger) for sample in ledger[step]]
    assert sorted(shown) == list(range(1000, 1144))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-12)


def note_seen(ledger: dict[int, list[int]], folder: Path, begun: int, done: int, *, per_step: int) -> None:
    """Of every process of a generation that began after the step `begun`, what belongs to steps up to `done`."""
    for path in folder.glob("seen-*"):
        for number, line in enumerate(path.read_text().splitlines()):
            step = begun + 1 + number // per_step
            if step <= done:
                ledger.setdefault(step, []).extend(json.loads(line))
        path.unlink()


# ---- faults in a save ------------------------------------------------------------------------------------------------

SHORT = [*WORDS, "--nproc", "2", "--plan", "fp64 zero=3", "--run.duration", "5step", "--run.dir", "run"]
SHORT += ["--checkpoint.every", "1step"]


def shards(folder: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / f"step-{step:08d}").glob("*.safetensors")}


@pytest.fixture(scope="module")
def five_steps(host: Host, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("five")
    ended = host.run(*SHORT, cwd=folder)
    assert ended.code == 0, ended.said
    return losses(folder / "run"), shards(saves(folder), 5)


def killed_at_write(host: Host, folder: Path, rank: int, write: int) -> Started:
    folder.mkdir()
    return host.start(*SHORT, cwd=folder, env={"SHOAL_FAULTS": f"kill_at=rank:{rank},save:2,write:{write}"})


STRIDE = 1 if os.environ.get("SHOAL_ALL") else 3
"""`make test-all` kills a run before every operation, `make test` before every third."""


@pytest.mark.parametrize("rank", [wide(0), 1])
def test_killed_before_every_operation_of_a_save(
    host: Host, five_steps: tuple[list[float], dict[str, bytes]], tmp_path: Path, rank: int
) -> None:
    """The second save of a run, on either rank: the run goes on from the step that it saved, or from the one before,
    by itself, and ends as if nothing had been."""
    whole, last = five_steps
    resumed: list[int] = []
    restarts = 1
    while restarts:
        first = len(resumed) * STRIDE + 1
        tried = range(first, first + 3 * STRIDE, STRIDE)  # at the same time: a run that was killed mostly waits
        for started in [killed_at_write(host, tmp_path / str(write), rank, write) for write in tried]:
            assert started.wait() == 0, started.said
            if restarts := started.json["restarts"]:  # else it has fewer operations than that
                resumed.append(started.json["resumed_from"])
        for write in tried:
            assert hexed(losses(tmp_path / str(write) / "run")) == hexed(whole), write
            assert shards(saves(tmp_path / str(write)), 5) == last, write
    assert len(resumed) * STRIDE >= (3 if rank else 10)
    assert set(resumed) == ({1} if rank else {1, 2})


REASONS = [
    ("ENOSPC", 0),
    ("EIO", 1),
    ("EACCES", 0),
    ("EROFS", 1),
    ("ENOSPC", 1),
    ("EIO", 0),
    ("EACCES", 1),
    ("EROFS", 0),
]


@pytest.mark.parametrize(("reason", "rank"), covered(REASONS, lambda *row: row))
def test_a_disk_that_fails_does_not_stop_training(
    host: Host, five_steps: tuple[list[float], dict[str, bytes]], tmp_path: Path, rank: int, reason: str
) -> None:
    whole, last = five_steps
    fault = {"SHOAL_FAULTS": f"disk_full_at=rank:{rank},step:3,errno:{reason}"}
    ended = host.run(*SHORT, cwd=tmp_path, env=fault)
    assert ended.code == 0, ended.said
    assert (ended.json["saves"], ended.json["saves_failed"], ended.json["restarts"]) == (4, 1, 0)
    assert "NOT SAVED, training continues: the checkpoint of step 3 was not saved" in ended.said
    assert "--checkpoint.dir DIR" in ended.said
    assert hexed(losses(tmp_path / "run")) == hexed(whole)
    assert shards(saves(tmp_path), 5) == last
    assert not list(saves(tmp_path).glob(".draft*"))


def test_a_full_disk_keeps_the_checkpoint_before(host: Host, tmp_path: Path) -> None:
    """The last save fails: what loads is the one before it."""
    fault = {"SHOAL_FAULTS": "disk_full_at=rank:1,step:5"}
    ended = host.run(*SHORT, cwd=tmp_path, env=fault)
    assert (ended.code, ended.json["saves_failed"], ended.json["saved_step"]) == (3, 1, 4), ended.said
    assert committed(saves(tmp_path)) == 4
    again = host.run(*SHORT, cwd=tmp_path)  # it has not ended as it should
    assert (again.code, again.json["resumed_from"]) == (0, 4)


def test_a_directory_that_is_removed_under_a_run(host: Host, tmp_path: Path) -> None:
    started = host.start(*SHORT, "--run.duration", "400step", cwd=tmp_path)
    until(lambda: committed(saves(tmp_path)) >= 3, started)
    shutil.rmtree(saves(tmp_path), ignore_errors=True)
    gone = len(losses(tmp_path / "run"))
    until(lambda: committed(saves(tmp_path)) > gone + 1, started)  # it is made again
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
    assert committed(saves(tmp_path)) == started.json["steps"]


def test_a_bit_that_turns_on_its_way_is_found(host: Host, tmp_path: Path) -> None:
    """Step 5 is saved while rank 0 sleeps in step 6."""
    fault = {"SHOAL_FAULTS": "corrupt_at=rank:1,step:5 sleep_at=rank:0,step:6,seconds:1 kill_at=rank:0,step:6"}
    ended = host.run(*SHORT, "--run.duration", "7step", cwd=tmp_path, env=fault)
    assert (ended.code, ended.json["resumed_from"], ended.json["restarts"]) == (0, 4, 1), ended.said
    assert "cannot be used, trying the next one" in ended.said
    assert "differ from what was written" in ended.said
    assert len(losses(tmp_path / "run")) == 7


def test_an_exchange_that_fails_is_a_restart(host: Host, five_steps: Any, tmp_path: Path) -> None:
    ended = host.run(*SHORT, cwd=tmp_path, env={"SHOAL_FAULTS": "fail_allreduce_at=rank:1,step:4"})
    assert (ended.code, ended.json["restarts"], ended.json["resumed_from"] in (2, 3)) == (0, 1, True), ended.said
    assert "the exchange of step 4 fails" in ended.said
    assert hexed(losses(tmp_path / "run")) == hexed(five_steps[0])


# ---- replicas that do not tell each other everything ----------------------------------------------------------------

MEETING = {
    "compressed": ["--plan", "fp64 compress=1bit", "--comm.warmup_steps", "3"],
    "local SGD": ["--plan", "fp64 sync=diloco:4 compress=topk:0.1"],
    "delayed local SGD": ["--plan", "fp64 sync=diloco:6", "--comm.fragments", "2", "--comm.outer_delay", "2"],
}


@pytest.mark.parametrize(("how", "rank"), [wide("compressed", 1), wide("local SGD", 1), wide("delayed local SGD", 0)])
def test_replicas_that_meet_rarely_go_on_bit_for_bit(host: Host, tmp_path: Path, how: str, rank: int) -> None:
    """A worker dies in the middle of its own steps, and one in the step in which all meet; both come back by
    themselves, and what was owed is still owed."""
    words = [*ALL, "--nproc", "2", "--checkpoint.every", "1step", *MEETING[how]]
    whole = host.start(*words, "--run.dir", "whole", cwd=tmp_path)
    killed = {}
    for step in (7, 12):  # at the same time: a run that was killed mostly waits
        faults = {"SHOAL_FAULTS": f"kill_at=rank:{rank},step:{step}"}
        killed[step] = host.start(*words, "--run.dir", f"killed-{step}", cwd=tmp_path, env=faults)
    assert whole.wait() == 0, whole.said
    for step, ended in killed.items():
        assert (ended.wait(), ended.json["restarts"]) == (0, 1), ended.said
        assert hexed(losses(tmp_path / f"killed-{step}")) == hexed(losses(tmp_path / "whole"))


@pytest.mark.parametrize("how", [wide("compressed"), wide("local SGD")])
def test_replicas_that_meet_rarely_join_and_leave(host: Host, tmp_path: Path, how: str) -> None:
    """2 → 4 → 3 ranks, as the power fails; and another H in the end."""
    words = [*ALL, *MEETING[how], "--checkpoint.every", "1step"]
    whole = host.start(*words, "--nproc", "2", "--run.dir", "whole", cwd=tmp_path)
    for step, nproc in ((7, 2), (14, 4)):
        started = host.start(*words, "--nproc", str(nproc), cwd=tmp_path)
        until(lambda step=step: committed(saves(tmp_path)) >= step, started)  # type: ignore[misc]
        started.kill_all()
    changed = [word.replace("diloco:4", "diloco:3") for word in words]
    ended = host.run(*changed, "--nproc", "3", cwd=tmp_path)
    assert (ended.code, whole.wait()) == (0, 0), ended.said + whole.said
    found, undisturbed = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert len(found) == 24
    assert found[-5:] == pytest.approx(undisturbed[-5:], rel=0.05)
