"""`shoal bench scale --hosts`: the steps of a case on the ranks of several hosts, by an agent on each."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.cli.agent.keys import handed_over, shared_key
from shoal.errors import Problem, raise_if
from shoal.launch.hosts.agent.join import run_agent
from shoal.launch.hosts.coordinator import Coordinator, coordinating
from shoal.launch.hosts.generation import Job as Order
from shoal.launch.hosts.hostlist import HostSpec, check_names, choose_address, read_hosts
from shoal.launch.hosts.messages import Message
from shoal.launch.hosts.ssh import NOBODY, SSH, is_reached, route_to

if TYPE_CHECKING:
    from shoal.bench.training.time_steps import RankSteps
    from shoal.launch.hosts.agent.runner import Work
    from shoal.train.recipe.preflight import Job

SECONDS_TO_JOIN = 60.0
"""Seconds in which all agents have to join."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a benchmark, this one first."""

    specs: tuple[HostSpec, ...]
    ssh: str
    listen: str | None

    @classmethod
    def read(cls, text: str, ssh: str | None, listen: str | None) -> Hosts:
        """The hosts of `--hosts a:2,b:2`; raises if the first one is not this one."""
        specs = tuple(read_hosts(text, default_slots=None))
        command = ssh or os.environ.get("SHOAL_SSH") or SSH
        problems = [*check_names(specs, partial(is_reached, template=command))]
        if not problems and command != NOBODY and not specs[0].is_local:
            what = f"--hosts must begin with this host, where one rank is measured, got {specs[0].name}"
            problems.append(
                Problem("N125", what, f"the same command on {specs[0].name}; or this host first in --hosts")
            )
        if not problems and len(specs) < 2:
            problems.append(
                Problem("N125", "--hosts must name two hosts or more", f"--hosts {text},b:{specs[0].slots}")
            )
        raise_if(problems)
        return cls(specs, command, listen)

    def check(self) -> None:
        """Let every agent join once; raises the reason of one that does not."""
        with self._coordinated(words=(), timeout=SECONDS_TO_JOIN) as coordinator:
            coordinator.start_agents()
            coordinator.wait_for_hosts(least=len(self.specs))
            coordinator.exit_code = 0

    def measure(self, job: Job, num_steps: int) -> Sequence[RankSteps]:
        """Make the steps of a job on all ranks of all hosts. Agents are started for each turn: a coordinator that
        measures something else meanwhile would be silent, and be taken for lost."""
        from shoal.bench.training.on_hosts import words_of
        from shoal.bench.training.time_steps import RankSteps

        timeout = job.recipe.launch.timeout
        with self._coordinated(words=words_of(job, num_steps), timeout=timeout) as coordinator:
            value = coordinator.run(0)
            coordinator.exit_code = 0
        return [RankSteps.of(value["steps"])]

    def _coordinated(self, *, words: Sequence[str], timeout: float) -> AbstractContextManager[Coordinator]:
        order = Order(
            words=words, recipe=None, name=secrets.token_hex(8), grace_period=1.0, start_time=time.time(),
            plan_for=lambda ranks: None,
        )  # fmt: skip
        return coordinating(
            self.specs,
            choose_address(self.specs, self.listen, partial(route_to, template=self.ssh)),
            order,
            key=shared_key() if self.ssh == NOBODY else None,
            ssh=self.ssh,
            local_agent=lambda address, key, name: run_agent(address, handed_over(key), name, prepare_steps),
            timeout=timeout,
            min_hosts=len(self.specs),
        )


def is_of_bench(order: Message) -> bool:
    """Whether an order to an agent is to measure steps."""
    from shoal.bench.training.on_hosts import FLAG

    return bool(order["words"]) and order["words"][0] == FLAG


def prepare_steps(order: Message) -> tuple[Message, Callable[[Message], Work]]:
    """Load and check the job of an order to measure steps."""
    from shoal.bench.training.on_hosts import read_words, time_together
    from shoal.cli.agent.prepare import device_there, recipe_hash
    from shoal.cli.process import import_for_workers
    from shoal.launch.hosts.agent.runner import Work

    job, num_steps = read_words(order["words"], int(order["world_size"]), int(order["num_local"]))
    import_for_workers(job.recipe.plan)
    facts = {
        "plan": str(job.recipe.plan),
        "recipe": recipe_hash(job.recipe),
        "device": device_there(job.recipe.launch.device, order),
        "saves_to": "",
        "has_copies": False,
    }

    def finish(steps: Any) -> Message:
        return {"steps": steps.to_mapping(), "was_stopped": False}

    launch = job.recipe.launch
    times = {"grace_period": launch.grace_period, "timeout": launch.timeout}
    return facts, lambda start: Work(function=time_together, args=(job, num_steps), finish=finish, **times)
