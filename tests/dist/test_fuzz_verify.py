"""Some cases of the fuzzer of `shoal verify`, run for real; and one whose comparison is made to fail."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.fuzz_verify import ROOT


def fuzzed(*words: str) -> tuple[int, dict[str, Any], str]:
    ended = subprocess.run(
        [sys.executable, "tests/fuzz_verify.py", "--json", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    return ended.returncode, json.loads(ended.stdout), ended.stderr


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(300)
def test_ten_cases_are_verified_or_rejected_with_a_fix() -> None:
    code, told, said = fuzzed("--seed", "0", "--cases", "10")
    assert code == 0, said
    assert told["verified"] + told["rejected"] == 10
    assert told["verified"] >= 5


@pytest.mark.wide
def test_a_comparison_that_fails_is_a_finding_with_its_command() -> None:
    """No two orders of summation are equal to the last bit: with a tolerance of 0 a right plan is not equal."""
    code, told, said = fuzzed("--seed", "0", "--cases", "1", "--", "--tolerance", "0")
    assert (code, told["finding"]) == (1, 1), said
    assert told["cases"][0]["command"].endswith("--tolerance 0")
    assert told["cases"][0]["command"] in said
