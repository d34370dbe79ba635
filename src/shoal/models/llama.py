"""The Llama 3 family: a decoder with rotary positions, grouped-query attention and a gated feed-forward.

Modules are named, and rotary pairs are chosen, as in Llama checkpoints on Hugging Face, so that weights mean the same
here and there. This is single-device code that any layout can cut: the number of heads is read off the tensors (a
tensor-parallel rank has fewer), rotary angles are computed from the given positions (a context-parallel rank has its
own), and there are no buffers, so construction on the meta device leaves only parameters to initialise.

Shapes: B batch, T tokens, D model dim, N heads, K key/value heads, H head dim, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.blueprint.description import Description, Split
from shoal.errors import ShoalError
from shoal.models.build_config import build_config, uninitialized
from shoal.models.llama_config import PRESETS, LlamaConfig
from shoal.models.rope_scaling import rope_angles
from shoal.numerics.ops.embedding import embedded
from shoal.numerics.ops.memory_saving_linear import RMSNorm, linear, rms_norm_linear, swiglu_linear
from shoal.numerics.ops.rotary import rotate_heads, rotated
from shoal.parallel.context.attention import Attention, DocumentMask, positions_in_documents

__all__ = ["PRESETS", "Llama", "LlamaConfig", "build"]

SPLITS = {
    "model.embed_tokens": Split.VOCABULARY,
    "model.layers.*.input_layernorm": Split.SEQUENCE,
    "model.layers.*.self_attn.q_proj": Split.COLUMN,
    "model.layers.*.self_attn.k_proj": Split.COLUMN,
    "model.layers.*.self_attn.v_proj": Split.COLUMN,
    "model.layers.*.self_attn.o_proj": Split.ROW,
    "model.layers.*.post_attention_layernorm": Split.SEQUENCE,
    "model.layers.*.mlp.gate_proj": Split.COLUMN,
    "model.layers.*.mlp.up_proj": Split.COLUMN,
    "model.layers.*.mlp.down_proj": Split.ROW,
    "model.norm": Split.SEQUENCE,
    "lm_head": Split.VOCABULARY,
}


def build(**arguments: Any) -> Llama:
    """A Llama from `preset` and any field of `LlamaConfig`; its parameters are NaN until they are initialised."""
    return Llama(build_config("llama", PRESETS, LlamaConfig(), arguments))


class Llama(nn.Module):
    """A decoder from tokens to logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = uninitialized(nn.Linear, config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """tokens_BT → logits_BTV.

        documents_BT numbers the document of each token: a token sees only its own, and positions count from the start
        of it. positions_BT overrules the positions; without either they count from the start of the sequence.
        """
        logits_BTV: Tensor = self.lm_head(self.model(tokens, documents, positions))
        return logits_BTV

    def describe(self) -> Description:
        """Its structure, for the planner and for every parallelism."""
        return Description(
            blocks=tuple(f"model.layers.{i}" for i in range(self.config.num_layers)),
            before_blocks=("model.embed_tokens",),
            after_blocks=("model.norm", "lm_head"),
            splits=SPLITS,
            tied=(("model.embed_tokens.weight", "lm_head.weight"),) if self.config.tied else (),
            head="lm_head",
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            num_outputs=self.config.vocabulary,
            max_tokens=self.config.max_sequence,
            positions="positions",
            documents="documents",
            positions_restart=True,
            training_flops=self.config.training_flops,
        )

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Ones for norms, normal values for matrices; smaller ones for those that write to the residual stream, so that
        depth adds no variance."""
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            return
        writes_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        depth = (2 * self.config.num_layers) ** -0.5 if writes_to_residual else 1.0
        nn.init.normal_(parameter, std=self.config.init_std * depth, generator=generator)


class Decoder(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = uninitialized(nn.Embedding, config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps, narrows=True)
        self.mask = DocumentMask()

    def forward(self, tokens: Tensor, documents: Tensor | None, positions: Tensor | None) -> Tensor:
        """tokens_BT → x_BTD. A later pipeline stage has no embedding, and its `tokens` are x_BTD."""
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.max_sequence:
            raise ShoalError(
                f"a sequence must have at most max_sequence={self.config.max_sequence} tokens, got {num_tokens}",
                fix=f"--model.max_sequence {num_tokens}, or --data.seq_len {self.config.max_sequence}",
                code="D034",
            )
        mask = self.mask(documents)
        if positions is None:
            everyone = torch.arange(num_tokens, device=tokens.device)[None]
            positions = everyone if documents is None else positions_in_documents(documents)
        x_BTD = embedded(tokens, self.embed_tokens)
        rope, dtype = self.config.rope, torch.promote_types(x_BTD.dtype, torch.float32)
        angles_BTH = rope_angles(positions, rope, self.config.dim_of_head, dtype)
        rotary = (angles_BTH.cos(), angles_BTH.sin())
        if rope.scale_of_cos != 1.0:
            rotary = (rotary[0] * rope.scale_of_cos, rotary[1] * rope.scale_of_cos)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary, mask)
        normed_BTD: Tensor = self.norm(x_BTD)
        return normed_BTD


class Block(nn.Module):
    """Attention and feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """x_BTD → x_BTD."""
        update_BTD: Tensor
        x_BTD, update_BTD = self.self_attn(x_BTD, self.input_layernorm, rotary, mask)
        x_BTD, update_BTD = self.mlp(x_BTD + update_BTD, self.post_attention_layernorm)
        return x_BTD + update_BTD


class SelfAttention(nn.Module):
    """Causal attention in which several query heads share one key/value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim_of_head
        self.q_proj = uninitialized(nn.Linear, config.hidden, config.num_heads * self.head_dim, bias=False)
        self.k_proj = uninitialized(nn.Linear, config.hidden, config.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = uninitialized(nn.Linear, config.hidden, config.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = uninitialized(nn.Linear, config.num_heads * self.head_dim, config.hidden, bias=False)
        self.attention = Attention()

    def forward(
        self, x_BTD: Tensor, norm: RMSNorm, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x_BTD → x_BTD, and the branch to add to it, computed from its norm; without a mask, every token attends to
        itself and to all before it."""
        x_BTD, projections = rms_norm_linear(x_BTD, norm, self.q_proj, self.k_proj, self.v_proj, together=True)
        heads = (
            self.of_one_product(projections[0], *rotary) if len(projections) == 1 else self.heads(projections, *rotary)
        )
        y_BNTH = self.attention(*(x.transpose(1, 2) for x in heads), mask)
        return x_BTD, linear(y_BNTH.transpose(1, 2).flatten(2), self.o_proj)

    def of_one_product(self, joint: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from one product, ready for attention."""
        num_heads, num_kv_heads = (layer.out_features // self.head_dim for layer in (self.q_proj, self.k_proj))
        return rotate_heads(joint, cos_BTH, sin_BTH, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def heads(self, projections: Sequence[Tensor], cos_BTH: Tensor, sin_BTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values for attention: the first two rotated by the angles of their positions."""
        q_BTNH, k_BTKH, v_BTKH = (x.unflatten(-1, (-1, self.head_dim)) for x in projections)  # -1: this rank's heads
        return rotated(q_BTNH, cos_BTH, sin_BTH), rotated(k_BTKH, cos_BTH, sin_BTH), v_BTKH


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = uninitialized(nn.Linear, config.hidden, config.ffn, bias=False)
        self.up_proj = uninitialized(nn.Linear, config.hidden, config.ffn, bias=False)
        self.down_proj = uninitialized(nn.Linear, config.ffn, config.hidden, bias=False)
        self.recompute = True
        """See `swiglu_linear`."""

    def forward(self, x_BTD: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """x_BTD → x_BTD, and the branch to add to it, computed from its norm, if there is one."""
        x_BTD, gate_and_up = rms_norm_linear(x_BTD, norm, self.gate_proj, self.up_proj, together=True)
        return x_BTD, swiglu_linear(gate_and_up, self.down_proj, recompute=self.recompute)
