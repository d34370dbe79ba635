"""A private folder: what its mode may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.files import PrivateFolder


@pytest.mark.parametrize("mode", [0o700, 0o2700, 0o1700])
def test_a_folder_that_only_its_owner_can_access(tmp_path: Path, mode: int) -> None:
    """A folder that is made in one with setgid has setgid too."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private").chmod(mode)
    with PrivateFolder(tmp_path / "private") as folder:
        folder.write("a", b"text")
        assert folder.read("a", 10) == b"text"


@pytest.mark.parametrize("mode", [0o2710, 0o701, 0o500, 0o720])
def test_a_folder_of_another_mode_is_rejected(tmp_path: Path, mode: int) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    with pytest.raises(PermissionError, match=f"its mode is {mode:04o}, not 0700"):
        PrivateFolder(tmp_path / "shared")
