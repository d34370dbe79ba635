"""Swap every module of a model that is recognised, and connect norms with the modules that get their output."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.huggingface.fast.attention import FastAttention, swap_attention
from shoal.models.huggingface.fast.embedding import swap_embedding, swap_rotary
from shoal.models.huggingface.fast.feed_forward import FastFeedForward, swap_feed_forward
from shoal.models.huggingface.fast.norms import FastNorm, Recall, swap_norm
from shoal.parallel.pipeline.skeleton import skeleton_of

TOKENS = 4


def swap_layers(model: Any, blocks: tuple[str, ...]) -> str | None:
    """Swap in place; return one line about it, or None if no module was recognised."""
    found: Counter[str] = Counter()
    rotaries = [one for one in model.modules() if any(name.endswith("inv_freq") for name in one._buffers)]
    kinds = set(getattr(_text_config(model), "layer_types", None) or ())
    swaps = [swap_rotary(module, kinds) for module in rotaries]
    for module in model.modules():
        if swap_norm(module):
            found["norms"] += 1
        elif swap_feed_forward(module):
            found["feed-forwards"] += 1
        elif rotaries and all(swaps) and swap_attention(module):
            found["attentions"] += 1
    if not found:
        return None
    found["embeddings"] += swap_embedding(model.get_input_embeddings())
    for name in blocks:
        _connect(model.get_submodule(name))
    counted = ", ".join(f"{number} {what}" for what, number in sorted(found.items()) if number)
    return f"fused layers in {type(model).__name__}: {counted}"


def _text_config(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def _connect(block: nn.Module) -> None:
    """Give a norm and the modules that get its output a common `Recall`."""
    modules: dict[str, Any] = dict(block.named_modules())
    for norm, users in _users_of_norms(block).items():
        recall = Recall(len(users))
        for name in (norm, *users):
            modules[name].recall = recall


def _users_of_norms(block: nn.Module) -> dict[str, list[str]]:
    """Norm → the modules that get its output, found by calling a copy without memory."""
    skeleton: Any = skeleton_of(block)
    outputs: list[tuple[Tensor, str]] = []
    users: dict[str, list[str]] = {}

    def note_output(name: str) -> Any:
        return lambda _module, _arguments, output: outputs.append((output, name))

    def note_input(user: str) -> Any:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            given = next(one for one in (*arguments, *options.values()) if isinstance(one, Tensor))
            norm = next((name for output, name in outputs if output is given), None)
            if norm is not None:
                users.setdefault(norm, []).append(user)

        return hook

    modules: dict[str, Any] = dict(skeleton.named_modules())
    for name, module in modules.items():
        if isinstance(module, FastNorm):
            skeleton.get_submodule(name).register_forward_hook(note_output(name))
        elif isinstance(module, FastAttention | FastFeedForward):
            skeleton.get_submodule(name).register_forward_pre_hook(note_input(name), with_kwargs=True)
    try:
        with torch.device("meta"):
            skeleton(**_arguments(skeleton))
    except Exception:  # it takes other arguments: then the output of norms is saved
        return {}
    return users


def _arguments(block: nn.Module) -> dict[str, Any]:
    """Arguments on the meta device, by the names that blocks of transformers give them."""
    attention: Any = next(one for one in block.modules() if isinstance(one, FastAttention))
    dtype, takes = attention.q_proj.weight.dtype, inspect.signature(block.forward).parameters
    angles = torch.empty(1, TOKENS, attention.head_dim, dtype=dtype, device="meta")
    x = torch.empty(1, TOKENS, attention.q_proj.in_features, dtype=dtype, device="meta")
    more = {name: (angles, angles) for name in takes if name.startswith("position_embeddings")}
    return {"hidden_states": x, "attention_mask": None, **more}
