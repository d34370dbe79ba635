"""Optimizers that evaluate other weights than they train: those of the library `schedulefree` (Defazio et al. 2024).

Gradients are taken at y, and the result of training is x, an average. `optimizer.eval()` puts x into the parameters and
`optimizer.train()` puts y there. A run evaluates, returns and saves x. A checkpoint has x, the states, and the numbers
of each group, from which y follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.train.run_state import RunState

NUMBERS = ("k", "weight_sum", "lr_max", "scheduled_lr")
"""Of a group: its steps, the sum of the weights of its average, and learning rates."""


def has_evaluation_weights(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer evaluates other weights than it trains."""
    return optimizer is not None and all("train_mode" in group for group in optimizer.param_groups)


@contextmanager
def evaluation_weights(run: RunState) -> Iterator[None]:
    """Inside, the model has the weights that its optimizer evaluates; afterwards those that it trains."""
    optimizer: Any = run.prepared_optimizer
    if not has_evaluation_weights(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield
        return
    for what, is_used in (("an EMA", run.ema is not None), ("offload=optimizer", run.host_copies is not None)):
        if is_used:
            raise ShoalError(
                f"{type(optimizer).__name__} evaluates other weights than it trains, which {what} does not know",
                fix=f"a run without {what}; or shoal.AdamW",
                code="T073",
            )
    optimizer.eval()
    run.composed.after_evaluation()  # a copy that is still gathered would be used in place of the new one
    try:
        yield
    finally:
        optimizer.train()
        run.composed.after_evaluation()


def saved_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint has of the groups of such an optimizer."""
    if not has_evaluation_weights(optimizer):
        return {}
    return {"averaging": [{name: group[name] for name in NUMBERS if name in group} for group in optimizer.param_groups]}


def restore_numbers(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Set the numbers of a checkpoint, whose weights are those of the evaluation."""
    known = state.get("averaging", [])
    if not has_evaluation_weights(optimizer) or len(known) != len(optimizer.param_groups):
        return
    was_training = optimizer.param_groups[0]["train_mode"]
    for group, numbers in zip(optimizer.param_groups, known, strict=True):
        group.update({name: type(group[name])(numbers[name]) for name in NUMBERS if name in numbers}, train_mode=False)
    if was_training:
        optimizer.train()
