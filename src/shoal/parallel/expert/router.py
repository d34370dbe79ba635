"""Routers: which expert computes which token, and how the load of the experts is balanced.

torch has no router. The common ones balance the tokens of a microbatch, so that a token's result depends on the other
samples in it, and one batch gives other numbers on other layouts. Here everything that depends on several tokens
depends on **one sequence**: capacity, expert choice, the auxiliary loss, the z-loss. One sequence, four tokens, four
experts, top_k=2, capacity 2 (= ceil(1.0 · 4 tokens · 2 / 4 experts)):

    token choice       e0  e1  e2  e3        with capacity       e0  e1  e2  e3        expert choice   e0  e1  e2  e3
      t0               .6  .3                  t0                .6   -                  t0            .6
      t1               .5      .4              t1                 -      .4              t1            .5      .4
      t2                   .7      .2          t2                    .7      .2          t2                .7      .2
      t3               .7  .5                  t3                .7  .5                  t3            .7  .5  .1  .1
    rows                3   3   1   1        the best two stay    2   2   1   1        each takes two   ...

If a sequence is divided over ranks (context or sequence parallelism), the ranks of `AuxLoss.group` have equal parts of
it and decide together. Only the bias that balances without a loss depends on the full batch, once a step.

Expert choice depends on later tokens of the sequence: in a causal model that is a leak, which generation does not have.

Shapes: B batch, T tokens of this rank, S tokens of the full sequence, D model dim, E experts, k experts per token,
C capacity, R rows: pairs of a token and an expert that computes it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group, all_gather, all_reduce, my_part
from shoal.errors import Problem, ShoalError, listed, raise_if
from shoal.numerics.ops.experts.split_product import has_split_product, split_product
from shoal.parallel.expert.aux_loss import AuxLoss

SCORES = ("softmax", "sigmoid")
CHOICES = ("token", "expert")


@dataclass(frozen=True, slots=True)
class Routing:
    """One row per pair of a token and an expert that computes it."""

    token_R: Tensor
    """Index into the B·T tokens of this rank."""

    expert_R: Tensor

    weight_R: Tensor
    """The weight of the expert's output; differentiable."""

    num_tokens: int

    top_k: int | None
    """k if every token has exactly k rows, in the order of tokens. None: rows are in any order."""

    num_experts: int | None = None
    """The number of experts of the router. None: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterOptions:
    """How a router scores, chooses and balances; invalid values are rejected by `Router`."""

    score: str = "softmax"
    choice: str = "token"
    normalise: bool = True
    scale: float = 1.0
    capacity_factor: float | None = None
    auxiliary_coefficient: float = 0.0
    z_coefficient: float = 0.0
    bias_rate: float = 0.0


class RouterSettings(TypedDict, total=False):
    """The fields of `RouterOptions`, for type checkers: the keyword arguments of `Router`."""

    score: str
    choice: str
    normalise: bool
    scale: float
    capacity_factor: float | None
    auxiliary_coefficient: float
    z_coefficient: float
    bias_rate: float


class Router(nn.Module):
    """Scores every expert for every token, and chooses.

    top_k                  experts per token; with choice "expert", on average and at capacity factor 1
    score                  softmax: scores compete; sigmoid: each expert is scored alone, as in DeepSeek-V3
    choice                 token: each token chooses its experts; expert: each expert chooses tokens of a sequence
    normalise              the weights of a token's experts sum to `scale` (True)
    scale                  a factor of all weights (1.0)
    capacity_factor        the most tokens of a sequence for one expert, as a multiple of an even share; None: no limit
    auxiliary_coefficient  of the load balancing loss; 0: none
    z_coefficient          of the z-loss, which keeps logits small; 0: none
    bias_rate              an expert that is chosen too often gets a smaller bias after each step, by this much; the
                           bias takes part in the choice, never in the weight; 0: no bias
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        *,
        top_k: int,
        **settings: Unpack[RouterSettings],
    ) -> None:
        super().__init__()
        options = RouterOptions(**settings)
        self.num_experts, self.top_k = num_experts, top_k
        self.score, self.choice = options.score, options.choice
        self.normalise, self.scale = options.normalise, options.scale
        self.capacity_factor = options.capacity_factor
        self.auxiliary_coefficient, self.z_coefficient = options.auxiliary_coefficient, options.z_coefficient
        self.bias_rate = options.bias_rate
        raise_if(problems_of(self), title="a router")
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        self.register_buffer("bias", torch.zeros(num_experts) if self.bias_rate > 0 else None)
        self.name = ""
        """Its full name in the model, set by `note_routers`."""
        self.shared: AuxLoss | None = None
        """Shared state of a run. None: plain torch, see `auxiliary_loss` and `update_biases`."""
        self.has_attached = False
        """Whether `attach_aux_loss` was ever called: without it, auxiliary losses and loads are dropped."""
        self.auxiliary_loss: Tensor | None = None
        """Plain torch: the mean over the sequences of the last forward."""
        self.load: Tensor | None = None
        """Plain torch: how often each expert was chosen since the last `update_biases`."""
        self.reset_parameters()

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"num_experts={self.num_experts}, top_k={self.top_k}, score={self.score}, choice={self.choice}"

    def reset_parameters(self) -> None:
        """Initialize the weight, if no enclosing module does."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_BTD: Tensor) -> tuple[Routing, Tensor | None, Tensor, Tensor]:
        """Return the rows, this rank's part of the auxiliary loss summed over sequences (None: there is none), how
        often each expert was chosen (E,), and how many choices were dropped."""
        if x_BTD.dim() != 3:
            raise ShoalError(
                f"a router must be called with (samples, tokens, features), got shape {tuple(x_BTD.shape)}",
                fix="call it before tokens are flattened, or with x[None]",
                code="M036",
            )
        group = None if self.shared is None or x_BTD.is_meta else self.shared.group
        logits_BTE = self._logits(x_BTD)
        scores_BTE = logits_BTE.softmax(-1) if self.score == "softmax" else logits_BTE.sigmoid()
        if self.choice == "expert":
            routing, taken_BTE = self._experts_choose(scores_BTE, group)
            balance_loss = None  # expert choice is balanced by construction
            load_E, num_dropped = taken_BTE.sum((0, 1)), (~taken_BTE.any(-1)).sum()
        else:
            routing, chosen_BTE, num_dropped = self._tokens_choose(scores_BTE, group)
            counts_BE = chosen_BTE.sum(1)
            balance_loss, load_E = self._balance_loss(scores_BTE, counts_BE, group), counts_BE.sum(0)
        losses = [loss for loss in (balance_loss, self._z_loss(logits_BTE, group)) if loss is not None]
        return routing, sum(losses[1:], losses[0]) if losses else None, load_E, num_dropped

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attach_aux_loss(self, y: Tensor, auxiliary: Tensor | None, load_E: Tensor, num_dropped: Tensor) -> Tensor:
        """Return y, the output of the experts, after recording the router's auxiliary loss and loads."""
        if y.is_meta:  # a trace of shapes
            return y
        self.has_attached = True
        if self.shared is not None:
            return self.shared.attach(y, auxiliary, load_E, num_dropped, self.name)
        self.auxiliary_loss = None if auxiliary is None else auxiliary / y.shape[0]
        self.load = load_E if self.load is None else self.load + load_E
        return y

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graph of the last forward, which can be neither copied nor pickled."""
        return {**self.__dict__, "auxiliary_loss": None}

    def _logits(self, x_BTD: Tensor) -> Tensor:
        """Compute in at least float32: in less, rounding would decide between close scores."""
        if has_split_product(x_BTD, self.weight):
            return split_product(x_BTD, self.weight)
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        with without_autocast(x_BTD):
            return nn.functional.linear(x_BTD.to(wide), self.weight.to(wide))

    def _tokens_choose(self, scores_BTE: Tensor, group: Group) -> tuple[Routing, Tensor, Tensor]:
        """Return the rows, which experts each token chose, and how many of those choices were dropped."""
        favour_BTE = scores_BTE.detach() if self.bias is None else scores_BTE.detach() + self.bias
        expert_BTk = favour_BTE.topk(self.top_k, dim=-1).indices
        weight_BTk = scores_BTE.gather(-1, expert_BTk)
        if self.normalise:
            total_BT1 = weight_BTk.sum(-1, keepdim=True)
            weight_BTk = weight_BTk / total_BT1.clamp_min(torch.finfo(total_BT1.dtype).tiny)
        if self.scale != 1.0:
            weight_BTk = weight_BTk * self.scale
        chosen_BTE = torch.zeros_like(scores_BTE, dtype=torch.bool).scatter_(-1, expert_BTk, True)
        num_tokens, capacity = scores_BTE[..., 0].numel(), self.capacity(scores_BTE.shape[1], group)
        row_R = torch.arange(num_tokens * self.top_k, device=scores_BTE.device)
        if self.capacity_factor is None or capacity >= scores_BTE.shape[1] * degree_of(group):
            rows = (row_R // self.top_k, expert_BTk.flatten(), weight_BTk.flatten())
            return Routing(*rows, num_tokens, self.top_k, self.num_experts), chosen_BTE, row_R.new_zeros(())
        wanted_BTE = scores_BTE.detach().masked_fill(~chosen_BTE, -math.inf)
        kept_BTE = best_of_each_sequence(wanted_BTE, capacity, group)[1] & chosen_BTE
        if not scores_BTE.is_meta:  # meta tensors have no values: keep all rows
            row_R = kept_BTE.gather(-1, expert_BTk).flatten().nonzero()[:, 0]
        rows = (row_R // self.top_k, expert_BTk.flatten()[row_R], weight_BTk.flatten().gather(0, row_R))
        return Routing(*rows, num_tokens, None, self.num_experts), chosen_BTE, chosen_BTE.sum() - kept_BTE.sum()

    def _experts_choose(self, scores_BTE: Tensor, group: Group) -> tuple[Routing, Tensor]:
        """Return the rows, and which experts took each token."""
        batch, num_tokens, num_experts = scores_BTE.shape
        capacity = self.capacity(num_tokens, group)
        best_BCE, taken_BTE = best_of_each_sequence(scores_BTE.detach(), capacity, group)
        if group is None:  # the number of rows is known without reading the device
            first_B11 = torch.arange(batch, device=scores_BTE.device)[:, None, None] * num_tokens
            token_R = (first_B11 + best_BCE).flatten()
            expert_R = torch.arange(num_experts, device=scores_BTE.device).expand_as(best_BCE).flatten()
            weight_R = scores_BTE.gather(1, best_BCE).flatten()
        else:
            token_R, expert_R = taken_BTE.flatten(0, 1).nonzero().unbind(1)
            weight_R = scores_BTE.flatten().gather(0, token_R * num_experts + expert_R)
        return Routing(token_R, expert_R, weight_R * self.scale, batch * num_tokens, None, self.num_experts), taken_BTE

    def capacity(self, num_tokens: int, group: Group) -> int:
        """Return C, the most tokens of one sequence that one expert computes; `num_tokens` of it are on this rank."""
        num_total = num_tokens * degree_of(group)
        factor = 1.0 if self.capacity_factor is None else self.capacity_factor
        return min(num_total, math.ceil(factor * num_total * self.top_k / self.num_experts))

    def _balance_loss(self, scores_BTE: Tensor, counts_BE: Tensor, group: Group) -> Tensor | None:
        """Return coefficient · E · Σ_e f_e P_e, summed over sequences. f: fraction of the choices that fell on e; P:
        mean fraction of its score. f is of the full sequence, and P's sum is over the tokens here: the ranks' terms add
        up."""
        if self.auxiliary_coefficient == 0:
            return None
        num_total = scores_BTE.shape[1] * degree_of(group)
        counts_BE = counts_BE if group is None else _summed(counts_BE, group)
        share_BE = counts_BE.to(scores_BTE.dtype) / (num_total * self.top_k)
        parts_BTE = scores_BTE if self.score == "softmax" else scores_BTE / scores_BTE.sum(-1, keepdim=True)
        return (share_BE * parts_BTE.sum(1)).sum() * (self.auxiliary_coefficient * self.num_experts / num_total)

    def _z_loss(self, logits_BTE: Tensor, group: Group) -> Tensor | None:
        """Return coefficient · mean over a sequence's tokens of logsumexp(logits)², summed over sequences. It keeps the
        logits small."""
        if self.z_coefficient == 0:
            return None
        num_total = logits_BTE.shape[1] * degree_of(group)
        return logits_BTE.logsumexp(-1).square().sum() * (self.z_coefficient / num_total)


def problems_of(router: Router) -> list[Problem]:
    """Return settings that are invalid, or with which the router cannot learn."""
    problems = []
    for what, value, known in (("score", router.score, SCORES), ("choice", router.choice, CHOICES)):
        if value not in known:
            problems.append(Problem("M039", f"{what} must be {listed(known)}, got {value!r}", f"{what}: {known[0]}"))
    if not 1 <= router.top_k <= router.num_experts:
        what = f"top_k must be from 1 to num_experts={router.num_experts}, got {router.top_k}"
        problems.append(Problem("M039", what, f"top_k: {min(2, router.num_experts)}"))
    if router.capacity_factor is not None and not router.capacity_factor > 0:
        problems.append(
            Problem("M008", f"capacity_factor must be above 0, got {router.capacity_factor}", "capacity_factor: null")
        )
    for name in ("auxiliary_coefficient", "z_coefficient", "bias_rate"):
        if not getattr(router, name) >= 0:
            problems.append(Problem("M008", f"{name} must be 0 or more, got {getattr(router, name)}", f"{name}: 0"))
    if router.choice == "expert" and router.bias_rate > 0:
        what = f"bias_rate={router.bias_rate} needs choice 'token', got choice 'expert'"
        problems.append(Problem("M039", what, "bias_rate: 0"))
    if router.choice == "token" and router.top_k == 1 and router.normalise:
        what = "top_k=1 with normalise gives every token the weight 1, so the router gets no gradient"
        problems.append(Problem("M039", what, "normalise: false"))
    return problems


# ---- one sequence, perhaps divided over ranks -----------------------------------------------------------------------


def best_of_each_sequence(scores_BTE: Tensor, capacity: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return the `capacity` tokens of each sequence with the highest score for each expert: their positions in the full
    sequence (B, C, E), and whether a token of this rank is one of them (B, T, E)."""
    whole_BSE = scores_BTE if group is None else _gathered(scores_BTE, group)
    best_BCE = whole_BSE.topk(capacity, dim=1).indices
    is_best_BSE = torch.zeros_like(whole_BSE, dtype=torch.bool).scatter_(1, best_BCE, True)
    return best_BCE, my_part(is_best_BSE, 1, group)


def degree_of(group: Group) -> int:
    """Return the number of ranks over which a sequence is divided."""
    return 1 if group is None else group.size()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gathered(scores_BTE: Tensor, group: Group) -> Tensor:
    return all_gather(scores_BTE, 1, group)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _summed(counts_BE: Tensor, group: Group) -> Tensor:
    return all_reduce(counts_BE, group)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast. The meta device has none to disable."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


# ---- all routers of a model -----------------------------------------------------------------------------------------


def routers(model: nn.Module) -> dict[str, Router]:
    """Map full names to routers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def note_routers(model: nn.Module, shared: AuxLoss) -> dict[str, Router]:
    """Give every router its name and the shared state of the run."""
    found = routers(model)
    for name, router in found.items():
        router.name, router.shared = name, shared
    return found


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Plain torch: return the term to add to the mean loss of the last batch."""
    losses = [router.auxiliary_loss for router in routers(model).values() if router.auxiliary_loss is not None]
    return torch.stack(losses).sum() if losses else torch.zeros(())


@torch.no_grad()
def update_bias(router: Router, load_E: Tensor, is_applied: Tensor | bool = True) -> None:
    """Lower the bias of experts that were chosen more often than the mean by `bias_rate`, and raise the others'; unless
    `is_applied`, possibly a number on the device, is false."""
    if router.bias is not None:
        load_E = load_E.to(router.bias.device, torch.float64)
        change = (load_E.mean() - load_E).sign() * is_applied
        router.bias.add_(change.to(router.bias.dtype), alpha=router.bias_rate)


def update_biases(model: nn.Module) -> None:
    """Plain torch: update once a step, after all its microbatches."""
    for router in routers(model).values():
        if router.load is not None:
            update_bias(router, router.load)
        router.load = None


def biases(model: nn.Module) -> dict[str, Tensor]:
    """Map full names to the biases of routers that have one."""
    return {f"{name}.bias": router.bias for name, router in routers(model).items() if router.bias is not None}


def hottest(load_E: Tensor) -> Tensor:
    """Return the load of the busiest expert relative to the mean; 1: all are equal."""
    load_E = load_E.double()
    return load_E.max() / load_E.mean()
