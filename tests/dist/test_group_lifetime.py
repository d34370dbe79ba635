"""Cut connections end a blocked collective, and a process can make new groups again and again."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm.group_lifetime import cut_groups, drop_groups
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch

REBUILDS = 10


def blocked_and_rebuilt(placement: Placement, store: Any, folder: str) -> list[tuple[float, int, int]]:
    """In each generation, rank 1 does not come to the second collective; seconds to its end, descriptors, threads."""
    found = []
    for generation in range(REBUILDS):
        place = replace(placement, generation=generation)
        store = dist.FileStore(f"{folder}/store-{generation}", place.world_size)
        world = World.start(place, device="cpu", store=store, threads=1)
        world.with_own_connections().barrier()
        began = time.monotonic() + 0.1
        thread = threading.Timer(0.1, cut_groups)
        thread.start()
        if placement.rank == 0:
            with pytest.raises(RuntimeError, match=r"closed|reset"):
                dist.all_reduce(torch.ones(1000))
        thread.join()
        seconds = time.monotonic() - began
        del world
        drop_groups(4.0)
        found.append((seconds, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return found


def test_a_cut_ends_a_blocked_collective_and_nothing_is_left_of_ten_worlds(tmp_path: Path) -> None:
    for measured in launch(blocked_and_rebuilt, (str(tmp_path),), nproc=2):
        assert max(seconds for seconds, _, _ in measured) < 1.0
        assert {counted[1:] for counted in measured[1:]} == {measured[0][1:]}
