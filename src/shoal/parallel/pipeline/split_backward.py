"""The second half of a backward that was split in two, as zero-bubble schedules do it: the gradients of weights.

torch's first half finds the gradients of a stage's inputs, and writes down what each node of the graph was given on the
way, behind which there are weights (`intermediates`) but no input. The second half starts from those nodes:

    output ─▶ ... ─▶ node ─▶ ... ─▶ input        first half:   what the node was given is written down
                      └────▶ weight              second half:  from the node on, with that

torch 2.11 adds up what a node was given for its several outputs, as if they were one; counts twice what flows from one
such node to another; and of functions that are written in Python it forgets the nodes, unless somebody holds the graph.
torch 2.13 does not. Both count a weight twice that is in two of their groups, and let weights share one gradient, to
which each then adds. Here it is right with both.
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
"""Whether the node of a function that is written in Python ends with the graph, whoever has it."""


@dataclass
class Group:
    """Weights and the nodes from which they are reached, and from which no others are."""

    given: dict[Node, tuple[Tensor | None, ...]]
    """Node → the gradient of each of its outputs."""
    leaves: set[Node]
    """The nodes that add to the weights' gradients."""

    def touches(self, other: Group) -> bool:
        """Whether they are one."""
        return bool(self.leaves & other.leaves or self.given.keys() & other.given.keys())


def edges_of(outputs: Iterable[Tensor]) -> list[GradientEdge]:
    """What keeps the graph of a stage alive when its outputs have left it, if that is needed. With torch 2.11 the last
    stage so keeps what its loss has kept, too."""
    return [get_gradient_edge(output) for output in outputs if output.requires_grad] if FORGETS_NODES else []


def add_gradients_of_weights(weights: Iterable[nn.Parameter], found: Iterable[dict[str, Any]]) -> None:
    """Add to `.grad` of the weights what is still missing. `found` are the groups of torch's first half; they are used
    up."""
    weight_of = {_leaf(weight): weight for weight in weights if weight.requires_grad}
    groups = _groups(found)
    keeps = any(len(group.given) > 1 for group in groups)  # on the way from one node to the next there are others
    while groups:
        group = groups.pop(0)
        _add_from(group.given, [weight_of[leaf] for leaf in group.leaves], keeps=keeps)


def _groups(found: Iterable[dict[str, Any]]) -> list[Group]:
    """What was given to nodes and weights that belong together. torch's groups may have some of them in common."""
    groups: list[Group] = []
    for one in found:
        nodes, given = one.pop("intermediates"), one.pop("grads", None)
        if given is None:  # no gradient came this way
            continue
        group = Group({node: every or () for node, every in zip(nodes, given, strict=True)}, set(one["params"]))
        for other in [other for other in groups if other.touches(group)]:
            groups.remove(other)
            group = Group(other.given | group.given, other.leaves | group.leaves)
        groups.append(group)
    return groups


def _add_from(given: dict[Node, tuple[Tensor | None, ...]], weights: Sequence[nn.Parameter], *, keeps: bool) -> None:
    """Go from the nodes on to the weights. `keeps`: the graph, for whoever comes next."""
    starts = [
        (GradientEdge(node, number), gradient)
        for node, of_outputs in given.items()
        for number, gradient in enumerate(of_outputs)
        if gradient is not None
    ]
    # A node behind another one is given what it was given before, whatever flows to it now: that was part of it.
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
    """The node that adds to a weight's gradient."""
    with torch.enable_grad():
        node = weight.view_as(weight).grad_fn
    assert node is not None
    leaf = node.next_functions[0][0]
    assert leaf is not None
    return leaf
