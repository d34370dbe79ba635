"""A rank that runs out of memory: the cause that grew over its prediction, a plan that fits, and no second attempt."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.blueprint.plan import Plan
from shoal.launch.cgroup import _folders
from shoal.planner.changes.nearest import Excess, beside_states, nearest_fitting
from shoal.planner.task import Task
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.presets.models import find_model
from tests.cli.host import Host
from tests.cli.test_endings import own

LIMIT = 600 * 2**20

OWN = """
import time
import torch, torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self, act, at):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.act, self.at, self.calls = act, at, 0

    def forward(self, tokens):
        self.calls += self.training
        if self.training and self.calls == self.at and dist.is_initialized() and dist.get_rank() == 1:
            self.act()
        return self.head(self.embedding(tokens))

def allocates(): return Model(lambda: torch.empty(2**45), 2)
def python_allocates(): return Model(lambda: bytearray(2**48), 2)
def leaks(): return Model(leak, 1)
def leak():
    kept = []
    while True:
        kept.append(torch.ones(2**23))
        time.sleep(0.05)
"""


def words(folder: Path, name: str, *more: str) -> list[str]:
    found = own(folder, name, "--nproc", "2", *more)
    (folder / "own.py").write_text(OWN)
    return found


@pytest.mark.parametrize(
    ("name", "grew"),
    [
        ("allocates", "activations, buffers, other took 128.00 TiB more than predicted, 128.00 TiB of it in the"),
        ("python_allocates", "activations, buffers, other took "),
    ],
)
def test_a_failed_allocation_is_explained_by_cause(host: Host, tmp_path: Path, name: str, grew: str) -> None:
    ended = host.run(*words(tmp_path, name), cwd=tmp_path)
    assert ended.code == 3, ended.said
    assert "restarting all workers" not in ended.said
    assert "rank 1 of 2 failed: " in ended.said
    assert "[N023]" in ended.said
    table = {line[4:32].strip(): line[32:].split() for line in ended.said.splitlines() if line.startswith("    ")}
    assert table["parameters"][:2] == table["parameters"][2:] == ["0.02", "MiB"], ended.said
    assert table["optimizer"][:2] == table["optimizer"][2:] == ["0.03", "MiB"]
    assert grew in ended.said
    assert "no plan for 2 ranks fits" in ended.said


def test_a_failed_allocation_on_one_of_two_hosts_is_explained_by_cause(host: Host, tmp_path: Path) -> None:
    """The report of another host had the traceback alone."""
    given = [word for word in words(tmp_path, "allocates") if word not in ("--nproc", "2")]
    ended = host.run(*given, "--hosts", "127.0.0.1:1,127.0.0.2:1", cwd=tmp_path)
    assert ended.code == 3, ended.said
    assert "rank 1 of 2 (host 127.0.0.2) failed: " in ended.said
    assert "memory of rank 1" in ended.said
    assert "activations, buffers, other took 128.00 TiB more than predicted, 128.00 TiB of it in the" in ended.said
    assert "no plan for 2 ranks fits" in ended.said
    assert "restarting all workers" not in ended.said


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a memory limit."""
    own_folder = next((each for each in _folders(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))), Path("/nowhere"))
    folder = own_folder / f"shoal-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if "/memory/" in f"{folder}" else "memory.max"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not create control groups: {error}")
    try:
        (folder / name).write_text(str(LIMIT))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"control groups have no memory limit here: {error}")
    yield folder
    until = time.monotonic() + 20  # processes that were just killed are in it for a moment
    while True:
        try:
            return folder.rmdir()
        except OSError:
            assert time.monotonic() < until, "a process is left in the control group"
            time.sleep(0.05)


def test_a_kill_for_lack_of_memory_is_tried_once_more_in_the_same_phase(
    host: Host, tmp_path: Path, group: Path
) -> None:
    started = host.start(*words(tmp_path, "leaks"), cwd=tmp_path)
    (group / "cgroup.procs").write_text(str(started.pid))  # before its workers are forked
    assert started.wait() == 3, started.said
    assert (
        "rank 1 of 2 was killed by signal 9 (SIGKILL): the kernel killed a process of this control group"
        in started.said
    )
    assert "its limit is 0.6 GiB" in started.said
    assert started.said.count("restarting all workers") == 1
    assert "not restarted: the memory ran out in the same phase before the restart" in started.said
    assert "activations, buffers, other took " in started.said
    assert "[N023]" in started.said


GIB = 2**30
TASK = Task(workload=find_model("llama3-8b"), cluster=parse_cluster("h100:8"), sequence=4096, global_batch=64)
PLAN = Plan.parse("zero=3 mb=4 bf16").resolve(8)


@pytest.mark.parametrize(
    ("fraction", "excess", "changes"),
    [
        (0.9, Excess(), 1),
        (0.9, Excess(factor=1.5), 1),
        (0.35, Excess(), 2),
        (0.01, Excess(), None),
        (0.9, Excess(fixed=500 * GIB), None),
    ],
)
def test_the_nearest_plan_that_fits_changes_few_words(fraction: float, excess: Excess, changes: int | None) -> None:
    """Every cheaper change was tried: no plan with fewer changed words fits."""
    limit = fraction * excess.expected(TASK.memory(PLAN))
    found = nearest_fitting(TASK, PLAN, limit=limit, excess=excess)
    if changes is None:
        assert found is None
        return
    assert found is not None
    assert excess.expected(found.memory) <= limit
    before, after = PLAN.to_mapping(), found.plan.to_mapping()
    assert sum(before.get(word) != after.get(word) for word in before | after) == changes


def test_memory_that_no_plan_divides_is_not_divided() -> None:
    memory = TASK.memory(PLAN)
    assert Excess(factor=2.0).expected(memory) == pytest.approx(memory.states + 2 * beside_states(memory))
    assert Excess(fixed=GIB).expected(memory) == pytest.approx(memory.reserved + GIB)
