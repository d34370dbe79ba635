"""The tensors of a run as a checkpoint stores them, under the names that they have on one device.

A layout divides a parameter into boxes (`ParallelModel.shard_boxes`), and the optimizer's state for it alike. A
checkpoint stores no layout: it stores full tensors and the box of each piece. So any layout can read a checkpoint that
any other layout wrote: each rank reads its own boxes.

    model/NAME                 parameters, and the biases and running statistics that a run learns; of a model with
                               LoRA, without the frozen ones below it
    optimizer/STATE/NAME       the optimizer's state for a parameter, such as exp_avg
    ema/NAME                   the moving average of a parameter

Tensors that differ between replicas are stored once per replica (`shoal.checkpoint.state.replica_state`). Replicas
differ if they compress what they exchange, or exchange it every few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint.storage.manifest import Shape
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import to_local
from shoal.parallel.expert.router import biases
from shoal.parallel.lora.quantize import quantized_layers
from shoal.parallel.parallel_model import ParallelModel


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A rank's piece of a tensor."""

    name: str
    full_shape: Shape
    begin: Shape
    value: Tensor
    """The run's own memory: writing to it changes the run."""
    is_saved: bool
    """Whether this rank saves it, of all ranks that have the same piece."""
    is_needed: bool = True
    """Whether a checkpoint without it is of another model. Imported checkpoints have no buffers."""
    replicas: int = 1
    """How many replicas have their own tensor of this name."""
    store: Callable[[Tensor], None] | None = None
    """Takes the values of a shard that a run does not hold as they are; `value` then has a shape and a dtype alone."""

    def fill_store(self, fill: Callable[[LocalShard], None]) -> None:
        """Give `store` the values that `fill` writes."""
        assert self.store is not None
        value = torch.empty(self.value.shape, dtype=self.value.dtype)
        fill(replace(self, value=value, store=None))
        self.store(value)


@dataclass(frozen=True, slots=True)
class Holder:
    """The objects of a run on this rank whose tensors are saved."""

    composed: ParallelModel
    optimizer: Optimizer | None = None
    """None: there is none yet, and no state of it."""
    copies: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Parameters that the optimizer updates through copies in host memory (`offload=optimizer`)."""
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → the moving average of this rank's piece of a parameter."""

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates for a parameter."""
        return self.copies.get(parameter, parameter)

    def states_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return the optimizer's states for a parameter."""
        found: Mapping[str, Any] = (
            {} if self.optimizer is None else self.optimizer.state.get(self.updated(parameter), {})
        )
        return found


def base_shards(holder: Holder) -> Iterator[LocalShard]:
    """Yield the frozen parameters below adapters, which are read and never saved, and those that are packed when they
    are read."""
    composed = holder.composed
    firsts = {second: first for first, second in composed.tied}
    for name in (name for name in composed.named if name in composed.base):
        value = to_local(composed.named[name]).detach()
        for begin, box in composed.boxes_of(name, value):
            yield LocalShard(f"model/{firsts.get(name, name)}", composed.shapes[name], begin, box, is_saved=False)
    for part in composed.parts:
        for name, layer in quantized_layers(part.model).items():
            shape = layer.lora_features[::-1]
            value = torch.empty(shape, dtype=layer.packed.dtype, device="meta")
            store = partial(layer.fill, name)
            yield LocalShard(f"model/{name}.weight", shape, (0, 0), value, is_saved=False, store=store)


def local_shards(holder: Holder) -> Iterator[LocalShard]:
    """Yield all tensors of a run on this rank, with optimizer states if there are any."""
    composed = holder.composed
    firsts = {second: first for first, second in composed.tied}
    base = composed.base
    for name, parameter in composed.named.items():
        if name in base:
            continue
        known = firsts.get(name, name)
        value = to_local(parameter).detach()
        num_elements = sum(math.prod(shape) for _, shape in composed.shard_boxes(name))
        assert value.numel() == num_elements, f"{name} has {num_elements} elements and the shape {tuple(value.shape)}"
        local_sgd = composed.local_sgd
        own = local_sgd.shared.get(name, value) if local_sgd is not None else value
        yield from _boxes(composed, name, f"model/{known}", own)
        if name in holder.averages:
            yield from _boxes(composed, name, f"ema/{known}", holder.averages[name], is_needed=False)
        for kind, state in holder.states_of(parameter).items():
            if isinstance(state, Tensor) and state.dim():
                own, path = to_local(state), f"optimizer/{kind}/{known}"
                if local_sgd is None and own.shape == value.shape:
                    yield from _boxes(composed, name, path, own)
                elif own.shape != value.shape:
                    yield _other_shape(holder, name, path, own)
    is_first = all(not place for axis, place in composed.mesh.coordinate.items() if axis != "pp")
    for name, buffer in _buffers(composed):
        yield LocalShard(f"model/{name}", tuple(buffer.shape), (0,) * buffer.dim(), buffer, is_first, is_needed=False)


def _other_shape(holder: Holder, name: str, path: str, state: Tensor) -> LocalShard:
    """A state that does not have its parameter's shape, such as Adafactor's of rows and columns. It is whole where the
    parameter is, and no layout can cut it."""
    composed = holder.composed
    shape = composed.shapes[name]
    if to_local(composed.named[name]).shape != shape or composed.local_sgd is not None:
        _, kind, _ = path.split("/", 2)
        raise ShoalError(
            f"{type(holder.optimizer).__name__} must keep {kind} of {name} in the parameter's shape {list(shape)}, got"
            f" {list(state.shape)}",
            fix="torch.optim.AdamW or torch.optim.SGD, whose states have the shape of their parameters",
            code="C013",
        )
    return LocalShard(path, tuple(state.shape), (0,) * state.dim(), state, composed.is_owner(name))


def _boxes(
    composed: ParallelModel, name: str, path: str, piece: Tensor, *, is_needed: bool = True
) -> Iterator[LocalShard]:
    """Yield a piece of a parameter, or a tensor of its shape; that of a packed layer is several boxes."""
    is_saved = composed.is_owner(name)
    for begin, value in composed.boxes_of(name, piece):
        yield LocalShard(path, composed.shapes[name], begin, value, is_saved, is_needed=is_needed)


def _buffers(composed: ParallelModel) -> Iterator[tuple[str, Tensor]]:
    """Yield biases of routers, and the persistent buffers of a model; the first rank's, if several have them."""
    for part in composed.parts:
        routed = biases(part.model)
        yield from routed.items()
        passing = {
            f"{prefix}{'.' * bool(prefix)}{name}"
            for prefix, module in part.model.named_modules()
            for name in module._non_persistent_buffers_set  # torch has no public name for it
        }
        for name, buffer in part.model.named_buffers():
            if name not in routed and name not in passing:
                yield name, to_local(buffer)


def scalars_of(holder: Holder) -> dict[str, dict[str, float]]:
    """Map names to the optimizer's scalar states, for the parameters that this rank saves."""
    found: dict[str, dict[str, float]] = {}
    for name, parameter in holder.composed.named.items():
        states = holder.states_of(parameter)
        numbers = {
            kind: float(state) for kind, state in states.items() if not isinstance(state, Tensor) or state.dim() == 0
        }
        if numbers and holder.composed.is_owner(name):
            found[name] = numbers
    return found


def make_states(
    holder: Holder, kinds: dict[str, dict[str, tuple[torch.dtype, Shape]]], scalars: dict[str, Any]
) -> None:
    """Create optimizer states, for each parameter of this rank, of the kinds that a checkpoint has."""
    optimizer, composed = holder.optimizer, holder.composed
    assert optimizer is not None
    firsts = {second: first for first, second in composed.tied}
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, of_model in composed.named.items():
        known, parameter = firsts.get(name, name), holder.updated(of_model)
        if parameter not in groups or (known not in kinds and known not in scalars):
            continue
        state = optimizer.state[parameter]
        for kind, (dtype, shape) in kinds.get(known, {}).items():
            is_alike = shape == composed.shapes[name]
            state[kind] = (
                torch.zeros_like(parameter, dtype=dtype)
                if is_alike
                else torch.zeros(shape, dtype=dtype, device=to_local(parameter).device)
            )
        for kind, number in scalars.get(known, {}).items():
            is_counter = kind == "step" or parameter.dim()
            dtype = torch.float32 if is_counter else parameter.dtype
            device = _device_of_step(groups[parameter], parameter) if is_counter else to_local(parameter).device
            state[kind] = torch.tensor(number, dtype=dtype, device=device)


def _device_of_step(group: dict[str, Any], parameter: nn.Parameter) -> torch.device:
    """Return the device of an optimizer's counters: the parameter's if its kernels read them, else the CPU."""
    is_near = group.get("fused") or group.get("capturable") or "state_dtype" in group
    return to_local(parameter).device if is_near else torch.device("cpu")
