"""Which rank sits where: degrees on named axes, and from them every group of ranks that talk to each other.

Torch's `DeviceMesh` answers the same questions, but only inside a started process group, one rank at a time. A `Layout`
is a value: it needs no process, so the planner asks it about 4096 ranks that do not exist and the runtime builds its
process groups from the very same answers. It adds the peers of any rank, axes that are made of others, which axes stay
inside a node, and a drawing.
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
    "island": ("pp", "dp_shard", "cp", "tp"),  # its ranks hold one copy of the model among them
}
"""Axes that are several directions of the mesh read as one."""

GROUP_AXES = (*AXES, "ep", "edp", *FLATTENED)
"""Everything that groups of ranks can be asked for."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees on the axes. `ep` is no direction of its own: it cuts the flattened (dp_shard, cp) ranks into slices.
    Ranks at the same place of different slices hold the same experts: they are the axis `edp`.

    >>> print(Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2).draw(devices_per_node=4))
    dp_replicate 0                 dp_replicate 1
                tp →                           tp →
               ┌───┬───┐                      ┌───┬───┐
    dp_shard ↓ │ 0 │ 1 │ node 0    dp_shard ↓ │ 4 │ 5 │ node 1
               ├───┼───┤                      ├───┼───┤
               │ 2 │ 3 │ node 0               │ 6 │ 7 │ node 1
               └───┴───┘                      └───┴───┘
    dp_replicate=2  0 4  between nodes
    dp_shard=2      0 2  inside a node
    tp=2            0 1  inside a node
    ep=2            0 2  inside a node
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
            Problem(f"{axis}={degree!r} is not a degree", f"{axis}=1 or more")
            for axis, degree in degrees.items()
            if type(degree) is not int or degree < 1
        ]
        if not problems and self.dp_shard * self.cp % self.ep:
            slots = self.dp_shard * self.cp
            problems.append(
                Problem(
                    f"ep={self.ep} does not divide dp_shard={self.dp_shard} x cp={self.cp} = {slots}",
                    f"ep={listed(divisors(slots))}, or a dp_shard x cp that {self.ep} divides: more ranks, or less of"
                    " other axes",
                )
            )
        raise_if(problems, "the layout" if len(problems) > 1 else "")

    @property
    def world_size(self) -> int:
        """How many ranks there are. ep divides ranks that other axes brought, so it does not count."""
        return prod(self.degree(axis) for axis in AXES)

    @property
    def data_degree(self) -> int:
        """Into how many parts the samples of a batch are divided."""
        return self.degree("data")

    def degree(self, axis: str) -> int:
        """The size of every group along the axis."""
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
        position = {axis: rank // self._stride(axis) % self.degree(axis) for axis in AXES}
        return {**position, "ep": self._expert_slot(position) % self.ep}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; axes that are not said are 0. The inverse of `coordinate`.

        >>> Layout(dp_shard=2, tp=2).rank(dp_shard=1)
        2
        """
        known = (*AXES, "ep")
        for axis, index in coordinate.items():
            _check_axis(axis, known)
            degree = self.degree(axis)
            if not 0 <= index < degree:
                raise ShoalError(f"there is no {axis}={index}: {axis} has degree {degree}", fix=f"0 to {degree - 1}")
        rank = sum(coordinate.get(axis, 0) * self._stride(axis) for axis in AXES)
        follows = self.coordinate(rank)["ep"]
        if coordinate.get("ep", follows) != follows:
            raise ShoalError(
                f"ep={coordinate['ep']} contradicts dp_shard and cp, from which ep={follows} follows",
                fix="say dp_shard and cp, and leave ep out",
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
        """Which of the `data_degree` parts of a batch a rank sees."""
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
        """The axes, ep included, whose groups never leave a node when ranks fill one node after the other.

        >>> Layout(pp=2, dp_shard=4, tp=2).axes_inside_node(8)
        ('dp_replicate', 'dp_shard', 'cp', 'tp', 'ep')
        """
        _check_node(devices_per_node)
        return tuple(
            axis
            for axis in (*AXES, "ep")
            if all(group[0] // devices_per_node == group[-1] // devices_per_node for group in self.groups(axis))
        )

    def draw(self, devices_per_node: int | None = None) -> str:
        """Its ranks as a grid, and below it rank 0's group along every axis that is in use."""
        if devices_per_node is not None:
            _check_node(devices_per_node)
        return "\n".join([*_draw_panels(self, devices_per_node), *_draw_legend(self, devices_per_node)])

    def _stride(self, axis: str) -> int:
        """How far apart the ranks of two neighbours on a direction of the mesh are."""
        return prod(self.degree(inner) for inner in AXES[AXES.index(axis) + 1 :])

    def _expert_slot(self, position: dict[str, int]) -> int:
        """The place in the flattened (dp_shard, cp) ranks, which ep cuts into slices."""
        return position["dp_shard"] * self.cp + position["cp"]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            last = self.world_size - 1
            raise ShoalError(f"there is no rank {rank} in a world of {self.world_size}", fix=f"0 to {last}")


def divisors(number: int) -> list[int]:
    """Every whole number that divides it, itself included.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _check_axis(axis: str, known: tuple[str, ...] = GROUP_AXES) -> None:
    if axis not in known:
        raise ShoalError(f"there is no axis {axis!r}", fix=nearest(axis, known) or listed(known))


def _check_node(devices_per_node: int) -> None:
    if devices_per_node < 1:
        raise ShoalError(f"a node with {devices_per_node} devices holds no rank", fix="devices_per_node=1 or more")


# Drawing. The innermost axis in use runs to the right and the next one down; each position on the axes that are left is
# a panel of its own. Panels stand side by side as far as the page is wide.

_PAGE = 110  # columns
_LONGEST_LINE = 16  # ranks; a longer axis continues on the next line
_AIRY_LINES = 8  # up to here every line has a rule above it; beyond, only the first line of a node


def _draw_panels(layout: Layout, devices_per_node: int | None) -> list[str]:
    used = [axis for axis in AXES if layout.degree(axis) > 1]
    outer, (down, right) = used[:-2], [None, None, *used][-2:]
    panels = []
    for index in product(*(range(layout.degree(axis)) for axis in outer)):
        place = dict(zip(outer, index, strict=True))
        heading = [", ".join(f"{axis} {number}" for axis, number in place.items())] if place else []
        lines = _lines_of_ranks(layout, layout.rank(**place), down, right, devices_per_node)
        panels.append(heading + _draw_boxes(lines, down, right, devices_per_node, len(str(layout.world_size - 1))))
    return _side_by_side(panels)


def _lines_of_ranks(
    layout: Layout, corner: int, down: str | None, right: str | None, devices_per_node: int | None
) -> list[tuple[int, ...]]:
    """The ranks of one panel, line by line. A single axis is broken where a node ends."""
    column = layout.peers(corner, down) if down else (corner,)
    rows = [layout.peers(rank, right) if right else (rank,) for rank in column]
    longest = _LONGEST_LINE if down or not devices_per_node else min(_LONGEST_LINE, devices_per_node)
    return [row[first : first + longest] for row in rows for first in range(0, len(row), longest)]


def _draw_boxes(
    lines: list[tuple[int, ...]], down: str | None, right: str | None, devices_per_node: int | None, digits: int
) -> list[str]:
    margin = f"{down} ↓ " if down else ""
    indent = " " * len(margin)

    def rule(left: str, middle: str, end: str, num_boxes: int) -> str:
        return indent + left + middle.join(["─" * (digits + 2)] * num_boxes) + end

    drawn = [f"{indent} {right} →"] if right else []
    drawn.append(rule("┌", "┬", "┐", len(lines[0])))
    for number, ranks in enumerate(lines):
        node = _nodes(ranks, devices_per_node)
        if number and (len(lines) <= _AIRY_LINES or node != _nodes(lines[number - 1], devices_per_node)):
            drawn.append(rule("├", "┼", "┤", len(lines[0])))
        boxes = "│".join(f" {rank:>{digits}} " for rank in ranks)
        drawn.append(f"{indent if number else margin}│{boxes}│ {node}".rstrip())
    return [*drawn, rule("└", "┴", "┘", len(lines[-1]))]


def _nodes(ranks: tuple[int, ...], devices_per_node: int | None) -> str:
    if devices_per_node is None:
        return ""
    first, last = ranks[0] // devices_per_node, ranks[-1] // devices_per_node
    return f"node {first}" if first == last else f"nodes {first}-{last}"


def _side_by_side(panels: list[list[str]]) -> list[str]:
    width = max(len(line) for panel in panels for line in panel) + 4
    per_band = max(1, _PAGE // width)
    bands = [panels[first : first + per_band] for first in range(0, len(panels), per_band)]
    return ["".join(line.ljust(width) for line in row).rstrip() for band in bands for row in zip(*band, strict=True)]


def _draw_legend(layout: Layout, devices_per_node: int | None) -> list[str]:
    used = [axis for axis in (*AXES, "ep") if layout.degree(axis) > 1]
    names = [f"{axis}={layout.degree(axis)}" for axis in used]
    groups = [_shortened(layout.peers(0, axis)) for axis in used]
    inside = layout.axes_inside_node(devices_per_node) if devices_per_node else ()
    where = [("inside a node" if axis in inside else "between nodes") if devices_per_node else "" for axis in used]
    width = max(map(len, names), default=0), max(map(len, groups), default=0)
    return [
        f"{name:<{width[0]}}  {group:<{width[1]}}  {place}".rstrip()
        for name, group, place in zip(names, groups, where, strict=True)
    ]


def _shortened(ranks: tuple[int, ...]) -> str:
    shown = [str(rank) for rank in ranks]
    return " ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])
