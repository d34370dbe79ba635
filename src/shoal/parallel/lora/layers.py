"""A linear layer with LoRA (Hu et al. 2021): y = W x + s · B (A x), where W is frozen and s = alpha / rank.

The layer keeps its class, as a new one that inherits from it, and its names. It gets two parameters, `lora_A`
(rank, in) and `lora_B` (out, rank), also where its weight has the inputs first, as Conv1D of GPT-2 (`Transposed`).
Under tp, with the pieces of `shoal.parallel.tensor` (w|: half of the outputs, w-: half of the inputs):

    COLUMN   x ──[enter]──┬── W| ──────┬── y/2       A is whole. Each rank has the gradient of its own half of B: A is
                          └── A ── B| ─┘             partial, and summed over tp once a step.
    ROW      x/2 ──┬── W- ──────┬──[leave]── y       B is whole. Each rank has the gradient of its own half of A: B is
                   └── A- ── B ─┘                    partial. The sum over ranks is the one that W needs anyway.

So LoRA adds no message to a forward or a backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Split
from shoal.parallel.tensor import ColumnParallelLinear, RowParallelLinear, check_features
from shoal.parallel.tensor_parts.linear_dims import PLAIN, TRANSPOSED, LinearDims
from shoal.parallel.tensor_parts.transposed import ColumnParallelTransposed, RowParallelTransposed

A, B = "lora_A", "lora_B"


class Adapted(nn.Module):
    """What all layers with LoRA share."""

    weight: Any
    bias: Any
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float
    adapter_seed: int | None
    """Decides the initial values, whenever they are drawn; None: the seed of the run does."""
    lora_features: tuple[int, int]
    """Inputs and outputs of the whole layer."""
    lora_base: type[nn.Module]
    """The class of the layer without LoRA."""
    adapter_names: ClassVar[tuple[str, ...]] = (A, B)
    """Parameters that `init_adapter` fills, whatever fills the rest of the model."""
    weight_dims: ClassVar[LinearDims] = PLAIN

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


class LoRALinear(Adapted, nn.Linear):
    """A whole layer with LoRA."""

    split_forms: ClassVar[dict[Split, type[nn.Module]]] = {}
    """Split → the class that the layer becomes under tp."""

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer, and the update."""
        return self.add_update(F.linear(x, self.weight, self.bias), x)


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
        """x with the features set to zero that one device would set."""
        return _dropped_part(self, x)


def _dropped_part(layer: Any, x: Tensor) -> Tensor:
    """This rank's features of an input, of which all ranks draw the whole mask."""
    size = layer.lora_features[0]
    whole = F.dropout(x.new_ones(*x.shape[:-1], size), layer.lora_dropout)
    return x * whole.narrow(-1, layer.tensor.first_of(size), x.shape[-1])


LoRALinear.split_forms = {Split.COLUMN: ColumnParallelLoRA, Split.ROW: RowParallelLoRA}


# ---- weights with the inputs first ----------------------------------------------------------------------------------


class Transposed(Adapted):
    """A whole layer with LoRA, which computes x W + b."""

    weight_dims: ClassVar[LinearDims] = TRANSPOSED
    split_forms: ClassVar[dict[Split, type[nn.Module]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer, and the update."""
        return self.add_update(F.linear(x, self.weight.T, self.bias), x)


@cache
def transposed(kind: Any) -> type[Transposed]:
    """The class of layers of a class with LoRA. It has the name of that class, by which layers are known."""
    made: type[Transposed] = type(kind.__name__, (Transposed, kind), {"__module__": kind.__module__})
    return made


class ColumnParallelTransposedLoRA(Adapted, ColumnParallelTransposed):
    """This rank's output features of such a layer."""

    weight_dims: ClassVar[LinearDims] = TRANSPOSED
    cut: ClassVar[dict[str, int]] = {"weight": 1, "bias": 0, B: 0}
    partial: ClassVar[tuple[str, ...]] = (A,)

    def forward(self, x: Tensor) -> Tensor:
        """Map a replicated tensor to this rank's features."""
        inside = self.tensor.enter_layer(self, x)
        return self.add_update(F.linear(inside, self.weight.T, self.bias), inside)


class RowParallelTransposedLoRA(Adapted, RowParallelTransposed):
    """This rank's input features of such a layer."""

    weight_dims: ClassVar[LinearDims] = TRANSPOSED
    cut: ClassVar[dict[str, int]] = {"weight": 0, A: 1}
    partial: ClassVar[tuple[str, ...]] = (B,)

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's features to a replicated tensor. The bias is added once, after the sum."""
        total: Tensor = self.tensor.leave(self.add_update(F.linear(x, self.weight.T), x))
        return total if self.bias is None else total + self.bias.to(total.dtype)

    def dropped(self, x: Tensor) -> Tensor:
        """x with the features set to zero that one device would set."""
        return _dropped_part(self, x)


Transposed.split_forms = {Split.COLUMN: ColumnParallelTransposedLoRA, Split.ROW: RowParallelTransposedLoRA}


# ---- layers of a model ----------------------------------------------------------------------------------------------


def adapt(layer: nn.Module, rank: int, scale: float, dropout: float, seed: int | None = None) -> None:
    """Make a linear layer one with LoRA, in place: names, hooks and references to it stay."""
    made: Any = layer
    kind: Any = type(layer)
    made.lora_base = kind
    made.__class__ = LoRALinear if kind is nn.Linear else transposed(kind)
    weight, dims = made.weight, made.weight_dims
    made.lora_features = (weight.shape[dims.inputs], weight.shape[dims.outputs])
    dtype = torch.promote_types(weight.dtype, torch.float32)
    inputs, outputs = made.lora_features
    for name, shape in ((A, (rank, inputs)), (B, (outputs, rank))):
        made.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype, device=weight.device)))
    made.lora_scale, made.lora_dropout, made.adapter_seed = float(scale), float(dropout), seed


def without_lora(model: nn.Module) -> None:
    """Take the adapters from all layers of a model that have any, in place. Weights in 4 bits have no values then."""
    for layer in adapted_layers(model).values():
        made: Any = layer
        if (packed := vars(made).pop("packed", None)) is not None:
            empty = torch.empty(packed.shape, dtype=packed.dtype, device="meta")
            made.weight = nn.Parameter(empty, requires_grad=False)
        made.__class__ = made.lora_base
        for name in (A, B, "lora_scale", "lora_dropout", "adapter_seed", "lora_features", "lora_base"):
            delattr(made, name)


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """The layers with LoRA, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of this name is one of LoRA's."""
    return parameter.rpartition(".")[2] in (A, B)
