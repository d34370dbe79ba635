"""Gated feed-forwards of transformers: down(act(gate(x)) · up(x)), with silu or GELU, with or without biases."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

from torch import Tensor, nn

from shoal.models.huggingface.fast.lora_feed_forward import FastLoRAFeedForward
from shoal.models.huggingface.fast.norms import Recall
from shoal.models.huggingface.fast.probe import FAR, Swapped, become, computes, drawn, has_linears, is_free, small_copy
from shoal.numerics.ops.memory_saving_linear import linears, swiglu_linear
from shoal.numerics.ops.swiglu import Activation
from shoal.parallel.lora.layers import LoRALinear

NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate", "up", "down"))
"""Names of the gate, the other product and the last one. Whether they are that is found by computing."""


class FastFeedForward(Swapped):
    """A gated feed-forward that saves gate and up, and computes their product again."""

    layer_names: tuple[str, str, str]
    gate_activation: Activation
    recall: Recall | None = None
    recompute = True
    """See `swiglu_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """x_BTD → y_BTD."""
        source = None if self.recall is None else self.recall.take(x)
        gate, up, down = (getattr(self, name) for name in self.layer_names)
        parts = linears(x, source, gate, up, together=True)
        return swiglu_linear(parts, down, recompute=self.recompute, activation=self.gate_activation)


def swap_feed_forward(module: nn.Module) -> bool:
    """Replace the forward of a module, if it is a gated feed-forward."""
    names = next((names for names in NAMES if has_linears(module, names, (nn.Linear, LoRALinear))), None)
    if names is None or not is_free(module):
        return False
    kind = FastFeedForward if has_linears(module, names) else FastLoRAFeedForward
    features, inner = getattr(module, names[0]).in_features, getattr(module, names[0]).out_features
    shapes = [(getattr(module, name).in_features, getattr(module, name).out_features) for name in names]
    if shapes != [(features, inner), (features, inner), (inner, features)]:
        return False
    probe = small_copy(module, dict(zip(names, [(6, 10), (6, 10), (10, 6)], strict=True)))
    for activation in get_args(Activation):
        ours = partial(_ours, probe, names, activation)
        if all(computes(probe, probe, ours, scale * drawn(2, 3, 6)) for scale in (1, FAR)):
            become(module, kind, layer_names=names, gate_activation=activation)
            return True
    return False


def _ours(module: Any, names: tuple[str, str, str], activation: Activation, x: Tensor) -> Tensor:
    gate, up, down = (getattr(module, name) for name in names)
    return swiglu_linear(linears(x, None, gate, up), down, activation=activation)
