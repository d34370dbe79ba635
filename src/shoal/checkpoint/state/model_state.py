"""The tensors of a run as a checkpoint stores them, under the names that they have on one device.

A layout divides a parameter into boxes (`ParallelModel.shard_box`), and the optimizer's state for it alike. A
checkpoint stores no layout: it stores full tensors and the box of each piece. So any layout can read a checkpoint that
any other layout wrote: each rank reads its own boxes.

    model/NAME                 parameters, and the biases and running statistics that a run learns
    optimizer/STATE/NAME       the optimizer's state for a parameter, such as exp_avg

Tensors that differ between replicas are stored once per replica (`shoal.checkpoint.state.replica_state`). Replicas
differ if they compress what they exchange, or exchange it every few steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint.storage.manifest import Shape
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import to_local
from shoal.parallel.expert.router import biases
from shoal.parallel.parallel_model import ParallelModel


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A piece of a tensor on this rank."""

    name: str
    full_shape: Shape
    begin: Shape
    value: Tensor
    """In the memory of the run: what is written to it changes the run."""
    is_saved: bool
    """Whether this rank writes it, of all that hold the same."""
    is_needed: bool = True
    """Whether a checkpoint without it is of another model. Those of others know nothing of buffers."""
    replicas: int = 1
    """How many have a tensor of their own in its place."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What holds the tensors of a run on this rank."""

    composed: ParallelModel
    optimizer: Optimizer
    copies: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Parameters whose copies in host memory the optimizer has instead (`offload=optimizer`)."""

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates for a parameter."""
        return self.copies.get(parameter, parameter)


def local_shards(holder: Holder) -> Iterator[LocalShard]:
    """Everything that this rank holds of a run, optimizer states as far as there are any."""
    composed = holder.composed
    firsts = {second: first for first, second in composed.tied}
    for name, parameter in composed.named.items():
        full_shape, (begin, shape), is_saved = composed.shapes[name], composed.shard_box(name), composed.is_owner(name)
        known = firsts.get(name, name)
        value = to_local(parameter).detach()
        assert tuple(value.shape) == shape, f"{name} has the box {shape} and holds {tuple(value.shape)}"
        local_sgd = composed.islands
        own = local_sgd.shared.get(name, value) if local_sgd is not None else value
        yield LocalShard(f"model/{known}", full_shape, begin, own, is_saved)
        for kind, state in holder.optimizer.state.get(holder.updated(parameter), {}).items():
            if isinstance(state, Tensor) and state.dim():
                own = to_local(state)
                if own.shape != value.shape:
                    raise ShoalError(
                        f"{type(holder.optimizer).__name__} keeps {kind} of {name} in the shape"
                        f" {list(own.shape)}, and the parameter has {list(value.shape)} here: nobody knows"
                        " which part of it that is",
                        fix="an optimizer whose states are as large as its parameters, such as AdamW or SGD",
                    )
                if local_sgd is None:
                    yield LocalShard(f"optimizer/{kind}/{known}", full_shape, begin, own, is_saved)
    is_first = all(not place for axis, place in composed.mesh.coordinate.items() if axis != "pp")
    for name, buffer in _buffers(composed):
        yield LocalShard(f"model/{name}", tuple(buffer.shape), (0,) * buffer.dim(), buffer, is_first, is_needed=False)


def _buffers(composed: ParallelModel) -> Iterator[tuple[str, Tensor]]:
    """Biases of routers, and what a model's own state_dict has of buffers; of several ranks, the first one's."""
    for part in composed.parts:
        routed = biases(part.model)
        yield from routed.items()
        passing = {
            f"{prefix}{'.' * bool(prefix)}{name}"
            for prefix, module in part.model.named_modules()
            for name in module._non_persistent_buffers_set  # torch has no public word for it
        }
        for name, buffer in part.model.named_buffers():
            if name not in routed and name not in passing:
                yield name, to_local(buffer)


def scalars_of(holder: Holder) -> dict[str, dict[str, float]]:
    """Name → what the optimizer keeps of a parameter in one number, of the parameters that this rank tells."""
    found: dict[str, dict[str, float]] = {}
    for name, parameter in holder.composed.named.items():
        states = holder.optimizer.state.get(holder.updated(parameter), {})
        numbers = {
            kind: float(state) for kind, state in states.items() if not isinstance(state, Tensor) or state.dim() == 0
        }
        if numbers and holder.composed.is_owner(name):
            found[name] = numbers
    return found


def make_states(holder: Holder, kinds: dict[str, dict[str, torch.dtype]], scalars: dict[str, Any]) -> None:
    """Let the optimizer hold, for each parameter of this rank, states of the kinds that a checkpoint has."""
    optimizer = holder.optimizer
    firsts = {second: first for first, second in holder.composed.tied}
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, of_model in holder.composed.named.items():
        known, parameter = firsts.get(name, name), holder.updated(of_model)
        if parameter not in groups or (known not in kinds and known not in scalars):
            continue
        state = optimizer.state[parameter]
        for kind, dtype in kinds.get(known, {}).items():
            state[kind] = torch.zeros_like(parameter, dtype=dtype)
        for kind, number in scalars.get(known, {}).items():
            is_counter = kind == "step" or parameter.dim()
            dtype = torch.float32 if is_counter else parameter.dtype
            device = _device_of_step(groups[parameter], parameter) if is_counter else to_local(parameter).device
            state[kind] = torch.tensor(number, dtype=dtype, device=device)


def _device_of_step(group: dict[str, Any], parameter: nn.Parameter) -> torch.device:
    """Where an optimizer keeps its counters: with the parameters if its kernels read them, else on the host."""
    is_near = group.get("fused") or group.get("capturable") or "states" in group
    return to_local(parameter).device if is_near else torch.device("cpu")
