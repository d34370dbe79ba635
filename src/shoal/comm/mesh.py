"""The process groups of a layout, seen from one rank.

torch's `init_device_mesh` makes groups for every direction, also for those of one rank, and only answers for
directions. `Mesh` reads a `Layout`, the very value that the planner reads, and makes one group for each axis on which
there is anyone to talk to, and for axes that are made of others when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.blueprint.layout import AXES, Layout
from shoal.comm.rendezvous.session import Session
from shoal.comm.world import World, keep_after_closing, new_group


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
    """Ranks of a host."""
    session: Session | None = None

    @classmethod
    def make(cls, world: World, layout: Layout) -> Mesh:
        """Make the groups. Every rank of the world calls this, and all make the same groups in the same order.

        An axis that spans the world has a group of its own too: what travels for control stays apart from it.
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
        """My group along any axis, also one that is several directions read as one; of one rank, if there is nobody
        else. It is made when it is first asked for, which all ranks have to do in the same order."""
        if axis not in self.groups:
            self.groups[axis] = self.new_group(axis)
        return self.groups[axis]

    def new_group(self, axis: str) -> dist.ProcessGroup:
        """The same ranks as `group`, over connections of their own: for a thread that talks to them at any time. All
        ranks have to ask in the same order."""
        mine: dist.ProcessGroup | None = None
        for ranks in self.layout.groups(axis):
            group = new_group(self.session, ranks, timeout=self.timeout)
            if self.rank in ranks:
                mine = group
                keep_after_closing(group)
        assert mine is not None
        return mine

    def group_of_several(self, axis: str) -> dist.ProcessGroup | None:
        """The same, or None if there is nobody else."""
        return self.group(axis) if self.degree(axis) > 1 else None

    def ranks_of_node(self, axis: str) -> int | None:
        """How many ranks of my group along an axis each host has; None: not all as many, or not one after the other."""
        hosts = [rank // self.local_size for rank in self.layout.peers(self.rank, axis)]
        node = hosts.count(hosts[0])
        are_alike = len(hosts) % node == 0 and hosts == sorted(hosts) and all(hosts.count(h) == node for h in hosts)
        return node if are_alike else None

    @property
    def comm_device(self) -> torch.device:
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
        groups = [self.group(axis) for axis in axes]
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=tuple(axes))
        outer, inner = axes
        ranks = [list(self.layout.peers(first, inner)) for first in self.layout.peers(self.peer(inner, 0), outer)]
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=torch.tensor(ranks, dtype=torch.int), mesh_dim_names=tuple(axes)
        )
