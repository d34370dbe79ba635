"""A linear layer with LoRA (Hu et al. 2021): y = W x + s · B (A x), where W is frozen and s = alpha / rank.

The layer stays an `nn.Linear` with its names. It gets two parameters, `lora_A` (rank, in) and `lora_B` (out, rank).
Under tp, with the pieces of `shoal.parallel.tensor` (w|: half of the outputs, w-: half of the inputs):

    COLUMN   x ──[enter]──┬── W| ──────┬── y/2       A is whole. Each rank has the gradient of its own half of B: A is
                          └── A ── B| ─┘             partial, and summed over tp once a step.
    ROW      x/2 ──┬── W- ──────┬──[leave]── y       B is whole. Each rank has the gradient of its own half of A: B is
                   └── A- ── B ─┘                    partial. The sum over ranks is the one that W needs anyway.

So LoRA adds no message to a forward or a backward.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Split
from shoal.parallel.tensor import ColumnParallelLinear, RowParallelLinear, check_features

A, B = "lora_A", "lora_B"


class Adapted(nn.Linear):
    """What all layers with LoRA share."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float
    adapter_names: ClassVar[tuple[str, ...]] = (A, B)
    """Parameters that `init_adapter` fills, whatever fills the rest of the model."""

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return self.lora_A.shape[0]

    def add_update(self, y: Tensor, x: Tensor) -> Tensor:
        """y + s · B (A x), in one pass over y."""
        x = self.dropped(x) if self.lora_dropout and self.training else x
        z = F.linear(x, self.lora_A.to(x.dtype)) * self.lora_scale  # a base in bfloat16 has adapters in float32
        rows = z.reshape(-1, z.shape[-1]).to(y.dtype)
        return torch.addmm(y.reshape(-1, y.shape[-1]), rows, self.lora_B.to(y.dtype).T).view(y.shape)

    def dropped(self, x: Tensor) -> Tensor:
        """x with some features set to zero."""
        return F.dropout(x, self.lora_dropout)

    @torch.no_grad()
    def init_adapter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """A as `nn.Linear` draws its weight, B zero: the first forward is that of the base."""
        if name == B:
            parameter.zero_()
            return
        bound = parameter.shape[1] ** -0.5  # kaiming_uniform_(a=√5)
        parameter.uniform_(-bound, bound, generator=generator)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"{super().extra_repr()}, rank={self.rank}"


class LoRALinear(Adapted):
    """A whole layer with LoRA."""

    split_forms: ClassVar[dict[Split, type[nn.Module]]] = {}
    """Split → the class that the layer becomes under tp."""

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer, and the update."""
        return self.add_update(super().forward(x), x)


class ColumnParallelLoRA(Adapted, ColumnParallelLinear):
    """This rank's output features of a layer with LoRA."""

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0, B: 0}
    partial: ClassVar[tuple[str, ...]] = (A,)

    def forward(self, x: Tensor) -> Tensor:
        """Map a replicated tensor to this rank's features."""
        check_features(self, x, "all")
        inside = self.tensor.enter_layer(self, x)
        return self.add_update(F.linear(inside, self.weight, self.bias), inside)


class RowParallelLoRA(Adapted, RowParallelLinear):
    """This rank's input features of a layer with LoRA."""

    cut: ClassVar[dict[str, int]] = {"weight": 1, A: 1}
    partial: ClassVar[tuple[str, ...]] = (B,)

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's features to a replicated tensor. The bias is added once, after the sum."""
        check_features(self, x, "this rank's part of the")
        total = self.tensor.leave(self.add_update(F.linear(x, self.weight), x))
        return total if self.bias is None else total + self.bias.to(total.dtype)

    def dropped(self, x: Tensor) -> Tensor:
        """x with the features set to zero that one device would set: all ranks draw for the whole input."""
        whole = F.dropout(x.new_ones(*x.shape[:-1], self.in_features), self.lora_dropout)
        return x * whole.narrow(-1, self.tensor.first_of(self.in_features), x.shape[-1])


LoRALinear.split_forms = {Split.COLUMN: ColumnParallelLoRA, Split.ROW: RowParallelLoRA}


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """The layers with LoRA, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of this name is one of LoRA's."""
    return parameter.rpartition(".")[2] in (A, B)
