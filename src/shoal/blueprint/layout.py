"""Ranks on named axes: the degree of each axis, and every group of ranks that communicate.

Torch's `DeviceMesh` holds the same facts, but only inside a started process group, one rank at a time. A `Layout` is a
value and needs no process. The planner queries it about 4096 ranks that do not exist, and the runtime builds its
process groups from the same results. It adds the peers of any rank, axes made of other axes, and which axes stay inside
a node. `layout_drawing` draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from shoal.errors import Problem, ShoalError, listed, nearest, raise_if

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The directions of the mesh, outermost first: neighbouring ranks differ in tp, so that tp stays inside a node."""

FLATTENED = {
    "data": ("dp_replicate", "dp_shard"),  # its ranks see different samples
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),  # its ranks see different tokens: a gradient is summed over it
    "dp_shard_cp": ("dp_shard", "cp"),  # its ranks share one copy of the parameters
    "cp_tp": ("cp", "tp"),  # with sequence parallelism, its ranks share one sequence
    "replica": ("pp", "dp_shard", "cp", "tp"),  # its ranks together hold one copy of the model
}
"""Axes that combine several directions of the mesh."""

GROUP_AXES = (*AXES, "ep", "edp", *FLATTENED)
"""Every axis that has groups of ranks."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degree of each parallel axis, and the groups of ranks along it. It needs no process.

    >>> layout = Layout(dp_shard=2, tp=2)
    >>> layout.world_size, layout.groups("tp"), layout.groups("dp_shard")
    (4, ((0, 1), (2, 3)), ((0, 2), (1, 3)))

    `ep` is no direction of its own: it cuts the flattened (dp_shard, cp) ranks into slices. Ranks at the same position
    of different slices hold the same experts and form the axis `edp`.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        degrees = {axis: getattr(self, axis) for axis in (*AXES, "ep")}
        problems = [
            Problem("P005", f"{axis} must be a whole number of at least 1, got {degree!r}", f"{axis}=1")
            for axis, degree in degrees.items()
            if type(degree) is not int or degree < 1
        ]
        if not problems and self.dp_shard * self.cp % self.ep:
            slots = self.dp_shard * self.cp
            problems.append(
                Problem(
                    "P015",
                    f"ep={self.ep} does not divide dp_shard={self.dp_shard} x cp={self.cp} = {slots}",
                    f"ep={listed(divisors(slots))}, or a dp_shard x cp that {self.ep} divides",
                )
            )
        raise_if(problems, "the layout" if len(problems) > 1 else "")

    @property
    def world_size(self) -> int:
        """The number of ranks. ep divides the ranks of other axes and adds none."""
        return prod(self.degree(axis) for axis in AXES)

    @property
    def data_degree(self) -> int:
        """The number of parts that the samples of a batch are divided into."""
        return self.degree("data")

    def degree(self, axis: str) -> int:
        """The size of every group along the axis."""
        if axis in AXES:  # the usual case, which a search meets a hundred thousand times
            return int(getattr(self, axis))
        _check_axis(axis)
        if axis == "edp":
            return self.dp_shard * self.cp // self.ep
        return prod(int(getattr(self, part)) for part in FLATTENED.get(axis, (axis,)))

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of a rank on every direction of the mesh, and within its ep group.

        >>> Layout(dp_shard=2, tp=2).coordinate(2)
        {'pp': 0, 'dp_replicate': 0, 'dp_shard': 1, 'cp': 0, 'tp': 0, 'ep': 0}
        """
        self._check_rank(rank)
        position, stride = dict.fromkeys(AXES, 0), 1
        for axis in reversed(AXES):  # the innermost has stride 1
            degree = self.degree(axis)
            position[axis] = rank // stride % degree
            stride *= degree
        return {**position, "ep": self._expert_slot(position) % self.ep}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; missing axes are 0. The inverse of `coordinate`.

        >>> Layout(dp_shard=2, tp=2).rank(dp_shard=1)
        2
        """
        known = (*AXES, "ep")
        for axis, index in coordinate.items():
            _check_axis(axis, known)
            degree = self.degree(axis)
            if not 0 <= index < degree:
                raise ShoalError(
                    f"{axis} must be from 0 to {degree - 1}, got {index}", fix=f"0 to {degree - 1}", code="P052"
                )
        rank = sum(coordinate.get(axis, 0) * self._stride(axis) for axis in AXES)
        follows = self.coordinate(rank)["ep"]
        if coordinate.get("ep", follows) != follows:
            raise ShoalError(
                f"ep must be {follows}, which follows from dp_shard and cp, got {coordinate['ep']}",
                fix="pass dp_shard and cp without ep",
                code="P052",
            )
        return rank

    def place(self, rank: int, axis: str) -> int:
        """The position of a rank in its group along any axis.

        >>> Layout(dp_shard=4, ep=2).place(3, "edp"), Layout(dp_shard=2, cp=2).place(3, "dp_shard_cp")
        (1, 3)
        """
        _check_axis(axis)
        here = self.coordinate(rank)
        if axis in ("ep", "edp"):
            slot = self._expert_slot(here)
            return slot % self.ep if axis == "ep" else slot // self.ep
        index = 0
        for name in FLATTENED.get(axis, (axis,)):
            index = index * self.degree(name) + here[name]
        return index

    def data_coordinate(self, rank: int) -> int:
        """The number of the part of a batch that a rank reads, from 0 to `data_degree` - 1."""
        position = self.coordinate(rank)
        return position["dp_replicate"] * self.dp_shard + position["dp_shard"]

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group of a rank along an axis, itself included, in the order of the axis.

        >>> Layout(dp_shard=4, tp=2, ep=2).peers(5, "dp_shard"), Layout(dp_shard=4, tp=2, ep=2).peers(5, "ep")
        ((1, 3, 5, 7), (5, 7))
        """
        _check_axis(axis)
        here = self.coordinate(rank)
        varies = ("dp_shard", "cp") if axis in ("ep", "edp") else FLATTENED.get(axis, (axis,))
        first = rank - sum(here[name] * self._stride(name) for name in varies)
        steps = product(*(range(0, self.degree(name) * self._stride(name), self._stride(name)) for name in varies))
        peers = tuple(first + sum(step) for step in steps)
        if axis == "edp":
            return peers[here["ep"] :: self.ep]
        if axis != "ep":
            return peers
        start = self._expert_slot(here) // self.ep * self.ep
        return peers[start : start + self.ep]

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along an axis, ordered by their first rank. Together they hold every rank once.

        >>> Layout(dp_shard=2, tp=2).groups("dp_shard")
        ((0, 2), (1, 3))
        """
        _check_axis(axis)
        groups: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(self.world_size):
            if rank not in seen:
                groups.append(self.peers(rank, axis))
                seen.update(groups[-1])
        return tuple(groups)

    def axes_inside_node(self, devices_per_node: int) -> tuple[str, ...]:
        """The axes, ep included, whose groups stay inside a node when ranks fill one node after the other.

        >>> Layout(pp=2, dp_shard=4, tp=2).axes_inside_node(8)
        ('dp_replicate', 'dp_shard', 'cp', 'tp', 'ep')
        """
        check_node(devices_per_node)
        return tuple(
            axis
            for axis in (*AXES, "ep")
            if all(group[0] // devices_per_node == group[-1] // devices_per_node for group in self.groups(axis))
        )

    def _stride(self, axis: str) -> int:
        """The distance in ranks between two neighbours on a direction of the mesh."""
        return prod(self.degree(inner) for inner in AXES[AXES.index(axis) + 1 :])

    def _expert_slot(self, position: dict[str, int]) -> int:
        """The position in the flattened (dp_shard, cp) ranks, which ep cuts into slices."""
        return position["dp_shard"] * self.cp + position["cp"]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            last = self.world_size - 1
            raise ShoalError(f"rank must be from 0 to {last}, got {rank}", fix=f"0 to {last}", code="P052")


def divisors(number: int) -> list[int]:
    """Every whole number that divides it, itself included.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _check_axis(axis: str, known: tuple[str, ...] = GROUP_AXES) -> None:
    if axis not in known:
        raise ShoalError(f"unknown axis {axis!r}", fix=nearest(axis, known) or listed(known), code="P053")


def check_node(devices_per_node: int) -> None:
    """Raise if a node has no device."""
    if devices_per_node < 1:
        raise ShoalError(
            f"devices_per_node must be at least 1, got {devices_per_node}", fix="devices_per_node=1", code="P005"
        )
