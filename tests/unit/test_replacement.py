"""The launcher's view of a replacement, without processes: reports of ranks go in, decisions come out."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from shoal.elastic.restart import RestartBudget
from shoal.errors import RunFailed
from shoal.launch import replacement as module
from shoal.launch.failure import Failure
from shoal.launch.replacement import Replacement
from shoal.launch.survivor import WAIT_FOR_ORDER, Survivor
from shoal.launch.watch.watcher import Watcher
from shoal.launch.worker_group import WorkerGroup

RANKS = range(3)
LOST = Failure(code="N024", rank=1, at=0.0, what="was killed", is_sudden=True, may_pass=True, is_lost=True)


class Three:
    """Three ranks, and what the launcher says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.replacement = Replacement(RestartBudget(most=3, say=self.said.append))
        self.workers: dict[int, Connection] = {}
        for rank in RANKS:
            self.connect(rank)
            self.report(rank, "armed", 0)

    def connect(self, rank: int) -> None:
        self.workers[rank] = self.replacement.connect(rank, multiprocessing)

    def report(self, rank: int, word: str, generation: int) -> None:
        self.workers[rank].send_bytes(f"{word} {generation}".encode())

    def lose_rank_1(self) -> None:
        error = RunFailed("rank 1 of 3 was killed", code="N024")
        error.may_pass = True
        assert self.replacement.allows(error)
        self.replacement.begin(LOST, [0, 2], lambda: error)
        self.connect(1)


@pytest.fixture
def three() -> Iterator[Three]:
    found = Three()
    yield found
    found.replacement.close()
    for connection in found.workers.values():
        connection.close()


@pytest.mark.parametrize("ends", ["an order", "the end of the launcher"])
def test_a_rank_that_lost_a_peer_does_not_wait_where_none_is_replaced(three: Three, ends: str) -> None:
    survivor = Survivor(three.workers[0], 0)
    if ends == "an order":
        three.replacement.give_up("")
    else:
        three.replacement.close()
    began = time.monotonic()
    assert not survivor.survives(RuntimeError("Connection closed by peer"))
    assert time.monotonic() - began < WAIT_FOR_ORDER / 2


def test_a_replacement_from_the_order_to_its_end(three: Three) -> None:
    assert three.replacement.why_not(LOST, [0, 2]) == ""
    three.lose_rank_1()
    assert [three.workers[rank].recv_bytes() for rank in (0, 2)] == [b"1", b"1"]
    assert three.replacement.look(RANKS) == ""
    assert three.said == []  # the others know where they waited when they have left
    three.report(0, "left", 0)
    three.report(2, "left", 0)
    assert three.replacement.look(RANKS) == ""
    assert three.said == [
        "rank 1 of 3 was killed [N024]\n  replacing rank 1; all ranks continue"
        " from the newest checkpoint, if there is one: restart 1 of 3"
    ]
    assert three.replacement.is_joining
    for rank in RANKS:
        three.report(rank, "joined", 1)
    assert three.replacement.look(RANKS) == ""
    assert not three.replacement.is_joining
    assert three.replacement.why_not(LOST, [0, 2]) == "rank 1 was lost while rank 1 was being replaced"
    for rank in RANKS:
        three.report(rank, "armed", 1)
    assert three.replacement.why_not(LOST, [0, 2]) == ""
    assert three.replacement.lost is None


def test_a_rank_that_does_not_train_cannot_be_replaced(three: Three) -> None:
    three.report(2, "disarmed", 0)
    assert three.replacement.why_not(LOST, [0, 2]) == "rank 2 is not in training"


def test_a_rank_that_does_not_leave_is_ended_once(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_TO_LEAVE", 0.0)
    three.replacement.seconds_to_join = 0.0
    three.lose_rank_1()
    three.report(0, "left", 0)
    assert three.replacement.ranks_to_end(RANKS) == [2]
    assert three.replacement.ranks_to_end(RANKS) == []
    assert three.replacement.look(RANKS) == "the ranks had not come together after 0 s"
    assert "replacing ranks 1 and 2; all ranks continue" in three.said[0]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_line_says_why_a_hung_rank_is_not_replaced(
    three: Three, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_lost: bool
) -> None:
    """As of a rank that was killed. Where the processes are not the cause, the failure itself says enough."""
    hung = replace(LOST, what="hangs", is_lost=is_lost)
    gone = cast("BaseProcess", SimpleNamespace(pid=2**30))  # no process has this number
    watcher = cast("Watcher", SimpleNamespace(look=lambda pids: hung))
    group = WorkerGroup(directory=tmp_path, grace=5, grace_period=30, watcher=watcher, replacement=three.replacement)
    group.processes, group.running = [gone] * 3, {"end of rank 0": 0, "end of rank 2": 2}
    three.report(2, "disarmed", 0)
    group._fence_hung()
    assert group.cause is hung
    said = capsys.readouterr().err
    assert said == ("shoal: no rank is replaced: rank 2 is not in training\n" if is_lost else "")


def test_a_signal_while_a_hung_rank_is_ended_leaves_the_others_all_of_their_time(tmp_path: Path) -> None:
    hung = Failure(code="N024", rank=1, at=0.0, what="hangs", is_sudden=True, may_pass=True)
    soon = time.monotonic() + 5
    ending = WorkerGroup(directory=tmp_path, grace=5, grace_period=30, deadline=soon, fenced={1: hung})
    ending._pass_on(signal.SIGTERM)
    assert ending.deadline is not None
    assert ending.deadline > soon + 20
    failed = WorkerGroup(directory=tmp_path, grace=5, grace_period=30, deadline=soon, cause=hung)
    failed._pass_on(signal.SIGTERM)
    assert failed.deadline == soon
