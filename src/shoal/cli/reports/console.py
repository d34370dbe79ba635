"""Print the tables of a verb at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 150
"""Columns of wide tables where the output is no terminal."""


def show(draw: Callable[[Console], None], out: TextIO, *, width: int | None = None) -> None:
    """Draw to memory, then print: rich would end the process with code 1 on a closed pipe. `width` applies where `out`
    is no terminal."""
    from rich.console import Console

    console = Console(file=out, width=None if out.isatty() else width)
    with console.capture() as drawn:
        draw(console)
    print(drawn.get(), end="", file=out)
