"""Who leads a run in etcd, and when its agents may leave, with a dictionary in place of etcd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.cli.agent.lead import _led
from shoal.comm.rendezvous.key import Key
from shoal.errors import RunFailed
from shoal.launch.hosts.agent.follow import _joined
from shoal.launch.hosts.coordinator import Coordinator
from shoal.launch.hosts.etcd.client import Etcd, Record
from shoal.launch.hosts.etcd.leadership import Leadership, LostLead
from shoal.launch.hosts.messages import Message
from tests.rejects import rejects

KEY = Key(b"k" * 32, "a test")


class Memory:
    """The calls of `Etcd` on a dictionary."""

    name = "a-run"

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.revision = 0

    def read(self, *keys: str) -> list[Record]:
        return [self.records.get(key, Record(None, 0)) for key in keys]

    def change(self, puts: dict[str, bytes], *, unchanged: dict[str, int], deletes: Sequence[str] = ()) -> int | None:
        if any(self.read(key)[0].revision != revision for key, revision in unchanged.items()):
            return None
        self.revision += 1
        self.records |= {key: Record(value, self.revision) for key, value in puts.items()}
        for key in deletes:
            self.records.pop(key, None)
        return self.revision


@dataclass
class Named:
    """A job of which nothing but its name matters."""

    name: str


def leading(etcd: Memory) -> Leadership:
    found = Leadership(cast("Etcd", etcd), KEY.secret)
    assert found.wait_to_lead(("127.0.0.1", 1), lambda text: None, lambda: None)
    return found


def coordinator() -> Any:
    members = SimpleNamespace(confirm_lead=lambda: None, each_turn=None)
    return SimpleNamespace(members=members, record=None, run=None, pause=None, exit_code=3, taken=[])


def ending(error: BaseException | None = None, *, was_stopped: bool = False) -> Callable[..., Any]:
    def train(coordinator: Coordinator) -> Any:
        if error is not None:
            raise error
        return {"summary": {"was_stopped": was_stopped}}

    return train


def what_agents_do(etcd: Memory) -> int:
    """The exit code with which agents leave that have lost their coordinator; they raise if they wait for another."""
    agent = Leadership(cast("Etcd", etcd), KEY.secret)
    found = _joined(agent, KEY, "a", 0.0, may_end=True)
    assert isinstance(found, int)
    return found


def test_agents_do_not_take_the_end_of_an_earlier_run_for_that_of_theirs() -> None:
    """The second command of a name is lost before it has written where its run is."""
    etcd = Memory()
    first = leading(etcd)
    first.write({"generation": 3})
    first.end(exit_code=3)
    assert what_agents_do(etcd) == 3
    with pytest.raises(LostLead):
        _led(leading(etcd), cast("Coordinator", coordinator()), ending(LostLead("its host is lost", code="N095")))
    with rejects("N098"):
        what_agents_do(etcd)


@pytest.mark.parametrize(
    ("train", "code"),
    [
        (ending(), 0),
        (ending(was_stopped=True), 130),
        (ending(RunFailed("a rank failed", code="N024")), 3),
        (ending(KeyboardInterrupt()), 130),
    ],
)
def test_agents_get_the_exit_code_of_the_run(train: Callable[..., Any], code: int) -> None:
    """From the coordinator that lets them go, and from etcd if they have lost it just then."""
    etcd, made = Memory(), coordinator()
    try:
        _led(leading(etcd), cast("Coordinator", made), train)
        assert made.exit_code == code
    except (RunFailed, KeyboardInterrupt):
        pass  # `coordinating` notes the code of an error
    assert what_agents_do(etcd) == code


def test_a_run_that_has_not_ended_is_taken_over() -> None:
    etcd, taken = Memory(), list[Message]()
    state: Message = {"generation": 3, "hosts": [["a", 1]], "num_saved": 7, "plan": "zero=3", "job": "x"}
    first = leading(etcd)
    first.write(state)
    first.end(exit_code=None)
    second = coordinator()
    second.job, second.continue_from = Named(""), taken.append
    _led(leading(etcd), cast("Coordinator", second), ending())
    assert (taken, second.job) == ([state], Named("x"))
