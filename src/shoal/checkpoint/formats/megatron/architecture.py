"""From the arguments of Megatron-LM to the model section of a recipe. A model that shoal's llama is not is rejected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import Problem, ShoalError, raise_if

NEEDED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
}
"""Arguments whose defaults are not a llama's → the value that they must have."""
MOST_LAYERS = 10_000
OTHERS: dict[str, tuple[Any, ...]] = {
    "add_bias_linear": (False,),
    "add_qkv_bias": (False, None),
    "qk_layernorm": (False, None),
    "apply_layernorm_1p": (False, None),
    "layernorm_zero_centered_gamma": (False, None),
    "num_experts": (None, 0),
    "multi_latent_attention": (False, None),
    "rotary_interleaved": (False, None),
    "rotary_percent": (1.0, 1, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (False, None),
    "rope_type": (None, "rope"),
    "window_size": (None,),
    "softmax_type": (None, "vanilla"),
    "attention_output_gate": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "squared_relu": (False, None),
    "mtp_num_layers": (None, 0),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "no_rope_freq": (None,),
}
"""Arguments that change what a model computes → the values under which it is a llama. A missing one has its default."""


def model_section(args: Mapping[str, Any], folder: Path, vocabulary: int | None) -> dict[str, Any]:
    """The model section that the arguments describe. `vocabulary`: its size without padding; None: with it."""
    fix = "--format dcp, which imports the tensors under Megatron's names, for a model of your own"
    said = {name: args.get(name, _missing(name, args)) for name in NEEDED}
    wrong = {name: value for name, value in said.items() if value != NEEDED[name]}
    wrong |= {name: args[name] for name, allowed in OTHERS.items() if name in args and args[name] not in allowed}
    raise_if(
        Problem("C045", f"{folder} has {name} {str(value)[:60]}, which shoal's llama does not support", fix)
        for name, value in wrong.items()
    )
    heads = _count(args, "num_attention_heads", folder)
    hidden = _count(args, "hidden_size", folder)
    padded = _count(args, "padded_vocab_size", folder)
    if vocabulary is not None and not 1 <= vocabulary <= padded:
        raise ShoalError(
            f"--vocabulary must be at most the padded_vocab_size {padded:,} of {folder}, got {vocabulary:,}",
            fix=f"--vocabulary {padded}",
            code="E066",
        )
    is_grouped = bool(args.get("group_query_attention"))
    return {
        "name": "llama",
        "vocabulary": padded if vocabulary is None else vocabulary,
        "hidden": hidden,
        "num_layers": _count(args, "num_layers", folder, most=MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": _count(args, "num_query_groups", folder) if is_grouped else heads,
        "head_dim": _count(args, "kv_channels", folder) if args.get("kv_channels") else hidden // heads,
        "ffn": _count(args, "ffn_hidden_size", folder),
        "max_sequence": _count(args, "max_position_embeddings", folder),
        "rope_theta": _number(args, "rotary_base", 10_000.0),
        "norm_eps": _number(args, "norm_epsilon", 1e-5),
        "tied": not args.get("untie_embeddings_and_output_weights", False),
        "init_std": _number(args, "init_method_std", 0.02),
    }


def _missing(name: str, args: Mapping[str, Any]) -> Any:
    """The value of an argument that older versions did not have."""
    is_rotary = name == "position_embedding_type" and args.get("use_rotary_position_embeddings")
    return "rope" if is_rotary else {"normalization": "LayerNorm", "swiglu": False}.get(name, "learned_absolute")


def _count(args: Mapping[str, Any], name: str, folder: Path, most: int = 2**40) -> int:
    value = args.get(name)
    if type(value) is int and 1 <= value <= most:
        return value
    raise ShoalError(
        f"the arguments of {folder} must have {name}, a number from 1 to {most:,}, got {str(value)[:40]}",
        fix="--format dcp, which imports the tensors under Megatron's names",
        code="E066",
    )


def _number(args: Mapping[str, Any], name: str, default: float) -> float:
    value = args.get(name, default)
    return float(value) if isinstance(value, int | float) and 0 < value < 1e12 else default
