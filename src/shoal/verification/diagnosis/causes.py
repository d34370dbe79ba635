"""Find the likely cause of a difference between two runs: one or two sentences that a user can act on.

A wrong layout leaves traces. A missing reduction leaves replicas with different values. A reduction that was done twice
leaves a factor that is a degree. A swapped slice leaves its values in another place. Each trace has one small rule. A
rule looks at the evidence and returns a text or None, and the first text of `RULES` is the likely cause. So the order
of the rules is part of the diagnosis, from certain traces to vague ones:

[1] Values that no other rule may look at: NaN, missing tensors, other shapes.
[2] Traces that have one cause only. A factor stands before the place where it occurs: all gradients of one stage,
    twice as large, are a sum in place of a mean, and no fault of that stage.
[3] One kind of module, where ranks communicate inside the forward: named by its module, not by its slices.
[4] The place alone: which slices, which stage, whose samples.
[5] Where in the step it began. The last rule always returns a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.verification.compare import Difference, Observation
from shoal.verification.diagnosis.evidence import Context, Evidence
from shoal.verification.diagnosis.fallback_causes import broken_backward, broken_forward, broken_optimizer
from shoal.verification.diagnosis.location_causes import (
    by_stage,
    only_what_tp_does_not_cut,
    other_samples,
    slices_swapped,
    some_slices,
)
from shoal.verification.diagnosis.module_causes import (
    broken_attention,
    broken_dispatch,
    broken_router,
    experts_not_in_place,
    experts_without_rows,
    fused_projection,
    unlike_biases,
)
from shoal.verification.diagnosis.numeric_causes import (
    all_zero,
    constant_factor,
    gradients_not_cleared,
    not_comparable,
    replicas_disagree,
    wrong_norm,
    wrong_update,
)

RULES: tuple[Callable[[Evidence], str | None], ...] = (
    not_comparable,  # [1]
    replicas_disagree,  # [2]
    gradients_not_cleared,
    experts_not_in_place,
    experts_without_rows,
    all_zero,
    constant_factor,
    wrong_norm,
    unlike_biases,
    wrong_update,
    broken_attention,  # [3]
    broken_router,
    broken_dispatch,
    fused_projection,
    only_what_tp_does_not_cut,  # [4]
    slices_swapped,
    some_slices,
    by_stage,
    other_samples,
    broken_backward,  # [5]
    broken_forward,
    broken_optimizer,
)


def likely_cause(
    difference: Difference, reference: Sequence[Observation], candidate: Sequence[Observation], context: Context
) -> str:
    """Name the likely cause of a difference, with its axis or tensor."""
    evidence = Evidence(difference, reference, candidate, context)
    if difference.step >= min(len(reference), len(candidate)):
        return f"There is nothing to compare at step {difference.step}: {difference.note}."
    return next(text for rule in RULES if (text := rule(evidence)))
