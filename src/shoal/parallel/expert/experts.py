"""`ep`: the experts of each layer divided over ranks that see different samples; tokens are sent to their experts.

torch has an all-to-all without a gradient, and a grouped matmul for one device. This file adds the rest: dispatch and
combine. Rows are sorted by expert [1], sent to the expert's rank [2], sorted again [3], computed in one grouped matmul
[4], sent back [5] and summed per token [6]. Only routed rows are sent, without padding. Two ranks, four experts,
top_k=2 (a2: a token of rank 0 for expert 2):

             tokens    by expert [1]          [2]         received         by expert [3]    computed by [4]
    rank 0   a b       a0 b1 │ a2 b2  ─┐ all  ┌▶  a0 b1 c0 d1      a0 c0 b1 d1      experts 0 and 1
    rank 1   c d       c0 d1 │ d2 c3  ─┘to all└▶  a2 b2 d2 c3      a2 b2 d2 c3      experts 2 and 3

The results take the same way back, and the backward takes both ways once more.

Weights are matrices of (experts · features) rows, so that sharding them by rows over any number of ranks is even.

Shapes: T tokens, D model dim, F feed-forward dim, E experts of all ranks, L experts of this rank, R rows, k experts per
token, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.layout import divisors
from shoal.comm.autograd_function import as_output, differentiable_once
from shoal.comm.collectives import Group, part
from shoal.errors import ShoalError, listed
from shoal.numerics.ops.experts.fused import fused_experts, has_fused_experts
from shoal.numerics.ops.experts.grouped_matmul import gated, grouped_matmul
from shoal.numerics.precision import in_autocast_dtype
from shoal.parallel.expert.router import Routing

WEIGHTS = ("gate_proj", "up_proj", "down_proj")
Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Rows sorted by expert (R, D), where those of each expert of this rank end, and weights (R,), or None → (R, D)."""

_all_to_all: Any = dist.all_to_all_single


class ExpertParallel:
    """The ep group of a rank. Without a group every expert is local."""

    def __init__(self, group: Group = None, *, comm_device: torch.device | None = None) -> None:
        self.group = group
        self.comm_device = comm_device
        """The device that tensors are sent from; None: their own. gloo has no all-to-all for CUDA tensors."""
        self.degree = 1 if group is None else group.size()
        self.index = 0 if group is None else dist.get_rank(group)

    def exchange(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send rows, ordered by target rank; return the received rows, ordered by source rank."""
        there = x if self.comm_device is None else x.to(self.comm_device)
        arrived = there.new_empty(sum(receive), *x.shape[1:])
        _all_to_all(arrived, there.contiguous(), receive, send, group=self.group)
        return arrived.to(x.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Return the same object: all parts of a model share it, and groups cannot be copied."""
        return self


class Experts(nn.Module):
    """The experts of a mixture of experts: gated feed-forwards (SwiGLU), which `ep` divides over ranks.

    hidden       features of a token
    ffn          features inside of an expert
    num_experts  experts on all ranks together

    A `Router` chooses the experts of each token, and records its loss and loads on their output:

        routing, *facts = self.router(x)  # x: (batch, tokens, hidden)
        y = self.experts(x.flatten(0, 1), routing).view_as(x)
        y = self.router.attach_aux_loss(y, *facts)
    """

    def __init__(self, hidden: int, ffn: int, num_experts: int) -> None:
        super().__init__()
        self.hidden, self.ffn = hidden, ffn
        self.num_experts = num_experts
        """The number on all ranks together."""
        self.gate_proj = nn.Parameter(torch.empty(num_experts * ffn, hidden))
        self.up_proj = nn.Parameter(torch.empty(num_experts * ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts * hidden, ffn))
        self.parallel: ExpertParallel | None = None
        self.reset_parameters()

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"hidden={self.hidden}, ffn={self.ffn}, num_experts={self.num_experts}"

    def reset_parameters(self) -> None:
        """Initialize the weights, if no enclosing module does."""
        for name in WEIGHTS:
            nn.init.normal_(getattr(self, name), std=0.02)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Return y_TD: for each token the sum over its experts of weight · expert(x)."""
        _check_call(self, x_TD, routing)
        x_TD = in_autocast_dtype(x_TD)
        is_local = self.parallel is None or self.parallel.group is None
        if is_local and routing.top_k is not None and has_fused_experts(x_TD, self.down_proj):
            expert_Tk, weight_Tk = (x.view(-1, routing.top_k) for x in (routing.expert_R, routing.weight_R))
            return fused_experts(x_TD, expert_Tk, weight_Tk, self.gate_proj, self.up_proj, self.down_proj)
        return dispatched(x_TD, routing, self.num_experts, self._computed, self.parallel)

    def _computed(self, x_RD: Tensor, ends_L: Tensor, weight_R: Tensor | None) -> Tensor:
        """Compute the experts of this rank for rows that are sorted by expert. The weight of a row is multiplied in
        before the last product: so the backward does not need the output."""
        gate_LDF = in_autocast_dtype(self.gate_proj).view(-1, self.ffn, self.hidden).transpose(1, 2)
        up_LDF = in_autocast_dtype(self.up_proj).view(-1, self.ffn, self.hidden).transpose(1, 2)
        down_LFD = in_autocast_dtype(self.down_proj).view(-1, self.hidden, self.ffn).transpose(1, 2)
        gate_RF = grouped_matmul(x_RD, gate_LDF, ends_L)
        up_RF = grouped_matmul(x_RD, up_LDF, ends_L)
        return grouped_matmul(gated(gate_RF, up_RF, weight_R), down_LFD, ends_L)


class Dispatch(nn.Module):
    """Sends tokens to experts that are no `Experts`: a submodule of theirs, in the attribute `DISPATCH`, which they
    call. Dim 0 of all parameters of such experts are the experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.parallel: ExpertParallel | None = None

    def forward(self, x_TD: Tensor, routing: Routing, compute: Compute) -> Tensor:
        """Return y_TD: for each token the sum over its experts of weight · expert(x)."""
        return dispatched(x_TD, routing, self.num_experts, compute, self.parallel)


DISPATCH = "shoal_dispatch"


def dispatched(
    x_TD: Tensor, routing: Routing, num_experts: int, compute: Compute, parallel: ExpertParallel | None
) -> Tensor:
    """Let each token be computed by its experts, wherever they are."""
    rows = sorted_rows(routing, num_experts)  # [1]
    x_RD = spread(x_TD, rows)
    weight_R = routing.weight_R.gather(0, rows.order_R)
    if parallel is None or parallel.group is None or x_TD.is_meta:
        return collect(compute(x_RD, rows.ends_E, weight_R), rows)  # [4], [6]
    y_RD = _visited(num_experts, compute, x_RD, rows.ends_E, parallel)
    return collect(y_RD * weight_R[:, None].to(y_RD.dtype), rows)  # [6] weights are known on this rank only


def _check_call(experts: Experts, x_TD: Tensor, routing: Any) -> None:
    """Reject the three common mistakes in a call of experts."""
    right = "routing, *facts = router(x); y = experts(x.flatten(0, 1), routing).view_as(x)"
    if not isinstance(routing, Routing):
        raise ShoalError(f"experts must be called with a Routing, got {type(routing).__name__}", fix=right, code="M036")
    if x_TD.dim() != 2:
        raise ShoalError(
            f"experts must be called with flat tokens, (tokens, features), got shape {tuple(x_TD.shape)}",
            fix=right,
            code="M036",
        )
    if routing.num_experts not in (None, experts.num_experts):
        raise ShoalError(
            f"num_experts of the router must be {experts.num_experts}, got {routing.num_experts}",
            fix=f"shoal.Router(..., num_experts={experts.num_experts})",
            code="M036",
        )


def divide(experts: nn.Module, parallel: ExpertParallel) -> None:
    """Keep the experts of this rank, in place, under the same names."""
    dispatch: Any = experts if isinstance(experts, Experts) else getattr(experts, DISPATCH)
    if dispatch.num_experts % parallel.degree:
        raise ShoalError(
            f"num_experts={dispatch.num_experts} must be divisible by ep={parallel.degree}",
            fix=f"ep={listed(divisors(dispatch.num_experts)[:8])}",
            code="P039",
        )
    if others := list(_undivided(experts, dispatch.num_experts)):
        known = ", ".join(WEIGHTS) if isinstance(experts, Experts) else "tensors with a row for each expert"
        raise ShoalError(
            f"{type(experts).__name__} also has {', '.join(others)}, and ep divides only {known}",
            fix="move them to another module, or ep=1",
            code="M037",
        )
    dispatch.parallel = parallel
    if parallel.group is None:
        return
    for name, full in list(experts.named_parameters(recurse=False)):
        own = part(full.detach(), 0, index=parallel.index, degree=parallel.degree).clone()
        setattr(experts, name, nn.Parameter(own, requires_grad=full.requires_grad))


def _undivided(experts: nn.Module, num_experts: int) -> Iterator[str]:
    """Parameters that are not of single experts."""
    for name, parameter in experts.named_parameters():
        is_known = name in WEIGHTS if isinstance(experts, Experts) else parameter.shape[0] == num_experts
        if not is_known or "." in name:
            yield name


def experts_in(model: nn.Module) -> dict[str, Any]:
    """Map full names to experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Experts) or isinstance(getattr(module, DISPATCH, None), Dispatch)
    }


# ---- over the ranks of a group --------------------------------------------------------------------------------------


# the number of rows per rank is known on the host only
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _visited(num_experts: int, compute: Compute, x_RD: Tensor, ends_E: Tensor, parallel: ExpertParallel) -> Tensor:
    """Compute the experts of all ranks for the rows of this one, which are sorted by expert."""
    num_local = num_experts // parallel.degree
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    ones = [num_local] * parallel.degree
    # Counts travel first: a rank must know the size of what it receives.
    arriving_PL = parallel.exchange(counts_E, ones, ones).view(parallel.degree, num_local)
    splits = torch.stack([counts_E.view_as(arriving_PL).sum(1), arriving_PL.sum(1)])
    send, receive = splits.tolist()  # the only time that the host waits
    arrived_RD = _exchanged(x_RD, send, receive, parallel)  # [2]
    by_expert = rows_by_expert(arriving_PL, sum(receive))  # [3] rows of one expert come from several ranks
    y_RD = collect(compute(spread(arrived_RD, by_expert), by_expert.ends_E, None), by_expert)  # [4]
    return _exchanged(y_RD, receive, send, parallel)  # [5]


def _exchanged(x_RD: Tensor, send: list[int], receive: list[int], parallel: ExpertParallel) -> Tensor:
    arrived: Tensor = _Exchange.apply(x_RD, send, receive, parallel)  # type: ignore[no-untyped-call]
    return arrived


class _Exchange(torch.autograd.Function):
    """Forward: rows to their ranks. Backward: gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, send: list[int], receive: list[int], parallel: ExpertParallel) -> Tensor:
        ctx.way_back, ctx.parallel = (receive, send), parallel
        return parallel.exchange(x_RD, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        return ctx.parallel.exchange(grads[0], *ctx.way_back), None, None, None


# ---- rows sorted by expert ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The rows of a routing in the order of their experts."""

    order_R: Tensor
    """The row at each place."""

    token_R: Tensor
    """Its token."""

    ends_E: Tensor
    """Where the rows of each expert end; int32."""

    place_Tk: Tensor | None
    """The places of each token's rows. None: the number of rows differs between tokens."""

    num_tokens: int


def sorted_rows(routing: Routing, num_experts: int) -> SortedRows:
    """Sort rows by expert, without a wait of the host."""
    expert_R, order_R = routing.expert_R.sort(stable=True)
    every_E = torch.arange(num_experts, device=expert_R.device)
    ends_E = torch.searchsorted(expert_R, every_E, right=True, out_int32=True)
    if routing.top_k is None:
        return SortedRows(order_R, routing.token_R[order_R], ends_E, None, routing.num_tokens)
    place_Tk = inverse(order_R).view(-1, routing.top_k)
    return SortedRows(order_R, order_R // routing.top_k, ends_E, place_Tk, routing.num_tokens)


def rows_by_expert(arriving_PL: Tensor, num_rows: int) -> SortedRows:
    """Reorder rows from (rank, expert) to (expert, rank)."""
    expert_PL = torch.arange(arriving_PL.shape[1], device=arriving_PL.device).expand_as(arriving_PL)
    expert_R = expert_PL.flatten().repeat_interleave(arriving_PL.flatten(), output_size=num_rows)
    order_R = expert_R.argsort(stable=True)
    ends_L = arriving_PL.sum(0).cumsum(0, dtype=torch.int32)
    return SortedRows(order_R, order_R, ends_L, inverse(order_R)[:, None], num_rows)


def inverse(order_R: Tensor) -> Tensor:
    """Return the new place of each row."""
    places_R = torch.arange(order_R.shape[0], device=order_R.device)
    return torch.empty_like(order_R).scatter_(0, order_R, places_R)


def spread(x_TD: Tensor, rows: SortedRows) -> Tensor:
    """Copy each row's token."""
    x_RD: Tensor = _Spread.apply(x_TD, rows.token_R, rows.place_Tk, rows.num_tokens)  # type: ignore[no-untyped-call]
    return x_RD


def collect(y_RD: Tensor, rows: SortedRows) -> Tensor:
    """Sum the rows of each token."""
    y_TD: Tensor = _Collect.apply(y_RD, rows.token_R, rows.place_Tk, rows.num_tokens)  # type: ignore[no-untyped-call]
    return y_TD


class _Spread(torch.autograd.Function):
    """Each of these two is the other's backward. torch's own backward of an index adds rows in any order, one atomic
    operation each. If the rows of each token are known, they can be read and summed in order instead."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, place_Tk: Tensor | None, num_tokens: int) -> Tensor:
        ctx.save_for_backward(token_R, place_Tk)
        ctx.num_tokens = num_tokens
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        token_R, place_Tk = ctx.saved_tensors
        return _sum_of_rows(grads[0], token_R, place_Tk, ctx.num_tokens), None, None, None


class _Collect(torch.autograd.Function):
    """The transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, place_Tk: Tensor | None, num_tokens: int) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sum_of_rows(y_RD, token_R, place_Tk, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        (token_R,) = ctx.saved_tensors
        return grads[0].index_select(0, token_R), None, None, None


def _sum_of_rows(y_RD: Tensor, token_R: Tensor, place_Tk: Tensor | None, num_tokens: int) -> Tensor:
    if place_Tk is None:
        return as_output(y_RD.new_zeros(num_tokens, y_RD.shape[1]).index_add_(0, token_R, y_RD))
    if place_Tk.shape[1] == 1:
        return y_RD.index_select(0, place_Tk[:, 0])
    if torch.compiler.is_compiling():
        return y_RD[place_Tk].sum(1)  # the compiler makes one kernel of it
    return F.embedding_bag(place_Tk, y_RD, mode="sum")  # one kernel as well, which adds in float32 or wider
