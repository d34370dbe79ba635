"""The configuration of a mixture of experts: its fields beside those of a Llama, the published sizes, and the FLOPs of
a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.errors import Problem, ShoalError, raise_if
from shoal.models.build_config import build_config, not_positive
from shoal.models.llama_config import LlamaConfig, smaller_std


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(LlamaConfig):
    """The size of a mixture of experts. The defaults are the preset `tiny`. `ffn` is that of the dense layers."""

    num_experts: int = 8
    """Experts per sparse layer, of which a token uses `top_k`."""

    top_k: int = 2
    """Experts per token; with choice 'expert', on average and at capacity factor 1."""

    expert_ffn: int = 128
    """Features inside one expert."""

    num_shared_experts: int = 0
    """Shared experts for every token; together one feed-forward of this many times `expert_ffn`."""

    num_dense_layers: int = 0
    """The number of first layers with one feed-forward of size `ffn` and no experts."""

    score: str = "softmax"
    """softmax: experts compete for a token. sigmoid: each is scored alone."""

    choice: str = "token"
    """token: each token chooses its experts. expert: each expert chooses the best tokens of a sequence. This depends on
    later tokens, so it is not for generation."""

    normalise: bool = True
    """True: the weights of a token's experts sum to `scale`."""

    scale: float = 1.0
    """A factor of the output of experts, without shared ones."""

    capacity_factor: float | None = None
    """The most tokens of one sequence for one expert, as a multiple of an even share; the others are dropped.
    None: no limit (with choice 'expert': 1)."""

    auxiliary_coefficient: float = 0.01
    """Coefficient of the load balancing loss; 0: none."""

    z_coefficient: float = 0.0
    """Coefficient of the z-loss, which keeps the router's logits small; 0: none."""

    bias_rate: float = 0.0
    """Step size of the router's bias, which balances the experts; 0: no bias."""

    qk_norm: bool = False
    """True: RMS norm over each head of queries and keys."""

    def __post_init__(self) -> None:
        problems: tuple[Problem, ...] = ()
        try:
            LlamaConfig.__post_init__(self)
        except ShoalError as error:
            problems = error.problems
        own = not_positive(self, "num_experts", "top_k", "expert_ffn", "scale")
        own += [_negative(name, getattr(self, name)) for name in _NOT_NEGATIVE if getattr(self, name) < 0]
        if self.num_dense_layers >= self.num_layers:
            what = f"num_dense_layers={self.num_dense_layers} of num_layers={self.num_layers} leave no layer to experts"
            own.append(Problem("M011", what, f"--model.num_dense_layers {self.num_layers - 1}, or --model.name llama"))
        raise_if([*problems, *own], title="model 'moe'")

    @property
    def shared_ffn(self) -> int:
        """Features inside the shared feed-forward."""
        return self.num_shared_experts * self.expert_ffn

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return self._parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that compute one token."""
        return self._parameters(self.top_k)

    def _parameters(self, num_experts: int) -> int:
        """Number of parameters with `num_experts` per sparse layer; the router always scores all."""
        sparse = 3 * self.hidden * (num_experts * self.expert_ffn + self.shared_ffn) + self.num_experts * self.hidden
        num_sparse = self.num_layers - self.num_dense_layers
        dense = 3 * self.hidden * self.ffn
        norms = 2 * self.dim_of_head * self.num_layers if self.qk_norm else 0
        as_llama = LlamaConfig.num_parameters.fget(self)  # type: ignore[attr-defined]  # slots=True rules out super()
        return int(as_llama + num_sparse * (sparse - dense) + norms)

    def training_flops(self, shape: tuple[int, ...]) -> float:
        """The FLOPs of a Llama with the active parameters."""
        idle = self.num_parameters - self.num_active_parameters
        return LlamaConfig.training_flops(self, shape) - 6.0 * idle * shape[0] * shape[1]


_NOT_NEGATIVE = ("num_shared_experts", "num_dense_layers", "auxiliary_coefficient", "z_coefficient", "bias_rate")


def _negative(name: str, value: float) -> Problem:
    return Problem("M008", f"{name} must be 0 or more, got {value}", f"--model.{name} 0")


PRESETS = {
    "tiny": MoeConfig(),
    # About a billion parameters per token; with Adam and float32 weights all of it fits on one device of 139 GiB.
    "1b-active": MoeConfig(
        vocabulary=32768,
        hidden=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=4,
        num_experts=16,
        top_k=2,
        expert_ffn=2048,
    ),
    "mixtral-8x7b": MoeConfig(
        vocabulary=32000,
        hidden=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        rope_theta=1e6,
        num_experts=8,
        top_k=2,
        expert_ffn=14336,
        auxiliary_coefficient=0.02,
    ),
    "qwen3-30b-a3b": MoeConfig(
        vocabulary=151936,
        hidden=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=True,
        num_experts=128,
        top_k=8,
        expert_ffn=768,
        auxiliary_coefficient=0.001,
    ),
    # Not the published attention (latent, about 187 M parameters per layer) but grouped-query attention of about that
    # size, and no choice among groups of experts: the size and the traffic of DeepSeek-V3, not its checkpoints.
    "deepseek-v3": MoeConfig(
        vocabulary=129280,
        hidden=7168,
        num_layers=61,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        ffn=18432,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        num_experts=256,
        top_k=8,
        expert_ffn=2048,
        num_shared_experts=1,
        num_dense_layers=3,
        score="sigmoid",
        scale=2.5,
        auxiliary_coefficient=1e-4,
        bias_rate=1e-3,
    ),
}


FREE = ("max_sequence", "init_std", "auxiliary_coefficient", "z_coefficient", "bias_rate")
"""Settings that the meaning of weights does not depend on: first values, and losses of the training."""


def settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All others, with those that the arguments leave out."""
    found = asdict(build_config("moe", PRESETS, MoeConfig(), arguments))
    return {key: value for key, value in found.items() if key not in FREE}


def smaller(arguments: Mapping[str, Any], *, num_stages: int, ep: int = 1) -> dict[str, Any]:
    """The arguments of a small copy with the same structure: as many heads, the same routing, eight experts (or a
    multiple for `ep`) if so few can represent the original, and enough layers for `num_stages`, one sparse."""
    config = build_config("moe", PRESETS, MoeConfig(), arguments)
    few = math.lcm(8, ep)
    num_experts = few if config.num_experts % few == 0 else config.num_experts
    num_layers = min(config.num_layers, max(4, num_stages + 1))
    return {
        **arguments,
        "hidden": 4 * config.num_heads,
        "head_dim": 4,
        "ffn": 6 * config.num_heads,
        "expert_ffn": config.num_heads,
        "vocabulary": 97,
        "num_layers": num_layers,
        "num_dense_layers": min(config.num_dense_layers, 1, num_layers - 1),
        "init_std": smaller_std(4 * config.num_heads),
        "num_experts": num_experts,
        "top_k": config.top_k if config.top_k < num_experts else max(1, num_experts // 2),
    }
