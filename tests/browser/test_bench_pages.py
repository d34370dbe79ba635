"""The pages of benchmarks in a real browser: light and dark, narrow and wide, with no message and no request.

`make test-browser` runs it. It needs Chromium and the package playwright, and is skipped without them.
"""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shoal.pages.report import write_page
from tests.bench_results import RESULTS
from tests.browser.visit import SIZES, Visit

pytestmark = pytest.mark.timeout(300)
HOSTILE = "</title><script>pwned=1</script><img src=x onerror=pwned=1>"


def written(folder: Path, name: str, *words: str) -> Path:
    path = folder / f"{name}.html"
    write_page(path, import_module(f"shoal.pages.bench.{name}").make_page(RESULTS[name](*words)))
    return path


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_page_is_drawn(browser: Any, tmp_path: Path, name: str, scheme: str, size: str) -> None:
    visit = Visit(browser, written(tmp_path, name), scheme, size)
    for summary in visit.page.query_selector_all("summary"):
        summary.click()
    assert visit.page.locator("svg:visible").count() >= 1
    width, view = visit.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width <= view, "the page scrolls sideways"
    visit.close()


@pytest.mark.parametrize("name", RESULTS)
def test_a_hostile_result_does_nothing(browser: Any, tmp_path: Path, name: str) -> None:
    visit = Visit(browser, written(tmp_path, name, HOSTILE))
    assert visit.page.evaluate("typeof pwned") == "undefined"
    assert visit.page.locator("img[src=x]").count() == 0
    visit.close()


def test_messages_travel_without_a_script(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, written(tmp_path, "comm"), java_script_enabled=False)
    visit.page.locator("summary", has_text="ring all_reduce").click()
    ball = visit.page.locator("details[open] .ball").first
    places = {tuple(ball.bounding_box().values())}
    until = time.monotonic() + 30
    while len(places) == 1 and time.monotonic() < until:
        visit.page.wait_for_timeout(100)
        places.add(tuple(ball.bounding_box().values()))
    assert len(places) > 1
    visit.close()
