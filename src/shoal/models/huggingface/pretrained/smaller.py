"""A small copy of a pretrained model with the same structure, for `shoal verify`: its config with small sizes.

Kinds of layers, groups of heads, experts, windows, scales and positions stay. Numbers of features become small, and few
layers of each kind are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.errors import ShoalError
from shoal.models.huggingface.position_table import max_tokens_of
from shoal.models.huggingface.pretrained.build import build

HEAD, FEATURES, WORDS, LAYERS = 8, 64, 128, 2
SIZES = {
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), FEATURES),
    **dict.fromkeys(("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), FEATURES),
    **{"vocab_size": WORDS, "sliding_window": 3},
}
"""Key of a config.json → its value in the small copy, where it is a larger number."""
DEPTHS = ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Keys with a number of layers of a model with two of them."""
POSITIONS = 480
"""Rows of a table of positions, at least: more than the tokens of a verification."""
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def smaller(name: str, arguments: Mapping[str, Any], *, num_stages: int, ep: int) -> dict[str, Any] | None:
    """The arguments of a small copy; None: it cannot be made so."""
    with torch.device("meta"):
        model: Any = build(name, **arguments)
        found = {**arguments, **_changes(model.config, num_stages)}
        if (max_tokens_of(model, model.config.get_text_config()) or POSITIONS) < POSITIONS:
            own_names = getattr(model.config, "attribute_map", {})
            found[own_names.get("max_position_embeddings", "max_position_embeddings")] = POSITIONS
        needs_vocabulary = model.recipe_task == "next token"
        if not needs_vocabulary and found.get("pad_token_id", 0) is None and model.config.pad_token_id is not None:
            found["pad_token_id"] = min(model.config.pad_token_id, WORDS - 1)  # by which a classifier finds the end
        try:
            small: Any = build(name, **found)
        except ShoalError:
            return None if needs_vocabulary else dict(arguments)
    has_vocabulary = isinstance(small.config.to_dict().get("vocab_size"), int)
    return None if needs_vocabulary and not has_vocabulary else found


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
    if getattr(config, "is_encoder_decoder", False):
        found |= {key: layers for key in DEPTHS if isinstance(said.get(key), int) and said[key] > layers}
        if isinstance(heads, int) and isinstance(said.get("d_model"), int):
            found["d_model"] = heads * HEAD
        found.pop("vocab_size", None)  # special tokens stay: the decoder's first one is among them
        return found
    if "vocab_size" in found:
        found |= {key: None for key in TOKENS if key in said}
    elif "vocab_size" in said:
        found["vocab_size"] = said["vocab_size"]
    return found
