"""Pages of `shoal plan` and `shoal verify` in a real browser: they fit a phone, say nothing and load nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.pages.plan.page import plan_page
from shoal.pages.report import write_page
from shoal.pages.verify.page import TensorError, verify_page
from shoal.planner.answer import answer
from shoal.planner.request import PlanRequest
from shoal.planner.search import Candidate
from tests.browser.visit import SIZES, Visit
from tests.run_directories import EVIL
from tests.unit.test_plan_pages import RESULT

pytestmark = pytest.mark.timeout(300)


def page_of_plans() -> str:
    seen: list[Candidate] = []
    request = PlanRequest(model="llama3-70b", cluster="h100:8x8", seq_len=8192, global_batch=128, pp=4)
    return plan_page(answer(request, seen), seen)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["plan", "verify"])
def test_a_page_without_a_script(browser: Any, tmp_path: Path, kind: str, size: str) -> None:
    tensors = [TensorError(f"model.layers.{number}.self_attn.q_proj.weight", 1e-15, 1e-9) for number in range(20)]
    write_page(
        tmp_path / "page.html",
        page_of_plans() if kind == "plan" else verify_page(RESULT, [*tensors, TensorError(EVIL, 1.0, 1.0)]),
    )
    visit = Visit(browser, tmp_path / "page.html", "dark", size)
    width, view = visit.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width <= view, "the page scrolls sideways"
    dots = visit.page.locator("circle.point, .gauge")
    assert dots.count() > 20
    assert dots.first.bounding_box()["width"] > 2
    assert visit.page.evaluate("typeof pwned") == "undefined"
    visit.close()
