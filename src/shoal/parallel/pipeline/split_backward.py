"""The second half of a split backward, as zero-bubble schedules need it: the gradients of weights.

torch's first half computes the gradients of a stage's inputs. On the way it records the gradients that reach each node
behind which there are weights but no input (`intermediates`). The second half starts from those nodes:

    output ─▶ ... ─▶ node ─▶ ... ─▶ input        first half:   records the gradients at the node      [1]
                      └────▶ weight              second half:  continues from the node with them      [2]

torch 2.11 sums the gradients of a node's several outputs as if they were one, counts twice what flows from one such
node to another [3], and loses the nodes of functions that are written in Python unless the graph stays alive [4]. torch
2.13 does not. Both count a weight twice that is in two of their groups [5], and let weights share one gradient tensor,
to which each then adds. This file is correct with both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.torch_version import TorchVersion

FORGETS_NODES = TorchVersion(torch.__version__) < "2.13"
"""Whether torch frees the node of a Python function with the graph, even if something refers to the node."""


@dataclass
class Group:
    """Weights, and the nodes that lead to these weights and to no others."""

    given: dict[Node, tuple[Tensor | None, ...]]
    """Node → the gradient of each of its outputs."""
    leaves: set[Node]
    """The nodes that accumulate the weights' gradients."""

    def touches(self, other: Group) -> bool:
        """Whether two groups have a node or a weight in common."""
        return bool(self.leaves & other.leaves or self.given.keys() & other.given.keys())


def edges_of(outputs: Iterable[Tensor]) -> list[GradientEdge]:
    """[4] Return references that keep the graph of a stage alive after its outputs are freed, if that is needed. With
    torch 2.11 the last stage so keeps the tensors that its loss has saved, too."""
    return [get_gradient_edge(output) for output in outputs if output.requires_grad] if FORGETS_NODES else []


def add_gradients_of_weights(weights: Iterable[nn.Parameter], found: Iterable[dict[str, Any]]) -> None:
    """Add the missing gradients to `.grad` of the weights. `found` are the groups of torch's first half [1]; they are
    consumed."""
    weight_of = {_leaf(weight): weight for weight in weights if weight.requires_grad}
    groups = _groups(found)
    keeps = any(len(group.given) > 1 for group in groups)  # paths between nodes of a group overlap
    while groups:
        group = groups.pop(0)
        _add_from(group.given, [weight_of[leaf] for leaf in group.leaves], keeps=keeps)


def _groups(found: Iterable[dict[str, Any]]) -> list[Group]:
    """[5] Merge torch's groups that have nodes or weights in common."""
    groups: list[Group] = []
    for one in found:
        nodes, given = one.pop("intermediates"), one.pop("grads", None)
        if given is None:  # no gradient reached it
            continue
        group = Group({node: every or () for node, every in zip(nodes, given, strict=True)}, set(one["params"]))
        for other in [other for other in groups if other.touches(group)]:
            groups.remove(other)
            group = Group(other.given | group.given, other.leaves | group.leaves)
        groups.append(group)
    return groups


def _add_from(given: dict[Node, tuple[Tensor | None, ...]], weights: Sequence[nn.Parameter], *, keeps: bool) -> None:
    """[2] Run the backward from the nodes to the weights. `keeps`: retain the graph for other groups."""
    starts = [
        (GradientEdge(node, number), gradient)
        for node, of_outputs in given.items()
        for number, gradient in enumerate(of_outputs)
        if gradient is not None
    ]
    # [3] A node behind another one receives the recorded gradients only: they include what flows to it now.
    handles = [
        node.register_prehook(lambda _, of_outputs=of_outputs: of_outputs)
        for node, of_outputs in given.items()
        if of_outputs and keeps
    ]
    try:
        edges, gradients = [edge for edge, _ in starts], [gradient for _, gradient in starts]
        torch.autograd.backward(edges, gradients, inputs=weights, retain_graph=keeps)
    finally:
        for handle in handles:
            handle.remove()


def _leaf(weight: nn.Parameter) -> Node:
    """Return the node that accumulates a weight's gradient."""
    with torch.enable_grad():
        node = weight.view_as(weight).grad_fn
    assert node is not None
    leaf = node.next_functions[0][0]
    assert leaf is not None
    return leaf
