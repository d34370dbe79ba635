"""Checks of expert parallelism: experts that ep must divide."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.description import Description, Split
from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import Plan
from shoal.errors import Problem, listed

EXPERTS_ESSAY = """remove ep, or give the model a method that lists its experts:
        from shoal import Description, Split
        def describe(self):
            return Description(
                num_experts=8,
                active_experts=2,
                splits={"blocks.*.experts": Split.EXPERTS},
            )
        with the names of your own modules; `*` stands for one part of a name"""


def check_experts(plan: Plan, description: Description) -> Iterator[Problem]:
    """Problems of ep with the experts of a model."""
    # Without `plan.layout`: there is none if ep does not divide dp_shard x cp, which is another problem.
    ep, slots, num_experts = plan.ep or 1, (plan.dp_shard or 1) * (plan.cp or 1), description.num_experts
    if ep == 1:
        return
    has_split = Split.EXPERTS in description.splits.values()
    if num_experts is None or not has_split:
        half = "no num_experts" if has_split else "no Split.EXPERTS in its splits" if num_experts else ""
        why = f"the model's describe() has {half}" if half else "the model describes none"
        yield Problem("P038", f"ep={ep} divides experts, but {why}", EXPERTS_ESSAY)
    elif num_experts % ep:
        legal = [degree for degree in divisors(slots) if num_experts % degree == 0]
        yield Problem("P039", f"ep={ep} does not divide num_experts={num_experts}", f"ep={listed(legal)}")
    if plan.recompute == "selective":
        yield Problem(
            "P040",
            f"ep={ep} gathers experts inside a block, which recompute=selective (torch's selective checkpoint)"
            " does not allow",
            "recompute=full or recompute=none",
        )
