"""Learning-rate schedulers of a script: checked when they are prepared, saved with the run, restored when it is loaded.

torch's `scheduler.state_dict()` is made for pickle: it has tuples, a `Counter`, infinite numbers and numbers of numpy.
A checkpoint is JSON, so these are written as tagged mappings:

    (0.9, 0.95)          {"$tuple": [0.9, 0.95]}
    Counter({30: 1})     {"$counter": [[30, 1]]}
    {30: 1}              {"$dict": [[30, 1]]}
    inf                  {"$float": "inf"}
    tensor(0.1)          {"$tensor": ["float32", 0.1]}

torch leaves functions out of the state, and so does a checkpoint: the functions of the script that loads it are used.
A scheduler may change any number of a group of parameters (`OneCycleLR` changes `betas`), so with a scheduler all
numbers of the groups are saved, not only the learning rate.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.errors import Problem, ShoalError

LARGEST_TENSOR = 4096
"""Elements of the largest tensor that is written into the manifest of a checkpoint."""


def is_scheduler(thing: Any) -> bool:
    """Whether a thing changes an optimizer's settings: a scheduler of torch, or of another library with its methods."""
    if isinstance(thing, LRScheduler):
        return True
    has_methods = all(callable(getattr(thing, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    return has_methods and isinstance(getattr(thing, "optimizer", None), Optimizer)


def check_optimizer(scheduler: Any, optimizer: Optimizer | None) -> None:
    """Reject a scheduler of another optimizer than the run's."""
    if optimizer is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ShoalError(
            f"this {type(scheduler).__name__} changes the learning rate of another optimizer than the one of this run",
            fix=f"{type(scheduler).__name__}(optimizer, ...) with the optimizer that run.prepare is given",
            code="T031",
        )


def saved_schedulers(schedulers: list[Any], optimizer: Optimizer) -> dict[str, Any]:
    """The entries of a checkpoint for these schedulers; no entry without schedulers."""
    if not schedulers:
        return {}
    groups = [_numbers(group) for group in optimizer.param_groups]
    return {
        "schedulers": [{"kind": kind_of(one), "state": encoded_state(one)} for one in schedulers],
        "groups": [encode(group, f"param_groups[{place}]") for place, group in enumerate(groups)],
    }


def scheduler_problems(schedulers: list[Any], optimizer: Optimizer, state: Mapping[str, Any]) -> Iterator[Problem]:
    """Differences between the schedulers of a checkpoint and those of the run that loads it."""
    was, now = [str(one["kind"]) for one in state.get("schedulers", ())], [kind_of(one) for one in schedulers]
    weights_alone = "run.load(..., only_weights=True) to take the weights alone"
    if was and not now:
        fix = f"run.prepare(scheduler), with a {', '.join(was)}, before run.load; or {weights_alone}"
        yield Problem("C019", f"the checkpoint has the state of {_counted(was)}, and the run has prepared none", fix)
    elif now and not was:
        what = f"the run has prepared {_counted(now)}, and the checkpoint has no state of a scheduler"
        yield Problem("C019", what, "run.prepare(scheduler) after run.load, with a scheduler that is at the right step")
    elif was != now:
        fix = f"prepare them as they were saved, in the same order; or {weights_alone}"
        yield Problem("C019", f"the schedulers were {', '.join(was)}, and are {', '.join(now)}", fix)
    elif was and len(state["groups"]) != len(optimizer.param_groups):
        what = f"the optimizer had {len(state['groups'])} groups of parameters, and has {len(optimizer.param_groups)}"
        yield Problem("C019", what, f"an optimizer with the same groups; or {weights_alone}")


def restore_schedulers(schedulers: list[Any], optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give schedulers, and the groups of the optimizer, the state that a checkpoint has."""
    if not schedulers or not state.get("schedulers"):
        return
    for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(decode(saved["state"]))
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        set_numbers(group, decode(saved))


def set_numbers(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Set entries of a group of parameters; a tensor stays the same tensor, which a compiled step may read."""
    for name, value in numbers.items():
        if isinstance(current := group.get(name), Tensor):
            current.fill_(float(value))
        else:
            group[name] = float(value) if isinstance(value, Tensor) else value


def warn_of_unprepared(schedulers: list[Any], optimizer: Optimizer, *, has_extra: bool, lost: str) -> None:
    """Warn of a scheduler that the run does not know. torch leaves a mark on the optimizer of every scheduler."""
    if not schedulers and not has_extra and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        warnings.warn(
            f"the optimizer has a learning-rate scheduler that this run does not know: {lost}."
            " fix: run.prepare(scheduler)",
            stacklevel=4,
        )


def kind_of(scheduler: Any) -> str:
    """The class of a scheduler, with the classes of those inside it: `SequentialLR(LinearLR, CosineAnnealingLR)`."""
    inner = getattr(scheduler, "_schedulers", None)  # torch has no public name for it
    name = type(scheduler).__name__
    return f"{name}({', '.join(map(kind_of, inner))})" if isinstance(inner, list | tuple) else name


def encoded_state(scheduler: Any) -> Any:
    """The state of a scheduler as JSON; rejected if it has anything else."""
    name = type(scheduler).__name__
    try:
        state = scheduler.state_dict()
    except Exception as error:
        raise ShoalError(
            f"{name}.state_dict() raised {type(error).__name__}: {error}",
            fix="a function of your own (def or lambda) in place of a built-in one; or a state_dict() that returns",
            code="C020",
        ) from error
    return encode(state, name)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def encode(value: Any, where: str) -> Any:
    """A value as JSON that `decode` gives back with its types. `where` names it in a message."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Counter):
        return {"$counter": _pairs(value, where)}
    if isinstance(value, dict):
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if is_plain:
            return {key: encode(one, f"{where}.{key}") for key, one in value.items()}
        return {"$dict": _pairs(value, where)}
    if isinstance(value, list):
        return [encode(one, f"{where}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode(list(value), where)}
    if isinstance(value, Tensor | np.ndarray) and np.prod(value.shape) <= LARGEST_TENSOR:
        tensor = torch.as_tensor(value)
        return {"$tensor": [str(tensor.dtype).removeprefix("torch."), encode(tensor.tolist(), where)]}
    raise ShoalError(
        f"{where} is a {type(value).__name__}, and a checkpoint holds numbers, texts, lists, tuples and mappings of"
        " a scheduler's state",
        fix="a state_dict() of the scheduler without it, and a load_state_dict() that leaves it as it is",
        code="C020",
    )


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _DECODERS:
        return _DECODERS[tag](value[tag])
    return {key: decode(one) for key, one in value.items()}


_DECODERS: dict[str, Any] = {
    "$float": float,
    "$tuple": lambda items: tuple(decode(items)),
    "$counter": lambda pairs: Counter(dict(decode(pairs))),
    "$dict": lambda pairs: dict(decode(pairs)),
    "$tensor": lambda of: torch.tensor(decode(of[1]), dtype=getattr(torch, of[0])),
}


def _pairs(value: Mapping[Any, Any], where: str) -> list[Any]:
    return [[encode(key, where), encode(one, f"{where}[{key!r}]")] for key, one in value.items()]


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group of parameters that a scheduler may change: numbers, and tuples of numbers."""
    return {name: value for name, value in group.items() if name != "params" and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _counted(kinds: list[str]) -> str:
    return f"{len(kinds)} scheduler{'s' * (len(kinds) > 1)} ({', '.join(kinds)})"
