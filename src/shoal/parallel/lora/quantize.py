"""QLoRA: the frozen weights below adapters in 4 bits. They are no parameters: no optimizer or checkpoint has them.

    script    quantize_base    packs weights that are loaded, before the plan is applied
    recipe    pack_later       a plan packs each unit as soon as it has filled it, and what is loaded afterwards as it
                               is read: a rank holds one weight at a time as it was

`tp` cuts what is packed, so that every rank has the numbers that one device has. Along all other axes packed weights
are whole on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from shoal.blueprint.description import Split
from shoal.errors import ShoalError
from shoal.numerics.nf4 import BLOCK, Packed, cut, linear, pack, unknown
from shoal.numerics.sampled_sum import sampled_sum
from shoal.parallel.lora.layers import Adapted, ColumnParallelLoRA, LoRALinear, RowParallelLoRA, adapted_layers
from shoal.parallel.tensor import check_inputs
from shoal.parallel.tensor_parts.linear_dims import TRANSPOSED
from shoal.parallel.tensor_parts.packed import ranges

Model = TypeVar("Model", bound=nn.Module)
LATER = "is_packed_later"
"""Of a layer: its weight is packed when it is filled."""


class Quantized(Adapted):
    """A layer whose frozen weight is packed. It is no parameter: no layout sends or saves it."""

    packed: Packed
    pack_device: torch.device | None = None
    """Where a weight that is read is packed; None: where it is read."""
    sums_unpacked = False
    """Whether the sum for a fingerprint is that of the weight before it was packed."""
    known_sum: int | None = None
    """That sum, of the whole weight, if this layer no longer has what it is computed of."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W' + bias."""
        if not x.is_meta:
            self.packed = self.packed.to(x.device)
        return linear(x, self.packed, bias)

    @torch.no_grad()
    def fill(self, name: str, weight: Tensor) -> None:
        """Pack the values of the whole weight. `name`: of this layer."""
        weight = weight.to(self.pack_device or weight.device, self.packed.dtype)
        packed = pack(weight)
        self.known_sum = None
        if self.sums_unpacked:
            self.known_sum = sampled_sum(f"{name}.weight", weight, tuple(weight.shape), (0, 0))
        self.keep(name, packed)

    def keep(self, name: str, packed: Packed) -> None:
        """Store what this layer has of a packed weight."""
        self.packed = packed

    def base_sum(self, name: str) -> int:
        """The sum of the weight for the fingerprint of the base."""
        return _sum_of(name, self.packed) if self.known_sum is None else self.known_sum

    def unpack(self) -> None:
        """Make it a layer with LoRA again, whose weight is the rounded one."""
        made: Any = self
        made.weight = nn.Parameter(self.packed.unpacked(), requires_grad=False)
        for name in ("packed", "pack_device", "sums_unpacked", "known_sum"):
            vars(made).pop(name, None)
        made.__class__ = LoRALinear


def _sum_of(name: str, packed: Packed) -> int:
    return sum(
        sampled_sum(f"{name}.packed", one, tuple(one.shape), (0,) * one.dim()) for one in packed.tensors
    )  # of a whole weight


class QuantizedLoRA(Quantized, LoRALinear):
    """A whole layer with LoRA whose frozen weight is packed."""

    split_forms: ClassVar[dict[Split, type[nn.Module]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer, and the update."""
        return self.add_update(self.product(x, self.bias), x)


class _CutQuantized(Quantized):
    """This rank's part of a packed weight, rounded as on one device."""

    tensor: Any  # a shoal.parallel.tensor.TensorParallel
    packed_dim: ClassVar[int]
    cut_ranges: tuple[tuple[int, int], ...]

    def cut_rest(self, name: str, parts: Sequence[int]) -> None:
        """Cut the packed weight as tp cuts the layer."""
        size, tensor = self.packed.shape[self.packed_dim], self.tensor
        self.cut_ranges = tuple(ranges(size, parts, index=tensor.index, degree=tensor.degree))
        self.keep(name, self.packed)

    def keep(self, name: str, packed: Packed) -> None:
        """Store this rank's part of a whole weight."""
        if self.known_sum is None:
            self.known_sum = _sum_of(name, packed)
        own = cut(packed, self.packed_dim, self.cut_ranges)
        if own is None:
            size = packed.shape[self.packed_dim] // self.tensor.degree
            what = "rows" if self.packed_dim == 0 else "columns"
            raise ShoalError(
                f"tp must cut frozen weights in 4 bits between blocks of {BLOCK} numbers of a row, got"
                f" tp={self.tensor.degree}, which cuts {name} of {list(packed.shape)} after {size} {what}",
                fix=f"tp=1, or a model whose {what} on a rank are a multiple of {BLOCK}; or a base that is not packed",
                code="L032",
            )
        self.packed = own


class ColumnParallelQuantized(_CutQuantized, ColumnParallelLoRA):
    """This rank's output features of a layer whose frozen weight is packed."""

    packed_dim: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map a replicated tensor to this rank's features."""
        check_inputs(self, x, self.packed.shape[1], "all")
        inside = self.tensor.enter_layer(self, x)
        return self.add_update(self.product(inside, self.bias), inside)


class RowParallelQuantized(_CutQuantized, RowParallelLoRA):
    """This rank's input features of a layer whose frozen weight is packed."""

    packed_dim: ClassVar[int] = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's features to a replicated tensor. The bias is added once, after the sum."""
        check_inputs(self, x, self.packed.shape[1], "this rank's part of the")
        total: Tensor = self.tensor.leave(self.add_update(self.product(x, None), x))
        return total if self.bias is None else total + self.bias.to(total.dtype)


QuantizedLoRA.split_forms = {Split.COLUMN: ColumnParallelQuantized, Split.ROW: RowParallelQuantized}


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
    _check(model, lambda layer: "has a weight without values, on the meta device" if layer.weight.is_meta else None)
    for layer in layers.values():
        _become_packed(layer, pack(layer.weight))
    return model


def pack_later(model: nn.Module) -> None:
    """Let a plan pack the frozen weights below the adapters of a model, which may have no values yet."""
    _check(model, lambda layer: None)
    for layer in adapted_layers(model).values():
        setattr(layer, LATER, True)


@torch.no_grad()
def pack_filled(model: nn.Module, holds: Callable[[str], bool], device: torch.device, dtype: torch.dtype) -> None:
    """Pack the weights of some submodules that were to be packed later. Those without values yet are NaN."""
    for name, layer in adapted_layers(model).items():
        if holds(name) and vars(layer).pop(LATER, False):
            weight: Any = layer.weight
            made: Any = layer
            made.pack_device, made.sums_unpacked = device, True
            is_known = not weight.is_meta and not bool(weight[:1, :1].isnan().any())
            value = weight.detach()
            _become_packed(layer, unknown(weight.shape, dtype))
            if is_known:
                made.fill(name, value)


def _become_packed(layer: Any, packed: Packed) -> None:
    weight = layer.weight
    layer.packed = packed
    layer.__class__ = QuantizedLoRA
    layer.weight = None
    weight.data = weight.new_empty(0)  # free its memory although others may reference the parameter


def _check(model: nn.Module, why_not: Callable[[Adapted], str | None]) -> None:
    """Reject layers whose weight cannot be packed."""
    uses: Counter[Tensor] = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in adapted_layers(model).items():
        why = _why_not(layer) or why_not(layer)
        why = why or ("shares its weight with another module" if uses[layer.weight] > 1 else None)
        if why is not None:
            raise ShoalError(
                f"weights of whole layers that are loaded can be packed in 4 bits, and {name} {why}",
                fix="shoal.quantize_base(model) once, after the weights are loaded and before run.prepare",
                code="L031",
            )


def _why_not(layer: Adapted) -> str | None:
    if isinstance(layer, Quantized):
        return "is packed already"
    if layer.weight_dims is TRANSPOSED:
        return f"is a {layer.lora_base.__name__}, whose weight has its inputs first"
    return None if type(layer) is LoRALinear else f"is a {type(layer).__name__}, a part of a layer"


def quantized_layers(model: nn.Module) -> dict[str, Quantized]:
    """The layers whose frozen weights are packed, by name."""
    return {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, Quantized)}
