"""`shoal train --hosts`: coordinate the agents of all hosts, and restart them from the last checkpoint."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from shoal.blueprint.plan import Plan
from shoal.cli.agent.keys import handed_over, shared_key
from shoal.cli.agent.lead import lead
from shoal.cli.agent.prepare import TrainVerb
from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.config.recipe import Recipe
from shoal.elastic.replan import fits_some_way, plan_for_ranks
from shoal.elastic.restart import RestartBudget, with_restarts
from shoal.errors import RunFailed, ShoalError, raise_if
from shoal.launch.hosts.agent.join import run_agent
from shoal.launch.hosts.coordinator import Coordinator, coordinating
from shoal.launch.hosts.etcd.leadership import LostLead
from shoal.launch.hosts.generation import Job
from shoal.launch.hosts.hostlist import check_names, choose_address, read_hosts
from shoal.launch.hosts.ssh import NOBODY, SSH, is_reached, route_to
from shoal.observe.failure_event import note_failure


def train_on_hosts(
    options: Any, words: Sequence[str], recipe: Recipe, verb: TrainVerb, start_time: float
) -> tuple[dict[str, Any], bool] | None:
    """Train on all hosts of --hosts; returns the summary of the run, and whether it was written. None: another
    coordinator has led the run to its end."""
    _reject_launcher()
    hosts = read_hosts(options.hosts, default_slots=recipe.launch.nproc)
    ssh = options.ssh or os.environ.get("SHOAL_SSH") or SSH
    raise_if(check_names(hosts, partial(is_reached, template=ssh)))
    all_ranks = sum(host.slots for host in hosts)
    job = Job(
        words=words,
        recipe=None if options.recipe is None else hashlib.sha256(options.recipe.read_bytes()).hexdigest(),
        name=secrets.token_hex(8),
        grace_period=recipe.launch.grace_period,
        start_time=start_time,
        plan_for=partial(_plan_for, recipe, all_ranks),
        fits=partial(_fits, recipe, all_ranks),
    )

    def be_agent(address: tuple[str, int], key: str, name: str) -> int:
        return run_agent(address, handed_over(key), name, verb.prepare)

    def coordinated(job: Job) -> AbstractContextManager[Coordinator]:
        return coordinating(
            hosts,
            choose_address(hosts, options.listen, partial(route_to, template=ssh)),
            job,
            key=shared_key() if ssh == NOBODY else None,
            ssh=ssh,
            local_agent=be_agent,
            timeout=recipe.launch.timeout,
            min_hosts=_min_hosts(options.min_hosts, len(hosts)),
        )

    def train(coordinator: Coordinator) -> Any:
        most = 0 if recipe.run.fast_dev_run else recipe.launch.max_restarts
        start = partial(_run_and_note, coordinator, recipe)
        return with_restarts(start, RestartBudget(most=most, say=_say), sleep=coordinator.pause)

    with _explaining_memory(recipe, per_node=hosts[0].slots):
        if options.store is None:
            with coordinated(job) as coordinator:
                value = train(coordinator)
                coordinator.exit_code = 130 if value["summary"]["was_stopped"] else 0
        else:
            value = lead(options.store, ssh, job, coordinated, train)
    return None if value is None else (value["summary"], value["is_written"])


@contextmanager
def _explaining_memory(recipe: Recipe, *, per_node: int) -> Iterator[None]:
    """If a rank had no memory left, raise an error that has its memory by cause, and a plan that would fit."""
    try:
        yield
    except RunFailed as error:
        if not error.memory:
            raise
        planned = recipe.model_copy(update={"plan": Plan.parse(error.plan)})
        try:
            from shoal.train.recipe.memory.explain import explained  # the planner, which few runs need
        except ImportError:  # this host has no torch
            raise error from error.__cause__
        raise explained(planned, error, per_node=per_node) from error.__cause__


def _run_and_note(coordinator: Coordinator, recipe: Recipe, restart: int) -> Any:
    """Run generations; a failure is noted beside the run, if its directory is seen from this host."""
    try:
        return coordinator.run(restart)
    except LostLead:  # another coordinator leads the run on
        raise
    except Exception as error:
        note_failure(recipe, coordinator.job.name, error)
        raise


def place_on_hosts(text: str | None, nproc: int | None) -> Placement:
    """The place of rank 0 on the hosts of --hosts, to check a job for them on this host."""
    slots = [host.slots for host in read_hosts(text or "", default_slots=nproc)]
    return Placement(rank=0, world_size=sum(slots), local_rank=0, local_world_size=slots[0])


def _plan_for(recipe: Recipe, all_ranks: int, world_size: int) -> str | None:
    """The plan for the ranks that are left; None: that of the command, or the planner's."""
    if _stays(recipe, all_ranks, world_size):
        return None
    return str(plan_for_ranks(recipe.plan, world_size, recipe.data.global_batch))


def _fits(recipe: Recipe, all_ranks: int, world_size: int) -> bool:
    """Whether there is a plan for the ranks that are left; that of the planner is not known yet."""
    stays = _stays(recipe, all_ranks, world_size)
    return stays or fits_some_way(recipe.plan, world_size, recipe.data.global_batch)


def _stays(recipe: Recipe, all_ranks: int, world_size: int) -> bool:
    """Whether the agents get the plan of the command as it is; `auto` is planned there."""
    return world_size == all_ranks or bool(recipe.run.planned)


def _min_hosts(wanted: int | None, num_hosts: int) -> int:
    if wanted is not None and not 1 <= wanted <= num_hosts:
        what = f"--min-hosts must be 1 to {num_hosts}, the number of hosts, got {wanted}"
        raise ShoalError(what, fix="--min-hosts 1", code="N065")
    return wanted or num_hosts


def _reject_launcher() -> None:
    placement = read_environment(os.environ)
    if placement is not None and placement.world_size > 1:
        raise ShoalError(
            f"--hosts starts the ranks itself, but this is rank {placement.rank} of {placement.source}",
            fix="give the command once, without torchrun, srun or mpirun; or leave --hosts out",
            code="N068",
        )


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
