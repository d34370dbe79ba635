"""From the config.json of a Hugging Face model to a `Workload`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.predict.left_out_axes import left_out_axes
from shoal.predict.workload import Latent, Workload
from shoal.safe_parsing import parse_json, read_text

HF_KEYS = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
}
HF_OPTIONAL = {
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "qk_nope_head_dim"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token", "moe_top_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "sequence": ("max_position_embeddings", "n_positions"),
}
UNGATED = ("gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "bloom", "mpt", "falcon", "bert", "phi", "starcoder2")
LEARNED_POSITIONS = ("gpt2", "opt", "bert", "gpt_neo")
BIASED = ("gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "bloom", "bert", "phi", "starcoder2")


class NoDimensions(ShoalError):
    """A config of a model that is no stack of equal blocks with attention. It can be traced."""


RECURRENT = ("state_size", "ssm_state_size", "mamba_d_state", "mamba_state_dim", "time_step_rank", "conv_L_cache")
"""Keys of models whose layers, or some of them, keep a state instead of attending to tokens."""

OTHER_PARTS = ("is_encoder_decoder", "image_size", "num_hidden_groups")
"""Keys of models that have two stacks, take images, or run one block several times."""


def workload_from_config(path: Path) -> Workload:
    """From the config.json of a model in Hugging Face's form."""
    fix = "the config.json of a Hugging Face model"
    try:
        text = read_text(path, fix)
    except OSError as error:
        raise ShoalError(
            f"{path} cannot be read: {error.strerror}", fix="the path of a config.json", code="Q022"
        ) from error
    config = parse_json(text, str(path), fix)
    if not isinstance(config, Mapping):
        raise ShoalError(f"{path} holds no keys and values", fix="the config.json of a Hugging Face model", code="Q022")
    found = from_hugging_face(config, name=str(config.get("_name_or_path") or path.parent.name or path.stem))
    return replace(found, left_out=left_out_axes(str(config.get("model_type", ""))))


def from_hugging_face(config: Mapping[str, Any], *, name: str) -> Workload:
    """From the keys of a config.json; all that are missing are named at once."""
    if (other := _other_layers(config)) is not None:
        what = f"the config of {name} has other layers than one stack with attention ({other})"
        raise NoDimensions(what, fix="file.py:function, which builds the model: it is traced", code="Q022")
    found: dict[str, Any] = {}
    for key, spellings in (*HF_KEYS.items(), *HF_OPTIONAL.items()):
        values = [config[word] for word in spellings if isinstance(config.get(word), int)]
        if values:
            found[key] = values[0]
    missing = [f"{key} ({' or '.join(spellings)})" for key, spellings in HF_KEYS.items() if key not in found]
    if missing:
        what = f"the config of {name} does not say {', '.join(missing)}"
        raise NoDimensions(what, fix="a config.json of a transformer, or plain dimensions", code="Q022")
    kind = str(config.get("model_type", ""))
    shared = int(config.get("n_shared_experts") or 0) * int(found.get("expert_ffn", 0))
    shared += int(config.get("shared_expert_intermediate_size") or 0)
    latent = None
    if config.get("kv_lora_rank"):
        rope, value = int(config["qk_rope_head_dim"]), int(config["v_head_dim"])
        query = int(config.get("q_lora_rank") or 0)
        latent = Latent(query_rank=query, key_rank=int(config["kv_lora_rank"]), rope_dim=rope, value_dim=value)
    return Workload(
        name=name,
        **found,
        gated=kind not in UNGATED,
        biases=kind in BIASED,
        positions=found.get("sequence", 0) if kind in LEARNED_POSITIONS else 0,
        tied=bool(config.get("tie_word_embeddings", kind in ("gpt2", "opt", "bloom", "bert"))),
        shared_ffn=shared,
        latent=latent,
        causal=kind != "bert",
        window=int(config.get("sliding_window") or 0) if config.get("use_sliding_window", kind == "mistral") else 0,
    )


def _other_layers(config: Mapping[str, Any]) -> str | None:
    """The key or the value that says so; None: all layers are attention."""
    kinds = config.get("layer_types")
    for one in kinds if isinstance(kinds, list) else ():
        if not str(one).endswith("attention") or str(one).startswith("linear"):
            return str(one)[:40]
    return next((key for key in (*RECURRENT, *OTHER_PARTS) if config.get(key)), None)
