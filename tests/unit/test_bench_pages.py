"""Pages of benchmarks: what they show, and that a hostile name in a result stays a name."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import import_module
from xml.etree import ElementTree

import pytest

from shoal.blueprint.collectives.steps import steps
from shoal.pages.bench.chart import Line, chart, linear_axis, log_axis
from shoal.pages.bench.comm import make_page as make_comm_page
from shoal.pages.bench.messages import drawing
from tests.bench_results import RESULTS, comm, scale, scale_row

HOSTILE = "</title><script>pwned=1</script><img src=x onerror=pwned=1>\"'&\u202e"


class Tags(HTMLParser):
    """All tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def page_of(name: str, hostile: str | None = None) -> str:
    make = RESULTS[name]
    found = make() if hostile is None else make(hostile)
    page: str = import_module(f"shoal.pages.bench.{name}").make_page(found)
    return page


@pytest.mark.parametrize("name", RESULTS)
def test_a_hostile_name_is_inert(name: str) -> None:
    tags = Tags(page_of(name, HOSTILE)).found
    assert {tag for tag, _ in tags} & {"script", "img", "iframe", "object"} == set()
    assert [key for _, attributes in tags for key in attributes if key.startswith("on")] == []


@pytest.mark.parametrize("name", RESULTS)
def test_a_page_asks_for_nothing(name: str) -> None:
    page = page_of(name)
    assert "default-src 'none'; script-src 'none'" in page
    assert not re.search(r"https?://", page)
    assert "nan" not in page


@pytest.mark.parametrize("name", RESULTS)
def test_every_drawing_is_well_formed(name: str) -> None:
    drawn = re.findall(r"<svg.*?</svg>", page_of(name), re.DOTALL)
    assert drawn
    for svg in drawn:
        ElementTree.fromstring(svg)


def test_scaling_shows_lines_reasons_and_dashes_for_predictions() -> None:
    page = page_of("scale")
    assert 'class="curve dash c0"' in page
    assert "zero=3 makes a step 1.6 times as fast on 2 ranks" in page
    assert "Not measured" in page


def test_the_efficiency_is_that_of_the_plan_in_the_headline() -> None:
    """It is the fastest one. Fewer ranks may be more efficient."""
    efficiency = dict.fromkeys(("median", "low", "high"), 0.95)
    rows = [scale_row("strong", "zero=3", 2, efficiency=efficiency, speedup=1.9), scale_row("strong", "zero=3", 4)]
    page = import_module("shoal.pages.bench.scale").make_page({**scale(), "rows": rows})
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert "zero=3 makes a step 3.2 times as fast on 4 ranks" in page
    assert facts["its efficiency"] == "80 %"
    assert "best efficiency" not in page


def test_different_losses_are_the_verdict() -> None:
    found = scale()
    found["losses"][0]["are_equal"] = False
    for key, what in (("largest", "losses"), ("largest_of_norm", "gradients")):
        apart = {**found, "losses": [{**found["losses"][0], key: 1.0}]}
        page = import_module("shoal.pages.bench.scale").make_page(apart)
        assert f"Plans have different {what}" in page
        assert 'class="verdict dead"' in page


def test_a_table_without_any_efficiency_has_a_page() -> None:
    found = {**scale(), "rows": [scale_row("strong", "ddp", 1)], "losses": []}
    assert "Strong scaling" in import_module("shoal.pages.bench.scale").make_page(found)


def test_each_message_of_a_collective_is_an_arrow_and_a_ball() -> None:
    ring = steps("all_reduce", "ring", 4, 840)
    drawn = drawing(ring)
    assert drawn.count('class="ball"') == len(list(ring.moves())) == 24
    assert drawn.count("which adds them") == 12
    assert "rank 3 sends 210 elements to rank 0" in drawn
    assert drawing(steps("all_reduce", "ring", 17, 840)) == "", "too many ranks to be read"


def test_axes_have_round_ticks() -> None:
    assert linear_axis(1.0, str).ticks == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axis = log_axis([1024, 2**20], str, 4.0)
    assert axis.ticks[0] == 1024
    assert axis.place(2**15) == pytest.approx(0.5)
    line = Line("a", [(1.0, 0.5, 0.4, 0.6)])
    assert "<circle" in chart([line], linear_axis(2.0, str), linear_axis(1.0, str), "one point")


def test_the_figure_that_is_compared_with_the_link_is_shown() -> None:
    page = make_comm_page(comm())
    assert "<th>bandwidth</th><th>bus bandwidth</th><th>of the link</th>" in page
    assert "<td>250&nbsp;MB/s</td><td>50&nbsp;%</td>" in page
