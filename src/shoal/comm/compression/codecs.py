"""Codecs: encode numbers as fewer bytes, and decode them.

A codec takes a flat tensor whose size is a multiple of its block. Every block becomes equally many bytes, so a part of
the tensor is a part of the message.

    int8    block of 256    256 bytes: round(x / scale) at random up or down │ 4 bytes: scale = max |x| / 127
    1bit    block of 1024   128 bytes: x >= 0, eight to a byte               │ 4 bytes: scale = mean |x|
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.blueprint.replicas.compress_words import INT8_BLOCK, SIGN_BLOCK, TOPK_BLOCK, Compression

BYTE = torch.uint8


class Codec(ABC):
    """Encodes blocks of numbers as bytes."""

    block: int
    """Numbers per block."""
    block_bytes: int
    """Bytes per encoded block."""

    @abstractmethod
    def encode(self, x: Tensor, drawn: torch.Generator) -> Tensor:
        """Encode full blocks."""

    @abstractmethod
    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode bytes to numbers."""


@dataclass(frozen=True, slots=True)
class CastCodec(Codec):
    """Round each number to a narrower type."""

    dtype: torch.dtype
    block = 1
    block_bytes = 2

    def encode(self, x: Tensor, drawn: torch.Generator) -> Tensor:
        """Two bytes per number."""
        return x.to(self.dtype).view(BYTE)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert the numbers to `dtype`."""
        return encoded.view(self.dtype).to(dtype)


class Int8Codec(Codec):
    """Multiples of a scale per block, rounded stochastically: the mean is unbiased."""

    block = INT8_BLOCK
    block_bytes = INT8_BLOCK + 4

    def encode(self, x: Tensor, drawn: torch.Generator) -> Tensor:
        """One byte per number, and one scale per block."""
        blocks = x.view(-1, self.block)
        # Slightly above the maximum: rounding up must not exceed 127.
        scale = (blocks.abs().amax(1, keepdim=True).float() / 127).mul_(1 + 1e-6)
        rounded = _noise(blocks, drawn).add_(blocks.float() / scale.clamp_min(torch.finfo(torch.float32).tiny)).floor_()
        return _joined(rounded.to(torch.int8), scale)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply by the scales."""
        rounded, scale = _parted(encoded, self.block)
        return rounded.view(torch.int8).to(dtype).mul_(scale.to(dtype)).view(-1)


class SignCodec(Codec):
    """The sign of each number, and the mean absolute value of its block."""

    block = SIGN_BLOCK
    block_bytes = SIGN_BLOCK // 8 + 4

    def encode(self, x: Tensor, drawn: torch.Generator) -> Tensor:
        """One bit per number, and one scale per block."""
        blocks = x.view(-1, self.block)
        scale = blocks.abs().mean(1, keepdim=True).float()
        bits = (blocks >= 0).view(-1, self.block // 8, 8).to(BYTE)
        return _joined(bits.mul_(_weights(x.device)).sum(2, dtype=BYTE), scale)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the block's scale with the number's sign."""
        packed, scale = _parted(encoded, self.block // 8)
        bits = packed.unsqueeze(2).bitwise_and(_weights(encoded.device)) != 0
        signs = bits.view(-1, self.block).to(dtype).mul_(2).sub_(1)
        return signs.mul_(scale.to(dtype)).view(-1)


@dataclass(frozen=True, slots=True)
class TopKCodec(Codec):
    """The largest numbers of each block, as bf16, and their indices in it."""

    kept: int
    block = TOPK_BLOCK

    @property
    def block_bytes(self) -> int:  # type: ignore[override]
        """Two bytes per value and two per index."""
        return 4 * self.kept

    def encode(self, x: Tensor, drawn: torch.Generator) -> Tensor:
        """Encode values and indices of the largest of each block."""
        blocks = x.view(-1, self.block)
        places = blocks.abs().topk(self.kept, dim=1, sorted=False).indices
        values = blocks.gather(1, places).to(torch.bfloat16)
        return torch.cat([values.view(BYTE), places.to(torch.int16).view(BYTE)], dim=1).view(-1)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Put the values at their indices, and zeros elsewhere."""
        values, places = encoded.view(-1, self.block_bytes).split(2 * self.kept, dim=1)
        blocks = torch.zeros(values.shape[0], self.block, dtype=dtype, device=encoded.device)
        blocks.scatter_(1, _aligned(places).view(torch.int16).long(), _aligned(values).view(torch.bfloat16).to(dtype))
        return blocks.view(-1)


def codec_of(compression: Compression) -> Codec:
    """Return the codec of a method that encodes numbers."""
    match compression.method:
        case "fp16":
            return CastCodec(torch.float16)
        case "bf16":
            return CastCodec(torch.bfloat16)
        case "int8":
            return Int8Codec()
        case "1bit":
            return SignCodec()
        case "topk":
            return TopKCodec(compression.kept_in_block)
        case other:
            raise AssertionError(f"{other} does not encode numbers")


def _noise(like: Tensor, drawn: torch.Generator) -> Tensor:
    """Return numbers between 0 and 1 of 16 random bits each, four per draw: drawing takes the time."""
    bits = torch.empty(like.numel() // 4, dtype=torch.int64, device=like.device).random_(
        -(2**63), None, generator=drawn
    )
    return bits.view(torch.int16).view(like.shape).float().add_(2**15 + 0.5).mul_(2.0**-16)


def _joined(body: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([body.view(BYTE), scale.view(BYTE)], dim=1).view(-1)


def _parted(encoded: Tensor, body: int) -> tuple[Tensor, Tensor]:
    numbers, scale = encoded.view(-1, body + 4).split([body, 4], dim=1)
    return numbers, _aligned(scale).view(torch.float32)


def _aligned(x: Tensor) -> Tensor:
    """Copy a tensor so that its memory is aligned for another type."""
    return x.clone(memory_format=torch.contiguous_format)


def _weights(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=BYTE, device=device)
