"""Options of one `shoal train` command that are not in its recipe."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.observe.metrics import Sink
from shoal.train.recipe.saving.host_storage import HostStorage


@dataclass(frozen=True, kw_only=True)
class RunInvocation:
    """Options of one command that are not in its recipe."""

    save: bool = True
    """Write a run directory and checkpoints."""
    only_profiles: bool = False
    """Make no evaluation and no last save: the run exists for its profile."""
    quiet: bool = False
    start_time: float
    """When the command was given, in seconds since the epoch."""
    resume: str = "auto"
    """auto, fresh, latest, or the number of a step."""
    generation: int = 0
    """How often the workers of this run were restarted."""
    is_replacement: bool = False
    """Whether this generation began because one worker was replaced: all ranks have trained this very job before, so
    the checks that come before a first step have passed."""
    memory_root: Path | None = None
    """A folder in shared memory that outlives the workers."""
    saved_before: int = 0
    """The newest step that workers of this run have saved on any host. A start at step 0 would lose it."""
    host: HostStorage | None = None
    """The storage of this host; None: the ranks were not started by `shoal train --hosts`."""
    command: str = ""
    """Identifies the command on all of its hosts and through its restarts; empty: it is not known. Under another
    launcher than shoal's it is LAUNCHER/NUMBER; torchrun's restarts have other numbers."""
    sinks: tuple[Sink, ...] = ()
    """Further destinations of this rank's records. Every rank writes the same ones."""

    def in_generation_of(self, placement: Placement | None) -> RunInvocation:
        """These options in the generation of a worker, which may have begun in this process."""
        if placement is None or placement.generation <= self.generation:
            return self
        return replace(self, generation=placement.generation, is_replacement=True, start_time=time.time())

    def agreed(self, placement: Placement | None, world: World) -> RunInvocation:
        """These options in one generation on all ranks. Agents of torchrun count their own restarts, and a rank that
        took this for the first generation would start over what others resume."""
        if placement is None or not placement.has_new_store:
            return self
        return replace(self, generation=max(world.all_gather_object(self.generation)))
