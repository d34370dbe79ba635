"""What the loss is that a model computes itself, read from its autograd graph.

The first batch does not show it by values alone. Class weights cancel in a microbatch of one class, the first label
that is left out may come later, and a term of routers may be smaller than what is rounded. The graph has all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.data.batch import IGNORE
from shoal.train.loss.autograd_graph import MEAN, MODEL, children_of, is_by_number, root_of

_SAME = ("ToCopyBackward", "CloneBackward", "AliasBackward", "ViewBackward")
_LOSS = "NllLoss"
_MAX_NODES = 200


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """What a graph shows of a loss. A kernel without a graph, or an evaluation, shows nothing."""

    target: Tensor | None = None
    """The targets of a plain mean cross-entropy; None: not visible."""
    other: str = ""
    """What the loss does beside that; empty: nothing, or not visible."""
    ignored: int | None = None
    """A class whose labels are left out."""
    has_terms: bool = False
    """Whether it is a sum of several terms."""


def read_own_loss(own: Tensor, num_classes: int) -> OwnLoss:
    """Compare the graph of a loss with that of `F.cross_entropy(logits, labels)`."""
    root = root_of(own)
    terms, losses = list(_terms(root)), list(_cross_entropies(root))
    if len(terms) > 1:
        return OwnLoss(other="has another term, such as a loss of routers or label smoothing", has_terms=True)
    if not losses:
        return OwnLoss()
    if losses != terms or losses[0]._saved_reduction != MEAN:
        return OwnLoss(other="is put together otherwise than by the mean of torch's cross-entropy")
    weight, ignored = losses[0]._saved_weight, _signed(losses[0]._saved_ignore_index)
    if weight is not None and not bool((weight == weight.flatten()[0]).all()):  # equal weights cancel in a mean
        return OwnLoss(other="weights classes")
    # Labels that are no class are rejected in every batch, so it does not matter if the model ignores them.
    if ignored != IGNORE and 0 <= ignored < num_classes:
        return OwnLoss(other=f"ignores labels of {ignored}, and shoal those of {IGNORE}", ignored=ignored)
    return OwnLoss(losses[0]._saved_target.flatten())


def _terms(node: Any) -> Iterator[Any]:
    """The nodes of the differentiable terms of a sum. A term times the number 0 is none, such as the sum of unused
    parameters. Other numbers change the value, which is compared."""
    stack = [node]
    while stack:
        node = stack.pop()
        name, inputs = ("", []) if node is None else (node.name(), children_of(node))
        is_scaled = name.startswith(("MulBackward", "DivBackward")) and is_by_number(node)
        if name.startswith(("AddBackward", "SubBackward")) or (len(inputs) == 1 and name.startswith(_SAME)):
            stack += inputs
        elif node is None or _is_times_zero(node):
            continue
        elif len(inputs) == 1 and is_scaled:
            stack += inputs
        else:
            yield node


def _is_times_zero(node: Any) -> bool:
    """Whether a chain of operations with one input has a product with the number 0."""
    while node is not None:
        inputs = children_of(node)
        if node.name().startswith("MulBackward") and len(inputs) == 1 and is_by_number(node):
            numbers = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
            if any(number is not None and not number for number in numbers):
                return True
        node = inputs[0] if len(inputs) == 1 else None
    return False


def _cross_entropies(node: Any) -> Iterator[Any]:
    """The nodes of torch's cross-entropy, those nearest to the loss first. The model below is not searched."""
    queue, seen = deque([node]), {node}
    while queue and len(seen) < _MAX_NODES:
        node = queue.popleft()
        name = "" if node is None else node.name()
        if name.startswith(_LOSS):
            yield node
        elif not name.startswith(MODEL) and not isinstance(node, torch.autograd.function.BackwardCFunction):
            more = [child for child in children_of(node) if child not in seen]
            seen.update(more)
            queue += more


def _signed(label: int) -> int:
    """torch shows a negative number as an unsigned one."""
    return label - 2**64 if label >= 2**63 else label
