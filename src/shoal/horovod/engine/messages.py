"""The two messages of the control plane, as JSON: a rank requests a collective, rank 0 answers when to execute it.

rank 1 ── Request(allreduce, "w", float32, [10]) ──►  rank 0: coordinator
rank 0 ── Request(allreduce, "w", float32, [10]) ──►  all members of the process set have requested "w"
every member  ◄── Response(allreduce, ["w", ...]) ──  execute these now, fused, in this order
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from math import prod
from typing import Any

import torch


class Kind(StrEnum):
    """What a request is for."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    ADD_SET = "add_process_set"
    REMOVE_SET = "remove_process_set"


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor's dtype and shape, without its values."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorShape:
        """Describe a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!r} is no dtype")
        return dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the first dim."""
        return prod(self.shape[1:]) * self.torch_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One collective, as one rank requests it."""

    kind: Kind
    name: str
    set_id: int = 0
    tensors: tuple[TensorShape, ...] = ()
    device: str = "cpu"
    op: int = 1
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    rows: tuple[int, ...] = ()
    """alltoall: rows for each rank. add_process_set: ranks. remove_process_set: the number of the set."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def fusion_key(self) -> tuple[Any, ...]:
        """Requests with one key may travel together."""
        return (self.kind, self.set_id, self.device, self.op, self.root, self.prescale, self.postscale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Collectives that are ready on every member of a process set."""

    kind: Kind
    set_id: int
    names: tuple[str, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """allgather: for each name and each tensor, the rows of each rank. alltoall: what each rank sends to each."""
    absent: tuple[Request, ...] = ()
    """The requests themselves, for ranks that have joined and contribute zeros."""
    value: int = -1
    """join: the last rank. add_process_set: the number of the set."""
    error: str = ""
    is_mismatch: bool = field(default=False)


def encode(message: Request | Response) -> bytes:
    """Return a message as JSON."""
    return json.dumps(astuple(message), separators=(",", ":")).encode()


def decode_request(data: bytes) -> Request:
    """Read a request. Raises ValueError for anything else."""
    return _request(_list(data))


def decode_response(data: bytes) -> Response:
    """Read a response. Raises ValueError for anything else."""
    try:
        kind, set_id, names, rows, absent, value, error, is_mismatch = _list(data)
        return Response(
            kind=Kind(kind),
            set_id=int(set_id),
            names=tuple(map(str, names)),
            rows=tuple(tuple(tuple(map(int, row)) for row in table) for table in rows),
            absent=tuple(map(_request, absent)),
            value=int(value),
            error=str(error),
            is_mismatch=bool(is_mismatch),
        )
    except (TypeError, KeyError) as problem:
        raise ValueError(f"no response: {problem}") from None


def _list(data: bytes) -> list[Any]:
    found = json.loads(data)
    if not isinstance(found, list):
        raise ValueError("a message must be a list")
    return found


def _request(fields: list[Any]) -> Request:
    try:
        kind, name, set_id, tensors, device, op, root, prescale, postscale, rows = fields
        return Request(
            kind=Kind(kind),
            name=str(name),
            set_id=int(set_id),
            tensors=tuple(TensorShape(str(dtype), tuple(map(int, shape))) for dtype, shape in tensors),
            device=str(device),
            op=int(op),
            root=int(root),
            prescale=float(prescale),
            postscale=float(postscale),
            rows=tuple(map(int, rows)),
        )
    except (TypeError, KeyError) as problem:
        raise ValueError(f"no request: {problem}") from None
