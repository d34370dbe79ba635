"""A collective as a drawing: ranks as rails, rounds downwards, messages as arrows with a ball that travels.

The ball is moved by CSS alone. Without animations, and in print, the arrows remain.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.collectives.algorithms import Move
from shoal.blueprint.collectives.steps import Steps
from shoal.pages.html import text

LEFT, TOP, ROUND = 70, 34, 46
"""Margins, and the height of a round."""
WIDEST = 620
SECONDS = 0.9
"""Seconds of a round."""
MOST_RANKS, MOST_ROUNDS = 16, 24
"""A larger drawing could not be read."""


def drawing(listed: Steps) -> str:
    """The drawing; empty if it could not be read."""
    if listed.world > MOST_RANKS or not 0 < len(listed.rounds) <= MOST_ROUNDS:
        return ""
    height = TOP + ROUND * len(listed.rounds) + 14
    label = f"{listed.algorithm} {listed.kind}: messages of {listed.world} ranks in {len(listed.rounds)} rounds"
    parts = [*_rails(listed, height), *_rounds(listed)]
    box = f'viewBox="0 0 {WIDEST} {height}" role="img"'
    return f'<svg class="messages" {box}><title>{text(label)}</title>{_travel(listed)}{"".join(parts)}</svg>'


def _travel(listed: Steps) -> str:
    """The animation of a ball: it is seen and moves for one round of the cycle, which has one round more for a rest."""
    part = 100 / (len(listed.rounds) + 1)
    there = "transform: translate(var(--dx), var(--dy))"
    return (
        f"<style>@keyframes {_name(listed)} {{ 0% {{ transform: none; opacity: 1; }} {part:.2f}% {{ {there};"
        f" opacity: 1; }} {part + 0.01:.2f}%, 100% {{ {there}; opacity: 0; }} }}</style>"
    )


def _name(listed: Steps) -> str:
    return f"travel{len(listed.rounds)}"


def _at(listed: Steps, rank: int) -> float:
    return LEFT + 20 + rank * (WIDEST - LEFT - 40) / max(1, listed.world - 1)


def _rails(listed: Steps, height: int) -> Iterator[str]:
    for rank in range(listed.world):
        x = _at(listed, rank)
        yield f'<text x="{x:.1f}" y="18" text-anchor="middle">rank {rank}</text>'
        yield f'<path class="rail" d="M{x:.1f} {TOP - 8}V{height - 6}"/>'


def _rounds(listed: Steps) -> Iterator[str]:
    cycle = SECONDS * (len(listed.rounds) + 1)
    for number, moves in enumerate(listed.rounds):
        y = TOP + number * ROUND
        yield f'<text x="0" y="{y + ROUND / 2:.0f}">round {number + 1}</text>'
        for move in moves:
            yield from _arrow(listed, move, y, number * SECONDS, cycle)


def _arrow(listed: Steps, move: Move, y: float, begin: float, cycle: float) -> Iterator[str]:
    x, to, down = _at(listed, move.source), _at(listed, move.target), ROUND - 12
    what = f"rank {move.source} sends {listed.elements(move):,} elements to rank {move.target}"
    what += ", which adds them" if move.adds else ", which keeps them"
    kind = "adds" if move.adds else "copies"
    yield f'<g class="{kind}"><title>{text(what)}</title><path class="arrow" d="M{x:.1f} {y}L{to:.1f} {y + down}"/>'
    side = -1 if to < x else 1
    tip = f"M{to:.1f} {y + down}l{-side * 9} -7M{to:.1f} {y + down}l{-side * 10} 1"
    yield f'<path class="arrow" d="{tip}"/></g>'
    style = f"animation-name:{_name(listed)};--dx:{to - x:.1f}px;--dy:{down}px;--all:{cycle:.1f}s;--at:{begin:.1f}s"
    yield f'<circle class="ball" cx="{x:.1f}" cy="{y}" r="5" style="{style}"/>'
