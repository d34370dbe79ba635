"""The process groups of a layout, seen from one rank.

torch's `init_device_mesh` creates a group for every direction, also for those of one rank, and knows directions only.
`Mesh` reads the same `Layout` as the planner. It creates one group for each axis of more than one rank, and groups of
combined axes on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.blueprint.layout import AXES, Layout
from shoal.comm.group_lifetime import keep_after_closing
from shoal.comm.rendezvous.session import Session
from shoal.comm.world import World, new_group


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank's place in a layout, and its group along every axis of more than one rank."""

    layout: Layout
    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    coordinate: dict[str, int] = field(default_factory=dict)
    timeout: timedelta = timedelta(minutes=10)
    local_size: int = 1
    """Ranks per host."""
    session: Session | None = None

    @classmethod
    def make(cls, world: World, layout: Layout) -> Mesh:
        """Create the groups. Every rank of the world calls this, and all create the same groups in the same order.

        An axis that spans the world gets its own group too: control messages stay apart from its tensors.
        """
        timeout = timedelta(seconds=world.timeout)
        mesh = cls(
            layout,
            world.rank,
            world.device,
            {},
            layout.coordinate(world.rank),
            timeout,
            world.local_size,
            world.session,
        )
        for axis in (*AXES, "ep"):
            if layout.degree(axis) > 1:
                mesh.group(axis)
        return mesh

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return my group along an axis, also a combined one; it may have one rank. The group is created on first use,
        and all ranks must ask in the same order."""
        if axis not in self.groups:
            self.groups[axis] = self.new_group(axis)
        return self.groups[axis]

    def new_group(self, axis: str) -> dist.ProcessGroup:
        """Create another group with the ranks of `group`, over separate connections, for a thread that may use it at
        any time. All ranks must call it in the same order."""
        mine: dist.ProcessGroup | None = None
        for ranks in self.layout.groups(axis):
            group = new_group(self.session, ranks, timeout=self.timeout, group_desc=axis)
            if self.rank in ranks:
                mine = group
                keep_after_closing(group)
        assert mine is not None
        return mine

    def group_of_several(self, axis: str) -> dist.ProcessGroup | None:
        """Return `group(axis)`, or None if it has one rank."""
        return self.group(axis) if self.degree(axis) > 1 else None

    def ranks_of_node(self, axis: str) -> int | None:
        """Count the ranks of my group on each host; None: the counts differ, or a host's ranks are not consecutive."""
        hosts = [rank // self.local_size for rank in self.layout.peers(self.rank, axis)]
        node = hosts.count(hosts[0])
        are_alike = len(hosts) % node == 0 and hosts == sorted(hosts) and all(hosts.count(h) == node for h in hosts)
        return node if are_alike else None

    @property
    def comm_device(self) -> torch.device:
        """The device that a tensor must be on to be sent: gloo sends from host memory only."""
        sends_from_device = self.device.type == "cpu" or "cuda:nccl" in dist.get_backend_config()
        return self.device if sends_from_device else torch.device("cpu")

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.layout.degree(axis)

    def peer(self, axis: str, index: int) -> int:
        """Return the rank at this index of my group along an axis."""
        return self.layout.peers(self.rank, axis)[index]

    def device_mesh(self, axes: Sequence[str]) -> DeviceMesh:
        """Return a DeviceMesh of my groups along these axes, outermost first. An axis of one rank gets its own
        group."""
        groups = [self.group(axis) for axis in axes]
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=tuple(axes))
        outer, inner = axes
        ranks = [list(self.layout.peers(first, inner)) for first in self.layout.peers(self.peer(inner, 0), outer)]
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=torch.tensor(ranks, dtype=torch.int), mesh_dim_names=tuple(axes)
        )
