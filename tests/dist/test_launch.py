"""Local workers with real processes and real signals: values, the first failure, and nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.errors import Problem, RunFailed, ShoalError
from shoal.launch.failure import Failure, first_failure, sudden_end
from shoal.launch.host_memory import Memory
from shoal.launch.local import launch
from tests.cover import wide
from tests.dist.pool import Pool
from tests.dist.test_pool import is_alive, wait_until

# ---- a process that launches, so that a test can send it signals ----------------------------------------------------


@dataclass
class Launcher:
    """A process, forked by the pool's server (torch loaded, nothing computed), that calls `launch` and tells the end.

    Workers write their process ids into `directory/pids`; the launch has its temporary files in `directory/tmp`.
    """

    process: Any
    directory: Path
    num_workers: int

    @classmethod
    def start(cls, directory: Path, body: Callable[..., Any], *args: Any, nproc: int = 2, **options: Any) -> Launcher:
        Pool.warm_up()
        for name in ("pids", "tmp"):
            (directory / name).mkdir()
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_launch_and_tell, args=(directory, body, args, nproc, options))
        process.start()
        return cls(process, directory, nproc)

    def pids(self) -> list[int]:
        """The workers by rank, once all of them have said that they are ready."""
        paths = [self.directory / "pids" / str(rank) for rank in range(self.num_workers)]
        wait_until(lambda: all(path.exists() for path in paths))
        return [int(path.read_text()) for path in paths]

    def outcome(self, seconds: float = 30) -> Any:
        """What `launch` returned or raised; checks that no worker and no file is left."""
        self.process.join(seconds)
        assert self.process.exitcode == 0, f"exit code {self.process.exitcode}"
        outcome, num_children, files = pickle.loads((self.directory / "outcome").read_bytes())
        assert num_children == 0
        assert files == []
        pids = [int(path.read_text()) for path in (self.directory / "pids").iterdir()]
        wait_until(lambda: not any(map(is_alive, pids)), 5)  # one that was killed takes a moment on a busy machine
        return outcome


def _launch_and_tell(directory: Path, body: Any, args: Any, nproc: int, options: dict[str, Any]) -> None:
    tempfile.tempdir = str(directory / "tmp")
    try:
        with open(directory / "said", "w") as said, contextlib.redirect_stderr(said):
            outcome: Any = launch(body, (directory, *args), nproc=nproc, **options)
    except BaseException as error:
        outcome = error
    try:
        os.waitpid(-1, os.WNOHANG)
        num_children = 1
    except ChildProcessError:  # neither a running one nor a zombie
        num_children = 0
    files = os.listdir(directory / "tmp")
    (directory / "outcome").write_bytes(pickle.dumps((outcome, num_children, files)))


def ready(directory: Path, name: object, pid: int | None = None) -> None:
    part = directory / f"{name}.part"
    part.write_text(str(pid or os.getpid()))
    part.rename(directory / "pids" / str(name))


# ---- values ---------------------------------------------------------------------------------------------------------


def talk(place: Placement, store: dist.Store, directory: Path, began: float) -> tuple[list[float], float]:
    ready(directory, place.rank)
    with World.start(place, device="cpu", store=store, timeout=30) as world:
        return world.all_reduce_host([world.rank, 1.0]).wait(), time.monotonic() - began


@pytest.mark.parametrize("nproc", [1, wide(2), 4, wide(8)])
def test_values_come_back_and_start_is_fast(nproc: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = Launcher.start(tmp_path, talk, time.monotonic(), nproc=nproc, start="fork").outcome()
    assert [sums for sums, _ in values] == [[nproc * (nproc - 1) / 2, nproc]] * nproc
    with capsys.disabled():
        print(
            f"\n{nproc} ranks: {max(seconds for _, seconds in values):.2f} s to the end of the first all-reduce",
            end=" ",
        )


def rank_and_environment(place: Placement, store: dist.Store, name: str) -> tuple[int, str | None]:
    return place.rank, os.environ.get(name)


@pytest.mark.parametrize("start", ["forkserver", wide("spawn")])
def test_other_ways_to_start(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST", "today")  # the fork server was started before, with another environment
    assert launch(rank_and_environment, ("SHOAL_TEST",), nproc=2, start=start) == [(0, "today"), (1, "today")]


def compute_in_parallel(place: Placement, store: dist.Store) -> float:
    torch.set_num_threads(2)
    return float(torch.ones(1000, 1000).add(1).sum())


FORK_OR_NOT = """
import torch
from shoal.config.load import build_recipe
from shoal.launch.local import fork_is_safe, launch
from shoal.train.recipe.preflight import preflight
from tests.dist.test_launch import compute_in_parallel

if __name__ == "__main__":
    preflight(build_recipe({"plan": "pp=2 1f1b mb=1", "data": {"global_batch": 4}}, title="test"), 2)  # it computes
    print(fork_is_safe(), launch(compute_in_parallel, nproc=2))
    torch.set_num_threads(2)
    torch.ones(1000, 1000).add(1).sum()  # OpenMP now has a thread, for which a forked child would wait for ever
    print(fork_is_safe(), launch(compute_in_parallel, nproc=2))
"""


@pytest.mark.wide
def test_a_process_that_has_computed_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORK_OR_NOT)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-W", "error", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True [2000000.0, 2000000.0]\nFalse [2000000.0, 2000000.0]\n", done.stderr


NO_MODULE = """
import threading
import torch
from torch import nn
import shoal

class Net(nn.Sequential):
    pass

torch.set_num_threads(2)
torch.ones(1000, 1000).add(1).sum()  # this process cannot be forked, and no process may run this script again
print("started")
def build():
    torch.manual_seed(0)
    net = Net(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    net.describe = lambda: shoal.Description(blocks=("0", "1", "2"))
    return net

batch = torch.randn(4, 4), torch.randn(4, 2)
loss = lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean()
print(shoal.verify(lambda: build(), batch, "dp_shard=2 zero=3 mb=2", loss=loss, steps=1).equal)
net = build()
net.lock = threading.Lock()
try:
    shoal.verify(net, batch, "dp_replicate=2 mb=2", loss=loss)
except shoal.ShoalError as error:
    print(*error.codes)
"""


@pytest.mark.parametrize("how", ["script", wide("notebook")])
def test_what_the_main_module_defines_reaches_ranks_that_are_no_forks(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(NO_MODULE)
    command = [sys.executable, *([str(script)] if how == "script" else ["-"])]
    done = subprocess.run(command, cwd=tmp_path, input=NO_MODULE, capture_output=True, text=True, timeout=120)
    assert done.stdout == "started\nTrue\nN124\n", done.stderr


def leave_early(place: Placement, store: dist.Store, directory: Path, how: Callable[[], object]) -> object:
    ready(directory, place.rank)
    return how() if place.rank == 1 else place.rank


def exit_0() -> NoReturn:
    sys.exit()


def exit_3() -> NoReturn:
    sys.exit(3)


def exit_at_once() -> NoReturn:
    os._exit(4)


def abort() -> NoReturn:
    os.abort()


def unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (exit_0, "rank 1 of 2 failed: sys.exit(0) was called before the end of the run"),
        (exit_3, "rank 1 of 2 failed: SystemExit: 3"),
        (exit_at_once, "rank 1 of 2 ended with exit code 4 before its function returned"),
        (abort, "rank 1 of 2 was killed by signal 6 (SIGABRT)"),
        (unpicklable, "rank 1 of 2 failed: AttributeError: Can't "),
    ],
)
def test_early_ends(how: Callable[[], object], text: str, tmp_path: Path) -> None:
    outcome = Launcher.start(tmp_path, leave_early, how).outcome()
    assert isinstance(outcome, RunFailed)
    assert str(outcome).startswith(text)


# ---- the first failure ----------------------------------------------------------------------------------------------


def raise_while_others_wait(
    place: Placement, store: dist.Store, directory: Path, failing: int, tells_late: bool
) -> None:
    ready(directory, place.rank)
    with World.start(place, device="cpu", store=store, timeout=30) as world:
        world.barrier()
        if world.rank != failing:
            world.barrier()
        time.sleep(0.2)
        try:
            raise ZeroDivisionError("the cause")
        finally:
            if tells_late:  # the others fail, write it down and end, and only then does this rank
                cut_all_connections()
                time.sleep(0.8)


def cut_all_connections() -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_INET and not connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("tells_late", [False, True])
@pytest.mark.parametrize("failing", [0, wide(1), 3])
def test_the_cause_is_shown_and_not_its_echo(failing: int, tells_late: bool, tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = Launcher.start(tmp_path, raise_while_others_wait, failing, tells_late, nproc=4).outcome()
    assert isinstance(outcome, RunFailed)
    assert str(outcome).startswith(f"rank {failing} of 4 failed: ZeroDivisionError: the cause [N022]\nTraceback"), str(
        outcome
    )
    assert 'raise ZeroDivisionError("the cause")' in str(outcome)
    assert "onnection closed" not in str(outcome)
    assert outcome.exit_code == 3
    assert time.monotonic() - began < 10


def refuse(place: Placement, store: dist.Store, directory: Path) -> None:
    ready(directory, place.rank)
    raise ShoalError(Problem("P011", "batch 10 over 4 ranks", "--data.global_batch 12"), title="recipe.yaml")


def test_a_shoal_error_comes_through_once_and_as_it_was(tmp_path: Path) -> None:
    outcome = Launcher.start(tmp_path, refuse, nproc=4).outcome()
    assert type(outcome) is ShoalError
    assert str(outcome) == "1 problem in recipe.yaml\n  batch 10 over 4 ranks [P011]\n      fix: batch_size=12"
    assert outcome.exit_code == 2


def keep_talking(place: Placement, store: dist.Store, directory: Path) -> None:
    with World.start(place, device="cpu", store=store, timeout=30) as world:
        world.barrier()
        ready(directory, place.rank)
        while True:
            world.barrier()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_killed_from_outside(victim: int, tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, keep_talking, nproc=3)
    os.kill(launcher.pids()[victim], signal.SIGKILL)
    began = time.monotonic()
    outcome = launcher.outcome()
    assert time.monotonic() - began < 5
    assert isinstance(outcome, RunFailed)
    assert str(outcome).startswith(f"rank {victim} of 3 was killed by signal 9 (SIGKILL)")


def fail_beside_a_sleeper(place: Placement, store: dist.Store, directory: Path, is_deaf: bool) -> None:
    if place.rank == 0:
        if is_deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready(directory, 0)
        time.sleep(1000)
    ready(directory, 1)
    wait_until((directory / "pids" / "0").exists)
    raise ZeroDivisionError


@pytest.mark.parametrize(("is_deaf", "grace"), [(False, 60.0), (True, 0.5)])
def test_a_sibling_gets_sigterm_and_after_the_grace_sigkill(is_deaf: bool, grace: float, tmp_path: Path) -> None:
    outcome = Launcher.start(tmp_path, fail_beside_a_sleeper, is_deaf, grace=grace).outcome(seconds=15)
    assert str(outcome).startswith("rank 1 of 2 failed: ZeroDivisionError")


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([(0, 10.0, ""), (1, 9.0, "")], 1),
        ([(0, 10.0, "echo"), (1, 11.0, "")], 1),
        ([(0, 10.0, ""), (1, 11.5, "sudden")], 1),
        ([(0, 10.0, ""), (1, 12.5, "sudden")], 0),
        ([(0, 10.0, "echo"), (1, 10.5, "echo")], 0),
        ([(0, 10.0, "echo"), (1, 15.0, "sudden")], 1),
    ],
)
def test_which_failure_explains_the_others(failures: list[tuple[int, float, str]], rank: int) -> None:
    told = [
        Failure(code="N022", rank=rank, at=at, what="", is_echo=kind == "echo", is_sudden=kind == "sudden")
        for rank, at, kind in failures
    ]
    assert first_failure(told).rank == first_failure(reversed(told)).rank == rank


def test_a_kill_when_memory_is_short_says_so() -> None:
    gib = 2**30
    assert "497.0 of 503.0 GiB" in sudden_end(3, -9, Memory(503 * gib, (200 * gib, 497 * gib, 210 * gib))).what
    assert "GiB" not in sudden_end(3, -9, Memory(503 * gib, (200 * gib,))).what
    assert "GiB" not in sudden_end(3, -11, Memory(503 * gib, (497 * gib,))).what
    memory = Memory()
    memory.look()
    assert 0 < memory.recent[-1] < memory.total


# ---- signals --------------------------------------------------------------------------------------------------------


def sleep_with_helper(place: Placement, store: dist.Store, directory: Path) -> None:
    helper = subprocess.Popen(["sleep", "1000"])
    ready(directory, f"helper-{place.rank}", helper.pid)
    ready(directory, place.rank)
    time.sleep(1000)


def leave_helper_behind(place: Placement, store: dist.Store, directory: Path) -> None:
    helper = subprocess.Popen(["sleep", "1000"])
    ready(directory, place.rank, helper.pid)
    helper.returncode = 0  # a lie, so that Python does not warn of it


def test_what_a_worker_leaves_behind_is_ended(tmp_path: Path) -> None:
    assert Launcher.start(tmp_path, leave_helper_behind).outcome() == [None, None]


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, sleep_with_helper)
    launcher.pids()
    pids = [int(path.read_text()) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 4
    assert all(map(is_alive, pids))
    os.kill(launcher.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)), seconds=2)
    assert os.listdir(tmp_path / "tmp") == []


def hold_gil(place: Placement, store: dist.Store, directory: Path) -> None:
    ready(directory, place.rank)
    ctypes.PyDLL(None).sleep(1000)  # a signal ends it
    signal.pause()


def test_workers_that_hold_the_gil_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """The signal of the parent's end interrupts their sleep; a loop would end by the alarm that it starts."""
    launcher = Launcher.start(tmp_path, hold_gil)
    pids = launcher.pids()
    os.kill(launcher.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)), seconds=10)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, "KeyboardInterrupt()"), (signal.SIGTERM, "SystemExit(143)")]
)
@pytest.mark.parametrize("body", [sleep_with_helper, keep_talking])
def test_a_signal_to_the_parent_ends_all(body: Any, number: int, expected: str, tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, body)
    launcher.pids()
    os.kill(launcher.process.pid, number)
    began = time.monotonic()
    assert repr(launcher.outcome()) == expected
    assert time.monotonic() - began < 5


def finish_when_told(place: Placement, store: dist.Store, directory: Path, late: float) -> list[int]:
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: told.append(received))
    ready(directory, place.rank)
    while not told:
        time.sleep(0.01)
    time.sleep(late)  # saving, say; a signal that came twice would be told twice
    return told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_may_finish_in_good_order_and_are_told_once(number: int, tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, finish_when_told, 0.5)
    launcher.pids()
    os.kill(launcher.process.pid, number)
    assert launcher.outcome() == [[number], [number]]


@pytest.mark.parametrize(("grace_period", "num_signals"), [(0.5, 1), (60.0, 2)])
def test_end_of_patience_or_a_second_signal_kills(grace_period: float, num_signals: int, tmp_path: Path) -> None:
    launcher = Launcher.start(tmp_path, finish_when_told, 1000.0, grace_period=grace_period)
    launcher.pids()
    for _ in range(num_signals):
        os.kill(launcher.process.pid, signal.SIGINT)
        time.sleep(0.3)
    assert isinstance(launcher.outcome(seconds=5), KeyboardInterrupt)
    told = "rank 0 and 1 did not stop within 0.5 s of SIGINT"  # who sends a second one need not be told
    assert ((tmp_path / "said").read_text().count(told)) == (num_signals == 1)
