"""A multilayer perceptron: the smallest model that has blocks, splits and a cost. Shapes: B batch, D features.

Its layers are torch's own, with torch's own law for the first values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Description, Split
from shoal.errors import Problem, listed, raise_if
from shoal.models.build_config import build_config, uninitialized

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": F.tanh}


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """The size of a multilayer perceptron."""

    sizes: tuple[int, ...] = (64, 128, 128, 10)
    """Features of the input, of every layer between, and of the output."""

    activation: str = "relu"
    """Between two layers: `relu`, `gelu`, `silu` or `tanh`."""

    def __post_init__(self) -> None:
        problems = []
        if len(self.sizes) < 2 or min(self.sizes, default=0) < 1:
            problems.append(
                Problem(
                    "M008", f"sizes must be two or more above 0, got {list(self.sizes)}", "--model.sizes '[64, 10]'"
                )
            )
        if self.activation not in ACTIVATIONS:
            problems.append(
                Problem("M008", f"unknown activation {self.activation!r}", f"--model.activation {listed(ACTIVATIONS)}")
            )
        raise_if(problems, title="model 'mlp'")

    def training_flops(self, shape: tuple[int, ...]) -> float:
        """FLOPs: two per weight and sample forward, twice that backward."""
        return 6.0 * shape[0] * sum(before * after for before, after in pairwise(self.sizes))


PRESETS = {"tiny": MLPConfig()}


def build(**arguments: Any) -> MLP:
    """An MLP from `preset` and any field of `MLPConfig`."""
    return MLP(build_config("mlp", PRESETS, MLPConfig(), arguments))


def settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All settings, with those that the arguments leave out."""
    return asdict(build_config("mlp", PRESETS, MLPConfig(), arguments))


class Layer(nn.Module):
    """A linear layer and its activation."""

    def __init__(self, num_inputs: int, num_outputs: int, activation: str | None) -> None:
        super().__init__()
        self.activation = activation
        self.linear = uninitialized(nn.Linear, num_inputs, num_outputs)

    def forward(self, x_BD: Tensor) -> Tensor:
        """x_BD → x_BD."""
        x_BD = self.linear(x_BD)
        return x_BD if self.activation is None else ACTIVATIONS[self.activation](x_BD)


class MLP(nn.Module):
    """Linear layers with an activation between them."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        activations = [config.activation] * (len(config.sizes) - 2) + [None]
        pairs = zip(pairwise(config.sizes), activations, strict=True)
        self.layers = nn.Sequential(*(Layer(*sizes, activation) for sizes, activation in pairs))

    def forward(self, images: Tensor) -> Tensor:
        """Images, or inputs of any shape after the batch dim → outputs_BD."""
        outputs_BD: Tensor = self.layers(images.flatten(1))
        return outputs_BD

    def describe(self) -> Description:
        """Every layer is a block; pairs of layers are a column and a row split, and an odd one at the end is
        replicated."""
        num_layers = len(self.layers)
        kinds = (Split.COLUMN, Split.ROW)
        return Description(
            blocks=tuple(f"layers.{i}" for i in range(num_layers)),
            splits={f"layers.{i}.linear": kinds[i % 2] for i in range(num_layers // 2 * 2)},
            num_outputs=self.config.sizes[-1],
            training_flops=self.config.training_flops,
        )
