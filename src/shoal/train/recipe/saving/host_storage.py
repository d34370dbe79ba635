"""Where the ranks of `shoal train --hosts` save, and the run directory of each host that shares none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.peers.host_ranks import HostRanks
from shoal.comm.all_or_none import all_or_none
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.observe.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStorage:
    """The storage of one host of several."""

    name: str
    """The name of this host in --hosts."""
    shares_disk: bool
    """Whether all hosts see the same directory of checkpoints. Else each host has its own."""

    def of_memory(self, world: World) -> HostRanks:
        """The ranks that share a folder in memory. Every rank calls it."""
        return HostRanks.of(world)

    def of_disk(self, world: World) -> HostRanks:
        """The ranks that share a directory of checkpoints. Every rank calls it."""
        return HostRanks.shared(world) if self.shares_disk else HostRanks.of(world)


def bytes_on_host(world: World, hosts: HostRanks, own: int) -> int:
    """The bytes of one step on this host: of its ranks, and the copy of those of the host before it."""
    of_ranks = world.all_gather_object(own)
    before = (hosts.index - 1) % len(hosts.groups)
    return sum(of_ranks[rank] for host in {hosts.index, before} for rank in hosts.groups[host])


def has_begun(world: World, recipe: Recipe, hosts: HostRanks, *, command: str) -> bool:
    """Whether an earlier generation of this command has begun to train on any host. Every rank calls it."""
    look = {"failed": "the run directory cannot be read", "fix": "--run.dir WRITABLE_DIRECTORY"}
    return any(
        all_or_none(world, lambda: hosts.is_leader and RunDirectory.has_begun(recipe, command), kinds=(), **look)
    )


def claim_directories(
    world: World, recipe: Recipe, resume: str, hosts: HostRanks, *, command: str, is_restart: bool
) -> RunDirectory:
    """Claim the run directory on the main rank; then the same one on every host that has its own. If one cannot be
    claimed, every rank raises. A run resumes if it has a directory on any host."""
    own: list[RunDirectory] = []
    how = {"failed": "the run directory cannot be created", "fix": "--run.dir WRITABLE_DIRECTORY"}

    def claim() -> Path | None:
        if world.is_main:
            own.append(RunDirectory.claim(recipe, resume, command=command, is_restart=is_restart))
        return own[0].path if own else None

    path = all_or_none(world, claim, kinds=(), **how)[0]
    assert path is not None

    def claim_same() -> bool:
        if hosts.is_leader and not world.is_main:
            named = recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": str(path)})})
            known = resume if resume == "fresh" else "auto"  # the host may be new, with nothing to resume
            own.append(RunDirectory.claim(named, known, command=command, is_restart=is_restart))
        return bool(own) and own[0].resumes

    try:
        resumes = any(all_or_none(world, claim_same, kinds=(), **how))
    except BaseException:
        for directory in own:
            directory.give_up()
        raise
    directory = own[0] if own else RunDirectory(path)
    directory.resumes = resumes
    return directory
