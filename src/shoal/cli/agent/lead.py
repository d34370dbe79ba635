"""`shoal train --hosts --store etcd://...`: lead a run, or wait to take it over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from shoal.cli.agent.keys import shared_key
from shoal.errors import ShoalError
from shoal.launch.hosts.coordinator import Coordinator, exit_code_of
from shoal.launch.hosts.etcd.client import Etcd
from shoal.launch.hosts.etcd.leadership import Leadership, LostLead
from shoal.launch.hosts.generation import Job
from shoal.launch.hosts.messages import Message
from shoal.launch.hosts.ssh import NOBODY


def lead(
    url: str,
    ssh: str,
    job: Job,
    coordinated: Callable[[Job], AbstractContextManager[Coordinator]],
    train: Callable[[Coordinator], Any],
) -> Any:
    """Return the value of rank 0 when this coordinator has led the run to its end; None: another one has."""
    if ssh != NOBODY:
        raise ShoalError(
            "--store needs agents that outlive a coordinator, but --ssh would start them from this host",
            fix="--ssh none, and on each host: shoal agent --store URL --name NAME, with the same SHOAL_KEY",
            code="N097",
        )
    leadership = Leadership(Etcd.at(url), shared_key().secret)
    while True:
        try:
            with coordinated(job) as coordinator:
                if not leadership.wait_to_lead(coordinator.address, _say, coordinator.raise_on_signal):
                    _say("the run has ended under another coordinator")
                    return None
                return _led(leadership, coordinator, train)
        except LostLead as error:
            _say(f"{error}\n  waiting to take over again")


def _led(leadership: Leadership, coordinator: Coordinator, train: Callable[[Coordinator], Any]) -> Any:
    """Lead the run: from the last generation that was recorded, if it has not ended."""
    exit_code: int | None
    members = coordinator.members

    def renew() -> None:
        if leadership.renew():
            members.confirm_lead()

    def record(state: Message) -> None:
        leadership.write(state)
        members.confirm_lead()

    members.each_turn, coordinator.record = renew, record
    try:
        state = leadership.state()
        if state.get("has_ended"):  # an earlier run: its agents would take it for this one, and leave
            leadership.write({})
        elif state:
            hosts = ", ".join(name for name, _ in state["hosts"])
            saved = f", step {state['num_saved']} was saved" if state["num_saved"] else ""
            _say(f"taking over generation {state['generation']} of hosts {hosts}{saved}: {state['plan']}")
            coordinator.job = replace(coordinator.job, name=str(state["job"]))
            coordinator.continue_from(state)
        value = train(coordinator)
        exit_code = coordinator.exit_code = 130 if value["summary"]["was_stopped"] else 0
        return value
    except LostLead:
        exit_code = None
        raise
    except BaseException as error:
        exit_code = exit_code_of(error)
        raise
    finally:
        leadership.end(exit_code=exit_code)


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
