"""Attention modules of transformers: products, norms of heads and rotary embedding before the attention function.

    x ─ q, k, v products ─▶ (norms) ─▶ rotation ─▶ attention function of transformers ─▶ o product ─▶ y
        one product                    one pass

The attention function is called with what the module would call it with. The probe records that call.
Shapes: B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.models.huggingface.fast.norms import Recall
from shoal.models.huggingface.fast.probe import (
    FAR,
    Swapped,
    become,
    computes,
    drawn,
    has_linears,
    is_free,
    small_copy,
)
from shoal.numerics.ops.memory_saving_linear import linear, linears
from shoal.numerics.ops.rotary import rotate_heads, rotated

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
PROBE = "shoal_probe"
TOKENS = 3


@dataclass(frozen=True)
class HeadRule:
    """How an attention module makes its heads, and what it passes to the attention function."""

    is_rotated: bool
    norms: str
    """Of queries and keys: "none", of each "head", or of the "whole" row before it is divided into heads."""
    options: tuple[tuple[str, Any], ...]
    dropout: float
    """While it trains."""


class FastAttention(Swapped):
    """Attention with one product for queries, keys and values, and one pass for their rotation."""

    head_rule: HeadRule
    interface: Any
    """transformers' attention functions, by name."""
    recall: Recall | None = None

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        """(B, T, D) → (B, T, D), and the weights, if the attention function returns them."""
        source = None if self.recall is None else self.recall.take(hidden_states)
        name = self.config._attn_implementation
        if past_key_values is not None or position_embeddings is None or name == "eager":
            return super().forward(  # type: ignore[misc]
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **options,
            )
        rule = self.head_rule
        joint = linears(hidden_states, source, self.q_proj, self.k_proj, self.v_proj, together=True)
        heads = (x.transpose(1, 2) for x in heads_of(self, joint, rule, *position_embeddings))
        dropout = rule.dropout if self.training else 0.0
        given = {**options, **dict(rule.options)}
        out, weights = self.interface[name](self, *heads, attention_mask, dropout=dropout, **given)
        return linear(out.flatten(2), self.o_proj), weights


def heads_of(module: Any, products: Sequence[Tensor], rule: HeadRule, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
    """q_BTNH, k_BTKH and v_BTKH of one product for all, or of one for each. The halves of cos and sin are alike."""
    half = module.head_dim // 2
    cos, sin = cos[..., :half], sin[..., :half]
    widths = [getattr(module, name).out_features for name in LAYERS[:3]]
    if len(products) == 1 and rule.is_rotated and rule.norms == "none":
        num_heads, num_kv_heads = (width // module.head_dim for width in widths[:2])
        return rotate_heads(products[0], cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads)
    parts = products[0].split(widths, dim=-1) if len(products) == 1 else products
    if rule.norms == "whole":
        parts = (module.q_norm(parts[0]), module.k_norm(parts[1]), parts[2])
    q, k, v = (x.unflatten(-1, (-1, module.head_dim)) for x in parts)
    if rule.norms == "head":
        q, k = module.q_norm(q), module.k_norm(k)
    if rule.is_rotated:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return q, k, v.contiguous()  # else saving v would keep the joint product


def swap_attention(module: Any) -> bool:
    """Replace the forward of a module, if it is such an attention."""
    head_dim = getattr(module, "head_dim", None)
    if not has_linears(module, LAYERS) or not is_free(module) or type(head_dim) is not int or head_dim % 2:
        return False
    widths = [getattr(module, name).out_features for name in LAYERS[:3]]
    if widths[1] != widths[2] or module.o_proj.in_features != widths[0]:
        return False
    sizes = {name: (6, width) for name, width in zip(LAYERS, widths, strict=False)} | {"o_proj": (widths[0], 6)}
    probe = small_copy(module, sizes)
    calls: list[dict[str, Any]] = []
    rule = _recognised(probe, head_dim, calls)
    if rule is None:
        return False
    become(module, FastAttention, head_rule=rule)
    FastAttention.interface = _interface()
    return True


def _interface() -> Any:
    return sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS


def _recognised(probe: Any, head_dim: int, calls: list[dict[str, Any]]) -> HeadRule | None:
    def record(_module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any, **options: Any) -> Any:
        """As attention functions: (B, N, T, H) → (B, T, N, H). The result depends on all three."""
        calls.append(options)
        mixed = q + (k + 2 * v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return mixed.transpose(1, 2).contiguous(), None

    functions = _interface()._global_mapping  # its own `register` would stay after the probe
    functions[PROBE] = record
    half = drawn(2, 1, TOKENS, head_dim // 2, seed=5)
    cos, sin = (torch_twice(one) for one in half)

    def theirs(x: Tensor) -> Any:
        return probe(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)[0]

    try:
        probe.config._attn_implementation = PROBE
        if (seen := _options(probe, theirs, calls)) is None:
            return None
        for norms in ("none", "head", "whole"):
            if (norms == "none") != all(getattr(probe, name, None) is None for name in NORMS):
                continue
            for is_rotated in (True, False):
                rule = HeadRule(is_rotated, norms, *seen)

                def ours(x: Tensor, rule: HeadRule = rule) -> Tensor:
                    return _ours(probe, rule, record, x, cos, sin)

                if all(computes(probe, theirs, ours, scale * drawn(1, TOKENS, 6)) for scale in (1, FAR)):
                    return rule
    except Exception:  # it takes other arguments
        return None
    finally:
        del functions[PROBE]
    return None


def _options(probe: Any, theirs: Any, calls: list[dict[str, Any]]) -> tuple[tuple[tuple[str, Any], ...], float] | None:
    """The options that the module itself passes, and its dropout; None: some of them are not plain numbers."""
    for is_training in (False, True):
        probe.train(is_training)
        theirs(drawn(1, TOKENS, 6))
    still, training = calls[-2:]
    dropouts = still.pop("dropout", 0.0), training.pop("dropout", 0.0)
    is_plain = all(one is None or isinstance(one, bool | int | float | str) for one in still.values())
    if still != training or dropouts[0] != 0.0 or not is_plain:
        return None
    return tuple(still.items()), float(dropouts[1])


def _ours(probe: Any, rule: HeadRule, function: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    products = linears(x, None, probe.q_proj, probe.k_proj, probe.v_proj)
    heads = (one.transpose(1, 2) for one in heads_of(probe, products, rule, cos, sin))
    return linear(function(probe, *heads, None)[0].flatten(2), probe.o_proj)


def torch_twice(x: Tensor) -> Tensor:
    """The angles of the first half of the features, for both halves."""
    return x.repeat(1, 1, 2)
