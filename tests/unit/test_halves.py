"""Both halves together are all tests."""

from __future__ import annotations

from tests.halves import HALVES, ROOT


def test_every_folder_of_tests_is_in_one_half() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert sorted(part for half in HALVES for part in half) == sorted(folders)
    assert not list((ROOT / "tests").glob("test_*.py"))
