"""Pictures of a collective: its messages round by round, as text and as SVG.

>>> from shoal.blueprint.collectives.steps import steps
>>> print(draw(steps("all_reduce", "ring", 2, 8)))
ring all_reduce, 2 ranks, 8 elements in 2 blocks: 2 rounds, at most 8 elements sent by a rank
round 1   0 ─b▶+ 1   1 ─a▶+ 0
round 2   0 ─a▶ 1    1 ─b▶ 0
"""

from __future__ import annotations

from shoal.blueprint.collectives.algorithms import Move
from shoal.blueprint.collectives.steps import Steps

WIDTH, HEIGHT, MARGIN = 90, 34, 40
"""Width of a column (a rank), height of a row (a round), and the margin, in an SVG."""


def draw(listed: Steps) -> str:
    """One line for each round: source, blocks, target; + where the blocks are added."""
    most = max((listed.sent(rank) for rank in range(listed.world)), default=0)
    head = (
        f"{listed.algorithm} {listed.kind}, {listed.world} ranks, {sum(listed.sizes):,} elements in"
        f" {len(listed.sizes)} blocks: {len(listed.rounds)} rounds, at most {most:,} elements sent by a rank"
    )
    rows = [[_arrow(move, listed) for move in moves] for moves in listed.rounds]
    width = max((len(arrow) for row in rows for arrow in row), default=0)
    digits = len(str(len(rows)))
    lines = [
        f"round {number:>{digits}}   " + "   ".join(arrow.ljust(width) for arrow in row).rstrip()
        for number, row in enumerate(rows, 1)
    ]
    return "\n".join([head, *lines])


def _arrow(move: Move, listed: Steps) -> str:
    return f"{move.source} ─{_named(move.blocks, listed)}▶{'+' * move.adds} {move.target}"


def _named(blocks: tuple[int, ...], listed: Steps) -> str:
    """Letters for up to 26 blocks, else numbers; of more than four names, the first and the last."""
    few = len(listed.sizes) <= 26
    names = [chr(ord("a") + block) if few else str(block) for block in blocks]
    if len(names) > 4:
        return f"{names[0]}…{names[-1]}"
    return ("" if few else ",").join(names)


def svg(listed: Steps) -> str:
    """Draw ranks as columns, rounds downwards, and messages as arrows; the colour shows where blocks are added."""
    width = 2 * MARGIN + WIDTH * max(1, listed.world - 1)
    height = 2 * MARGIN + HEIGHT * len(listed.rounds)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="11">',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/></marker></defs>',
    ]
    for rank in range(listed.world):
        x = MARGIN + rank * WIDTH
        parts.append(f'<text x="{x}" y="{MARGIN - 14}" text-anchor="middle">rank {rank}</text>')
        parts.append(f'<line x1="{x}" y1="{MARGIN - 6}" x2="{x}" y2="{height - MARGIN / 2}" stroke="#bbb"/>')
    for number, moves in enumerate(listed.rounds):
        for place, move in enumerate(moves):
            parts += _line(move, listed, MARGIN + (number + (place + 1) / (len(moves) + 1)) * HEIGHT)
    return "\n".join([*parts, "</svg>", ""])


def _line(move: Move, listed: Steps, y: float) -> list[str]:
    start, end = (MARGIN + rank * WIDTH for rank in (move.source, move.target))
    colour = "#c2410c" if move.adds else "#1d4ed8"
    middle, name = (start + end) / 2, _named(move.blocks, listed)
    return [
        f'<line x1="{start}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="{colour}" marker-end="url(#end)"/>',
        f'<text x="{middle}" y="{y - 2:.1f}" text-anchor="middle" fill="{colour}" font-size="9">{name}</text>',
    ]
