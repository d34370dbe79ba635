"""Checks of tensor and sequence parallelism: heads, features and tokens that tp must divide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.blueprint.description import Description, Split, matches, supports_sequence_parallel
from shoal.blueprint.placement import cut_dim, is_divided_by_default
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.description import Shapes, as_pattern, split_of_parameter
from shoal.errors import Problem, listed

SPLITS_ESSAY = """give the model a method that lists the splits of its layers:
        from shoal import Description, Split
        def describe(self):
            return Description(
                before_blocks=("embedding",),
                blocks=tuple(f"blocks.{i}" for i in range(len(self.blocks))),
                after_blocks=("norm", "head"),
                splits={
                    "embedding": Split.VOCABULARY,  # split by tokens of the vocabulary
                    "blocks.*.norm": Split.SEQUENCE,  # works on each position alone
                    "blocks.*.up": Split.COLUMN,  # a linear split by output features, ...
                    "blocks.*.down": Split.ROW,  # ... and the one that reads these features
                    "norm": Split.SEQUENCE,
                    "head": Split.VOCABULARY,
                },
            )
        with the names of your own modules; `*` stands for one part of a name"""


@dataclass(frozen=True)
class _Rule:
    """A size that tp must divide or, where `uneven`, of which every rank must get at least one."""

    size: int
    what: str
    uneven: bool = False

    def allows(self, tp: int) -> bool:
        # Uneven pieces are cut as torch.chunk does: all of one size, and the last one takes the remainder.
        return -(-self.size // tp) * (tp - 1) < self.size if self.uneven else self.size % tp == 0


def check_tensor(plan: Plan, description: Description, sequence: int | None, features: Shapes) -> Iterator[Problem]:
    """Problems of tp with the splits, heads, features and tokens of a model."""
    tp = plan.layout.tp
    if tp == 1:
        return
    if not description.splits:
        yield Problem("P028", f"tp={tp} splits layers, but the model describes no splits", SPLITS_ESSAY)
        return
    rules = [*_rules_of_heads(description), *_rules_of_features(description, features)]
    legal = [degree for degree in range(1, max(tp, 8) + 1) if all(rule.allows(degree) for rule in rules)]
    if odd := [rule.what for rule in rules if not rule.uneven and not rule.allows(tp)]:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        yield Problem("P029", f"tp={tp} does not divide {', '.join(odd[:3])}{more}", f"tp={listed(legal)}")
    for rule in (rule for rule in rules if rule.uneven and not rule.allows(tp)):
        per_rank = -(-rule.size // tp)
        yield Problem(
            "P030",
            f"tp={tp} leaves no token of {rule.what} to the last rank: {per_rank} go to each",
            f"tp={listed(legal)}",
        )
    yield from _check_tokens(plan, description, sequence, legal, must_change=bool(odd))
    yield from _check_splits(tp, description, features)


def _rules_of_heads(description: Description) -> Iterator[_Rule]:
    for name in ("num_heads", "num_kv_heads"):
        if (heads := getattr(description, name)) is not None:
            yield _Rule(heads, f"{name}={heads}")


def _rules_of_features(description: Description, features: Shapes) -> Iterator[_Rule]:
    """One rule for each pattern of the description and each size that it matches."""
    seen = set()
    for name, shape in features.items():
        pattern, split = split_of_parameter(name, description)
        dim = cut_dim(description, name) if split else None
        if dim is None or dim >= len(shape) or (pattern, shape[dim]) in seen:  # the bias of a row is not split
            continue
        seen.add((pattern, size := shape[dim]))
        parts = next((sizes for key, sizes in description.parts.items() if matches(key, name.rpartition(".")[0])), ())
        yield from (_Rule(one, f"the {one} features of a part of {pattern}") for one in dict.fromkeys(parts))
        if split is Split.VOCABULARY:
            yield _Rule(size, f"the {size} of {pattern}", uneven=True)
        else:
            kinds = {Split.ROW: "input features", Split.COLUMN: "output features"}
            which = kinds.get(split, "entries") if split else "entries"
            yield _Rule(size, f"the {size} {which} of {pattern}")


def _check_tokens(
    plan: Plan, description: Description, sequence: int | None, legal: Sequence[int], *, must_change: bool
) -> Iterator[Problem]:
    """Check that every tp rank gets as many tokens. An open `sp` is on where the model allows it.

    `must_change`: tp has to become one of `legal` anyway. Then tokens that another degree divides are no problem.
    """
    if plan.sp and not supports_sequence_parallel(description):
        yield Problem(
            "P031",
            "sp=on needs an embedding in before_blocks and a head in after_blocks that are split by vocabulary;"
            " the model does not describe both",
            'sp=off, or splits={"embedding": Split.VOCABULARY, "head": Split.VOCABULARY}',
        )
        return
    if plan.sp and plan.layout.pp > 1 and description.token_blocks not in ((), description.blocks):
        yield Problem(
            "M141",
            f"pp={plan.layout.pp} with sp=on divides tokens from the first block to the last, but the model describes"
            f" {len(description.blocks)} blocks and {len(description.token_blocks)} token_blocks",
            "sp=off, or pp=1",
        )
    is_on = is_divided_by_default(description) if plan.sp is None else plan.sp
    tp, cp = plan.layout.tp, plan.layout.cp
    if is_on and sequence is not None and sequence % (tp * cp):
        around = sorted({max(1, sequence // (tp * cp)) * tp * cp, -(-sequence // (tp * cp)) * tp * cp})
        degrees = [degree for degree in legal if sequence % (degree * cp) == 0] or [1]
        if must_change and max(degrees) > 1:
            return
        ranks = f"tp={tp} x cp={cp}" if cp > 1 else f"tp={tp}"
        yield Problem(
            "P032",
            f"{ranks} does not divide the {sequence} tokens of a sequence, which sp divides over the ranks",
            f"sp=off, or --data.seq_len {listed(around)}, or tp={listed(degrees)}",
        )


def _check_splits(tp: int, description: Description, features: Shapes) -> Iterator[Problem]:
    """Parameters without a split in the description."""
    lost = [name for name in features if split_of_parameter(name, description)[1] is None]
    modules = list(dict.fromkeys(as_pattern(name.rpartition(".")[0]) for name in lost))
    if loose := [name for name in lost if "." not in name]:
        what = f"tp={tp}: {', '.join(loose)} must be in a submodule, since splits name submodules"
        own = f"self.own = nn.Module(); self.own.{loose[0]} = nn.Parameter(...)"
        yield Problem("P034", what, f"move {loose[0]} into a submodule of its own: {own}")
    if modules := [module for module in modules if module]:
        entries = ", ".join(f'"{module}": Split.SEQUENCE' for module in modules)
        yield Problem(
            "P033",
            f"tp={tp}: the model describes no split of {', '.join(modules)}",
            f"add to its description splits={{{entries}}} if it works on each position alone,"
            " else Split.COLUMN, ROW, VOCABULARY or HEADS",
        )
