"""Causes of last resort: the part of the step that is wrong, without a specific reason."""

from __future__ import annotations

from shoal.verification.diagnosis.evidence import Evidence
from shoal.verification.diagnosis.wording import joined


def broken_backward(e: Evidence) -> str | None:
    """Name the place where gradients become wrong, from the end of the model to its start."""
    if e.difference.kind != "gradient":
        return None
    names = list(e.reference.gradients)
    start = (
        "The loss is right" if e.difference.step == 0 else f"Steps before {e.difference.step} and the loss are right"
    )
    if len(e.wrong) < len(names) and e.wrong == names[: len(e.wrong)]:
        return (
            f"{start}, and gradients are wrong from {e.wrong[-1]} back to {names[0]}: the gradient that flows back from"
            f" {names[len(e.wrong)]} is wrong{_over(e, 'tp', 'cp')}."
        )
    if len(e.wrong) < len(names):
        return f"{start}, {len(e.wrong)} of {len(names)} gradients are wrong, {e.wrong[0]} first: look at its backward."
    suspects = [f"the reduction over {axis}" for axis in e.data_axes()]
    suspects += ["the accumulation over microbatches"] if e.context.num_microbatches > 1 else []
    return f"{start}, but no gradient is: look at {joined(suspects, 'or') or 'the backward' + _over(e, 'tp', 'pp')}."


def broken_forward(e: Evidence) -> str | None:
    """The loss is wrong: name the parts of the forward to look at."""
    if e.difference.kind != "loss":
        return None
    hints = {
        "cp": "cp (the tokens and labels of a rank, the positions that the model gets, what attention receives from"
        " other ranks, the number of tokens in the mean)",
        "ep": "ep (the placement of experts, the dispatch and return of rows, the router's weights in their sum)",
        "tp": "tp (the sum after a layer split by rows, or over the vocabulary)",
        "pp": "pp (the activations sent between stages, and microbatches paired with their targets)",
        **{axis: f"{axis} (the samples of each rank, and the mean over them)" for axis in ("dp_replicate", "dp_shard")},
    }
    places = joined([words for axis, words in hints.items() if e.context.layout.degree(axis) > 1], "or")
    if e.difference.step:
        biased = next((name for name in e.of_role("router") if e.piece(name).has_bias), None)
        bias = (
            f" the bias of {biased.rpartition('.')[0]} is not updated from the loads of all ranks, or" if biased else ""
        )
        return (
            f"All before step {e.difference.step} is right and its loss is not:{bias} a stale copy of the weights is"
            f" used, or other samples; look at {places or 'the state between steps'}."
        )
    return f"The forward is already wrong, before any gradient; look at {places or 'the initial weights and the data'}."


def broken_optimizer(e: Evidence) -> str:
    """Gradients are right and weights are not: name the optimizer."""
    if e.difference.step:
        return (
            f"Step 0 is right and the weights of step {e.difference.step} are not, though its gradients are:"
            f" optimizer state or learning rate of {e.difference.tensor} is not carried over."
        )
    return (
        f"Every gradient is right, but {e.difference.tensor} is not after the update: look at clipping"
        " and at the optimizer's options for it (weight decay, learning rate)."
    )


def _over(e: Evidence, *axes: str) -> str:
    used = [axis for axis in axes if e.context.layout.degree(axis) > 1]
    return f", perhaps a sum over {' or '.join(used)} that is missing in the backward" if used else ""
