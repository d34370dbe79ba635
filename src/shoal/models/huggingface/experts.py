"""The function that experts of transformers call under the name "shoal".

transformers looks it up by the name in the model's configuration. Its own functions need bfloat16, or read values,
which a trace on the meta device does not have. Shapes: T tokens, k experts per token, R = T·k rows, D features, E
experts.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.models.huggingface.modules import experts_in
from shoal.numerics.ops.experts.grouped_matmul import grouped_matmul
from shoal.numerics.precision import in_autocast_dtype
from shoal.parallel.expert.experts import DISPATCH, Dispatch
from shoal.parallel.expert.router import Routing

NAME = "shoal"


def install(model: Any) -> None:
    """Let the experts of a model, if it has some, be computed by `experts_forward`."""
    if not experts_in(model):
        return
    interface = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
    if NAME not in interface._global_mapping:
        interface.register(NAME, experts_forward)
    for module in experts_in(model).values():
        if not hasattr(module, DISPATCH):
            setattr(module, DISPATCH, Dispatch(int(module.num_experts)))
    model.set_experts_implementation(NAME)


def written_out(model: Any) -> None:
    """Let transformers compute experts one after the other, which works in every precision."""
    if experts_in(model):
        model.set_experts_implementation("eager")


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """(T, D), and the experts of each token with their weights (T, k) → (T, D)."""
    num_tokens, top_k = top_k_index.shape
    token_R = torch.arange(num_tokens * top_k, device=hidden_states.device) // top_k
    rows = (token_R, top_k_index.flatten(), top_k_weights.flatten())
    dispatch = getattr(experts, DISPATCH)
    routing = Routing(*rows, num_tokens, top_k, dispatch.num_experts)
    y_TD: Tensor = dispatch(in_autocast_dtype(hidden_states), routing, partial(_computed, experts))
    return y_TD.to(hidden_states.dtype)


def _computed(experts: Any, x_RD: Tensor, ends_L: Tensor, weight_R: Tensor | None) -> Tensor:
    """The experts of this rank, for rows that are sorted by expert."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    y_RF = _product(experts, first, x_RD, ends_L)
    y_RF = experts._apply_gate(y_RF) if experts.has_gate else experts.act_fn(y_RF)
    y_RD = _product(experts, "down_proj", y_RF, ends_L)
    if experts.has_post_expert_norm:
        y_RD = experts.post_expert_norm(y_RD)
    return y_RD if weight_R is None else y_RD * weight_R[:, None].to(y_RD.dtype)


def _product(experts: Any, name: str, x_RD: Tensor, ends_L: Tensor) -> Tensor:
    """Each row with the matrix of its expert, and with its bias."""
    weight = in_autocast_dtype(getattr(experts, name))
    y_RF: Tensor = grouped_matmul(x_RD, weight if experts.is_transposed else weight.transpose(1, 2), ends_L)
    if not experts.has_bias:
        return y_RF
    bias_LF: Tensor = getattr(experts, f"{name}_bias").to(y_RF.dtype)
    expert_R = torch.searchsorted(ends_L, torch.arange(len(x_RD), device=ends_L.device, dtype=ends_L.dtype), right=True)
    return y_RF + bias_LF[expert_R]
