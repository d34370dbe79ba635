"""The page of a run in a real browser: drawn in time, light and dark, narrow and wide, with no message and no request.

`make test-browser` runs it. It needs Chromium and the package playwright, and is skipped without them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shoal.pages.report import make_report, write_page
from shoal.pages.run.read_run import read_run
from tests.browser.visit import SIZES, Visit
from tests.run_directories import make_hostile_run, make_run, record, write_lines

pytestmark = pytest.mark.timeout(300)
STEPS, RANKS = 100_000, 64


def written(path: Path, *runs: Path) -> Path:
    write_page(path, make_report([read_run(run) for run in runs]))
    return path


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return written(folder / "page.html", make_run(folder / "run", 300, ranks=2))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_drawn_and_every_control_works(browser: Any, page_file: Path, scheme: str, size: str) -> None:
    visit = Visit(browser, page_file, scheme, size)
    assert len(visit.page.query_selector_all(".uplot canvas")) == 5
    width, view = visit.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width <= view, "the page scrolls sideways"
    visit.click_everything()
    assert len(visit.page.query_selector_all(".uplot canvas")) == 5
    visit.close()


def test_a_page_without_javascript_shows_curves_and_tables(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file, java_script_enabled=False)
    assert visit.page.locator(".fallback:visible").count() == 5
    assert visit.page.locator(".controls:visible").count() == 0
    assert "Died at step 300 of 400" in visit.page.inner_text("body")
    visit.close()


EMPTY_COLUMNS = """() => {
  const canvas = document.querySelector(".chart[data-key=loss] canvas");
  const { width, height } = canvas, pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const wanted = getComputedStyle(document.documentElement).getPropertyValue("--c0").trim().match(/[0-9a-f]{2}/gi);
  const isClose = (at) => (part, i) => Math.abs(pixels[at + i] - parseInt(part, 16)) < 24;
  const near = (at) => wanted.every(isClose(at)) && pixels[at + 3] > 200;
  let last = null, longest = 0;
  for (let x = 0; x < width; x++) for (let y = 0; y < height; y++) if (near(4 * (y * width + x))) {
    longest = Math.max(longest, last === null ? 0 : x - last);
    last = x;
    break;
  }
  return longest / width;
}"""
"""The longest stretch between two columns of the loss's curve, as a fraction of the chart."""


def test_a_loss_that_is_not_finite_is_a_gap_in_its_curve(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    for name, lost in (("whole", range(0)), ("lost", range(100, 201))):
        lines = (record(step, **({"loss": "nan"} if step in lost else {})) for step in range(1, 301))
        write_lines(run / "metrics.jsonl", lines)
        visit = Visit(browser, written(tmp_path / f"{name}.html", run))
        gap = visit.page.evaluate(EMPTY_COLUMNS)
        assert gap < 0.02 if name == "whole" else 0.2 < gap < 0.4, f"{name}: {gap}"
        visit.close()


def test_a_hostile_run_does_nothing(browser: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "page.html", make_hostile_run(tmp_path), make_run(tmp_path / "other"))
    visit = Visit(browser, path)
    visit.click_everything()
    assert visit.page.evaluate("typeof pwned") == "undefined"
    assert visit.page.locator("img[src=x]").count() == 0
    visit.close()


def test_the_page_of_a_long_run_on_many_ranks(browser: Any, tmp_path: Path) -> None:
    """At most 3 MB, made within 2.5 s of processor time, drawn within 1 s."""
    run = make_run(tmp_path / "run", STEPS)
    few = make_run(tmp_path / "few", 2_000, ranks=1) / "metrics.rank0.jsonl"  # only sampled lines are read
    for rank in range(RANKS):
        (run / f"metrics.rank{rank}.jsonl").hardlink_to(few)
    began = time.process_time()
    path = written(tmp_path / "page.html", run)
    seconds = time.process_time() - began
    visit = Visit(browser, path)
    drawn = int(visit.page.get_attribute("html", "data-drawn"))
    visit.close()
    print(f"{path.stat().st_size / 1e6:.2f} MB, made in {seconds:.1f} s, drawn in {drawn} ms")
    assert path.stat().st_size <= 3e6
    assert seconds <= 2.5
    assert drawn <= 1000
