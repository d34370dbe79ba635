"""The pictures of README and docs are what shoal draws, and nothing else lies beside them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import shoot_pages
from tools.draw_pictures import FOLDER, pictures

COMMAND = "python tools/draw_pictures.py"


@pytest.mark.parametrize(("name", "drawn"), pictures().items(), ids=list(pictures()))
def test_a_committed_picture_is_what_is_drawn(name: str, drawn: str) -> None:
    assert (FOLDER / name).read_text() == drawn, f"docs/pictures/{name} is out of date; write it with: {COMMAND}"
    ElementTree.fromstring(drawn)


def shown() -> str:
    root = Path(__file__).parents[2]
    return "".join(page.read_text() for page in [root / "README.md", *(root / "docs").rglob("*.md")])


def test_every_picture_is_drawn_and_shown() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(pictures())
    assert [name for name in pictures() if f"pictures/{name})" not in shown()] == []


def test_every_screenshot_is_taken_by_the_tool_small_and_shown() -> None:
    sizes = {path.name: path.stat().st_size for path in shoot_pages.FOLDER.iterdir()}
    assert set(sizes) == {f"{name}.png" for name in shoot_pages.SHOTS}
    assert [name for name, size in sizes.items() if size > shoot_pages.MOST_BYTES] == []
    assert [name for name in sizes if f"images/{name})" not in shown()] == []
