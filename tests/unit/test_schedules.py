"""Pipeline schedules on paper: their order, what is rejected, what they cost, and how they are drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.blueprint.plan import VIRTUAL_STAGES, Schedule
from shoal.blueprint.schedules.draw import LABEL, WIDTH, boxes, draw, svg
from shoal.blueprint.schedules.schedule_orders import check_schedule, make_schedule
from shoal.blueprint.schedules.simulate import StageCost, Timeline, in_flight, simulate
from shoal.blueprint.schedules.table import Action, Kind, Pair, ScheduleTable, align
from shoal.errors import ShoalError
from tests.rejects import rejects

WORDS: tuple[Schedule, ...] = get_args(Schedule)
EQUAL = StageCost(forward=1, input_grad=1, weight_grad=1)
DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "pipeline-schedules.md"


def table(word: Schedule, p: int, m: int, v: int | None = None) -> ScheduleTable:
    return make_schedule(word, num_ranks=p, v=v or VIRTUAL_STAGES.get(word, 1), num_microbatches=m)


# ---- the order ------------------------------------------------------------------------------------------------------

DRAWINGS = {
    ("gpipe", 1, 4): """
        0F0 0F1 0F2 0F3 .   .   0B0 0B1 0B2 0B3
        .   1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 .  """,
    ("1f1b", 1, 4): """
        0F0 0F1 .   0B0 0F2 0B1 0F3 0B2 .   0B3
        .   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 .  """,
    ("1f1b", 1, 1): """
        0F0 .   .   0B0
        .   1F0 1B0 .  """,
    ("looped", 2, 2): """
        0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
        .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 .  """,
    ("interleaved", 2, 4): """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .  """,
    ("zb", 1, 4): """
        0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
        .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3""",
    ("zbv", 2, 3): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2""",
    ("dualpipev", 2, 4): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3
        .   1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2I3 1I3 2W3 1W3""",
}


@pytest.mark.parametrize(("word", "v", "m"), DRAWINGS)
def test_two_ranks_do_as_drawn(word: Schedule, v: int, m: int) -> None:
    lines = DRAWINGS[word, v, m].strip().splitlines()
    columns = table(word, 2, m, v).slots
    for line, column in zip(lines, columns, strict=True):
        drawn = ["&".join(str(part) for part in slot.parts) if slot else "." for slot in column]
        assert drawn == line.split()


@st.composite
def tables(draw_from: st.DrawFn) -> ScheduleTable:
    word = draw_from(st.sampled_from(WORDS))
    p, m = draw_from(st.integers(1, 6)), draw_from(st.integers(1, 20))
    v = VIRTUAL_STAGES.get(word) or draw_from(st.integers(1, 3))
    while check_schedule(word, num_ranks=p, v=v, num_microbatches=m):
        m += 1
    return make_schedule(word, num_ranks=p, v=v, num_microbatches=m)


@given(tables())
def test_every_table_is_valid_and_reads_back(made: ScheduleTable) -> None:
    made.validate()
    assert ScheduleTable.parse(str(made)) == made
    results = [result for _, _, slot in made.ticks() for part in slot.parts for result in part.results]
    assert len(results) == len(set(results)) == made.num_stages * made.num_microbatches * 3


def test_stages_go_around_or_in_a_v() -> None:
    assert table("interleaved", 3, 3, 2).stage_rank == (0, 1, 2, 0, 1, 2)
    assert table("zbv", 3, 6).stage_rank == table("dualpipev", 3, 6).stage_rank == (0, 1, 2, 2, 1, 0)


def test_spelling() -> None:
    assert str(Action(12, Kind.W, 3)) == "12W3"
    assert Action.parse("12W3") == Action(12, Kind.W, 3)
    pair = "(0F3;3B1)OVERLAP_F_B"
    assert str(Pair(Action.parse("0F3"), Action.parse("3B1"))) == pair
    with rejects("P055", "'2X0'", "2F0"):
        Action.parse("2X0")


# ---- what cannot run ------------------------------------------------------------------------------------------------

TWO_RANKS = """1f1b on 2 ranks, v=1, 2 microbatches
tick | rank0  rank1
   0 | 0F0    .
   1 | 0F1    1F0
   2 | .      1B0
   3 | 0B0    1F1
   4 | .      1B1
   5 | 0B1    ."""


def test_the_table_that_is_broken_below_is_whole() -> None:
    assert ScheduleTable.parse(TWO_RANKS) == table("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("wrong", "right", "mark"),
    [
        ("   4 | .      1B1\n   5 | 0B1    .", "   4 | 0B1    1B1", "0B1 needs 1B1, which runs at tick 4"),
        ("1F0", ".  ", "1B0 needs 1F0, which never runs"),
        ("0 | 0F0", "0 | .  ", "0B0 needs 0F0, which never runs"),
        ("3 | 0B0    1F1", "3 | 0F1    1F1", "0F1 repeats 0F1 of tick 1"),
        ("3 | 0B0    1F1", "3 | 1B0    1F1", "1B0 must be on rank 1, got rank 0"),
        ("0F1", "0F7", "0F7 does not exist"),
        ("3 | 0B0", "3 | 0I0", "0W0 never runs"),
        ("3 | 0B0", "3 | 0W0", "0W0 needs 0I0, which never runs"),
    ],
)
def test_the_place_of_a_fault_is_shown(wrong: str, right: str, mark: str) -> None:
    broken = ScheduleTable.parse(TWO_RANKS.replace(wrong, right))
    with pytest.raises(ShoalError) as caught:
        broken.validate()
    assert f"    <-- ERROR HERE: {mark}" in str(caught.value)
    assert "\n    fix: " in str(caught.value)


def test_the_message_of_a_fault() -> None:
    broken = TWO_RANKS.replace("3 | 0B0    1F1", "3 | 0B1    1F1").replace("5 | 0B1", "5 | 0B0")
    with pytest.raises(ShoalError) as caught:
        ScheduleTable.parse(broken).validate()
    assert str(caught.value) == (
        "1f1b on 2 ranks, v=1, 2 microbatches: cannot run [P056]\n"
        "tick | rank0  rank1\n"
        "   0 | 0F0    .\n"
        "   1 | 0F1    1F0\n"
        "   2 | .      1B0\n"
        "   3 | 0B1    1F1      <-- ERROR HERE: 0B1 needs 1B1, which runs at tick 4\n"
        "   4 | .      1B1\n"
        "   5 | 0B0    .\n"
        "    fix: 0B1 at tick 5 or later, or 1B1 before tick 3"
    )
    with rejects("P056", "0B1", "1B1"):
        simulate(ScheduleTable.parse(broken), EQUAL)


def test_a_deadlock_names_the_waiting_ranks_and_their_inputs() -> None:
    orders = [[Action.parse(text) for text in line.split()] for line in ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")]
    with rejects("P056", "rank 0", "0B0", "1I0", "rank 1", "1F1", "0F1"):
        align(orders, num_stages=2)


@pytest.mark.parametrize("text", ["", "1f1b", TWO_RANKS.replace("2 ranks", "3 ranks")])
def test_what_is_no_table(text: str) -> None:
    with rejects("P055", match=r"is not the first line of a schedule|must have 3 slots, one per rank, got 2"):
        ScheduleTable.parse(text)


@pytest.mark.parametrize(
    ("word", "p", "v", "m", "what", "fix"),
    [
        ("1f1b", 4, 1, 3, "1f1b on pp=4 ranks cannot run 3 microbatches: with fewer than 4", "1, 4 or 5 micro"),
        ("gpipe", 4, 1, 2, "gpipe on pp=4 ranks cannot run 2 microbatches: with fewer than 4", "1, 4 or 5 micro"),
        ("interleaved", 4, 2, 11, "they do not fall into 2 equal rounds", "10, 12 or 15 micro"),
        ("zb", 2, 1, 5, "they do not fall into 2 equal rounds", "4, 6 or 8 micro"),
        ("dualpipev", 4, 2, 1, "it needs one for each of its 2 x pp = 8 stages", "8 or 9 micro"),
        ("zbv", 4, 1, 8, "zbv must have v=2 stages per rank, got v=1", "v=2, or interleaved"),
        ("1f1b", 4, 2, 8, "1f1b must have v=1 stages per rank, got v=2", "v=1, or interleaved"),
        ("interleave", 4, 2, 8, "'interleave' is not a schedule", "interleaved"),
        ("1f1b", 0, 1, 4, "pp must be at least 1, got 0", "pp=1"),
    ],
)
def test_errors_name_the_legal_values(word: Schedule, p: int, v: int, m: int, what: str, fix: str) -> None:
    (problem,) = check_schedule(word, num_ranks=p, v=v, num_microbatches=m)
    assert what in problem.what
    assert problem.fix.startswith(fix)
    with pytest.raises(ShoalError):
        make_schedule(word, num_ranks=p, v=v, num_microbatches=m)


# ---- time -----------------------------------------------------------------------------------------------------------

SIZES = [(2, 8), (3, 12), (4, 8), (4, 16), (6, 24)]
SECONDS = [(1, 1, 1), (1, 1, 0.5), (2, 2, 1), (1, 1.5, 0.75), (1, 2, 1), (1, 1, 1.5), (1, 0.5, 1), (2, 1, 1)]


def played(word: Schedule, p: int, m: int, v: int = 1, cost: StageCost = EQUAL) -> Timeline:
    return simulate(table(word, p, m, v), cost)


@pytest.mark.parametrize(("f", "i", "w"), SECONDS)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_closed_forms_of_the_bubble(p: int, m: int, f: float, i: float, w: float) -> None:
    """With v stages per rank a stage costs 1/v of what the rank has, so that a bubble in stages is 1/v of it."""
    cost = StageCost(forward=f, input_grad=i, weight_grad=w)
    full = (p - 1) * (f + i + w)
    assert played("gpipe", p, m, cost=cost).bubble_seconds == pytest.approx(full)
    assert played("1f1b", p, m, cost=cost).bubble_seconds == pytest.approx(full)
    for v in (2, 3):
        assert played("interleaved", p, m, v, cost).bubble_seconds == pytest.approx(full)
        assert played("looped", p, m, v, cost).bubble_seconds == pytest.approx(full)
    # ZB-H1's (p-1)(F+I-W) as long as W fits into I; a longer W fills no more than there is
    for v in (1, 2):
        assert played("zb", p, m, v, cost).bubble_seconds == pytest.approx((p - 1) * (f + max(0, i - w)))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbv_waits_only_for_the_step_to_begin_and_end(p: int, m: int) -> None:
    timeline = played("zbv", p, m, 2)
    assert timeline.gaps == (0.0,) * p
    assert timeline.bubble_seconds == p - 1  # the first forward on its way down the V
    assert max(played("zbv", p, m, 2, StageCost(forward=1, input_grad=2, weight_grad=1)).gaps) > 0


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubble_of_dualpipev(p: int, m: int) -> None:
    """(stages/2 - 1)(F&B + B - 3W) for F = I = W, with F&B as long as F and B."""
    assert played("dualpipev", p, m, 2).bubble_seconds == (p - 1) * (3 + 2 - 3)
    apart, together = (simulate(table("dualpipev", p, m), EQUAL, overlap=part) for part in (0, 1))
    assert together.total < apart.total


def test_one_microbatch_is_one_rank_at_a_time() -> None:
    timeline = played("1f1b", 4, 1)
    assert (timeline.total, timeline.bubble) == (12, 0.75)


def test_sending_takes_time_between_ranks_only() -> None:
    timeline = simulate(table("gpipe", 2, 1), EQUAL, send=0.25)
    assert timeline.total == 2 * 3 + 2 * 0.25
    assert simulate(table("interleaved", 1, 4, 2), EQUAL, send=9).total == 4 * 2 * 3
    # 0F0 → 1F0 2F0 → 3F0 3I0 → 2I0 2W0 1I0 → 0I0 0W0: the turn of the V stays on its rank
    assert simulate(table("zbv", 2, 1), EQUAL, send=0.25).total == 10 + 4 * 0.25


def test_the_slowest_stage_sets_the_pace() -> None:
    slow = StageCost(forward=2, input_grad=2, weight_grad=2)
    timeline = simulate(table("1f1b", 4, 8), [EQUAL, EQUAL, EQUAL, slow])
    assert timeline.total == 3 * 3 + 8 * 6
    assert timeline.busy == (24, 24, 24, 48)
    assert timeline.bubble_seconds == 9
    assert timeline.bubble == pytest.approx(1 - 120 / (4 * 57))


@given(tables(), st.data())
def test_nothing_starts_before_what_it_needs(made: ScheduleTable, data: st.DataObject) -> None:
    seconds = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    costs = [
        StageCost(forward=data.draw(seconds), input_grad=data.draw(seconds), weight_grad=data.draw(seconds))
        for _ in range(made.num_stages)
    ]
    timeline = simulate(made, costs, send=0.5)
    ends = {r: (span.end, rank) for rank, spans in enumerate(timeline.spans) for span in spans
            for part in span.slot.parts for r in part.results}  # fmt: skip
    for rank, spans in enumerate(timeline.spans):
        free = 0.0
        for span in spans:
            needs = [ends[need] for part in span.slot.parts for need in part.needs(made.num_stages)]
            assert span.start == max([free, *(end + 0.5 * (source != rank) for end, source in needs)])
            free = span.end


@pytest.mark.parametrize(
    "call",
    [
        lambda: simulate(table("1f1b", 2, 2), [EQUAL]),
        lambda: simulate(table("1f1b", 2, 2), EQUAL, overlap=2),
        lambda: StageCost(forward=-1, input_grad=1, weight_grad=1),
        lambda: in_flight(table("1f1b", 2, 2), [1.0]),
    ],
)
def test_costs_that_cannot_be(call: object) -> None:
    assert callable(call)
    with rejects("P054", match="fix: "):
        call()


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_microbatches_in_flight(p: int, m: int) -> None:
    assert in_flight(table("gpipe", p, m)) == (m,) * p
    assert in_flight(table("looped", p, m, 2)) == (2 * m,) * p
    assert in_flight(table("1f1b", p, m)) == tuple(range(p, 0, -1))
    assert in_flight(table("zb", p, m)) == (p,) * p  # the worst rank as in 1f1b, and all ranks like it
    assert in_flight(table("zbv", p, m)) == (2 * p,) * p  # in halves of a rank: as 1f1b, and even
    assert in_flight(table("dualpipev", p, m)) == (2 * p + 1,) * p
    for v in (2, 3):  # 1f1b x (1 + (p-1)/(pv)), in parts of 1/v
        assert in_flight(table("interleaved", p, m, v))[0] == pytest.approx(v * p * (1 + (p - 1) / (p * v)))


def test_memory_in_flight_counts_what_each_stage_keeps() -> None:
    assert in_flight(table("1f1b", 3, 6), [10, 1, 5]) == (30, 2, 5)


# ---- drawing --------------------------------------------------------------------------------------------------------


def test_a_drawing() -> None:
    assert draw(played("1f1b", 4, 8)) == "\n".join(
        [
            "rank 0 │0 1 2 3 ............0━━━4 1━━━5 2━━━6 3━━━7 4━━━..5━━━..6━━━..7━━━",
            "rank 1 │..0 1 2 ........0━━━3 1━━━4 2━━━5 3━━━6 4━━━7 5━━━..6━━━..7━━━....",
            "rank 2 │....0 1 ....0━━━2 1━━━3 2━━━4 3━━━5 4━━━6 5━━━7 6━━━..7━━━........",
            "rank 3 │......0 0━━━1 1━━━2 2━━━3 3━━━4 4━━━5 5━━━6 6━━━7 7━━━............",
            "        0  forward   0━━ backward   . idle",
        ]
    )


def test_a_narrow_drawing() -> None:
    assert draw(played("interleaved", 2, 4, 2), 40) == "\n".join(
        [
            "rank 0 │01ab2.0═31═c0━d1━.2═.3═2━3━",
            "rank 1 │.01a0═b1═20━31━c2═d3═2━3━..",
            "        0 or a forward   0━ or 0═ backward   . idle",
        ]
    )


@given(tables(), st.integers(40, 200))
def test_drawings_have_the_given_width(made: ScheduleTable, width: int) -> None:
    lines = draw(simulate(made, EQUAL), width).splitlines()[:-1]
    assert len(lines) == made.num_ranks
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= width


@given(tables())
def test_a_picture_has_every_action_in_its_place(made: ScheduleTable) -> None:
    timeline = simulate(made, EQUAL)
    root = ElementTree.fromstring(svg(timeline, "a & b"))
    rects = [rect.attrib for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    drawn = [
        (rect["class"][0], float(rect["x"])) for rect in rects if rect["height"] == "28" and rect["class"] != "idle"
    ]
    scale = (WIDTH - LABEL) / timeline.total
    wanted = [box for rank in range(made.num_ranks) for box in boxes(timeline, rank)]
    assert [kind for kind, _ in drawn] == [box.action.kind.name for box in wanted]
    assert [x for _, x in drawn] == pytest.approx([LABEL + box.start * scale for box in wanted], abs=0.06)
    assert f"a & b: bubble {timeline.bubble:.0%}" in {text.text for text in root.iter()}


def test_a_picture_follows_light_and_dark_mode() -> None:
    drawn = svg(played("zbv", 2, 4, 2), "zbv")
    assert "prefers-color-scheme: dark" in drawn
    assert "later" in drawn  # the second stage of a rank
    assert not set(re.findall(r'fill="([^"]*)"', drawn))  # every colour comes from the style


SHOWN = [("gpipe", 1), ("1f1b", 1), ("looped", 2), ("interleaved", 2), ("zb", 1), ("zbv", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("word", "v"), SHOWN)
def test_the_documentation_shows_what_is_drawn_and_counted(word: Schedule, v: int) -> None:
    part = StageCost(forward=1 / v, input_grad=1 / v, weight_grad=1 / v)
    timeline = simulate(made := table(word, 4, 8, v), part)
    kept = [f"{number / v:g}" for number in in_flight(made)]
    row = f"| `{word}` | {v} | {timeline.total:g} | {timeline.bubble:.0%} | {' '.join(kept)} |"
    text = DOCS.read_text()
    assert draw(timeline) in text
    assert row in text
