"""Fault injection: a fault happens where it was ordered and nowhere else, and a mistyped one is rejected."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.blueprint.faults import GENERATION, KINDS, VARIABLE, Fault, Faults
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.errors import RunFailed, ShoalError
from shoal.launch.local import launch
from shoal.train.run import Run
from tests.cover import wide

ALL = (
    "kill_at=rank:1,step:5 disk_full_at=rank:0,write:3 corrupt_at=write:2 slow_disk_at=write:1,seconds:2"
    " fail_allreduce_at=rank:1,step:7,generation:2 stop_at=rank:2,step:1 sleep_at=rank:2,step:1,seconds:9"
    " hold_gil_at=rank:2,step:1 block_read_at=rank:2,step:1 other_op_at=rank:2,step:1 other_shape_at=rank:2,step:1"
    " flip_gradient_at=rank:2,step:1 flip_gradient_from=rank:2,step:1"
)


def test_words_are_faults() -> None:
    faults = Faults.parse(ALL).ordered
    assert {fault.kind for fault in faults} == set(KINDS)
    assert faults[0] == Fault(kind="kill_at", rank=1, step=5)
    assert faults[1] == Fault(kind="disk_full_at", rank=0, write=3, errno=errno.ENOSPC)
    assert faults[3].seconds == 2.0
    assert faults[4].generation == 2
    assert Faults.parse("").ordered == ()
    assert Faults.parse("disk_full_at=write:1,errno:EIO").ordered[0].error("x").errno == errno.EIO
    assert Faults.parse("kill_at=generation:any").ordered[0].generation is None


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("kil_at=rank:1", "unknown fault 'kil_at'", "kill_at"),
        ("kill_at", "kill_at needs a condition", "kill_at=step:5"),
        ("kill_at=rnk:1", "unknown condition 'rnk'", "rank"),
        ("kill_at=rank:one", "rank must be a whole number of at least 0, got 'one'", "rank:0"),
        ("kill_at=write:0", "write must be a whole number of at least 1, got '0'", "write:1"),
        ("kill_at=rank:-1", "at least 0, got '-1'", "rank:0"),
        ("slow_disk_at=seconds:long", "seconds must be a number", "seconds"),
        ("slow_disk_at=seconds:inf", "seconds must be a number", "seconds"),
        ("disk_full_at=errno:EFULL", "errno must be a name such as ENOSPC", "errno:EIO"),
        ("kill_at=rank:1,rank:2", "twice", "one rank"),
        ("fail_allreduce_at=write:1", "no write", "step"),
        ("stop_at=save:1", "no save", "step"),
    ],
)
def test_a_mistyped_fault_is_rejected_with_a_fix(text: str, what: str, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        Faults.parse(text)
    assert what in str(caught.value)
    assert fix in str(caught.value).partition("fix:")[2]


def test_those_of_this_process_come_from_its_environment() -> None:
    environ = {VARIABLE: ALL}
    assert [fault.kind for fault in Faults.here(0, environ).ordered] == ["disk_full_at", "corrupt_at", "slow_disk_at"]
    assert [fault.kind for fault in Faults.here(1, environ).ordered] == ["kill_at", "corrupt_at", "slow_disk_at"]
    assert Faults.here(0, {}).ordered == ()
    again = {VARIABLE: ALL, GENERATION: "2"}
    assert [fault.kind for fault in Faults.here(1, again).ordered] == ["fail_allreduce_at"]
    assert Faults.here(0, {VARIABLE: "kill_at=generation:any", GENERATION: "3"}).ordered


def test_a_fault_is_due_where_all_that_it_names_holds() -> None:
    faults = Faults.parse("kill_at=step:5 kill_at=step:7,write:3 disk_full_at=save:2 slow_disk_at=write:4")
    assert faults.due("kill_at", step=5) == faults.ordered[0]
    assert faults.due("kill_at", step=6) is None
    assert faults.due("kill_at", step=7) is None, "that one is for an operation of the disk"
    at_disk = {"step": 5, "save": 1, "write": 14, "write_of_save": 4}
    assert faults.due("kill_at", **at_disk) is None, "the step is killed, not its save"
    assert faults.due("kill_at", step=7, save=2, write=14, write_of_save=3) == faults.ordered[1]
    assert faults.due("kill_at", step=7, save=2, write=3, write_of_save=2) is None, "counted from the save's begin"
    assert faults.due("disk_full_at", **at_disk) is None
    assert faults.due("disk_full_at", step=6, save=2, write=15, write_of_save=1) == faults.ordered[2]
    assert faults.due("slow_disk_at", step=5, save=1, write=4, write_of_save=4) == faults.ordered[3]
    assert faults.due("slow_disk_at", **at_disk) is None, "counted from the run's begin"


def save_on(placement: Placement, store: dist.Store, folder: str) -> str:
    """Make a step and save it; the error text, if the save fails."""
    with World.start(placement, store=store, device="cpu", threads=1) as world:
        run = Run("zero=3 mb=1", world=world, seed=0)
        run.prepare(nn.Linear(4, 3))
        run.prepare(torch.optim.AdamW(run.parameters, lr=1e-3))
        run.step((torch.ones(1, 4), torch.tensor([1])))
        try:
            run.save(folder)
        except RunFailed as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("reason", "reason_text"), [wide("ENOSPC", "No space left on device"), ("EIO", "Input/output error")]
)
def test_a_failing_disk_of_one_rank_is_reported_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, reason_text: str
) -> None:
    monkeypatch.setenv(VARIABLE, f"disk_full_at=rank:1,save:1,write:2,errno:{reason}")
    for text in launch(save_on, (str(tmp_path),), nproc=2):
        assert f"rank 1: {reason_text}" in text
        assert "shard-00001.safetensors" in text
    monkeypatch.setenv(VARIABLE, "")  # not removed: a server of forks keeps what it was started with
    assert launch(save_on, (str(tmp_path),), nproc=2) == ["", ""]
