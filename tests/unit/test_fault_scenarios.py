"""The table of fault scenarios names tests that exist, and counts its own verdicts."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "fault-scenarios.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if re.match(r"\| \d", line)]
VERDICTS = {"holds", "partly", "no"}


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_scenario_has_a_verdict_and_a_test_that_exists() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 44))
    for number, _, about, verdict, shown in ROWS:
        assert verdict in VERDICTS, number
        assert about, number
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
        assert len(named) == shown.count("::"), number
        assert named or verdict == "no", number
        for path, name in named:
            assert name in functions(ROOT / path), f"{path}::{name}"


def test_the_sum_is_that_of_the_rows() -> None:
    counts = Counter(row[3] for row in ROWS)
    assert f"{counts['holds']} hold, {counts['partly']} hold partly, {counts['no']} do not hold." in TEXT
