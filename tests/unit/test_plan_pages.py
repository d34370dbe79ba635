"""Pages of `shoal plan` and `shoal verify`: every part is there, nothing can act, and hostile names stay names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.pages.plan.page import plan_page, thinned
from shoal.pages.plan.scatter import Dot, scatter, ticks
from shoal.pages.verify.page import TensorError, verify_page
from shoal.planner.answer import answer
from shoal.planner.request import PlanRequest
from shoal.planner.search import Candidate
from tests.rejects import rejects
from tests.run_directories import EVIL
from tests.unit.test_pages import Tags

RESULT = {
    "equal": True, "plan": "tp=2 zero=0 fp64", "ranks": 2, "worst": {"loss": 1e-16, "grad": 2e-15, "weight": "inf"},
    "first_difference": None, "bytes": {"tp": {"predicted": 4096, "counted": 4096}}, "steps": 2, "seconds": 3.4,
    "collectives": {"tp": {"all_reduce": {"predicted": 8, "counted": 8}}}, "notes": [], "tolerance": 1e-10,
    "memory": {"parameters": {"predicted": 10, "counted": 11}, "peak": {"measured": 12}},
}  # fmt: skip


def check(page: str) -> Tags:
    """Nothing in a page can act or leave it."""
    tags = Tags(page)
    assert [*tags.open, *tags.outside, *tags.handlers] == []
    assert tags.scripts == []
    assert "script-src 'none'" in page
    return tags


@pytest.fixture(scope="module")
def planned() -> str:
    seen: list[Candidate] = []
    request = PlanRequest(model="llama3-70b", cluster="h100:8x8", seq_len=8192, global_batch=128, pp=4)
    return plan_page(answer(request, seen), seen)


def test_a_page_of_plans_has_every_part(planned: str) -> None:
    check(planned)
    names = re.findall(r"<section id=(\w+)>", planned)
    assert names == ["scatter", "plans", "causes", "layout", "alternatives", "lints", "commands"]
    dots = re.findall(r'<circle class="point (\w+)" [^>]*><title>([^<]+)</title>', planned)
    assert {kind for kind, _ in dots} == {"plan", "frontier", "best"}
    assert all(re.search(r"pp=4 .*: [\d.]+ GiB, [\d.]+ (ms|s|min)", title) for _, title in dots)
    assert "data:image/svg+xml" in planned  # the schedule
    assert "srun --nodes 8" in planned


def test_a_page_without_a_plan_says_what_would_fit() -> None:
    request = PlanRequest(model="llama3-70b", cluster="h100:8", seq_len=8192, global_batch=64)
    page = plan_page(answer(request), ())
    check(page)
    assert "No plan fits" in page
    assert "--cluster" in page


def test_the_page_is_written_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama3-1b", "--cluster", "h100:2", "--seq-len", "2048", "--global-batch", "8", "--json"]
    assert main([*words, "--html", str(tmp_path / "plan.html")]) == 0
    assert "Memory against time" in (tmp_path / "plan.html").read_text()
    capsys.readouterr()
    assert main([*words, "--html", str(tmp_path / "none" / "plan.html")]) == 2
    assert "--html ELSEWHERE.html" in capsys.readouterr().err


def test_dots_of_one_place_become_the_fastest() -> None:
    plan = answer(PlanRequest(model="llama3-1b", cluster="h100:1", global_batch=8)).best[0].prediction.plan
    many = [Candidate(plan, 1e9, 1 + 1e-6 * number) for number in range(1000)] + [Candidate(plan, 9e9, 2.0)]
    assert [one.seconds for one in thinned(many)] == [1.0, 2.0]
    assert thinned([]) == []


def test_a_scatter_marks_its_axes() -> None:
    drawn = scatter([Dot(1, 1, EVIL, "plan"), Dot(8, 900, "b", "best")], ("x", "y"), (str, str))
    assert "(logarithmic)" in drawn
    assert EVIL not in drawn
    assert scatter([], ("x", "y"), (str, str)) == ""
    assert ticks(0) == ticks(float("nan")) == [0.0]


def test_a_page_of_verify_has_every_tensor_the_worst_first() -> None:
    tensors = [TensorError("a.weight", 1e-16, 1e-17), TensorError("b.weight", float("inf"), 0.0)]
    page = verify_page(RESULT, tensors)
    check(page)
    assert page.index("b.weight") < page.index("a.weight")
    assert re.findall(r"<section id=(\w+)>", page) == ["tensors", "communication", "memory", "layout"]
    assert ('<rect class="bad"' in page, '<rect class="good"' in page) == (True, True)
    assert "∞" in page


def test_a_difference_is_named_with_its_cause() -> None:
    first = {"step": 1, "kind": "gradient", "tensor": "a.weight", "cause": "the gradient is divided twice"}
    page = verify_page({**RESULT, "equal": False, "first_difference": first}, [])
    assert "NOT equal" in page
    assert "step 1, gradient of a.weight. the gradient is divided twice" in page


def test_hostile_names_stay_names() -> None:
    counts = {EVIL: {"predicted": 1, "counted": EVIL}}
    hostile = {
        **RESULT,
        "plan": EVIL,
        "notes": [EVIL],
        "bytes": counts,
        "collectives": {EVIL: counts},
        "memory": counts,
    }
    page = verify_page(hostile, [TensorError(EVIL, 1.0, 1.0)])
    check(page)
    assert EVIL not in page


def test_a_page_shows_one_plan() -> None:
    with rejects("R072", "--html shows one plan"):
        from shoal.cli import verify

        verify.main(["--matrix", "--html", "page.html"])
