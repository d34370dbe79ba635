"""Checks of context parallelism: positions, tokens and heads that cp must divide."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.description import Description
from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import Plan
from shoal.errors import Problem, listed

POSITIONS_ESSAY = """remove cp, or let the model take the positions of its tokens, and name the argument:
        from shoal import Description
        def forward(self, tokens, positions=None): ...  # (batch, tokens); None: counted from 0
        def describe(self):
            return Description(positions="positions")
        with the other fields of your model's description"""


def num_chunks(plan: Plan, cp: int | None = None) -> int:
    """The number of equal chunks that cp cuts a sequence into; a ring gives two of them to each rank."""
    degree = cp or plan.layout.cp
    return degree if degree == 1 or plan.context == "ulysses" else 2 * degree


def check_context(plan: Plan, description: Description, sequence: int | None) -> Iterator[Problem]:
    """Problems of cp with the positions, the sequence and the heads of a model."""
    cp, tp, heads = plan.layout.cp, plan.layout.tp, description.num_heads
    if cp == 1:
        return
    if description.positions is None:
        what = f"cp={cp} gives each rank tokens from the middle of a sequence, but the model takes no positions"
        yield Problem("P035", what, POSITIONS_ESSAY)
    chunks = num_chunks(plan)
    if sequence is not None and sequence % chunks:
        around = sorted({max(1, sequence // chunks) * chunks, -(-sequence // chunks) * chunks})
        degrees = divisors(plan.layout.world_size)
        legal = [degree for degree in degrees if sequence % num_chunks(plan, degree) == 0]
        yield Problem(
            "P036",
            f"cp={cp} cuts a sequence into {chunks} chunks, which do not divide its {sequence} tokens",
            f"--data.seq_len {listed(around)}, or cp={listed(legal)}",
        )
    if plan.context == "ulysses" and heads is not None and heads % tp == 0 and heads // tp % cp:
        share = f"num_heads={heads} / tp={tp} = {heads // tp}" if tp > 1 else f"num_heads={heads}"
        legal = divisors(heads // tp)
        yield Problem(
            "P037",
            f"cp={cp} with ulysses divides heads over the ranks, and does not divide {share}",
            f"ring instead of ulysses, or cp={listed(legal)}",
        )
