"""The process groups of a layout, seen from one rank.

torch's `init_device_mesh` makes groups for every direction, also for those of one rank, and only answers for
directions. `Mesh` reads a `Layout`, the very value that the planner reads, and makes one group for each axis on which
there is anyone to talk to. An axis of one rank has no group: whoever asks for it has nobody to talk to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.blueprint.layout import AXES, Layout
from shoal.comm.world import World, keep_after_closing


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank's place in a layout, and its group along every axis of more than one rank."""

    layout: Layout
    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    coordinate: dict[str, int] = field(default_factory=dict)
    timeout: timedelta = timedelta(minutes=10)

    @classmethod
    def make(cls, world: World, layout: Layout) -> Mesh:
        """Make the groups. Every rank of the world calls this, and all make the same groups in the same order.

        An axis that spans the world has a group of its own too: what travels for control stays apart from it.
        """
        timeout = timedelta(seconds=world.timeout)
        mesh = cls(layout, world.rank, world.device, {}, layout.coordinate(world.rank), timeout)
        for axis in AXES:
            if layout.degree(axis) > 1:
                for ranks in layout.groups(axis):
                    group = dist.new_group(list(ranks), timeout=mesh.timeout)
                    if world.rank in ranks:
                        mesh.groups[axis] = group
                        keep_after_closing(group)
        return mesh

    @property
    def wire(self) -> torch.device:
        """Where a tensor has to be to be sent from rank to rank: gloo sends from host memory only."""
        sends_from_device = self.device.type == "cpu" or "cuda:nccl" in dist.get_backend_config()
        return self.device if sends_from_device else torch.device("cpu")

    def degree(self, axis: str) -> int:
        """How many ranks share a group along this axis."""
        return self.layout.degree(axis)

    def peer(self, axis: str, index: int) -> int:
        """The rank at this place of my group along an axis."""
        return self.layout.peers(self.rank, axis)[index]

    def device_mesh(self, axes: Sequence[str]) -> DeviceMesh:
        """torch's name for my groups along these axes, outermost first. An axis of one rank gets a group for itself."""
        groups = [self._group_or_self(axis) for axis in axes]
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=tuple(axes))
        outer, inner = axes
        ranks = [list(self.layout.peers(first, inner)) for first in self.layout.peers(self.peer(inner, 0), outer)]
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=torch.tensor(ranks, dtype=torch.int), mesh_dim_names=tuple(axes)
        )

    def _group_or_self(self, axis: str) -> dist.ProcessGroup:
        if axis not in self.groups:
            for rank in range(self.layout.world_size):
                group = dist.new_group([rank], timeout=self.timeout)
                if rank == self.rank:
                    self.groups[axis] = group
                    keep_after_closing(group)
        return self.groups[axis]
