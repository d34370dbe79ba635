"""Load the newest step of which the hosts together have all files, and bring to each host what it lacks.

                 host a                host b (has come back)
    step 120     shards 0, 1
    step 117                           shards 0, 1, 2, 3 of an earlier generation
    ▼ step 120 is complete, since its manifest lists shards 0 and 1 only
    fetch        shards 0, 1 ───────▶  shards 0, 1

[1] Hosts may have different saves of one step: a host that was cut off has one of an earlier layout. Only files under
    the same manifest belong together.
[2] A host gets the files that its ranks read. A file that a single host has goes to the next host, too: from the first
    step on, no file is lost with one host.
[3] Files are added to a new save of the step, as any save is made: a step in a store is never changed.
[4] To hash all files before each start would take long. It is done if a step cannot be used: a host with a damaged file
    then counts as one that lacks it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.checkpoint.load import MismatchedModel, load_step, needed_files
from shoal.checkpoint.peers.host_ranks import HostRanks, Transfer, on_leaders
from shoal.checkpoint.peers.transfer import send_files
from shoal.checkpoint.state.model_state import Holder
from shoal.checkpoint.storage.locate import SavedStep
from shoal.checkpoint.storage.manifest import MOST_BYTES, NAME, Manifest
from shoal.checkpoint.storage.store import Store, wrong_sizes
from shoal.checkpoint.verify import verify
from shoal.comm.all_or_none import all_or_none
from shoal.comm.world import World
from shoal.errors import LostPeer, Problem, RunFailed, ShoalError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A step in a store of one host."""

    place: int
    """The number of the store."""
    step: int
    manifest: str
    """The SHA-256 of its manifest."""
    files: tuple[str, ...]
    """The files that this host has."""
    missing: tuple[str, ...]
    """The other files in the manifest."""

    def without(self, damaged: Collection[str]) -> HeldStep:
        """The step on a host that has not got some of these files."""
        files = tuple(name for name in self.files if name not in damaged)
        return replace(self, files=files, missing=tuple(sorted({*self.missing, *damaged})))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step that some hosts have under one manifest."""

    place: int
    step: int
    manifest: str
    held: tuple[HeldStep | None, ...]
    """What each host has of it."""

    @property
    def files(self) -> set[str]:
        """All files of the step."""
        return {file for each in self.held if each is not None for file in (*each.files, *each.missing)}

    @property
    def missing(self) -> set[str]:
        """The files that no host has."""
        return self.files - {file for each in self.held if each is not None for file in each.files}

    def has(self, host: int, file: str) -> bool:
        """Whether a host has a file."""
        held = self.held[host]
        return held is not None and file in held.files


def load_newest_of_hosts(
    stores: Sequence[tuple[Store, HostRanks]], world: World, holder: Holder, say: Say, *, step: int | None = None
) -> Manifest | None:
    """Fill a run from the newest step, or from one step, of all stores; every rank calls it. None: there is no step.

    `stores`: each with the ranks that share it.
    """
    problems: list[Problem] = []
    for candidate in sorted(_candidates(stores, world, step), key=lambda each: (-each.step, each.place, each.manifest)):
        store, hosts = stores[candidate.place]
        if candidate.missing:
            names = ", ".join(sorted(candidate.missing)[:3])
            what = f"step {candidate.step} in {store.where} is incomplete: no host that is left has {names}"
            problems.append(Problem("N092", what, "--resume STEP, with another step, or bring the lost hosts back"))
            say(f"{what}; trying the next one")
            continue
        try:
            return _load(candidate, store, world, hosts, holder, say)
        except MismatchedModel:
            raise
        except ShoalError as error:
            problems += error.problems
            say(f"step {candidate.step} of {store.where} cannot be used, trying the next one: {error}")
    if problems:
        raise RunFailed(*problems, title=f"the checkpoints in {stores[-1][0].where}, none of which can be used")
    return None


def _load(candidate: Candidate, store: Store, world: World, hosts: HostRanks, holder: Holder, say: Say) -> Manifest:
    """Fetch and load a step; once more, if files are damaged of which another host has intact ones."""
    try:
        _fetch(candidate, store, world, hosts, holder)
        return load_step(store, world, holder, candidate.step)
    except (MismatchedModel, LostPeer):
        raise
    except ShoalError as error:
        if len(hosts.groups) == 1:
            raise
        intact = _without_damaged(candidate, store, world, hosts)
        if intact == candidate or intact.missing:
            raise
        say(f"step {candidate.step} of {store.where} is damaged on one host, fetching files of another one: {error}")
    _fetch(intact, store, world, hosts, holder)
    return load_step(store, world, holder, candidate.step)


# ---- what there is --------------------------------------------------------------------------------------------------


def _candidates(stores: Sequence[tuple[Store, HostRanks]], world: World, wanted: int | None) -> Iterator[Candidate]:
    for place, (store, hosts) in enumerate(stores):

        def look(place: int = place, store: Store = store, hosts: HostRanks = hosts) -> list[HeldStep]:
            return list(_held(place, store, wanted)) if hosts.is_leader else []

        found = all_or_none(
            world, look, failed=f"{store.where} was not read", fix="--checkpoint.dir", kinds=(HeldStep,)
        )
        by_host = [found[ranks[0]] for ranks in hosts.groups]
        for step, manifest in dict.fromkeys((each.step, each.manifest) for held in by_host for each in held):
            held = tuple(
                next((each for each in of_host if (each.step, each.manifest) == (step, manifest)), None)
                for of_host in by_host
            )
            yield Candidate(place, step, manifest, held)  # [1]


def _held(place: int, store: Store, wanted: int | None) -> Iterator[HeldStep]:
    """The steps in the store of this host; damaged ones are left out."""
    for step in store.steps():
        if wanted not in (None, step):
            continue
        try:
            text = store.disk.read(store.path(step) / NAME, MOST_BYTES + 1)
            manifest = store.manifest(step)
        except (OSError, ShoalError):
            continue
        missing = {name for name, _ in wrong_sizes(store.path(step), manifest, store.disk)}
        own = tuple(name for name in manifest.files if name not in missing)
        yield HeldStep(place, step, hashlib.sha256(text).hexdigest(), own, tuple(sorted(missing)))


def _without_damaged(candidate: Candidate, store: Store, world: World, hosts: HostRanks) -> Candidate:
    """[4] The step without the files that do not have their hashes on a host."""

    def look() -> list[str]:
        held = candidate.held[hosts.index]
        if held is None or not hosts.is_leader:
            return []
        step = SavedStep(store.path(candidate.step), store.manifest(candidate.step), store.disk)
        return sorted({damage.file for damage in verify(step).damages}.intersection(held.files))

    how = {
        "failed": f"step {candidate.step} of {store.where} was not verified",
        "fix": "--resume STEP, with another step",
    }
    found = all_or_none(world, look, kinds=(), **how)
    of_hosts = zip(candidate.held, hosts.groups, strict=True)
    return replace(candidate, held=tuple(held and held.without(found[ranks[0]]) for held, ranks in of_hosts))


# ---- what is fetched ------------------------------------------------------------------------------------------------


def _fetch(candidate: Candidate, store: Store, world: World, hosts: HostRanks, holder: Holder) -> None:
    """Bring files of a complete step to the hosts that need them."""
    if len(hosts.groups) == 1:
        return
    step, how = candidate.step, {"failed": f"step {candidate.step} of {store.where} was not fetched", "fix": "--resume"}
    text = _manifest_text(candidate, store, world, hosts, how)
    manifest = Manifest.parse(text.encode())
    needs = all_or_none(world, lambda: sorted(needed_files(manifest, holder)), kinds=(), **how)
    transfers = list(transfers_to_load(candidate, hosts, needs))
    changed = {hosts.host_of(each.target) for each in transfers}
    changed |= {host for host, held in enumerate(candidate.held) if held is None}
    if not changed:
        return
    is_changed = hosts.index in changed
    old = store.path(step)
    on_leaders(world, hosts, lambda: _begin(store, candidate, hosts.index, old) if is_changed else None, **how)
    act = partial(
        send_files, world, transfers, manifest.files, source=lambda: old, target=partial(store.draft, step),
        disk=store.disk,
    )  # fmt: skip
    try:
        all_or_none(world, act, kinds=(), **how)
    except ShoalError:
        if hosts.is_leader and is_changed:
            store.abandon(step)
        raise
    on_leaders(world, hosts, lambda: store.commit(manifest) if is_changed else None, **how)  # [3]


def _manifest_text(candidate: Candidate, store: Store, world: World, hosts: HostRanks, how: dict[str, str]) -> str:
    """The text of the manifest, from the first host that has it."""
    source = next(ranks[0] for ranks, held in zip(hosts.groups, candidate.held, strict=True) if held is not None)
    path = store.path(candidate.step) / NAME
    texts = all_or_none(
        world, lambda: store.disk.read(path, MOST_BYTES).decode() if world.rank == source else "", kinds=(), **how
    )
    return texts[source]


def transfers_to_load(candidate: Candidate, hosts: HostRanks, needs: Sequence[Sequence[str]]) -> Iterator[Transfer]:
    """The transfers that give each host the files that its ranks need. `needs`: by rank."""
    for number, file in enumerate(sorted(candidate.files)):
        holders = [host for host in range(len(hosts.groups)) if candidate.has(host, file)]
        wanted = {hosts.host_of(rank) for rank, files in enumerate(needs) if file in files}
        if len(holders) == 1:  # [2]
            wanted.add(hosts.next_host(holders[0]))
        for count, host in enumerate(sorted(wanted - set(holders))):
            source, target = hosts.groups[holders[count % len(holders)]], hosts.groups[host]
            yield Transfer(file, source[number % len(source)], target[number % len(target)])


def _begin(store: Store, candidate: Candidate, host: int, old: Path) -> None:
    """Make a draft with the files of the step that this host has."""
    draft = store.begin(candidate.step)
    held = candidate.held[host]
    for name in held.files if held is not None else ():
        try:
            os.link(old / name, draft / name)
        except OSError:  # a file system without links
            shutil.copyfile(old / name, draft / name)
