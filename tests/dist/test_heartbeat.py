"""Heartbeats of real processes: torch's private counters are as expected, and a rank that hangs is named and ended."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm.heartbeat import recorder
from shoal.comm.heartbeat.heart import begin_step, heart, phase
from shoal.comm.heartbeat.ticket import Ticket
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.errors import RunFailed
from shoal.launch.local import launch
from shoal.train.recipe.fault_injection.faults import hold_gil
from tests.cover import wide


def count(place: Placement, store: dist.Store) -> dict[str, object]:
    """What the recorder holds after two collectives, three messages, and while a collective is pending."""
    with World.start(place, device="cpu", store=store, timeout=30, threads=1) as world:
        # For rank 0 a placeholder: torch's number of the next group is another one than in its name.
        world.new_group([1], timeout=timedelta(seconds=30))
        group = world.new_group([0, 1], timeout=timedelta(seconds=30), group_desc="dp")
        dist.all_reduce(torch.ones(3), group=group)
        for _ in range(3):
            if place.rank == 0:
                dist.send(torch.ones(2), 1, group=group)
            else:
                dist.recv(torch.ones(2), 0, group=group)
        found: dict[str, object] = {}
        if place.rank == 0:
            work = dist.all_reduce(torch.ones(2, 5, dtype=torch.float64), group=group, async_op=True)
            beating = heart()
            assert beating is not None
            assert work is not None
            beating.beat(with_tickets=True)
            found = {**(beating.board.read(0) or {}), "name": group.group_name}
            found["last"] = next(each for each in reversed(recorder.tickets()) if each.group == group.group_name)
        world.barrier()
        if place.rank == 1:
            dist.all_reduce(torch.ones(2, 5, dtype=torch.float64), group=group)
        else:
            work.wait()
        for name in ("step", "save", "step"):
            with phase(name):
                dist.all_reduce(torch.ones(1), group=group)
        beating = heart()
        assert beating is not None
        beating.beat()
        found["compared"] = [each.number for each in beating.compared() if each.group == group.group_name]
        return found


def test_the_recorder_counts_what_it_did_in_the_versions_that_are_known() -> None:
    """If this fails with a new torch, `shoal.comm.heartbeat.recorder` has to follow."""
    found = launch(count, nproc=2, timeout=30)[0]
    last, name = found["last"], found["name"]
    assert isinstance(last, Ticket)
    assert (last.number, last.operation, last.inputs(), last.is_done) == (2, "all_reduce", "float64[2, 5]", False)
    assert abs(last.nanoseconds - time.time_ns()) < 60e9
    assert found["compared"] == [3, 5]  # of steps: while ranks save, one may wait for another
    assert found["counters"][f"gloo/{name}"] == [2, 1]  # type: ignore[index]  # of collectives alone, although torch's count has messages
    assert found["counters"][f"{name}:0>1"][0] == 3 + 1  # type: ignore[index]  # one more in the handshake
    assert found["groups"][name] == ["dp", [0, 1]]  # type: ignore[index]
    assert found["tickets"][-1]["number"] == 2  # type: ignore[index]


def hang(place: Placement, store: dist.Store, how: str) -> None:
    """Steps of 10 ms with an all-reduce each; rank 1 hangs before the one of step 20."""
    with World.start(place, device="cpu", store=store, timeout=60, threads=1) as world:
        for step in range(1, 40):
            with begin_step(step):
                time.sleep(0.01)
                if step == 20 and place.rank == 1:
                    act(how)
                size = 7 if step == 20 and place.rank == 1 and how == "shape" else 100
                dist.all_reduce(torch.ones(size), group=world.control_group)


def act(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "gil":
        hold_gil()
    elif how == "sleep":
        time.sleep(100)


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("stop", "N025", "was stopped by a signal (SIGSTOP) for 2."),
        (
            "shape",
            "N033",
            "called all_reduce of float32[7] as #21 of world; ranks 0, 2 called all_reduce of float32[100]",
        ),
        ("sleep", "N030", "never entered all_reduce #21 of world (float32[100]); ranks 0, 2 have waited 5."),
        wide("gil", "N031", "holds the GIL"),
    ],
    ids=["stop", "shape", "sleep", "gil"],
)
def test_a_rank_that_hangs_is_named_and_ended(how: str, code: str, text: str) -> None:
    with pytest.raises(RunFailed) as caught:
        launch(hang, (how,), nproc=3)
    said = str(caught.value)
    assert said.startswith(f"rank 1 of 3 {text}"), said
    assert f"[{code}]" in said
    assert any(f"{name} (" in said for name in ("act", "all_reduce", "hang")), said  # the stack: it may have left `act`
    assert caught.value.may_pass == (how != "shape")


def hang_in_a_pair(place: Placement, store: dist.Store) -> None:
    """Four ranks in pairs, as dp=2 and tp=2 are; rank 1 hangs before a collective of the second pair that it is in."""
    with World.start(place, device="cpu", store=store, timeout=60, threads=1) as world:
        half = timedelta(seconds=30)
        dp = [world.new_group(ranks, timeout=half, group_desc="dp") for ranks in ([0, 2], [1, 3])]
        tp = [world.new_group(ranks, timeout=half, group_desc="tp") for ranks in ([0, 1], [2, 3])]
        for step in range(1, 40):
            with begin_step(step):
                time.sleep(0.01)
                dist.all_reduce(torch.ones(100), group=dp[place.rank % 2])
                if step == 20 and place.rank == 1:
                    act("sleep")
                dist.all_reduce(torch.ones(50), group=tp[place.rank // 2])


def messages_after_the_heartbeat(place: Placement, store: dist.Store) -> list[float]:
    with World.start(place, device="cpu", store=store, timeout=30, threads=1) as world:
        beating = heart()
        assert beating is not None
        beating.stop()
        number = torch.full((1,), float(world.rank))
        if place.rank == 0:
            dist.send(number + 5, 1, group=world.control_group)
            dist.recv(number, group=world.control_group)
        else:
            dist.recv(number, 0, group=world.control_group)
            dist.send(number + 1, 0, group=world.control_group)
        return number.tolist()


def test_messages_are_sent_also_after_the_heartbeat_has_ended() -> None:
    assert launch(messages_after_the_heartbeat, nproc=2) == [[6.0], [5.0]]


def test_torchs_numbers_of_groups_are_not_taken_for_their_names() -> None:
    """They differ from rank to rank, and with them rank 0 would seem to be elsewhere than where it waits."""
    with pytest.raises(RunFailed) as caught:
        launch(hang_in_a_pair, nproc=4)
    assert str(caught.value).startswith("rank 1 of 4 never entered all_reduce #20 of tp (float32[50])"), caught.value


def be_late(place: Placement, store: dist.Store) -> float:
    """Rank 1 takes 4 s for its data."""
    with World.start(place, device="cpu", store=store, timeout=60, threads=1) as world, phase("data"):
        if place.rank == 1:
            time.sleep(4.0)
        return world.all_reduce_host([1.0]).wait()[0]


def test_a_rank_that_is_slow_between_steps_is_named_once_and_continues(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(be_late, nproc=2) == [2.0, 2.0]
    said = capfd.readouterr().err
    assert said.count("rank 1 of 2 never entered all_reduce #2 of world (float64[1])") == 1, said
    assert "(phase: data) [N030]" in said
    assert "be_late (" in said
