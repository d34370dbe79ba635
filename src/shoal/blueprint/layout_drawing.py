"""Draw a layout as text: a grid of its ranks, and the groups of rank 0.

The innermost axis in use runs to the right and the next one down. Each position on the remaining axes is a panel.
Panels stand side by side as far as the page is wide.
"""

from __future__ import annotations

from itertools import product

from shoal.blueprint.layout import AXES, Layout, check_node

_PAGE = 110  # columns
_LONGEST_LINE = 16  # ranks; a longer axis continues on the next line
_AIRY_LINES = 8  # up to here every line has a rule above it; beyond, only the first line of a node


def draw_layout(layout: Layout, devices_per_node: int | None = None) -> str:
    """Draw the ranks as a grid, and below it the group of rank 0 along every axis in use.

    >>> print(draw_layout(Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2), devices_per_node=4))
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
    if devices_per_node is not None:
        check_node(devices_per_node)
    return "\n".join([*_draw_panels(layout, devices_per_node), *_draw_legend(layout, devices_per_node)])


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
