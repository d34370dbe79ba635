"""Tiny models of transformers, one of each architecture, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests import huggingface_more as more

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
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**KV, "num_local_experts": 4, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**KV, "head_dim": 4, "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
    ),
    "gpt-oss": (
        "GptOss",
        {**KV, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **{"num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
            **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
            **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
        },
    ),
}
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": (
        "Phi3",
        {**KV, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}},
    ),
    "gpt2": ("GPT2", {"n_positions": TOKENS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "modernbert": ("ModernBert", {"local_attention": 4, "sep_token_id": None, "cls_token_id": None}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"max_position_embeddings": 16}),
    "vit": ("ViT", {"image_size": 12, "patch_size": 4, "num_labels": 5}),
    "clip": ("CLIP", {}),
    "t5": (
        "T5",
        {
            "d_model": 16,
            "d_ff": 24,
            "d_kv": 4,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "whisper": ("Whisper", {}),
    "mamba": ("Mamba", {"state_size": 4}),
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("Phi", {**KV, "resid_pdrop": 0.0}),
    "stablelm": ("StableLm", KV),
    "glm4": ("Glm4", {**KV, "head_dim": 4}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "multi_query": False}),
    "gptj": ("GPTJ", {"rotary_dim": 4, "n_positions": 16, **NO_DROPOUT}),
    "openai-gpt": ("OpenAIGPT", {"n_positions": TOKENS, **NO_DROPOUT}),
    "bloom": ("Bloom", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "roberta": ("Roberta", {"max_position_embeddings": 16, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {"max_position_embeddings": 16, "pad_token_id": 1}),  # registers its output first
    "electra": ("Electra", {"embedding_size": 16, "max_position_embeddings": 16}),
    "distilbert": ("DistilBert", {"hidden_dim": 24, "max_position_embeddings": 16}),
}
LISTED = DENSE | EXPERTS | PACKED | OTHERS | OLDER
ALL = LISTED | more.ALL
REJECTED = {
    **dict.fromkeys(("vit", "clip", "falcon", "gptj", "openai-gpt", "roberta", "xlm-roberta"), ("cp=2",)),
    **dict.fromkeys(("t5", "whisper", "bloom"), ("cp=2",)),
    "mamba": ("tp=2", "cp=2"),
    **more.REJECTED,
}
"""Architecture → words of plans that it cannot have. All others are equal."""
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
CLASSES = {
    **{"OpenAIGPT": "OpenAIGPTLMHeadModel", "Electra": "ElectraForMaskedLM", "DistilBert": "DistilBertForMaskedLM"},
    **{"Roberta": "RobertaForMaskedLM", "XLMRoberta": "XLMRobertaForMaskedLM"},
    **{"GPT2": "GPT2LMHeadModel", "ModernBert": "ModernBertForMaskedLM", "Bert": "BertForMaskedLM"},
    **{"ViT": "ViTForImageClassification", "CLIP": "CLIPForImageClassification"},
    **{"T5": "T5ForConditionalGeneration", "Whisper": "WhisperForConditionalGeneration"},
}


def config_of(name: str, settings: dict[str, Any]) -> Any:
    if name == "CLIP":
        sizes = {
            key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        }
        return transformers.CLIPConfig(
            text_config={**SMALL, "max_position_embeddings": 16},
            vision_config={**sizes, "image_size": 12, "patch_size": 4},
            projection_dim=8,
            num_labels=5,
        )
    if name == "Whisper":
        own = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in WHISPER.items()}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        sizes = {"vocab_size": VOCABULARY, "d_model": 16, "num_mel_bins": 4}
        lengths = {"max_source_positions": 4, "max_target_positions": TOKENS}
        return transformers.WhisperConfig(
            **own, **tokens, **sizes, **lengths, suppress_tokens=None, begin_suppress_tokens=None
        )
    return getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**SMALL | settings)


WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 24}


def build(kind: str) -> nn.Module:
    """In float32, with weights of which every one matters."""
    torch.manual_seed(3)
    name, settings = ALL[kind]
    found = more.class_of(kind) if kind in more.ALL else CLASSES.get(name, f"{name}ForCausalLM")
    config = more.config_of(kind) if kind in more.ALL else config_of(name, settings)
    model: nn.Module = getattr(transformers, found)(config)
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
    if kind in ("vit", "clip") or kind in more.IMAGES:
        size = 16 if kind in ("swin", "deit", "siglip") else 12
        return {"pixel_values": torch.randn(BATCH, 3, size, size, generator=generator), "labels": ids[:, 0] % 5}
    if kind in more.SOUNDS:
        return {"input_values": torch.randn(BATCH, 200, generator=generator), "labels": ids[:, 0] % 5}
    if kind == "whisper":
        return {"input_features": torch.randn(BATCH, 4, 8, generator=generator), "labels": labels}
    made = {"input_ids": ids, "labels": labels}
    if pads:
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        mask[3, :3] = 0
        labels[3, 3] = -100  # the token before it is padding, and what that sees differs between transformers' kernels
        made["labels"] = labels.masked_fill(mask == 0, -100)
        made["attention_mask"] = mask
    return made
