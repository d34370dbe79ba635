"""Count the collectives and bytes that a rank passes to torch.distributed, by axis of the layout.

torch's `CommDebugMode` counts calls, but knows neither bytes nor groups, so it cannot attribute cost to an axis. This
file uses the same mechanism, a dispatch mode that sees every operator. It records each collective's axis, operation
and message size. A prediction can then be compared with the *counted* traffic.

    with count({"dp_shard": shard_group, "pp": [pipeline_group]}) as traffic:
        loss.backward()
    traffic.of_axis("dp_shard").bytes

Bytes are those of the full message, the S of a cost model, not those that the link carries:

| operation        | bytes                                        |
|------------------|----------------------------------------------|
| `all_reduce`     | the tensor                                   |
| `all_gather`     | the output: the parts of all ranks           |
| `reduce_scatter` | the input: the parts for all ranks           |
| `all_to_all`     | the input                                    |
| `broadcast`      | the tensor                                   |
| `reduce`         | the tensor                                   |
| `gather`         | the part that this rank contributes          |
| `scatter`        | the part that this rank receives             |
| `send`, `recv`   | the tensor                                   |
| `barrier`        | 0                                            |
| any other        | every tensor argument, under its own name    |

A group without a name is `world` if it is the default group, else `other`. A group with several names uses the first.
An axis over all ranks often has the default group as its own: then traffic of no axis is counted there as well. `recv`
is counted, but left out of an axis's total: each message is another rank's send.

The mode sees operators that pass through torch's dispatcher in the thread that entered `with`, and in the threads in
which autograd runs that thread's backward, since they inherit the mode. This covers DDP's reducer, FSDP2, DTensor,
pipelining and a user's own collectives. The mode does not see other threads: those that a user starts, and gloo's,
which run the callbacks of a future (`work.get_future().then(...)`; under NCCL these run in the calling thread, and are
seen). Outside `with` nothing is slower; inside, each operator costs some microseconds more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

WORLD = "world"
OTHER = "other"


class Total(NamedTuple):
    """Collectives and the bytes of their messages."""

    calls: int
    bytes: int


@dataclass(slots=True)
class Traffic:
    """Calls and bytes by (axis, operation).

    >>> one = Traffic()
    >>> one.record("dp", "all_reduce", 100)
    >>> one.record("pp", "send", 8)
    >>> one.record("pp", "recv", 8)
    >>> (one + one).to_mapping()["dp"]
    {'all_reduce': {'calls': 2, 'bytes': 200}}
    >>> one.of_axis("pp")
    Total(calls=1, bytes=8)
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def record(self, axis: str, operation: str, num_bytes: int) -> None:
        """Count one call."""
        self.calls[axis, operation] += 1
        self.bytes[axis, operation] += num_bytes

    def of_axis(self, axis: str) -> Total:
        """Return the total of an axis, each message once: a receive is another rank's send."""
        keys = [key for key in self.calls if key[0] == axis and key[1] != "recv"]
        return Total(sum(self.calls[key] for key in keys), sum(self.bytes[key] for key in keys))

    def to_mapping(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return `{axis: {operation: {"calls": ..., "bytes": ...}}}`, in alphabetical order, ready for JSON."""
        mapping: dict[str, dict[str, dict[str, int]]] = {}
        for axis, operation in sorted(self.calls):
            counted = {"calls": self.calls[axis, operation], "bytes": self.bytes[axis, operation]}
            mapping.setdefault(axis, {})[operation] = counted
        return mapping

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(_sum(self.calls, other.calls), _sum(self.bytes, other.bytes))


@contextmanager
def count(groups: Mapping[str, dist.ProcessGroup | Sequence[dist.ProcessGroup]]) -> Iterator[Traffic]:
    """Count what this rank passes to torch.distributed inside `with`. The keys of `groups` name the axes."""
    axes = axis_of_group(groups)
    traffic = Traffic()
    lock = threading.Lock()  # autograd has a thread per device

    def record(operator: str, args: Sequence[Any], result: Any) -> None:
        operation, num_bytes = message_of(operator, args, result)
        with lock:
            traffic.record(_axis(args, axes), operation, num_bytes)

    with _collectives_shown_to(record):
        yield traffic


def axis_of_group(groups: Mapping[str, dist.ProcessGroup | Sequence[dist.ProcessGroup]]) -> dict[str, str]:
    """Map torch's name of each group to its axis."""
    axes: dict[str, str] = {}
    for axis, given in groups.items():
        for group in _members(given):
            axes.setdefault(group.group_name, axis)
    if dist.group.WORLD is not None:
        axes.setdefault(dist.group.WORLD.group_name, WORLD)
    return axes


def _members(given: Any) -> list[dist.ProcessGroup]:
    """Return the groups of an axis, without torch's placeholder for a group that this rank is not in."""
    every = given if isinstance(given, Sequence) else [given]
    return [group for group in every if group != dist.GroupMember.NON_GROUP_MEMBER]


# ---- operators of torch.distributed ---------------------------------------------------------------------------------

NAMESPACES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
LOCAL = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
"""Operators of these namespaces that do not communicate."""

_RESULT = -1
_MESSAGE: dict[str, tuple[str, int]] = {  # operator → operation, index of the argument (or result) with the message
    # collectives that write into their arguments
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    # functional collectives, which return new tensors: DTensor, and compiled code
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", _RESULT),
    "all_gather_into_tensor_out": ("all_gather", _RESULT),
    "all_gather_into_tensor_coalesced": ("all_gather", _RESULT),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "shard_dim_alltoall": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "isend": ("send", 0),
    "irecv": ("recv", 0),
}
_WITHOUT_MESSAGE = {"barrier": "barrier", "monitored_barrier_": "barrier"}


def message_of(operator: str, args: Sequence[Any], result: Any) -> tuple[str, int]:
    """Return the operation that an operator performs, and the bytes of its full message."""
    if operator in _WITHOUT_MESSAGE:
        return _WITHOUT_MESSAGE[operator], 0
    if operator not in _MESSAGE:
        return operator, num_bytes(args)
    operation, place = _MESSAGE[operator]
    return operation, num_bytes(result if place == _RESULT else args[place])


def num_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a value, also in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(num_bytes, value)) if isinstance(value, list | tuple) else 0


def _axis(args: Iterable[Any], axes: Mapping[str, str]) -> str:
    """Return the axis of the group among an operator's arguments."""
    names = filter(None, map(_group_name, args))
    return next((axes[name] for name in names if name in axes), OTHER)


def _group_name(value: Any) -> str | None:
    """Return the name of the group that an argument holds: some operators take its name, others a boxed group."""
    if isinstance(value, str):
        return value  # or the name of a reduction, which no group has
    if isinstance(value, torch.ScriptObject):
        try:
            value = dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError, ValueError):  # a boxed ReduceOp
            return None
    return value.group_name if isinstance(value, dist.ProcessGroup) else None


def _sum(one: Counter[tuple[str, str]], other: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Add counters and keep zeros, which `+` drops: a barrier has zero bytes."""
    total = one.copy()
    total.update(other)
    return total


def _collectives_shown_to(seen: Callable[[str, Sequence[Any], Any], None]) -> AbstractContextManager[Any]:
    """Return a context that calls `seen` for every collective of this thread, with its arguments, once it has started.

    Dispatch modes are documented and widely used, but have a private name; only this function depends on it.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        supports_higher_order_operators = True  # else torch rejects one that runs inside `with`

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                # A wrapper, such as DTensor: it calls the operator on its parts, which come here again.
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            if getattr(func, "namespace", None) in NAMESPACES:
                operator = func.__name__.partition(".")[0]  # of "allreduce_.default"
                if operator not in LOCAL:
                    seen(operator, [*args, *(kwargs or {}).values()], result)
            return result

    mode: AbstractContextManager[Any] = Mode()  # type: ignore[no-untyped-call]
    return mode
