"""The second half of a backward that was split in two, as zero-bubble schedules do it: the gradients of weights.

torch's first half finds the gradients of a stage's inputs, and writes down what each node of the graph was given on the
way, behind which there are weights (`intermediates`) but no input. The second half starts from those nodes:

    output ─▶ ... ─▶ node ─▶ ... ─▶ input        first half:   what the node was given is written down
                      └────▶ weight              second half:  from the node on, with that

torch 2.11 adds up what a node was given for its several outputs, as if they were one; counts twice what flows from one
such node to another; and of functions that are written in Python it forgets the nodes, unless somebody holds the graph.
2.13 does not. Here it is right with both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Given = tuple[Tensor | None, ...]
"""The gradient of each output of a node."""


def held_by(outputs: Iterable[Tensor]) -> list[GradientEdge]:
    """What keeps the graph of a stage alive when its outputs have left it. It costs nothing: all but the last nodes of
    the graph are behind the nodes of the second half."""
    return [get_gradient_edge(output) for output in outputs if output.requires_grad]


def add_gradients_of_weights(weights: Iterable[nn.Parameter], groups: Sequence[dict[str, Any]]) -> None:
    """Add to `.grad` of the weights what is still missing. `groups` are those that torch's first half has found; they
    are used up."""
    weight_of = {_leaf(weight): weight for weight in weights if weight.requires_grad}
    keeps = any(len(group["intermediates"]) > 1 for group in groups)  # on the way from one to the next there are others
    for group in groups:
        nodes, given = group.pop("intermediates"), group.pop("grads", None)
        if given is None:  # no gradient came this way
            continue
        leaves = list(group["params"])
        found = _from(nodes, [one or () for one in given], leaves, keeps=keeps)
        for leaf, gradient in zip(leaves, found, strict=True):
            weight = weight_of[leaf]
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _from(
    nodes: Iterable[Node], given: Iterable[Given], leaves: Iterable[Node], *, keeps: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of leaves, from nodes and what they were given on. `keeps`: the graph, for whoever comes next."""
    starts = [
        (GradientEdge(node, number), gradient)
        for node, all_of in zip(nodes, given, strict=True)
        for number, gradient in enumerate(all_of)
        if gradient is not None
    ]
    # A node behind another one is given what it was given before, whatever flows to it now: that was part of it.
    handles = [
        node.register_prehook(lambda _, all_of=all_of: all_of)
        for node, all_of in zip(nodes, given, strict=True)
        if all_of and keeps
    ]
    try:
        edges, gradients = [edge for edge, _ in starts], [gradient for _, gradient in starts]
        return torch.autograd.grad(
            edges, [GradientEdge(leaf, 0) for leaf in leaves], gradients, retain_graph=keeps, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()


def _leaf(weight: nn.Parameter) -> Node:
    """The node that adds to a weight's gradient."""
    with torch.enable_grad():
        node = weight.view_as(weight).grad_fn
    assert node is not None
    leaf = node.next_functions[0][0]
    assert leaf is not None
    return leaf
