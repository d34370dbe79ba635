"""No wait without a limit, and no wrong rank blamed: workers that stop, hang, leave early, or leave threads running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.blueprint.faults import VARIABLE
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.data.dataset import Batch
from shoal.data.loader import Loader, RankStream
from shoal.errors import RunFailed
from shoal.launch.scratch import scratch_prefix, sweep
from tests.cover import wide
from tests.dist.test_launch import Launcher, ready, sleep_with_helper
from tests.dist.test_pool import is_alive, wait_until
from tests.dist.test_saver import share, started

TIMEOUT = 2.0
SLACK = 5.0


def within(began: float) -> bool:
    return time.monotonic() - began < TIMEOUT + SLACK


# ---- scripts that close nothing -------------------------------------------------------------------------------------

LEFT_OPEN = """
import atexit, os, sys
import torch.distributed as dist
atexit.register(lambda: print("open" if dist.is_initialized() else "closed", flush=True))
import torch
import shoal.deepspeed
words = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = shoal.deepspeed.initialize(model=torch.nn.Linear(2, 2), config=words)
engine.backward(engine(torch.ones(2, 2)).sum())
engine.step()
if sys.argv[1] == "fails":
    raise ValueError("of the script")
"""


@pytest.mark.parametrize(("way", "state", "code"), [("ends", "closed", 0), ("fails", "open", 1)])
def test_the_end_of_a_script_closes_its_group(way: str, state: str, code: int, tmp_path: Path) -> None:
    """Else gloo's threads would end some processes with SIGABRT. A rank that fails must not cut its connections."""
    (tmp_path / "script.py").write_text(LEFT_OPEN)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    command = [sys.executable, str(tmp_path / "script.py"), way]
    ranks = [subprocess.Popen(command, env=place, stdout=subprocess.PIPE, text=True) for place in places]
    assert [(rank.communicate(timeout=60)[0].split(), rank.returncode) for rank in ranks] == [([state], code)] * 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- waits ----------------------------------------------------------------------------------------------------------


def save(place: Placement, store: dist.Store, directory: Path, wait: bool) -> None:
    """Rank 1 takes a minute to write its part."""
    os.environ[VARIABLE] = "slow_disk_at=rank:1,write:1,seconds:60"
    with World.start(place, device="cpu", store=store, timeout=TIMEOUT, threads=1) as world:
        run = started(world)
        run.step(share(run, 0))
        ready(directory, place.rank)
        run.save(directory / "saves", wait=wait)
        run.wait_for_save(directory / "saves")


@pytest.mark.alone  # what it stops, it stops at a certain moment
@pytest.mark.parametrize(("wait", "stops"), [wide(True, True), (False, True), wide(False, False)])
def test_a_save_waits_no_longer_than_the_timeout(wait: bool, stops: bool, tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, save, wait)
    pids = launcher.pids()
    wait_until(lambda: any((tmp_path / "saves").glob(".draft-*")))
    if stops:
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    outcome = launcher.outcome()
    assert within(began)
    assert isinstance(outcome, RunFailed)
    assert outcome.may_pass
    text = str(outcome)
    assert "the checkpoint of step 1 was not saved" in text
    assert f"rank 0 waited {TIMEOUT:g} s for the other ranks" in text
    assert text.startswith("rank 1 of 2 was stopped by a signal (SIGSTOP)") == stops


def stop_before_meeting(place: Placement, store: dist.Store, directory: Path) -> None:
    if place.rank == 1:
        ready(directory, 1)
        os.kill(os.getpid(), signal.SIGSTOP)
    World.start(place, device="cpu", store=store, timeout=TIMEOUT)


def test_ranks_wait_for_one_that_never_comes_no_longer_than_the_timeout(tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, stop_before_meeting)
    wait_until((tmp_path / "pids" / "1").exists)
    began = time.monotonic()
    outcome = launcher.outcome()
    assert within(began)
    assert str(outcome).startswith("rank 1 of 2 was stopped by a signal (SIGSTOP), and rank 0 waited for it"), outcome


def return_or_not(place: Placement, store: dist.Store, directory: Path, how: str) -> None:
    ready(directory, place.rank)
    if place.rank == 1 and how == "hangs":
        time.sleep(1000)
    if place.rank == 1 and how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "text"), [("hangs", "had not ended 1 s after rank 0 had"), ("stops", "was stopped by a signal (SIGSTOP)")]
)
def test_the_launcher_waits_no_longer_than_the_timeout(how: str, text: str, tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, return_or_not, how, timeout=1.0, grace=1.0)
    launcher.pids()
    began = time.monotonic()
    outcome = launcher.outcome()
    assert within(began)
    assert isinstance(outcome, RunFailed)
    assert str(outcome).startswith(f"rank 1 of 2 {text}")


class Slow:
    """A dataset whose batches take an hour, from the third on."""

    tokens_per_sample = labels_per_sample = None
    is_in_memory = False

    def __len__(self) -> int:
        return 100

    def batch(self, ids: object) -> Batch:
        self.calls = getattr(self, "calls", 0) + 1
        time.sleep(3600 if self.calls > 2 else 0)
        return {"inputs": torch.zeros(1)}

    def describe(self) -> str:
        return "slow"


@pytest.mark.parametrize("workers", [0, wide(1)])  # torch gives its processes ten seconds
def test_a_batch_is_waited_for_no_longer_than_the_timeout(workers: int) -> None:
    loader = Loader(RankStream(Slow(), seed=0, batch=1), workers=workers, timeout=0.5)
    next(loader), next(loader)
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"the next batch was not ready within 0\.5 s"):
        next(loader)
    loader.close()
    assert time.monotonic() - began < (15 if workers else 4)


# ---- what is left running -------------------------------------------------------------------------------------------

LEFT: list[object] = []


def leave_something(place: Placement, store: dist.Store, directory: Path) -> int:
    fork = multiprocessing.get_context("fork")
    ready(directory, place.rank)
    if place.rank == 0:
        threading.Thread(target=time.sleep, args=(3600,), name="left-thread").start()
    elif place.rank == 1:
        LEFT.append(fork.Process(target=time.sleep, args=(3600,), name="left-process"))
        LEFT[0].start()  # type: ignore[attr-defined]
    elif place.rank == 2:
        Finalize(None, hang, exitpriority=1)  # as `atexit`, which forked processes do not have before Python 3.13
    else:
        LEFT.append(fork.Pool(2))
    return place.rank


def hang() -> None:
    time.sleep(3600)


def test_what_is_left_running_does_not_hold_up_the_end(tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, leave_something, nproc=4, timeout=6.0)
    launcher.pids()
    began = time.monotonic()
    assert launcher.outcome() == [0, 1, 2, 3]
    assert time.monotonic() - began < 12
    lines = (tmp_path / "said").read_text().splitlines()
    assert len(lines) == 4
    assert any("rank 2 is done, and waits for an exit handler (test_endings.py:" in line for line in lines)
    assert any("rank 0 is done, and left thread 'left-thread' running" in line for line in lines)
    assert any("rank 1 is done, and left process 'left-process' (pid" in line for line in lines)
    assert any("rank 2 is done, and left an exit handler (test_endings.py:" in line for line in lines)


# ---- early ends -----------------------------------------------------------------------------------------------------


def leave_while_others_work(place: Placement, store: dist.Store, directory: Path, how: Callable[[], None]) -> None:
    ready(directory, place.rank)
    with World.start(place, device="cpu", store=store, timeout=20) as world:
        world.barrier()
        if world.rank == 1:
            how()
        world.barrier()


def exit_0() -> None:
    sys.exit(0)


def exit_0_at_once() -> None:
    os._exit(0)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (exit_0, "rank 1 of 2 failed: sys.exit(0) was called before the end of the run"),
        (exit_0_at_once, "rank 1 of 2 ended with exit code 0 before its function returned, while the other ranks were"),
        (interrupt, "rank 1 of 2 failed: KeyboardInterrupt"),
    ],
)
def test_a_rank_that_leaves_early_is_the_one_that_is_named(how: Callable[[], None], text: str, tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, leave_while_others_work, how)
    launcher.pids()
    began = time.monotonic()
    outcome = launcher.outcome()
    assert isinstance(outcome, RunFailed)
    assert str(outcome).startswith(text)
    assert not outcome.may_pass
    assert time.monotonic() - began < 10


# ---- folders of dead launchers --------------------------------------------------------------------------------------


def test_the_folder_of_a_launcher_that_was_killed_is_removed_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("dead", "live")]
    launchers = []
    for folder in folders:
        folder.mkdir()
        launchers.append(Launcher.start(folder, sleep_with_helper))
    pids = [[launcher.process.pid, *launcher.pids()] for launcher in launchers]
    for pid in pids[0]:
        os.kill(pid, signal.SIGSTOP)  # so that no worker removes the folder when its parent dies
    for pid in pids[0]:
        os.kill(pid, signal.SIGKILL)
    launchers[0].process.join(10)
    wait_until(lambda: not any(map(is_alive, pids[0])))
    left = list((folders[0] / "tmp").iterdir())
    assert len(left) == 1
    stranger = folders[0] / "tmp" / "shoal-data"
    stranger.mkdir()

    def is_swept() -> bool:  # a thread of a killed process may hold the lock for a moment longer
        for folder in folders:
            sweep(folder / "tmp", scratch_prefix())
        return not left[0].exists()

    wait_until(is_swept)
    assert list((folders[0] / "tmp").iterdir()) == [stranger]
    assert len(list((folders[1] / "tmp").iterdir())) == 1
    os.kill(pids[1][0], signal.SIGTERM)
    launchers[1].outcome()
    for path in (folders[0] / "pids").glob("helper-*"):
        os.kill(int(path.read_text()), signal.SIGKILL)
