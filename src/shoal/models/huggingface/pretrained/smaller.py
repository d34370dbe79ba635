"""A small copy of a pretrained model with the same structure, for `shoal verify`: its config with small sizes.

Kinds of layers, groups of heads, experts, windows, scales and positions stay. Numbers of features become small, and few
layers of each kind are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.errors import ShoalError
from shoal.models.huggingface.pretrained.build import build

HEAD, FEATURES, WORDS, LAYERS = 8, 64, 128, 2
SIZES = {
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), FEATURES),
    **{"vocab_size": WORDS, "sliding_window": 3},
}
"""Key of a config.json → its value in the small copy, where it is a larger number."""
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def smaller(name: str, arguments: Mapping[str, Any], *, num_stages: int, ep: int) -> dict[str, Any] | None:
    """The arguments of a small copy; None: it cannot be made so."""
    with torch.device("meta"):
        model: Any = build(name, **arguments)
        found = {**arguments, **_changes(model.config, num_stages)}
        try:
            small: Any = build(name, **found)
        except ShoalError:
            return None
    return found if isinstance(small.config.to_dict().get("vocab_size"), int) else None


def _changes(config: Any, num_stages: int) -> dict[str, Any]:
    said = config.to_dict()
    found: dict[str, Any] = {
        key: size for key, size in SIZES.items() if isinstance(said.get(key), int) and said[key] > size
    }
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and isinstance(said.get("hidden_size"), int):
        found["hidden_size"] = heads * HEAD
    layers = max(LAYERS, num_stages)
    kinds = said.get("layer_types")
    if isinstance(kinds, list):
        layers = max(layers, kinds.index(kinds[-1]) + 1, max(kinds.index(kind) for kind in set(kinds)) + 1)
        found["layer_types"] = kinds[:layers]
    if isinstance(said.get("num_hidden_layers"), int):
        found["num_hidden_layers"] = min(layers, said["num_hidden_layers"]) if kinds else layers
    if "vocab_size" in found:
        found |= {key: None for key in TOKENS if key in said}
    elif "vocab_size" in said:
        found["vocab_size"] = said["vocab_size"]
    return found
