"""Find the reductions that a scalar was computed by, and their counts, from its autograd graph.

A count is used only if it is that of the one reduction over the batch. Decisions depend on the structure of the graph,
never on values, so that every rank and every microbatch decides equally.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SAME = ("ToCopyBackward", "CloneBackward", "AliasBackward", "ViewBackward", "SqueezeBackward", "NegBackward")
_MAX_NODES = 200
MEAN, _SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_WEIGHTED = ("AddmmBackward", "MmBackward", "BmmBackward", "MvBackward", "LinearBackward", "ConvolutionBackward")
MODEL = (*_WEIGHTED, "EmbeddingBackward", "CompiledFunctionBackward", "torch::autograd::AccumulateGrad")
"""Operations of a model, where the search for reductions ends."""
_OTHER = ("Logsumexp", "Amax", "Amin", "LinalgVectorNorm", "Norm", "Var", "Std", "Prod", "Max", "Min", "Median")
_OTHER_REDUCTIONS = tuple(f"{name}Backward" for name in _OTHER)
_CURVES = (
    *("Sqrt", "Rsqrt", "Log", "Log1P", "Log2", "Log10", "Exp", "Expm1", "Pow", "Abs", "Sigmoid", "Tanh", "Softplus"),
    *("Reciprocal", "Clamp", "Relu", "Maximum", "Minimum"),
)
_NONLINEAR = (*(f"{name}Backward" for name in _CURVES), *_OTHER_REDUCTIONS)
"""Operations of one number, or to one, whose mean over microbatches is not that of the whole batch."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A reduction over elements, at the end of a graph of scalars. Without a count, it is another operation."""

    count: Tensor | float | None = None
    is_sum: bool = False
    """Whether it is a sum that is neither divided nor multiplied."""
    node: Any = None
    source: Any = None
    """The node that the count was read from."""
    is_nonlinear: bool = False
    """Whether it is another function of the batch than a mean or a sum, such as the root of a mean."""
    divisor: float | None = None
    """The Python number by which a mean is divided; None: by none, or by several."""


def leaves_of(node: Any) -> Iterator[Leaf]:
    """The reductions that a scalar is a linear combination of."""
    num_seen = 0
    stack: list[tuple[Any, Any, bool]] = [(node, None, False)]
    while stack:
        node, division, is_scaled = stack.pop()
        num_seen += 1
        name = "" if node is None else node.name()
        children = children_of(node)
        if num_seen > _MAX_NODES:
            yield Leaf()
            return
        if name.startswith(("AddBackward", "SubBackward")) and children:
            stack += [(child, division, is_scaled) for child in children]
        elif len(children) == 1 and (name.startswith(_SAME) or _is_of_reduced_number(node, name)):
            stack.append((children[0], division, is_scaled))
        elif name.startswith("MulBackward") and len(children) == 1 and is_by_number(node):
            stack.append((children[0], division, True))
        elif name.startswith("DivBackward") and len(children) == 1:
            stack.append((children[0], node if division is None else math.nan, is_scaled))
        elif _is_nonlinear(name, children):
            yield Leaf(is_nonlinear=True)
        else:
            yield _leaf(node, name, division, is_scaled)


def common_count(leaves: list[Leaf]) -> Tensor | float | None:
    """The common count; None: one is not known, or they may differ."""
    if not leaves or any(leaf.count is None for leaf in leaves):
        return None
    if all(leaf.source is leaves[0].source for leaf in leaves):
        return leaves[0].count
    return _count_of_smoothed(leaves)


def _is_nonlinear(name: str, children: list[Any]) -> bool:
    """Whether a number is a nonlinear function of the batch: a curve, or a product of two numbers of it."""
    if name.startswith(("MulBackward", "DivBackward")):
        return len(children) == 2 and all(_sees_data(child) for child in children)
    return name.startswith(_NONLINEAR) and any(_sees_data(child) for child in children)


def _sees_data(node: Any) -> bool:
    """Whether a node depends on the batch, and not on parameters alone, such as a penalty on weights."""
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        name = node.name()
        is_first_layer = name.startswith(_WEIGHTED) and any(child is None for child, _ in node.next_functions)
        is_opaque = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_first_layer or is_opaque or name.startswith(("EmbeddingBackward", "CompiledFunctionBackward")):
            return True
        more = [child for child in children_of(node) if child not in seen]
        seen.update(more)
        if len(seen) > _MAX_NODES:
            return True
        stack += more
    return False


def root_of(value: Tensor) -> Any:
    """The node that a value was computed by."""
    return _below_sink(value.grad_fn, value.output_nr)


def children_of(node: Any) -> list[Any]:
    """The nodes of a node's inputs; inputs without a gradient have none."""
    inputs = [] if node is None else [_below_sink(*edge) for edge in node.next_functions]
    return [child for child in inputs if child is not None]


def _below_sink(node: Any, output: int) -> Any:
    """torch's DDP puts one node over all outputs of a model, if that may leave parameters out."""
    is_sink = node is not None and node.name().startswith("_DDPSink")
    return node.next_functions[output][0] if is_sink else node


def _reduction(node: Any, name: str) -> int | None:
    """Whether a reduction is a mean or a sum; None: it is no reduction."""
    if name.startswith("MeanBackward"):
        return MEAN
    if name.startswith("SumBackward"):
        return _SUM
    reduction: int | None = getattr(node, "_saved_reduction", None)
    return reduction


def _is_of_reduced_number(node: Any, name: str) -> bool:
    """Whether it is a mean or a sum of one number that was reduced before."""
    if not name.startswith(("MeanBackward", "SumBackward")) or math.prod(node._saved_self_sym_sizes) != 1:
        return False
    return not node._saved_self_sym_sizes or _reduced_below(node) is not None


def _leaf(node: Any, name: str, division: Any, is_scaled: bool) -> Leaf:
    reduction = _reduction(node, name)
    if reduction not in (MEAN, _SUM):
        return Leaf()
    below = _reduced_below(node)
    if reduction == _SUM and division is None:
        return Leaf(is_sum=below in (None, _SUM) and not is_scaled)
    if below is not None:
        return Leaf()
    if reduction == MEAN and division is not None and not is_by_number(division):
        return Leaf()
    if reduction == MEAN:
        has_one = division is not None and not isinstance(division, float)
        divisor = float(division._saved_other) if has_one else None
        return Leaf(_num_counted(node, name), node=node, source=node, divisor=divisor)
    count = None if isinstance(division, float) else _as_count(division._saved_other)
    return Leaf(count, node=node, source=division)


def is_by_number(node: Any) -> bool:
    """Whether a product or a quotient is by a Python number and not by a tensor, which may be a count. The graph has a
    Python number as a tensor of 8 bytes in host memory."""
    if isinstance(node, float):
        return False
    others = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    return all(
        one.device.type == "cpu" and not one.dim() and one.dtype.itemsize == 8
        for one in others
        if isinstance(one, Tensor)
    )


def _as_count(other: Any) -> Tensor | float | None:
    """The divisor; None if it is not one number."""
    if not isinstance(other, Tensor):
        return float(other)
    return other.detach() if not other.dim() else None


def labels_of(leaf: Leaf) -> tuple[Tensor, int] | None:
    """How many labels a sum of torch's cross-entropy counts, and how many there are; None: it is another reduction."""
    node = leaf.node
    if leaf.source is node or node is None or not node.name().startswith("NllLoss") or node._saved_weight is not None:
        return None
    return node._saved_total_weight.detach(), node._saved_target.numel()


def _num_counted(node: Any, name: str) -> Tensor | float:
    if name.startswith("NllLoss"):
        weight: Tensor = node._saved_total_weight
        return weight.detach()
    if name.startswith("MeanBackward"):
        return float(node._saved_self_sym_numel)
    return float(node._saved_self.numel())


# ---- below a reduction -----------------------------------------------------------------------------------------------


def _reduced_below(node: Any) -> int | None:
    """Whether the input of a reduction was reduced over samples before: only by sums (`_SUM`), or otherwise (`MEAN`),
    when its number of elements is not that of the batch. None: it was not."""
    stack, seen, found = children_of(node), {node}, set()
    has_rows_reduced = has_moved_samples = False
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MAX_NODES:
            return MEAN
        name = node.name()
        found.add(_reduction_of_samples(node, name))
        has_rows_reduced |= name.startswith(("MeanBackward", "SumBackward"))
        has_moved_samples |= _moves_samples(node, name)
        if not name.startswith(MODEL) and not isinstance(node, torch.autograd.function.BackwardCFunction):
            stack += children_of(node)
    if has_rows_reduced and has_moved_samples:
        return MEAN
    return MEAN if MEAN in found else _SUM if _SUM in found else None


def _reduction_of_samples(node: Any, name: str) -> int | None:
    """The kind of a reduction over all dimensions, or over the first; None: it is none."""
    reduction = _reduction(node, name)
    if name.startswith(("MeanBackward", "SumBackward")):
        return reduction if _is_over_first(node) else None
    if reduction in (MEAN, _SUM):
        return reduction
    is_other = name.startswith(_OTHER_REDUCTIONS) and _is_over_first(node)
    return MEAN if is_other or _makes_a_number(node, name) else None


def _is_over_first(node: Any) -> bool:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    values = getattr(node, "_saved_self", None) if sizes is None else None
    num_dims = len(sizes) if sizes is not None else values.dim() if isinstance(values, Tensor) else 0
    dims = getattr(node, "_saved_dim", None)
    if dims is None or dims == ():
        return True
    return any(_signed(dim) in (0, -num_dims) for dim in ([dims] if isinstance(dims, int) else dims))


def _moves_samples(node: Any, name: str) -> bool:
    """Whether the first dimension is moved."""
    if name.startswith("TransposeBackward"):
        dims = {_signed(node._saved_dim0), _signed(node._saved_dim1)}
        num_dims = len(_shapes(node)[0]) if _shapes(node) else 0
        return bool(dims & {0, -num_dims}) and len(dims) > 1
    if name.startswith("PermuteBackward"):
        return _signed(node._saved_dims[0]) not in (0, -len(node._saved_dims))
    return name.startswith("TBackward")


def _makes_a_number(node: Any, name: str) -> bool:
    """Whether a node turns a tensor into one number."""
    if name.startswith("torch::autograd::AccumulateGrad") or () not in _shapes(node):
        return False
    is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    return is_custom or any(shape for child in children_of(node) for shape in _shapes(child))


def _shapes(node: Any) -> list[tuple[int, ...]]:
    """The shapes of a node's forward outputs."""
    return [tuple(one.shape) for one in getattr(node, "_input_metadata", [])]


def _signed(number: int) -> int:
    """torch shows a negative dimension as an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


# ---- label smoothing -------------------------------------------------------------------------------------------------


def _count_of_smoothed(leaves: list[Leaf]) -> Tensor | float | None:
    """The count of torch's cross-entropy with label smoothing, whose two terms are means over the same targets."""
    if len(leaves) != 2:
        return None
    plain, smooth = sorted(leaves, key=lambda leaf: not leaf.node.name().startswith("NllLoss"))
    if not plain.node.name().startswith("NllLoss"):
        return None
    path = ("SumBackward0", "MaskedFillBackward", "NegBackward", "SumBackward1")
    node = smooth.node
    for name in path:
        if node is None or not node.name().startswith(name):
            return None
        node = (children_of(node) or [None])[0]
    log_softmax = _log_softmax(node)
    return plain.count if log_softmax is not None and log_softmax is _log_softmax(plain.node) else None


def _log_softmax(node: Any) -> Any:
    """The log-softmax from which a node was computed, within a few steps."""
    for _ in range(5):
        if node is None or node.name().startswith("LogSoftmaxBackward"):
            return node
        node = (children_of(node) or [None])[0]
    return None
