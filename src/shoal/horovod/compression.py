"""Send gradients in fewer bits: `Compression.none` and `Compression.fp16`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """What a script may subclass: `compress` returns a tensor and what `decompress` needs."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a context."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the same tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the same tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Send floating-point tensors in 16 bits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return a half-precision copy, and the dtype."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its dtype."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
