"""What a checkpoint of adapters knows of the frozen weights below them, which it does not hold.

The fingerprint is a sum over some values of every frozen parameter, at places that its shape decides. Each rank adds
the values that it holds, so the sum is the same on every layout. Of packed weights one rank adds all, as they were
before (recipes, whose model other programs build without packing), or packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.checkpoint.storage.manifest import Manifest
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.numerics.init import key
from shoal.numerics.local_tensor import to_local
from shoal.numerics.sampled_sum import sampled_sum
from shoal.parallel.lora.layers import A, adapted_layers, is_adapter
from shoal.parallel.lora.quantize import quantized_layers
from shoal.parallel.tensor_parts.linear_dims import TRANSPOSED

if TYPE_CHECKING:
    from shoal.parallel.parallel_model import ParallelModel  # it loads torch's sharding, which a start need not

BASE = "base"
"""The key of the fingerprint in the state of a checkpoint."""


def adapter_state(composed: ParallelModel, world: World) -> dict[str, Any]:
    """The fingerprint of the base and the settings of LoRA; empty: there is none. Every rank calls it."""
    if not any(map(is_adapter, composed.shapes)):
        return {}
    return {BASE: fingerprint(composed, world), "lora": lora_settings(composed)}


def lora_settings(composed: ParallelModel) -> dict[str, Any]:
    """Rank, alpha, dropout, targets and others, as `adapter_config.json` has them."""
    layer = next(iter(layer for part in composed.parts for layer in adapted_layers(part.model).values()))
    return {
        "rank": layer.rank,
        "alpha": layer.lora_scale * layer.rank,
        "dropout": layer.lora_dropout,
        "targets": targets_of(composed.shapes),
        "fan_in_fan_out": layer.weight_dims is TRANSPOSED,
        **composed.peft_settings,
    }


def targets_of(parameters: Any) -> list[str]:
    """The last parts of the names of layers with LoRA, if no other module ends so; else their whole names.

    >>> targets_of(["a.up.weight", "a.up.lora_A", "b.up.weight", "b.up.lora_A", "a.down.weight"])
    ['up']
    >>> targets_of(["a.up.weight", "a.up.lora_A", "b.up.weight"])
    ['a.up']
    """
    modules = {name.rpartition(".")[0] for name in parameters}
    adapted = {name.rpartition(".")[0] for name in parameters if name.endswith(f".{A}")}
    last = {name.rpartition(".")[2] for name in adapted}
    is_exact = adapted == {name for name in modules if name.rpartition(".")[2] in last}
    return sorted(last if is_exact else adapted)


@torch.no_grad()
def fingerprint(composed: ParallelModel, world: World) -> str:
    """The fingerprint of the frozen parameters of all ranks. Every rank calls it."""
    if composed.base_fingerprint:
        return composed.base_fingerprint
    total = 0
    for name in (name for name in composed.base if composed.is_owner(name)):
        for begin, piece in composed.boxes_of(name, to_local(composed.named[name])):
            total += sampled_sum(name, piece, composed.shapes[name], begin)
    if all(not place for axis, place in composed.mesh.coordinate.items() if axis != "pp"):
        total += sum(_of_packed(part.model) for part in composed.parts)
    composed.base_fingerprint = _joined(world.all_gather_object(total % 2**64), composed.shapes)
    return composed.base_fingerprint


@torch.no_grad()
def fingerprint_of_whole(model: nn.Module) -> str:
    """The same of a whole model in one process."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    named = {name: parameter for name, parameter in frozen.items() if not is_adapter(name)}
    total = sum(sampled_sum(name, p, tuple(p.shape), (0,) * p.dim()) for name, p in named.items()) + _of_packed(model)
    every = model.named_parameters(remove_duplicate=False)
    return _joined([total], {name: tuple(parameter.shape) for name, parameter in every})


def _joined(totals: list[int], shapes: Mapping[str, tuple[int, ...]]) -> str:
    names = sum(key(0, name, *shape) for name, shape in shapes.items() if not is_adapter(name))
    return f"{(sum(totals) + names) % 2**64:016x}"


def _of_packed(model: nn.Module) -> int:
    """Of the weights in 4 bits, which are no parameters."""
    return sum(layer.base_sum(name) for name, layer in quantized_layers(model).items())


def reject_other_base(composed: ParallelModel, world: World, manifest: Manifest, where: str) -> None:
    """Raise if a step of adapters was trained on other frozen weights. Every rank calls it."""
    if BASE in manifest.state:
        compare(manifest, fingerprint(composed, world), where)


def compare(manifest: Manifest, here: str, where: str) -> None:
    """Raise if this is not the fingerprint that a step of adapters was saved with."""
    saved = manifest.state[BASE]
    if here != saved:
        raise ShoalError(
            f"the adapters of step {manifest.step} of {where} were trained on other frozen weights: their fingerprint"
            f" was {saved}, and is {here}",
            fix="--run.start_from with the base of that run, or the same model and seed",
            code="L010",
        )
