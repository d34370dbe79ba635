"""The example pages of `make docs` in a real browser: light and dark, narrow and wide, silent, without a request."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from shoal.pages.report import write_page
from tests.browser.visit import SIZES, Visit

pytestmark = pytest.mark.timeout(300)
NAMES = ("report", "watch", "profile", "plan", "verify", "scale", "step", "memory", "comm")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_site", Path(__file__).parents[2] / "tools/docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    folder = tmp_path_factory.mktemp("pages")
    (folder / "samples").mkdir()
    for uri, make in site.EXAMPLES.items():
        write_page(folder / uri, make())
    return folder / "samples"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_drawn(browser: Any, pages: Path, name: str, scheme: str, size: str) -> None:
    visit = Visit(browser, pages / f"{name}.html", scheme, size)
    for summary in visit.page.query_selector_all("summary"):
        summary.click()
    assert visit.page.locator("svg:visible, canvas:visible").count() >= 1
    width, view = visit.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width <= view, "the page scrolls sideways"
    visit.close()


def test_every_example_is_looked_at(pages: Path) -> None:
    assert {path.stem for path in pages.iterdir()} == set(NAMES)
