"""`fp8`: the products of a model's blocks in 8-bit floats, scaled in every step; all else as under bf16.

A linear layer scales its input, its weight and the gradient of its output to the range of an 8-bit float. It uses one
scale per tensor (`fp8_linear`) or one per row (torchao's). The parameter itself stays in float32.

in fp8   linear layers inside of blocks whose features are multiples of 16 and not below `MIN_FEATURES`
in bf16  embeddings, norms, the logits of the head, which the loss is most sensitive to, routers and experts, and narrow
         layers, for which casting costs more than a faster product saves

A head that computes the loss has its own products for the gradients: `numerics.ops.fused_linear_cross_entropy`.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from shoal.errors import ShoalError, to_install
from shoal.numerics.fp8.fp8_linear import Fp8Linear

Scaling = Literal["tensorwise", "rowwise"]
FromHead = Literal["gradients", "none"]

MIN_FEATURES = 512
"""Layers with fewer features than this, in or out, stay in bf16. Measured on an H200."""


def to_fp8(block: nn.Module, scaling: Scaling, device: torch.device, *, min_features: int | None = None) -> None:
    """Make the linear layers of a block, or the layer itself, compute in fp8. They stay the same objects, with their
    names, parameters and hooks.

    A CPU has no such products, and computes them in float32 from the same values.
    """
    least = MIN_FEATURES if min_features is None else min_features
    layers = (layer for layer in block.modules() if isinstance(layer, nn.Linear))
    chosen = [layer for layer in layers if is_fit_for_fp8(layer, least)]
    if scaling == "tensorwise":
        for layer in chosen:
            Fp8Linear.of(layer)
    else:
        _convert_by_torchao(chosen, scaling, device)


def _convert_by_torchao(layers: list[nn.Linear], scaling: Scaling, device: torch.device) -> None:
    try:
        with silence("torchao", "torch.utils._pytree"):  # import messages that users cannot act on
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ShoalError(
            "rowwise fp8 needs torchao, which is not installed", fix=to_install("fp8"), code="R027"
        ) from None
    config = Float8LinearConfig.from_recipe_name(scaling)
    if device.type == "cpu":
        config = dataclasses.replace(config, emulate=True)
    for layer in layers:
        (made,) = convert_to_float8_training(nn.Sequential(layer), config=config)  # it replaces the layer in its parent
        layer.__dict__.update({name: value for name, value in made.__dict__.items() if name not in layer.__dict__})
        layer.__class__ = type(made)


@contextmanager
def silence(*names: str) -> Iterator[None]:
    """Ignore Python's warnings, and the warnings of these loggers."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns of torchao's docstrings when it compiles them
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def is_fit_for_fp8(layer: nn.Module, min_features: int = MIN_FEATURES) -> bool:
    """Whether fp8 makes a layer's product faster."""
    if type(layer) is not nn.Linear:
        return False
    features = (layer.in_features, layer.out_features)
    return all(size % 16 == 0 and size >= min_features for size in features)
