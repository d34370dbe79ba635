"""A mixture of experts like Mixtral, Qwen3 and DeepSeek: a Llama with many feed-forwards, of which a token uses a few.

Attention, norms and embeddings are Llama's own, under the same names. New are `mlp.router`, `mlp.experts` and, for
shared experts, `mlp.shared`. Like Llama this is single-device code: expert parallelism and the counting of loads attach
to the router and the experts. In plain torch, add `shoal.parallel.expert.router.auxiliary_loss(model)` to the loss, and
call `update_biases(model)` after each step.

The preset `deepseek-v3` has grouped-query attention in place of latent attention, and does not limit the choice to
groups of experts: its size and traffic are DeepSeek-V3's, but its checkpoints do not fit.

Shapes: B batch, T tokens, D model dim, N heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.blueprint.description import Description, Split
from shoal.models.build_config import build_config, with_nan_weights
from shoal.models.llama import SPLITS, FeedForward, Llama, SelfAttention
from shoal.models.moe_config import PRESETS, MoeConfig
from shoal.numerics.ops.memory_saving_linear import RMSNorm
from shoal.parallel.expert.experts import Experts
from shoal.parallel.expert.router import Router

__all__ = ["PRESETS", "Moe", "MoeConfig", "build"]

ROUTING = (
    *("top_k", "score", "choice", "normalise", "scale", "capacity_factor"),
    *("auxiliary_coefficient", "z_coefficient", "bias_rate"),
)
"""Fields of the configuration for the router."""


def build(**arguments: Any) -> Moe:
    """A model from `preset` and any field of `MoeConfig`; its parameters are NaN until they are initialised."""
    return Moe(build_config("moe", PRESETS, MoeConfig(), arguments))


class Moe(Llama):
    """A decoder with experts from tokens to logits."""

    config: MoeConfig

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        for layer, block in enumerate(self.model.layers):
            if config.qk_norm:
                block.self_attn = NormedAttention(config)
            if layer >= config.num_dense_layers:
                block.mlp = SparseFeedForward(config)
                # Router and experts read the same tokens: under bf16 those are bfloat16.
                block.post_attention_layernorm = RMSNorm(config.hidden, eps=config.norm_eps, narrows=True)

    def describe(self) -> Description:
        """Its structure, for the planner and for every parallelism."""
        return dataclasses.replace(
            super().describe(),
            splits=splits_of(self.config),
            num_experts=self.config.num_experts,
            active_experts=self.config.top_k,
            positions="positions",
            documents="documents",
        )

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """The init rules of a Llama; an expert's last matrix also writes to the residual stream."""
        as_in_llama = f"{name}.weight" if name.endswith("experts.down_proj") else name
        super().init_parameter(as_in_llama, parameter, generator)


class NormedAttention(SelfAttention):
    """Attention with a norm over each head of queries and keys, before the rotation."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        self.q_norm = RMSNorm(self.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.norm_eps)

    def of_one_product(self, joint: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from one product, ready for attention."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = joint.split([layer.out_features for layer in layers], dim=-1)
        # A copy: a saved view of the values would also keep the queries and keys in memory.
        return self.heads((q, k, v.contiguous()), cos_BTH, sin_BTH)

    def heads(self, projections: Sequence[Tensor], cos_BTH: Tensor, sin_BTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values for attention."""
        q, k, v = projections
        q, k = (
            norm(x.unflatten(-1, (-1, self.head_dim))).flatten(-2) for norm, x in ((self.q_norm, q), (self.k_norm, k))
        )
        return super().heads((q, k, v), cos_BTH, sin_BTH)


class SparseFeedForward(nn.Module):
    """Experts, of which each token uses a few, and optionally a feed-forward for all tokens."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        routing = {name: getattr(config, name) for name in ROUTING}
        self.router = with_nan_weights(Router(config.hidden, config.num_experts, **routing))
        self.experts = with_nan_weights(Experts(config.hidden, config.expert_ffn, config.num_experts))
        has_shared = config.num_shared_experts > 0
        self.shared = FeedForward(dataclasses.replace(config, ffn=config.shared_ffn)) if has_shared else None

    def forward(self, x_BTD: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """x_BTD → x_BTD, and the branch to add to it, computed from its norm."""
        normed_BTD = norm(x_BTD)
        routing, *facts = self.router(normed_BTD)
        y_BTD: Tensor = self.experts(normed_BTD.flatten(0, 1), routing).view_as(normed_BTD)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(normed_BTD)[1]
        return x_BTD, self.router.attach_aux_loss(y_BTD, *facts)


def splits_of(config: MoeConfig) -> dict[str, Split]:
    """The splits of tensor parallelism for the layers of this configuration."""
    has_dense = config.num_dense_layers > 0
    splits = {pattern: how for pattern, how in SPLITS.items() if has_dense or ".mlp." not in pattern}
    sparse = "model.layers.*.mlp"
    splits |= {f"{sparse}.router": Split.SEQUENCE, f"{sparse}.experts": Split.EXPERTS}
    if config.num_shared_experts:
        splits |= {f"{sparse}.shared.{name}_proj": Split.COLUMN for name in ("gate", "up")}
        splits |= {f"{sparse}.shared.down_proj": Split.ROW}
    if config.qk_norm:
        splits |= {f"model.layers.*.self_attn.{name}_norm": Split.HEADS for name in ("q", "k")}
    return splits
