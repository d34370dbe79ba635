"""Writes docs/compositions.md: which pairs of parallelisms are proven by which plans of the tests, and why the others
are refused, in the words of the code that refuses them.

    python -m tests.dist.table > docs/compositions.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from math import prod

from shoal.blueprint.description import Description, Split
from shoal.blueprint.plan import DEGREES, Plan
from shoal.blueprint.validation.check import check_plan
from shoal.errors import ShoalError
from tests.dist.compositions import features_of as features_of
from tests.dist.compositions import in_short, proven

FEATURES: dict[str, str] = {
    "`dp_replicate`": "dp_replicate=2",
    **{f"`zero={stage}`": f"dp_shard=2 zero={stage}" for stage in (1, 2, 3)},
    **{f"`{kind}`": f"cp=2 {kind}" for kind in ("ring", "ulysses")},
    "`sp=off`": "tp=2 sp=off",
    "`sp=on`": "tp=2 sp=on",
    **{f"`{order}`": f"pp=2 {order}" for order in ("gpipe", "1f1b", "interleaved", "looped", "zb", "zbv", "dualpipev")},
    "`ep`": "dp_shard=2 ep=2",
    **{f"`{much}`": f"recompute={much}" for much in ("full", "selective")},
    "compile": "",
}
"""What stands over a column → the words that ask for it. `run.compile` is no word of a plan."""

MODEL = Description(
    before_blocks=("embedding",),
    blocks=tuple(f"blocks.{i}" for i in range(5)),
    after_blocks=("head",),
    splits={
        "embedding": Split.VOCABULARY,
        "blocks.*.norm": Split.SEQUENCE,
        "blocks.*.experts": Split.EXPERTS,
        "head": Split.VOCABULARY,
    },
    num_heads=4,
    num_kv_heads=2,
    num_experts=4,
    active_experts=2,
    positions="positions",
)
"""One that can have every parallelism: what is refused for it is refused for all."""


def refusal(first: str, second: str) -> str | None:
    """Why the two cannot be had together, as a user would be told. None: they can."""
    words = list(dict.fromkeys(f"{FEATURES[first]} {FEATURES[second]}".split()))
    try:
        plan = Plan.parse(" ".join(words))
        size = prod(getattr(plan, axis) or 1 for axis in DEGREES if axis != "ep")
        resolved = plan.resolve(size)
    except ShoalError as error:
        return error.problems[0].what
    found = check_plan(resolved, description=MODEL, compiles="compile" in (first, second))
    return next((problem.what for problem in found), None)


# ---- the page -------------------------------------------------------------------------------------------------------


def page() -> str:
    """All of docs/compositions.md."""
    reasons: dict[str, str] = {}
    matrix = "\n".join(_rows(reasons))
    count = len(proven())
    sizes = sorted({plan.num_ranks for plan in proven()})
    ranks = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
    return f"""# Compositions

Which parallelisms go together, pair by pair. A number: so many plans with both are trained by `make test-all` and hold
against one process in float64, every loss, norm, gradient and weight. CI trains some of them; at a star none that has
both. A letter: the pair is rejected before a process starts, for the reason below. On the diagonal: all plans with the
one. There are {count} plans, on {ranks} ranks; CI trains {len(in_short())}, which `tests/dist/compositions.py` chooses:
each word, each pair of axes (so `tp` with some schedule), each model beside every axis, each dense model compiled.

`zero=1..3` share parameters over `dp_shard` x `cp`. `ring` and `ulysses` are `cp`, `sp=off` and `sp=on` are `tp`, the
schedules are `pp`, `full` and `selective` are `recompute`, and compile is `run.compile`.

{matrix}

{chr(10).join(f"- **{letter}**: {reason}" for reason, letter in reasons.items())}

A pair is no proof of three: for a plan of your own there is [`shoal verify`](verify.md), and `--matrix` for every
legal layout of some ranks.

This page is written by `tests/dist/table.py`, and a test holds it against the lists of plans that are run.

## The plans

Models: `llama` is dense; `packed` too, with several documents in a sample; `moe` routes by softmax with an auxiliary
loss and a z-loss, and has a dense layer first; `bias` routes by sigmoid, has a shared expert and is balanced by a bias;
`capacity` drops; in `choice` experts choose their tokens.

{chr(10).join(_list())}
"""


def _rows(reasons: dict[str, str]) -> Iterator[str]:
    """The matrix; reasons get a letter when they are first met."""
    names = list(FEATURES)
    cells = {}
    for first, second in combinations_with_replacement(names, 2):
        cells[first, second] = cells[second, first] = cell(first, second, reasons)
    yield f"| | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for row in names:
        yield f"| {row} | {' | '.join(cells[row, column] for column in names)} |"


def cell(first: str, second: str, reasons: dict[str, str]) -> str:
    """How many plans prove a pair, or the letter of the reason why it is refused. Empty: nobody knows."""
    both = [plan for plan in proven() if {first, second} <= plan.features]
    if both:
        return f"{len(both)}" if in_short().intersection(both) else f"{len(both)}*"
    reason = refusal(first, second)
    if reason is None:
        return ""
    what, is_choice, _ = reason.partition(" is set twice")
    text = f"a plan has one {what}" if is_choice else reason
    return reasons.setdefault(text, chr(ord("a") + len(reasons)))


def _list() -> Iterator[str]:
    yield "| ranks | plan | model | test | run by |"
    yield "|---:|---|---|---|---|"
    for plan in sorted(proven(), key=lambda plan: plan.num_ranks):
        by = "CI" if plan in in_short() else "`make test-all`"
        yield f"| {plan.num_ranks} | `{plan.words}` | {plan.model} | `{plan.test}` | {by} |"


def unknown_pairs() -> list[tuple[str, str]]:
    """Pairs that no plan proves and nothing refuses."""
    pairs: Sequence[tuple[str, str]] = list(combinations_with_replacement(FEATURES, 2))
    return [pair for pair in pairs if not cell(*pair, {})]


if __name__ == "__main__":
    print(page(), end="")
