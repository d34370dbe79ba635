"""Frozen weights in 4 bits: the NormalFloat of QLoRA (Dettmers et al. 2023), with scales in 8 bits.

    weight      64 numbers ──▶ 64 codes of 4 bits, and their largest magnitude: the scale
    scales     256 scales  ──▶ 256 codes of 8 bits around the mean of all, and one factor in float32

That is 0.516 bytes for a number. A part of a matrix under tp has its scales in float32, since their groups of 256 are
not divided with it: 0.563 bytes.

The product with a packed weight unpacks it for a moment, in the forward and again in
the backward; autograd keeps the packed one alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CODES = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
"""Quantiles of the normal distribution between -1 and 1; Dettmers et al. 2023, appendix E."""
TINY = 1e-30
BLOCK, GROUP = 64, 256
"""Numbers that share a scale, and scales that share a factor."""


@dataclass(frozen=True)
class Packed:
    """A matrix in 4 bits a number."""

    codes: Tensor
    """Two numbers in a byte."""
    scales: Tensor
    """In int8, or in float32 without factors and a mean."""
    factors: Tensor | None
    mean: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    """That of the matrix before it was packed."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory that it takes."""
        return tuple(one for one in (self.codes, self.scales, self.factors, self.mean) if one is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        """Return the same object: nothing changes it, so copies of a model share it."""
        return self

    def to(self, device: torch.device) -> Packed:
        """Return it on a device; itself, if it is there."""
        if self.codes.device == device:
            return self
        names = ("codes", "scales", "factors", "mean")
        moved = {name: one.to(device) for name in names if (one := getattr(self, name)) is not None}
        return replace(self, **moved)

    @property
    def block_scales(self) -> Tensor:
        """The scale of each block, in float32."""
        if self.factors is None or self.mean is None:
            return self.scales
        return _unpacked_scales(self.scales, self.factors, self.mean, len(self.codes) * 2 // BLOCK)

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix that the codes stand for, in its dtype or another one."""
        table = torch.tensor(CODES, device=self.codes.device)
        codes = torch.stack((self.codes >> 4, self.codes & 15), -1).reshape(-1, BLOCK)
        values = table[codes.int()] * self.block_scales[:, None]
        return values.view(-1)[: math.prod(self.shape)].view(self.shape).to(dtype or self.dtype)


@torch.no_grad()
def pack(weight: Tensor) -> Packed:
    """Round a matrix to 4 bits a number."""
    flat = weight.detach().float().reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    mean = largest.mean()
    groups = F.pad(largest - mean, (0, -len(largest) % GROUP)).view(-1, GROUP)
    factors = groups.abs().amax(1).clamp(min=TINY) / 127
    scales = (groups / factors[:, None]).round().to(torch.int8)
    known = _unpacked_scales(scales, factors, mean, len(blocks))
    table = torch.tensor(CODES, device=flat.device)
    nearest = torch.bucketize(blocks / known[:, None], (table[1:] + table[:-1]) / 2).to(torch.uint8).view(-1, 2)
    codes = nearest[:, 0] << 4 | nearest[:, 1]
    return Packed(codes, scales, factors, mean, tuple(weight.shape), weight.dtype)


def unknown(shape: Sequence[int], dtype: torch.dtype) -> Packed:
    """A matrix whose numbers are packed later. Until then all of them are NaN."""
    blocks = -(-math.prod(shape) // BLOCK)
    groups = -(-blocks // GROUP)
    codes, scales = torch.zeros(blocks * BLOCK // 2, dtype=torch.uint8), torch.zeros(groups, GROUP, dtype=torch.int8)
    nan = torch.full((groups,), torch.nan)
    return Packed(codes, scales, nan, nan.mean(), tuple(shape), dtype)


def cut(packed: Packed, dim: int, ranges: Sequence[tuple[int, int]]) -> Packed | None:
    """Some rows (dim 0) or columns (dim 1) of a matrix, rounded as in the whole: (first, number) of each range, one
    after the other. None: a range begins or ends inside of a block."""
    rows, columns = packed.shape
    blocks = torch.arange(len(packed.codes) * 2 // BLOCK)
    if dim == 0:
        edges = [edge * columns for first, size in ranges for edge in (first, first + size)]
    else:
        edges = [columns, *(edge for first, size in ranges for edge in (first, first + size))]
        blocks = blocks.view(rows, -1) if columns % BLOCK == 0 else blocks
    if any(edge % BLOCK for edge in edges):
        return None
    per_unit = columns if dim == 0 else 1
    kept = [(first * per_unit // BLOCK, size * per_unit // BLOCK) for first, size in ranges]
    chosen = torch.cat([blocks.narrow(dim, first, size) for first, size in kept], dim).flatten().to(packed.codes.device)
    shape = list(packed.shape)
    shape[dim] = sum(size for _, size in ranges)
    codes = packed.codes.view(-1, BLOCK // 2)[chosen].flatten()
    return Packed(codes, packed.block_scales[chosen], None, None, tuple(shape), packed.dtype)


def _unpacked_scales(scales: Tensor, factors: Tensor, mean: Tensor, number: int) -> Tensor:
    """Above zero: near the smallest ones, rounding around the mean may go below."""
    return (scales * factors[:, None] + mean).view(-1)[:number].clamp(min=TINY)


def linear(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Return x W' + bias. Under autocast, in its dtype. No gradient is computed for the weight."""
    if x.is_meta:  # of a trace of shapes
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    is_cast = torch.is_autocast_enabled(x.device.type)
    x = x.to(torch.get_autocast_dtype(x.device.type)) if is_cast and x.dtype != torch.float64 else x
    y: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)


class _Linear(torch.autograd.Function):
    """The product with a frozen weight that is unpacked twice and never saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Packed) -> Tensor:
        ctx.weight = weight
        return x @ weight.unpacked(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return (grad @ ctx.weight.unpacked(grad.dtype) if ctx.needs_input_grad[0] else None), None
