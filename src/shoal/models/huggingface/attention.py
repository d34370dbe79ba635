"""The function that attention of transformers calls under the name "shoal", so that context parallelism reaches it.

transformers looks the function up by the name in the model's configuration and calls it with what it calls flash
attention with. So a model that flash attention can compute says here all that its attention needs. Its masks are made
by another function of that name: padding comes as (B, 1, 1, keys), and causality and windows as arguments.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.huggingface.modules import attentions
from shoal.numerics.ops.attention import AttentionRule
from shoal.parallel.context.attention import Attention

NAME = "shoal"
OWN = "shoal_attention"
"""The attribute of an attention module that computes its attention."""
WITHOUT_EFFECT = {
    *("position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"),
    "deterministic",
}
"""Arguments that models pass through and that change nothing in the attention of a whole sequence."""


def has_interface(model: Any) -> bool:
    """Whether the attention of a model can be another function, by its name in the configuration."""
    before = getattr(model.config, "_attn_implementation", None)
    if before == NAME:
        return True
    _register()
    try:
        model.set_attn_implementation(NAME)
        return bool(model.config._attn_implementation == NAME)
    finally:
        if before is not None and model.config._attn_implementation != before:
            model.set_attn_implementation(before)


def _register() -> None:
    interface = sys.modules["transformers.modeling_utils"].AttentionInterface  # the model's class was made there
    if NAME not in interface._global_mapping:
        interface.register(NAME, attention_forward)
        sys.modules["transformers.masking_utils"].AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """The mask that attention modules get: which keys are no padding, (B, keys) → (B, 1, 1, keys). None: all.

    It is of uint8, since models pass a mask of four dimensions that a user made to attention as it is. One of booleans
    says all that a query may see, also when it has this shape.
    """
    if attention_mask is None:
        return None
    keys = attention_mask.to(torch.bool)
    return None if not keys.is_meta and bool(keys.all()) else keys[:, None, None].view(torch.uint8)


def install(model: Any) -> None:
    """Let the attention of a model be computed by `shoal.Attention`."""
    _register()
    for module in attentions(model).values():
        if not hasattr(module, OWN):
            setattr(module, OWN, Attention(causal=bool(module.is_causal)))
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ShoalError(
            f"{type(model).__name__} does not call transformers' attention interface",
            fix=_FIX,
            code="M062",
        )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Queries, keys and values as (B, heads, T, features) → (B, T, heads, features)."""
    attention = getattr(module, OWN, None)
    is_causal = options.pop("is_causal", None)
    if attention is None or is_causal not in (None, attention.causal):
        raise ShoalError(
            f"{type(module).__name__} calls attention in a way that shoal does not know", fix=_FIX, code="M062"
        )
    rule = AttentionRule(
        scale=scaling,
        softcap=options.pop("softcap", None),
        window=options.pop("sliding_window", None),
        dropout=dropout,
    )
    sinks = options.pop("s_aux", None)
    strange = [name for name, given in options.items() if given is not None and name not in WITHOUT_EFFECT]
    if strange:
        raise ShoalError(f"{type(module).__name__} passes {', '.join(strange)} to its attention", fix=_FIX, code="M062")
    keys = _keys(attention_mask)
    if keys is not None and attention.context is None:
        keys = keys[:, -key.shape[2] :]  # a cache of a window has dropped the first ones
    num_features = value.shape[-1]
    if attention.context is not None and num_features < query.shape[-1]:  # over ranks, keys and values travel together
        value = F.pad(value, (0, query.shape[-1] - num_features))
    out = attention(query, key, value, keys, rule=rule, sinks=sinks)[..., :num_features]
    return out.transpose(1, 2).contiguous(), None


_FIX = "cp=1, pp=1 and sp=off for this model"


def _keys(mask: Tensor | None) -> Tensor | None:
    """Which keys may be seen, of what `padding_mask` has made."""
    if mask is None:
        return None
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1) or mask.dtype != torch.uint8:
        raise ShoalError(
            f"attention_mask must have one entry for each token, (samples, tokens), got shape {tuple(mask.shape)}",
            fix="attention_mask as the tokenizer returns it, or none",
            code="M063",
        )
    return mask[:, 0, 0].view(torch.bool)
