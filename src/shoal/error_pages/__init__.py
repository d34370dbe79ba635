"""A page for each code of an error: the rule, why it holds, an example of the message, and the ways to fix it.

There is one Markdown file per area. `shoal explain` prints its sections, and the documentation shows the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AREAS = {
    "P": "plan",
    "R": "settings",
    "Q": "planner",
    "D": "data",
    "M": "model",
    "T": "training",
    "C": "checkpoints",
    "N": "launch",
    "J": "jobs",
    "V": "verify",
    "L": "finetuning",
    "H": "horovod",
    "E": "deepspeed",
    "Y": "ray",
}
"""The letter of an area → its file, without the ending."""

_HEADING = re.compile(r"^## ([A-Z]\d{3}): (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ErrorPage:
    """The page of one code."""

    code: str
    title: str
    text: str
    """Markdown below the title."""


def read_area(letter: str) -> tuple[str, list[ErrorPage]]:
    """The title of an area, and its pages in the order of their codes."""
    markdown = (Path(__file__).parent / f"{AREAS[letter]}.md").read_text(encoding="utf-8")
    head, *parts = _HEADING.split(markdown)
    title = head.splitlines()[0].removeprefix("# ").partition(": ")[2]
    sections = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return title, [ErrorPage(code, name, text.strip("\n")) for code, name, text in sections]


def read_pages() -> Iterator[ErrorPage]:
    """All pages, by area."""
    for letter in AREAS:
        yield from read_area(letter)[1]
