"""The defects of tools/mutate.py still fit the code, and their tests are there. To try them takes minutes: by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.mutate import MUTATIONS, ROOT, Mutation, find

PACKAGES = {
    *("blueprint", "config", "predict", "planner", "comm", "launch", "numerics", "data", "parallel", "checkpoint"),
    *("train", "elastic", "verification", "cli"),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_its_text_occurs_once_and_its_test_exists(mutation: Mutation) -> None:
    find(mutation, ROOT / "src")
    file, _, name = mutation.test.partition("::")
    text = Path(ROOT, file).read_text()
    assert not name or f"def {name.partition('[')[0]}(" in text


def test_every_package_has_some() -> None:
    assert {mutation.package for mutation in MUTATIONS} == PACKAGES
    assert len({(mutation.file, mutation.old) for mutation in MUTATIONS}) == len(MUTATIONS) >= 30


def test_a_text_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "shoal").mkdir()
    (tmp_path / "shoal" / "a.py").write_text("x = 1\nx = 1\n")
    for old in ("x = 1", "x = 2"):
        with pytest.raises(ValueError, match=re.escape(f"{old!r} occurs")):
            find(Mutation("", "a.py", old, "x = 3", ""), tmp_path)
