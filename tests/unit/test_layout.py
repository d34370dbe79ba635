"""A layout places every rank once, its groups divide the world, and its drawing is what a person sees."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.blueprint.layout import AXES, GROUP_AXES, Layout, divisors
from shoal.blueprint.layout_drawing import draw_layout
from shoal.errors import ShoalError

few = settings(max_examples=40, deadline=None)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = {axis: draw(st.integers(1, 4)) for axis in AXES}
    layout = Layout(**degrees)
    assume(layout.world_size <= 96)
    return Layout(**degrees, ep=draw(st.sampled_from(divisors(layout.dp_shard * layout.cp))))


def reference_mesh(layout: Layout) -> dict[tuple[int, ...], int]:
    """Ranks counted up in nested loops, the outermost axis first."""
    degrees = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    return {position: rank for rank, position in enumerate(product(*map(range, degrees)))}


@few
@given(layouts())
def test_ranks_are_counted_with_tp_innermost(layout: Layout) -> None:
    mesh = reference_mesh(layout)
    assert len(mesh) == layout.world_size
    for position, rank in mesh.items():
        coordinate = layout.coordinate(rank)
        assert tuple(coordinate[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")) == position
        assert layout.rank(**coordinate) == rank
        assert layout.data_coordinate(rank) == position[1] * layout.dp_shard + position[2]


@few
@given(layouts(), st.sampled_from(GROUP_AXES))
def test_groups_divide_the_world(layout: Layout, axis: str) -> None:
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {layout.degree(axis)}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert all(layout.peers(rank, axis) == group for rank in group)


@few
@given(layouts(), st.sampled_from(AXES))
def test_peers_differ_in_their_axis_alone(layout: Layout, axis: str) -> None:
    for rank in range(layout.world_size):
        peers = layout.peers(rank, axis)
        assert rank in peers
        for index, peer in enumerate(peers):
            expected = {name: layout.coordinate(rank)[name] for name in AXES} | {axis: index}
            assert {name: layout.coordinate(peer)[name] for name in AXES} == expected


@few
@given(layouts())
def test_expert_peers_are_slices_of_the_flattened_dp_shard_and_cp_ranks(layout: Layout) -> None:
    mesh = reference_mesh(layout)
    for pp, replicate, tp in product(range(layout.pp), range(layout.dp_replicate), range(layout.tp)):
        flat = [mesh[pp, replicate, shard, cp, tp] for shard, cp in product(range(layout.dp_shard), range(layout.cp))]
        for start in range(0, len(flat), layout.ep):
            group = tuple(flat[start : start + layout.ep])
            for position, rank in enumerate(group):
                assert layout.peers(rank, "ep") == group
                assert layout.coordinate(rank)["ep"] == position
                assert layout.place(rank, "ep") == position
                alike = tuple(flat[position :: layout.ep])  # the same place of every slice: the same experts
                assert layout.peers(rank, "edp") == alike
                assert alike[layout.place(rank, "edp")] == rank
        assert layout.degree("edp") * layout.ep == len(flat)


@few
@given(layouts(), st.sampled_from(GROUP_AXES))
def test_a_place_is_where_a_rank_stands_in_its_group(layout: Layout, axis: str) -> None:
    for group in layout.groups(axis):
        assert [layout.place(rank, axis) for rank in group] == list(range(layout.degree(axis)))


@few
@given(layouts(), st.integers(1, 16))
def test_an_axis_is_inside_a_node_when_no_group_of_it_leaves_one(layout: Layout, devices_per_node: int) -> None:
    inside = [
        axis
        for axis in (*AXES, "ep")
        if all(len({rank // devices_per_node for rank in group}) == 1 for group in layout.groups(axis))
    ]
    assert layout.axes_inside_node(devices_per_node) == tuple(inside)


@few
@given(layouts(), st.none() | st.integers(1, 16))
def test_every_rank_is_drawn_once_in_a_straight_picture(layout: Layout, devices_per_node: int | None) -> None:
    drawing = draw_layout(layout, devices_per_node).splitlines()
    boxes = [int(number) for line in drawing for number in re.findall(r"(?<=│)\s*(\d+)\s*(?=│)", line)]
    assert sorted(boxes) == list(range(layout.world_size))
    assert max(map(len, drawing)) <= 120
    assert all(line == line.rstrip() and line for line in drawing)


def test_flattened_axes() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert layout.data_degree == 4
    assert layout.peers(6, "data") == (2, 6, 10, 14)
    assert layout.groups("data") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert layout.groups("dp_cp") == ((0, 2, 4, 6, 8, 10, 12, 14), (1, 3, 5, 7, 9, 11, 13, 15))
    assert [layout.data_coordinate(rank) for rank in range(0, 16, 2)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.groups("dp_shard_cp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert layout.groups("cp_tp") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))


def test_ranks_that_hold_the_same_experts() -> None:
    layout = Layout(dp_shard=4, tp=2, ep=2)
    assert layout.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.place(6, "edp") == 1


def test_axes_inside_a_node_of_eight() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=4, ep=2)
    assert layout.axes_inside_node(8) == ("dp_shard", "cp", "tp", "ep")
    assert layout.axes_inside_node(4) == ("cp", "tp")
    assert layout.axes_inside_node(64) == (*AXES, "ep")


def test_drawing_of_one_axis() -> None:
    assert draw_layout(Layout(dp_replicate=4)) == drawn("""
         dp_replicate →
        ┌───┬───┬───┬───┐
        │ 0 │ 1 │ 2 │ 3 │
        └───┴───┴───┴───┘
        dp_replicate=4  0 1 2 3
    """)


def test_drawing_of_one_axis_over_two_nodes() -> None:
    assert draw_layout(Layout(dp_shard=16), devices_per_node=8) == drawn("""
         dp_shard →
        ┌────┬────┬────┬────┬────┬────┬────┬────┐
        │  0 │  1 │  2 │  3 │  4 │  5 │  6 │  7 │ node 0
        ├────┼────┼────┼────┼────┼────┼────┼────┤
        │  8 │  9 │ 10 │ 11 │ 12 │ 13 │ 14 │ 15 │ node 1
        └────┴────┴────┴────┴────┴────┴────┴────┘
        dp_shard=16  0 1 2 ... 15  between nodes
    """)


def test_drawing_of_four_axes() -> None:
    assert draw_layout(Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2, ep=2), devices_per_node=8) == drawn("""
        pp 0, dp_replicate 0             pp 0, dp_replicate 1             pp 1, dp_replicate 0
                    tp →                             tp →                             tp →
                   ┌────┬────┐                      ┌────┬────┐                      ┌────┬────┐
        dp_shard ↓ │  0 │  1 │ node 0    dp_shard ↓ │  4 │  5 │ node 0    dp_shard ↓ │  8 │  9 │ node 1
                   ├────┼────┤                      ├────┼────┤                      ├────┼────┤
                   │  2 │  3 │ node 0               │  6 │  7 │ node 0               │ 10 │ 11 │ node 1
                   └────┴────┘                      └────┴────┘                      └────┴────┘
        pp 1, dp_replicate 1
                    tp →
                   ┌────┬────┐
        dp_shard ↓ │ 12 │ 13 │ node 1
                   ├────┼────┤
                   │ 14 │ 15 │ node 1
                   └────┴────┘
        pp=2            0 8  between nodes
        dp_replicate=2  0 4  inside a node
        dp_shard=2      0 2  inside a node
        tp=2            0 1  inside a node
        ep=2            0 2  inside a node
    """)


def test_a_long_drawing_has_rules_only_between_nodes() -> None:
    assert draw_layout(Layout(dp_shard=9, tp=2), devices_per_node=8) == drawn("""
                    tp →
                   ┌────┬────┐
        dp_shard ↓ │  0 │  1 │ node 0
                   │  2 │  3 │ node 0
                   │  4 │  5 │ node 0
                   │  6 │  7 │ node 0
                   ├────┼────┤
                   │  8 │  9 │ node 1
                   │ 10 │ 11 │ node 1
                   │ 12 │ 13 │ node 1
                   │ 14 │ 15 │ node 1
                   ├────┼────┤
                   │ 16 │ 17 │ node 2
                   └────┴────┘
        dp_shard=9  0 2 4 ... 16  between nodes
        tp=2        0 1           inside a node
    """)


def test_a_drawing_marks_lines_that_cross_nodes() -> None:
    assert "│ 4 │ 5 │ 6 │ 7 │ nodes 0-1" in draw_layout(Layout(dp_shard=2, tp=4), devices_per_node=6)


def test_one_rank_is_a_layout_too() -> None:
    assert Layout().world_size == 1
    assert Layout().groups("tp") == ((0,),)
    assert draw_layout(Layout()) == "┌───┐\n│ 0 │\n└───┘"


def test_all_bad_degrees_are_reported_at_once() -> None:
    with pytest.raises(ShoalError) as error:
        Layout(tp=0, pp=-1, cp=True)
    assert str(error.value).splitlines() == [
        "3 problems in the layout",
        "  pp must be a whole number of at least 1, got -1 [P005]",
        "      fix: pp=1",
        "  cp must be a whole number of at least 1, got True [P005]",
        "      fix: cp=1",
        "  tp must be a whole number of at least 1, got 0 [P005]",
        "      fix: tp=1",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: Layout(dp_shard=4, cp=3, ep=5),
            "ep=5 does not divide dp_shard=4 x cp=3 = 12 [P015]\n"
            "    fix: ep=1, 2, 3, 4, 6 or 12, or a dp_shard x cp that 5 divides",
        ),
        (lambda: Layout(tp=2).coordinate(2), "rank must be from 0 to 1, got 2 [P052]\n    fix: 0 to 1"),
        (lambda: Layout(tp=2).peers(-1, "tp"), "rank must be from 0 to 1, got -1 [P052]\n    fix: 0 to 1"),
        (lambda: Layout(tp=2).rank(tp=2), "tp must be from 0 to 1, got 2 [P052]\n    fix: 0 to 1"),
        (lambda: Layout(tp=2).rank(dp_shrad=0), "unknown axis 'dp_shrad' [P053]\n    fix: dp_shard"),
        (
            lambda: Layout(dp_shard=2, ep=2).rank(ep=1),
            "ep must be 0, which follows from dp_shard and cp, got 1 [P052]\n    fix: pass dp_shard and cp without ep",
        ),
        (
            lambda: Layout().groups("x"),
            "unknown axis 'x' [P053]\n"
            "    fix: pp, dp_replicate, dp_shard, cp, tp, ep, edp, data, dp_cp, dp_shard_cp, cp_tp or replica",
        ),
        (
            lambda: Layout().axes_inside_node(0),
            "devices_per_node must be at least 1, got 0 [P005]\n    fix: devices_per_node=1",
        ),
        (
            lambda: draw_layout(Layout(), -1),
            "devices_per_node must be at least 1, got -1 [P005]\n    fix: devices_per_node=1",
        ),
    ],
)
def test_message(wrong, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShoalError) as error:
        wrong()
    assert str(error.value) == message


def drawn(picture: str) -> str:
    """A picture as it stands in the test, without the test's indentation."""
    return "\n".join(line[8:] for line in picture.strip("\n").splitlines()).rstrip()
