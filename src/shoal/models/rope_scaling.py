"""Rotary frequencies of models that were trained on longer texts than their positions were made for.

default   1 / theta^(2i/H)
linear    all divided by a factor (position interpolation, arXiv 2306.15595)
llama3    those of long waves divided, those of short ones not, and between them a mean of both (Llama 3.1)
yarn      the same by the number of turns within the first length; cos and sin are scaled, too (arXiv 2309.00071)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import Problem, listed

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """What decides the frequencies. The names are those of `rope_parameters` in a config.json."""

    rope_theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def problems(self) -> list[Problem]:
        """Values that no frequency can be computed from."""
        found = []
        if self.rope_type not in ROPE_TYPES:
            what = f"rope_type must be {listed(ROPE_TYPES)}, got {self.rope_type!r}"
            found.append(Problem("M008", what, "--model.rope_type default"))
        if self.factor < 1:
            found.append(Problem("M008", f"rope_factor must be at least 1, got {self.factor}", "--model.rope_factor 8"))
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            what = f"rope_low_freq must be below rope_high_freq={self.high_freq_factor}, got {self.low_freq_factor}"
            found.append(Problem("M008", what, "--model.rope_low_freq 1 --model.rope_high_freq 4"))
        return found

    @property
    def scale_of_cos(self) -> float:
        """The factor of cos and sin."""
        if self.rope_type != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


def rope_angles(positions_BT: Tensor, rope: Rope, dim_of_head: int, dtype: torch.dtype) -> Tensor:
    """angles_BTH for the first half of the head dim: position * frequency. Never below float32: in bfloat16 positions
    above 256 cannot be distinguished."""
    exponents_H = torch.arange(0, dim_of_head, 2, dtype=dtype, device=positions_BT.device) / dim_of_head
    powers_H = rope.rope_theta**exponents_H
    positions = positions_BT[:, :, None].to(dtype)
    if rope.rope_type == "default":
        return positions / powers_H
    if rope.rope_type == "linear":
        return positions / (powers_H * rope.factor)
    kept_H = (
        _kept_of_llama3(rope, 2 * math.pi * powers_H)
        if rope.rope_type == "llama3"
        else _kept_of_yarn(rope, dim_of_head, exponents_H)
    )
    return positions * ((1 - kept_H) / (powers_H * rope.factor) + kept_H / powers_H)


def _kept_of_llama3(rope: Rope, lengths_H: Tensor) -> Tensor:
    """1 where waves are short, 0 where they are long, and between them by turns within the first length."""
    turns_H = rope.original_max_position_embeddings / lengths_H
    between = rope.high_freq_factor - rope.low_freq_factor
    return ((turns_H - rope.low_freq_factor) / between).clamp(0, 1)


def _kept_of_yarn(rope: Rope, dim_of_head: int, exponents_H: Tensor) -> Tensor:
    """1 at frequencies with more turns than beta_fast within the first length, 0 at those with fewer than beta_slow."""

    def place(turns: float) -> float:
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim_of_head * math.log(ratio) / (2 * math.log(rope.rope_theta))

    low, high = max(math.floor(place(rope.beta_fast)), 0), min(math.ceil(place(rope.beta_slow)), dim_of_head - 1)
    width = high - low if high != low else 0.001
    return 1 - ((exponents_H * dim_of_head / 2 - low) / width).clamp(0, 1)
