"""Tiny models of transformers, one of each architecture, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, TOKENS, BATCH = 41, 8, 4
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
KV = {"num_key_value_heads": 2}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", KV),
    "llama tied": ("Llama", {**KV, "tie_word_embeddings": True}),
    "llama 3.1": (
        "Llama",
        {
            **KV,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "qwen2": ("Qwen2", KV),
    "qwen3": ("Qwen3", {**KV, "head_dim": 4}),
    "mistral": ("Mistral", {**KV, "sliding_window": None}),
    "olmo2": ("Olmo2", KV),
    "granite": (
        "Granite",
        {
            **KV,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
        },
    ),
    "smollm3": ("SmolLM3", {**KV, "no_rope_layer_interval": 2}),
    "starcoder2": ("Starcoder2", {**KV, "sliding_window": None}),
    "gpt-neox": ("GPTNeoX", {}),
    "cohere": ("Cohere", {**KV, "logit_scale": 0.5}),
    "mistral window": ("Mistral", {**KV, "sliding_window": 3}),
    "gemma2": (
        "Gemma2",
        {**KV, "head_dim": 4, "sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        {**KV, "head_dim": 4, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
"""Name → the first part of the names of its classes, and settings that differ from `SMALL`."""
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def build(kind: str) -> nn.Module:
    """In float32, with weights of which every one matters."""
    torch.manual_seed(3)
    name, settings = DENSE[kind]
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**SMALL | settings)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def batch(kind: str, *, pads: bool = False) -> dict[str, Tensor]:
    """Ragged: some labels do not count. With padding, at the end of some samples and at the start of others."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    labels[2, 3:] = -100
    made = {"input_ids": ids, "labels": labels}
    if pads:
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        mask[3, :3] = 0
        labels[3, 3] = -100  # the token before it is padding, and what that sees differs between transformers' kernels
        made["labels"] = labels.masked_fill(mask == 0, -100)
        made["attention_mask"] = mask
    return made
