"""QLoRA: the frozen weights below adapters in 4 bits, whole on every rank."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from shoal.blueprint.description import Split
from shoal.errors import ShoalError
from shoal.numerics.nf4 import Packed, linear, pack
from shoal.parallel.lora.layers import Adapted, LoRALinear, adapted_layers

Model = TypeVar("Model", bound=nn.Module)


class QuantizedLoRA(LoRALinear):
    """A layer with LoRA whose frozen weight is packed. It is no parameter: no layout cuts, sends or saves it."""

    packed: Packed
    split_forms: ClassVar[dict[Split, type[nn.Module]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer, and the update."""
        if not x.is_meta:
            self.packed = self.packed.to(x.device)
        return self.add_update(linear(x, self.packed, self.bias), x)

    def unpack(self) -> None:
        """Make it a layer with LoRA again, whose weight is the rounded one."""
        made: Any = self
        made.weight = nn.Parameter(self.packed.unpacked(), requires_grad=False)
        del made.packed
        made.__class__ = LoRALinear


def quantize_base(model: Model) -> Model:
    """Store the frozen weights below the adapters of a model in 4 bits, in place. Returns the model.

    Call it after `shoal.lora` or `shoal.load_adapter`, and before `run.prepare`. One layer after the other is packed.

    >>> from shoal.parallel.lora.apply import lora
    >>> model = quantize_base(lora(nn.Sequential(nn.Linear(64, 64)), rank=2))
    >>> [name for name, _ in model.named_parameters()]
    ['0.bias', '0.lora_A', '0.lora_B']
    """
    layers = adapted_layers(model)
    if not layers:
        raise ShoalError(
            f"{type(model).__name__} must have LoRA before its frozen weights are packed, got none",
            fix="model = shoal.quantize_base(shoal.lora(model))",
            code="L030",
        )
    uses: Counter[Tensor] = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in layers.items():
        why = _why_not(layer) or ("shares its weight with another module" if uses[layer.weight] > 1 else None)
        if why is not None:
            raise ShoalError(
                f"weights of whole layers that are loaded can be packed in 4 bits, and {name} {why}",
                fix="shoal.quantize_base(model) once, after the weights are loaded and before run.prepare",
                code="L031",
            )
    for layer in layers.values():
        made: Any = layer
        weight = layer.weight
        made.packed = pack(weight)
        made.__class__ = QuantizedLoRA
        made.weight = None
        weight.data = weight.new_empty(0)  # free its memory although others may reference the parameter
    return model


def _why_not(layer: Adapted) -> str | None:
    if isinstance(layer, QuantizedLoRA):
        return "is packed already"
    if type(layer) is not LoRALinear:
        return f"is a {type(layer).__name__}, a part of a layer"
    return "has a weight without values, on the meta device" if layer.weight.is_meta else None


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLoRA]:
    """The layers whose frozen weights are packed, by name."""
    return {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, QuantizedLoRA)}
