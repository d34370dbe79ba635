"""The configuration of a Llama: its fields, their checks, the published sizes, and the FLOPs of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.errors import Problem, listed, raise_if
from shoal.models.build_config import build_config, not_positive
from shoal.models.rope_scaling import Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The size of a Llama. The defaults are the preset `tiny`."""

    vocabulary: int = 264
    """Size of the vocabulary; 264 is every byte and eight special tokens."""

    hidden: int = 128
    """Features of the residual stream."""

    num_layers: int = 4
    """Blocks, each one attention and one feed-forward."""

    num_heads: int = 4
    """Query heads per block."""

    num_kv_heads: int = 2
    """Key/value heads per block; each serves num_heads / num_kv_heads query heads."""

    head_dim: int | None = None
    """Features per head. None: hidden / num_heads."""

    ffn: int = 384
    """Features inside the feed-forward."""

    max_sequence: int = 8192
    """The longest sequence. It costs no memory: no tensor has this size."""

    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths, the longest of which is about 2 pi times this."""

    rope_type: str = "default"
    """`default`, or how rotary frequencies are scaled for longer texts: `linear`, `llama3` or `yarn`."""

    rope_factor: float = 1.0
    """By how much texts are longer than the model was first trained for (linear, llama3, yarn)."""

    rope_original: int = 8192
    """The first length (llama3, yarn)."""

    rope_low_freq: float = 1.0
    """Waves with fewer turns than this within the first length are scaled (llama3)."""

    rope_high_freq: float = 4.0
    """Waves with more turns than this stay (llama3)."""

    rope_beta_fast: float = 32.0
    """Waves with more turns than this stay (yarn)."""

    rope_beta_slow: float = 1.0
    """Waves with fewer turns than this are scaled (yarn)."""

    rope_attention: float | None = None
    """The scale of cos and sin (yarn). None: 0.1 ln(rope_factor) + 1."""

    norm_eps: float = 1e-5
    """Added to the mean square in every norm."""

    tied: bool = False
    """True: the output head is the embedding, transposed."""

    init_std: float = 0.02
    """Standard deviation of the initial matrices; those that end a branch get it divided by sqrt(2 * num_layers)."""

    def __post_init__(self) -> None:
        counts = ("vocabulary", "hidden", "num_layers", "num_heads", "num_kv_heads", "ffn", "max_sequence")
        problems = not_positive(self, *counts, "rope_theta", "norm_eps", "init_std")
        problems += [] if self.head_dim is None else not_positive(self, "head_dim")
        problems += not_positive(self, "rope_original", "rope_low_freq", "rope_beta_fast", "rope_beta_slow")
        problems += self.rope.problems()
        raise_if(problems or self._mismatches(), title="model 'llama'")

    def _mismatches(self) -> list[Problem]:
        """Find fields that do not divide each other; called for positive numbers only."""
        problems = []
        if self.head_dim is None and self.hidden % self.num_heads:
            fix = f"--model.num_heads {listed(_divisors(self.hidden))}, or --model.head_dim 64"
            problems.append(
                Problem("M009", f"hidden={self.hidden} is not divisible by num_heads={self.num_heads}", fix)
            )
        elif self.dim_of_head % 2:
            why = f"the head dim must be even for rotary positions, got {self.dim_of_head}"
            problems.append(Problem("M010", why, f"--model.head_dim {self.dim_of_head + 1}"))
        if self.num_heads % self.num_kv_heads:
            what = f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}"
            problems.append(Problem("M009", what, f"--model.num_kv_heads {listed(_divisors(self.num_heads))}"))
        return problems

    @property
    def rope(self) -> Rope:
        """What decides the rotary frequencies."""
        return Rope(
            rope_theta=self.rope_theta,
            rope_type=self.rope_type,
            factor=self.rope_factor,
            original_max_position_embeddings=self.rope_original,
            low_freq_factor=self.rope_low_freq,
            high_freq_factor=self.rope_high_freq,
            beta_fast=self.rope_beta_fast,
            beta_slow=self.rope_beta_slow,
            attention_factor=self.rope_attention,
        )

    @property
    def dim_of_head(self) -> int:
        """Features per head, also if `head_dim` is None."""
        return self.hidden // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        attention = 2 * self.hidden * self.dim_of_head * (self.num_heads + self.num_kv_heads)
        block = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.num_layers * block + self.hidden + embeddings

    def training_flops(self, shape: tuple[int, ...]) -> float:
        """For a batch of shape (batch, tokens): 6 per token and parameter, and 12 per token, layer, attention feature
        and token of the sequence. Attention counts as if it were not causal, which is how MFU is published; looking up
        an embedding is free, multiplying by a tied one is not."""
        batch, num_tokens = shape[:2]
        looked_up = 0 if self.tied else self.vocabulary * self.hidden
        attention = 12 * self.num_layers * self.num_heads * self.dim_of_head * num_tokens
        return float(batch * num_tokens * (6 * (self.num_parameters - looked_up) + attention))


def _divisors(number: int) -> list[int]:
    """Every divisor up to 128, which is more heads than any preset has."""
    return [divisor for divisor in range(1, min(number, 128) + 1) if number % divisor == 0]


PRESETS = {
    "tiny": LlamaConfig(),
    "small": LlamaConfig(hidden=384, num_layers=8, num_heads=6, num_kv_heads=2, ffn=1024),
    "llama3-1b": LlamaConfig(
        vocabulary=128256, hidden=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn=8192, tied=True
    ),
    "llama3-8b": LlamaConfig(vocabulary=128256, hidden=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn=14336),
    "llama3-70b": LlamaConfig(vocabulary=128256, hidden=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn=28672),
    "llama3-405b": LlamaConfig(
        vocabulary=128256, hidden=16384, num_layers=126, num_heads=128, num_kv_heads=8, ffn=53248
    ),
}


FREE = ("max_sequence", "init_std")
"""Settings that the meaning of weights does not depend on."""


def settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All others, with those that the arguments leave out."""
    found = asdict(build_config("llama", PRESETS, LlamaConfig(), arguments))
    return {key: value for key, value in found.items() if key not in FREE}


def smaller_std(hidden: int) -> float:
    """Standard deviation of the matrices of a small copy. With few features, the small values of a large model would
    hardly change the activations, so an error would hardly show; larger values would amplify rounding."""
    return min(0.125, 1.0 / math.sqrt(hidden))


def smaller(arguments: Mapping[str, Any], *, num_stages: int, ep: int = 1) -> dict[str, Any]:
    """The arguments of a small copy with the same structure: as many heads, tied or not, and enough layers for
    `num_stages`, unevenly distributed if the original has that many. It has no experts for `ep`."""
    config = build_config("llama", PRESETS, LlamaConfig(), arguments)
    return {
        **arguments,
        "hidden": 4 * config.num_heads,
        "head_dim": 4,
        "ffn": 6 * config.num_heads,
        "vocabulary": 97,
        "num_layers": min(config.num_layers, max(4, num_stages + 1)),
        "init_std": smaller_std(4 * config.num_heads),
    }
