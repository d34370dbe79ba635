"""The pool itself: values come back, the first failure is shown, and the next test always finds a working world."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.comm.world import World
from tests.dist.pool import Pool, RankFailed, on_ranks


@on_ranks(2, 4)
def test_body_runs_on_every_rank(world: World) -> None:
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world.size * (world.size + 1) / 2


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_and_fixtures_reach_the_ranks(world: World, dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / str(world.rank)).write_text(str(torch.zeros(1, dtype=dtype).dtype))
    world.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@on_ranks(2)
def test_skips(world: World) -> None:
    pytest.skip("to show that a rank can")


def rank_times(world: World, factor: int) -> tuple[int, torch.Tensor]:
    return os.getpid(), torch.full((2,), world.rank * factor)


def test_values_come_back_by_rank(pool: Pool) -> None:
    pids, tensors = zip(*pool.run(rank_times, 4, 10), strict=True)
    assert len({*pids, os.getpid()}) == 5
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [10, 10], [20, 20], [30, 30]]


def wait_for_nobody(world: World, failing: int) -> None:
    if world.rank == failing:
        time.sleep(0.2)
        numbers = [world.rank, 7]
        assert sum(numbers) == 0
    world.barrier()


def test_first_failure_is_shown_at_once_with_rank_values_and_line(pool: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        pool.run(wait_for_nobody, 4, 2)
    text = str(failure.value)
    assert text.startswith("rank 2 of 4: AssertionError: assert 9 == 0")
    assert "assert sum(numbers) == 0" in text
    assert "ranks still running, and ended: 0, 1, 3" in text
    assert time.monotonic() - began < 5
    assert len(pool.run(rank_times, 4, 1)) == 4


def fail_on_all(world: World) -> None:
    time.sleep(0.2 * ((world.rank + 1) % 4))  # rank 3 first
    raise KeyError(world.rank)


def test_of_several_failures_the_first_is_first(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"\Arank 3 of 4: KeyError: 3\n") as failure:
        pool.run(fail_on_all, 4)
    assert "rank 1 also: KeyError: 1" in str(failure.value)


def hang(world: World, ranks: list[int]) -> None:
    if world.rank in ranks:
        time.sleep(1000)  # the line that the stack has to show


def test_timeout_names_the_ranks_and_their_stacks_and_the_pool_recovers(pool: Pool) -> None:
    pool.run(rank_times, 4, 1)  # they are there: the timeout is not that of their start
    with pytest.raises(RankFailed) as failure:
        pool.run(hang, 4, [1, 3], timeout=1.0)
    text = str(failure.value)
    assert "no answer within 1 s from rank 1, 3 of 4" in text
    line = next(
        number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "stack has to" in line
    )
    assert len(re.findall(rf"test_pool.py\", line {line} in hang", text)) == 2, text
    assert len(pool.run(rank_times, 4, 1)) == 4


def stop_oneself(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_is_named(pool: Pool) -> None:
    pool.run(rank_times, 2, 1)
    with pytest.raises(RankFailed, match=r"from rank 1 of 2\nrank 1 is at\n.*does not run at all"):
        pool.run(stop_oneself, 2, timeout=0.5)
    assert len(pool.run(rank_times, 2, 1)) == 2


def kill_oneself(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def test_a_killed_rank_wins_over_the_lost_connections_of_others(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"\Arank 1 of 2: was killed by signal 9 \(SIGKILL\)"):
        pool.run(kill_oneself, 2)
    assert len(pool.run(rank_times, 2, 1)) == 2


def test_a_worker_killed_between_two_calls(pool: Pool) -> None:
    pids = [pid for pid, _ in pool.run(rank_times, 2, 1)]
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(RankFailed, match="rank 0 of 2: was killed by signal 9"):
        pool.run(rank_times, 2, 1)
    assert len(pool.run(rank_times, 2, 1)) == 2


def warn(world: World) -> None:
    warnings.warn("careless", UserWarning, stacklevel=1)


def test_warnings_are_errors_on_ranks_too(pool: Pool) -> None:
    with pytest.raises(RankFailed, match="UserWarning: careless"):
        pool.run(warn, 2)


def test_a_local_function_is_refused(pool: Pool) -> None:
    with pytest.raises(RankFailed, match="module level"):
        pool.run(lambda world: None, 2)


@pytest.mark.alone
def test_start_and_call_are_fast(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    pool.run(rank_times, 8, 1)
    started = time.monotonic()
    for _ in range(10):
        pool.run(rank_times, 8, 1)
    seconds_per_call = (time.monotonic() - started) / 10
    with capsys.disabled():
        print(f"\npool of 8: first call {started - began:.2f} s, later ones {seconds_per_call * 1e3:.1f} ms", end=" ")
    assert started - began < 10  # bounds are wide, for a busy machine
    assert seconds_per_call < 0.2


INNER_CONFTEST = """
import signal
from tests.dist.conftest import pool
from tests.dist.pool import PRELOAD
PRELOAD[:] = ["torch.distributed"]  # enough here, and sooner loaded
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
"""
INNER_TEST = """
import os, time
from pathlib import Path

def who(world): return os.getpid(), os.getppid()
def sleep(world, path): Path(path).touch(); time.sleep(1000)

def test_it(pool):
    pids = {pid for pair in pool.run(who, 2) for pid in pair}
    Path("pids.part").write_text(" ".join(map(str, pids)))
    Path("pids.part").rename("pids")
    if os.environ["END"] != "returns":
        pool.run(sleep, 2, os.path.abspath("asleep"))
"""
ENDS = {"returns": 0, "is interrupted": 2, "is killed": -9}


@pytest.fixture(scope="module")
def inner(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, subprocess.Popen[bytes]]]:
    """A pytest of its own for each end, at the same time: they mostly load torch."""
    started = {}
    for end in ENDS:
        folder = tmp_path_factory.mktemp("inner")
        (folder / "conftest.py").write_text(INNER_CONFTEST)
        (folder / "test_inner.py").write_text(INNER_TEST)
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        environ = {**os.environ, "END": end, "TMPDIR": str(folder), "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
        started[end] = (
            folder,
            subprocess.Popen(
                [*command, "test_inner.py"], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ),
        )
    return started


@pytest.mark.wide
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_when_pytest(end: str, inner: dict[str, tuple[Path, subprocess.Popen[bytes]]]) -> None:
    folder, process = inner[end]
    if end != "returns":
        wait_until((folder / "asleep").exists)
        process.send_signal(signal.SIGINT if end == "is interrupted" else signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ENDS[end], output.decode()
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 3  # two workers and their server
    wait_until(lambda: not any(is_alive(pid) for pid in pids), seconds=5)
    assert list(folder.glob("shoal-pool-*")) == []


def wait_until(condition: object, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not yet collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
