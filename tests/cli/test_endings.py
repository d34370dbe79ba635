"""How a run ends when something in it does not: ranks that stop, threads that stay, exits that come early."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli.host import Host, Started, until
from tests.cli.test_resume import WORDS, committed, saves
from tests.cli.test_train import MADE_UP, SHOAL, Command
from tests.cover import wide

TWO = [*WORDS, "--nproc", "2", "--run.dir", "run", "--checkpoint.every", "1step", "--plan", "fp64 zero=3"]
TIMEOUT = 3.0
BOUNDED = ["--launch.timeout", str(TIMEOUT), "--launch.max_restarts", "0"]
SLACK = 5.0
"""Seconds beside the timeout: to notice it, to write it down, and to end the other workers."""

OWN = """
import atexit, os, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn

class Bigram(nn.Module):
    def __init__(self, act, at):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.act, self.at, self.calls = act, at, 0

    def forward(self, tokens):
        if self.training:
            self.calls += 1
            if self.calls == self.at and (not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1):
                self.act()
        return self.head(self.embedding(tokens))

def thread(): return Bigram(lambda: threading.Thread(target=time.sleep, args=(3600,), name="left-alone").start(), 1)
def at_exit(seconds=3600):
    from shoal.launch import shutdown
    shutdown.SECONDS_FOR_EXIT_HANDLERS = 6.0
    return Bigram(lambda: atexit.register(upload, seconds), 1)
def uploads(): return at_exit(4.5)
def upload(seconds):
    time.sleep(seconds)
    print("uploaded", file=sys.stderr)
def exits(): return Bigram(lambda: sys.exit(0), 4)
def exits_at_once(): return Bigram(lambda: os._exit(0), 4)
def interrupts(): return Bigram(lambda: interrupt(), 4)
def interrupt(): raise KeyboardInterrupt
def no_memory(): return Bigram(lambda: run_out(), 4)
def run_out(): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
def no_host_memory(): return Bigram(lambda: run_out_here(), 4)
def run_out_here(): raise MemoryError
"""


def own(folder: Path, name: str, *words: str) -> list[str]:
    """A run of two ranks with a model of one's own, in which the last rank does something."""
    (folder / "own.py").write_text(OWN)
    model = ["--model", "{name: own.py:" + name + "}", *MADE_UP, "--data.seq_len", "16", "--data.global_batch", "4"]
    about = ["--device", "cpu", "--launch.threads", "1", "--data.workers", "0", "--json"]
    return [
        "train",
        *model,
        *about,
        "--run.dir",
        "run",
        "--checkpoint.every",
        "1step",
        "--run.duration",
        "6step",
        *words,
    ]


def stop_in_save(host: Host, folder: Path, step: int, rank: int, *words: str) -> tuple[Started, float]:
    """A rank gets SIGSTOP while it writes its part of a step."""
    fault = {"SHOAL_FAULTS": f"slow_disk_at=rank:{rank},step:{step},write:{1 if rank else 4},seconds:60"}
    started = host.start(*TWO, *BOUNDED, *words, cwd=folder, env=fault)
    until(lambda: (saves(folder) / f".draft-step-{step:08d}").exists(), started)
    time.sleep(0.1)
    os.kill(started.workers[rank], signal.SIGSTOP)
    return started, time.monotonic()


@pytest.mark.parametrize(("duration", "rank"), [("24step", 1), wide("2step", 0)], ids=["on the way", "at the end"])
def test_a_rank_that_stops_in_a_save(host: Host, tmp_path: Path, duration: str, rank: int) -> None:
    started, began = stop_in_save(host, tmp_path, 2, rank, "--run.duration", duration)
    assert started.wait(TIMEOUT + SLACK + 2) == 3, started.said
    assert time.monotonic() - began < TIMEOUT + SLACK
    assert f"rank {rank} of 2" in started.said
    assert "stopped" in started.said
    assert committed(saves(tmp_path)) == 1


# ---- restarts -------------------------------------------------------------------------------------------------------


def test_a_run_that_makes_progress_has_all_its_restarts_again(host: Host, tmp_path: Path) -> None:
    kills = " ".join(f"kill_at=rank:1,step:{3 + 2 * number},generation:{number}" for number in range(3))
    words = [*TWO, "--run.duration", "9step", "--launch.max_restarts", "1"]
    ended = host.run(*words, cwd=tmp_path, env={"SHOAL_FAULTS": kills})
    assert (ended.code, ended.json["restarts"], ended.json["steps"]) == (0, 3, 9), ended.said
    assert ended.said.count("restart 1 of 1 since step") == 3


@pytest.mark.wide
def test_a_run_that_makes_no_progress_has_not(host: Host, tmp_path: Path) -> None:
    words = [*TWO, "--launch.max_restarts", "1", "--run.duration", "9step"]
    ended = host.run(*words, cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=rank:1,step:1,generation:any"})
    assert ended.code == 3
    assert ended.said.count("rank 1 of 2 was killed by signal 9") == 2  # the first time, and after the one restart


def test_the_same_exception_in_the_same_step_is_not_tried_a_third_time(host: Host, tmp_path: Path) -> None:
    ended = host.run(*TWO, cwd=tmp_path, env={"SHOAL_FAULTS": "fail_allreduce_at=rank:1,step:4,generation:any"})
    assert ended.code == 3, ended.said
    assert ended.said.count("restarting all workers") == 1
    assert "not restarted: the same exception was raised in the same step" in ended.said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("exits", "rank 1 of 2 failed: sys.exit(0) was called before the end of the run [N022]\nin step "),
        ("exits_at_once", "rank 1 of 2 ended with exit code 0 before its function returned"),
        ("interrupts", "rank 1 of 2 failed: KeyboardInterrupt [N022]\nin step "),
    ],
)
def test_a_failure_that_would_come_back(host: Host, tmp_path: Path, name: str, text: str) -> None:
    ended = host.run(*own(tmp_path, name, "--nproc", "2"), cwd=tmp_path)
    assert ended.code == 3, ended.said
    assert "restarting all workers" not in ended.said
    assert text in ended.said
    assert "rank 0" not in ended.said


def test_one_process_that_exits_early_has_failed(host: Host, tmp_path: Path) -> None:
    ended = host.run(*own(tmp_path, "exits", "--nproc", "1"), cwd=tmp_path)
    assert ended.code == 3
    assert "rank 0 of 1 failed: sys.exit(0) was called before the end of the run" in ended.said


# ---- what is left running -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), [("thread", "thread 'left-alone'"), wide("at_exit", "an exit handler")])
def test_one_process_ends_although_something_is_left(name: str, text: str, tmp_path: Path) -> None:
    """As a command of its own: a fork of the host would end at once anyway."""
    command = Command.start([*SHOAL, *own(tmp_path, name, "--nproc", "1")], cwd=tmp_path)
    until_there(tmp_path / "run" / "summary.json")
    began = time.monotonic()
    ended = command.ended()
    assert time.monotonic() - began < 10
    assert ended.code == 0, ended.err
    assert f"shoal train is done, and left {text}" in ended.err


@pytest.mark.wide
def test_an_exit_handler_has_longer_than_threads(tmp_path: Path) -> None:
    ended = Command.start([*SHOAL, *own(tmp_path, "uploads", "--nproc", "1")], cwd=tmp_path).ended()
    assert ended.code == 0, ended.err
    assert "shoal train is done, and waits for an exit handler (own.py:" in ended.err
    assert "uploaded" in ended.err
    assert "running" not in ended.err


def until_there(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.wide
def test_workers_end_although_something_is_left(host: Host, tmp_path: Path) -> None:
    ended = host.run(*own(tmp_path, "thread", "--nproc", "2"), cwd=tmp_path)
    assert (ended.code, ended.json["steps"]) == (0, 6), ended.said
    assert ended.said.count("shoal: rank 1 is done, and left thread 'left-alone' running") == 1


# ---- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_a_step_is_saved_although_latest_is_not(host: Host, tmp_path: Path) -> None:
    """The operations of a save by the main rank: from the fault on, all of them fail in turn."""
    for write in range(1, 20):
        folder = tmp_path / str(write)
        folder.mkdir()
        fault = {"SHOAL_FAULTS": f"disk_full_at=rank:0,step:2,write:{write},errno:EIO"}
        words = [*TWO, "--nproc", "1", "--plan", "fp64", "--run.duration", "2step", "--checkpoint.every", "1step"]
        ended = host.run(*words, cwd=folder, env=fault)
        is_there = (saves(folder) / "step-00000002").exists()
        assert ("NOT SAVED" in ended.said) == (not is_there), ended.said
        assert ended.json["saved_step"] == (2 if is_there else 1)
        assert ended.code == (0 if is_there else 3)
        if "could not be updated" in ended.said:
            break
    assert "step 2 is saved in run/checkpoints, but `latest` could not be updated" in ended.said
    assert committed(saves(folder)) == 1
    longer = host.run(*words, "--resume", "latest", "--run.duration", "3step", cwd=folder)
    assert (longer.code, longer.json["resumed_from"], committed(saves(folder))) == (0, 2, 3), longer.said
