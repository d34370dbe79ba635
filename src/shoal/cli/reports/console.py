"""What a verb draws for people, printed at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 150
"""Columns of wide tables where nobody says how many there are."""


def show(draw: Callable[[Console], None], out: TextIO, *, width: int | None = None) -> None:
    """Drawn first and printed then: rich would end the process with code 1 if nobody reads on. `width` counts where
    `out` is no terminal."""
    from rich.console import Console

    console = Console(file=out, width=None if out.isatty() else width)
    with console.capture() as drawn:
        draw(console)
    print(drawn.get(), end="", file=out)
