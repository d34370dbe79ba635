"""Send parameters, optimizer states and plain Python objects from one rank to all, or from all to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.horovod.basics import rank
from shoal.horovod.collectives.allgather import allgather
from shoal.horovod.collectives.broadcast import broadcast_, broadcast_async_
from shoal.horovod.collectives.waiting import synchronize
from shoal.horovod.plain_objects import pack, unpack
from shoal.horovod.process_sets import ProcessSet, global_process_set


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with those of one rank: a state dict, named parameters or a list of tensors."""
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        what = f"params must be a state dict or a list of parameters, got {type(params).__name__}"
        raise ShoalError(what, fix="hvd.broadcast_parameters(model.state_dict(), root_rank=0)", code="H025")
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named if isinstance(tensor, Tensor)]
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of `root_rank`. It must be plain data."""
    label = name or "object"
    is_root = rank() == root_rank
    data = pack(obj, label) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    broadcast_(length, root_rank, f"{label}.sz", process_set)
    if not is_root:
        data = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{label}.t", process_set)
    arrived = unpack(data)
    return obj if is_root else arrived


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in their order. They must be plain data."""
    label = name or "object"
    data = pack(obj, label)
    sizes = allgather(torch.tensor([data.numel()]), f"{label}.sz", process_set).tolist()
    gathered = allgather(data, f"{label}.t", process_set)
    return [unpack(part) for part in gathered.split(sizes)]


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Overwrite the options and the state of an optimizer with those of one rank. `model` has no effect.

    A rank whose optimizer has no state yet gets that of the root; no step is made to create it.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        what = "the state of torch.optim.LBFGS cannot be broadcast"
        fix = "state = hvd.broadcast_object(optimizer.state_dict()); optimizer.load_state_dict(state)"
        raise ShoalError(what, fix=fix, code="H024")
    mine = optimizer.state_dict()
    outline = broadcast_object(_outline(mine) if rank() == root_rank else None, root_rank, "optimizer")
    if rank() != root_rank:
        _take_shape(optimizer, outline)
        mine = optimizer.state_dict()
    tensors = [
        (f"optimizer.{number}.{key}", value)
        for number, state in sorted(mine["state"].items())
        for key, value in sorted(state.items())
        if isinstance(value, Tensor)
    ]
    broadcast_parameters(tensors, root_rank)


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with dtypes and shapes in place of tensors."""
    described = {number: {key: _described(each) for key, each in one.items()} for number, one in state["state"].items()}
    return {"state": described, "param_groups": state["param_groups"]}


def _described(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return ("tensor", str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type)
    return ("value", value)


def _take_shape(optimizer: torch.optim.Optimizer, outline: Mapping[str, Any]) -> None:
    """Give an optimizer the options of the root, and a state of the same keys, dtypes and shapes."""
    for group, theirs in zip(optimizer.param_groups, outline["param_groups"], strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {id(param): number for number, param in enumerate(params)}
    for param in params:
        described = outline["state"].get(numbers[id(param)])
        if described is None:
            optimizer.state.pop(param, None)
        else:
            own = optimizer.state[param]
            optimizer.state[param] = {key: _value(one, own.get(key), param) for key, one in described.items()}


def _value(described: tuple[Any, ...], own: Any, param: Tensor) -> Any:
    if described[0] == "value":
        return described[1]
    _, name, shape, kind = described
    dtype: torch.dtype = getattr(torch, name)
    device = torch.device("cpu") if kind == "cpu" else param.device
    if isinstance(own, Tensor) and own.dtype == dtype and list(own.shape) == shape and own.device == device:
        return own
    return torch.zeros(shape, dtype=dtype, device=device)
