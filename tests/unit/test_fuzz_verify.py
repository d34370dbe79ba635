"""The fuzzer of `shoal verify`: its cases are a pure function of the seed, and it reports what it has to report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fuzz_verify import AXES, SCHEDULES, Judged, Outcome, case_of, judge

EQUAL = {
    "equal": True,
    "plan": "tp=2",
    "worst": {"loss": 0.0, "tensor": "a"},
    "bytes": {"tp": {"predicted": 8, "counted": 8}},
    "collectives": {"tp": {"all_reduce": {"predicted": None, "counted": 2}}},
    "memory": {"gradients": {"predicted": 1000, "counted": 1001}, "peak": {"predicted": None, "counted": None}},
}
REJECTED = {"error": {"problems": [{"what": "batch 3", "fix": "--data.global_batch 4"}]}}


def judged(code: int | None, told: Any, err: str = "") -> Judged:
    return judge(Outcome(code, told if isinstance(told, str) else json.dumps(told), err, 1.0))


def test_cases_are_a_pure_function_of_seed_and_number() -> None:
    cases = [case_of(7, number) for number in range(50)]
    assert cases == [case_of(7, number) for number in reversed(range(50))][::-1]
    assert len({case.words for case in cases}) == 50
    assert case_of(8, 0) != case_of(7, 0)
    assert cases[3].command.startswith("shoal verify --nproc ")


def test_cases_reach_every_axis_schedule_and_model() -> None:
    said = " ".join(case_of(0, number).command for number in range(300))
    words = [*(f"{axis}=2" for axis in (*AXES, "ep")), *SCHEDULES, *(f"zero={stage}" for stage in (1, 2, 3))]
    words += [
        "ring",
        "ulysses",
        "sp=on",
        "sp=off",
        "recompute=full",
        "recompute=selective",
        "v=3",
        "compress=",
        "sync=",
    ]
    words += ["--model.name moe", "--model.name mlp", "--model.name resnet", "--data.mask_documents true", "tied true"]
    assert [word for word in words if word not in said] == []


def test_what_is_equal_and_as_predicted_is_verified_and_what_has_a_fix_is_rejected() -> None:
    assert judged(0, EQUAL).verdict == "verified"
    assert judged(2, REJECTED).verdict == "rejected"


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (judged(1, {**EQUAL, "equal": False, "first_difference": {"tensor": "norm.weight"}}), "norm.weight"),
        (judged(0, {**EQUAL, "equal": False}), "equal is false"),
        (judged(0, {**EQUAL, "bytes": {"tp": {"predicted": 8, "counted": 9}}}), "tp bytes: predicted 8, counted 9"),
        (judged(0, {**EQUAL, "memory": {"optimizer": {"predicted": 100, "counted": 102}}}), "memory of optimizer"),
        (judged(2, {"error": {"problems": [{"what": "batch 3", "fix": ""}]}}), "rejected without a fix"),
        (judged(3, {"error": {"problems": []}}), "exit code 3"),
        (judged(2, REJECTED, "Traceback (most recent call last):\n"), "a traceback"),
        (judged(0, ""), "without one JSON object"),
        (judged(None, ""), "did not end"),
    ],
)
def test_anything_else_is_a_finding(outcome: Judged, why: str) -> None:
    assert outcome.verdict == "finding"
    assert why in outcome.why
