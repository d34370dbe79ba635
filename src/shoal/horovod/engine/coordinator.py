"""Decide the order of collectives: rank 0 counts requests by name, and releases those that every member has made.

All process sets have one coordinator. So there is one order of all collectives, and a rank that is in two sets cannot
wait in one of them for a rank that waits in the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shoal.errors import Problem
from shoal.horovod.engine.agreement import find_absent, find_mismatch
from shoal.horovod.engine.messages import Kind, Request, Response

FUSED = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLGATHER)
Key = tuple[int, str]


@dataclass(slots=True)
class Waiting:
    """The requests under one name, until every member has made its own."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    is_reported: bool = False


@dataclass(slots=True)
class Coordinator:
    """Pure bookkeeping: requests go in, responses come out."""

    size: int
    fusion_bytes: int = 64 * 2**20
    largest_fused: int = 2 * 2**20
    """A larger tensor travels alone: to copy it into a buffer costs more than a message."""
    sets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    """Ranks that have left, and how."""
    _waiting: dict[Key, Waiting] = field(default_factory=dict)
    _ready: list[tuple[Request, Response]] = field(default_factory=list)
    _joined: list[int] = field(default_factory=list)
    _next_set: int = 1
    _members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """All sets, also those that were removed while a response was under way."""

    def __post_init__(self) -> None:
        self.sets[0] = self._members[0] = tuple(range(self.size))

    def add(self, rank: int, request: Request) -> None:
        """Note that a rank is ready for a collective."""
        if request.set_id not in self.sets or rank not in self.sets[request.set_id]:
            return  # the rank itself rejects this before it sends; a set may have been removed meanwhile
        if request.kind == Kind.JOIN:
            self._joined.append(rank)
        key = (request.set_id, request.name)
        waiting = self._waiting.setdefault(key, Waiting(time.monotonic()))
        waiting.requests[rank] = request
        for each in [key] if request.kind != Kind.JOIN else list(self._waiting):
            self._release(each)

    def leave(self, rank: int, how: str) -> None:
        """Note that a rank takes part in nothing any more."""
        self.gone.setdefault(rank, how)
        for key, waiting in list(self._waiting.items()):
            waiting.requests.pop(rank, None)
            self._release(key)
        for index, (request, response) in enumerate(self._ready):
            if rank in self._members[request.set_id] and not response.error:
                self._ready[index] = (request, self._response(request, {}, [rank], [rank]))

    def members_of(self, response: Response) -> tuple[int, ...]:
        """The ranks that execute a response."""
        return self._members.get(response.set_id, ())

    def has_urgent(self) -> bool:
        """Whether something is ready in which rank 0 takes no part."""
        return any(0 not in self._members[request.set_id] for request, _ in self._ready)

    def take(self, *, only_urgent: bool = False) -> list[Response]:
        """Return what is ready, fused, in the order in which it became ready; or only that without rank 0."""
        kept = [each for each in self._ready if only_urgent and 0 in self._members[each[0].set_id]]
        taken = [each for each in self._ready if not only_urgent or 0 not in self._members[each[0].set_id]]
        self._ready = kept
        batches: list[list[tuple[Request, Response]]] = []
        open_batches: dict[object, int] = {}
        for request, response in taken:
            key = request.fusion_key if request.kind in FUSED and not response.error else None
            if request.num_bytes > self.largest_fused:
                key = None
            index = open_batches.get(key) if key is not None else None
            if index is None or self._bytes(batches[index]) + request.num_bytes > self.fusion_bytes:
                index = len(batches)
                batches.append([])
                if key is not None:
                    open_batches[key] = index
            batches[index].append((request, response))
        return [_fused([response for _, response in batch]) for batch in batches]

    def stalled(self, seconds: float) -> list[str]:
        """Return a line for each name for which some ranks have waited long for others; each once."""
        lines = []
        for (set_id, name), waiting in self._waiting.items():
            if not waiting.is_reported and time.monotonic() - waiting.since > seconds:
                waiting.is_reported = True
                missing = [rank for rank in self.sets[set_id] if rank not in waiting.requests]
                lines.append(f"{name}: ready on ranks {sorted(waiting.requests)}, missing on ranks {missing}")
        return lines

    def expire(self, seconds: float) -> None:
        """Fail each name for which some ranks have waited that long for others."""
        for key, waiting in list(self._waiting.items()):
            if not waiting.requests or time.monotonic() - waiting.since <= seconds:
                continue
            del self._waiting[key]
            request = waiting.requests[min(waiting.requests)]
            missing = [rank for rank in self.sets[key[0]] if rank not in waiting.requests]
            what = f"{request.kind} {request.name!r} has waited for more than {seconds:g} s for ranks {missing}"
            error = str(Problem("H005", what, "look at the output of these ranks; they did not call it"))
            self._ready.append((request, Response(kind=request.kind, set_id=key[0], names=key[1:], error=error)))

    @staticmethod
    def _bytes(batch: Iterable[tuple[Request, Response]]) -> int:
        return sum(request.num_bytes for request, _ in batch)

    def _release(self, key: Key) -> None:
        """Move a name to the ready ones, if all members have requested it, have joined or cannot come."""
        waiting, members = self._waiting[key], self.sets[key[0]]
        if not waiting.requests:
            return
        request = waiting.requests[min(waiting.requests)]
        missing = [rank for rank in members if rank not in waiting.requests]
        gone = [rank for rank in missing if rank in self.gone]
        if not gone and any(rank not in self._joined for rank in missing):
            return
        del self._waiting[key]
        self._ready.append((request, self._response(request, waiting.requests, missing, gone)))

    def _response(
        self, request: Request, requests: dict[int, Request], missing: list[int], gone: list[int]
    ) -> Response:
        response = Response(kind=request.kind, set_id=request.set_id, names=(request.name,))
        if gone:
            how = f"{request.kind} {request.name!r} needs rank {gone[0]}, which {self.gone[gone[0]]}"
            return replace(response, error=str(Problem("H005", how, "end all ranks together")))
        problem = find_mismatch(requests)
        if problem is not None:
            return replace(response, error=str(problem), is_mismatch=True)
        if missing and (problem := find_absent(request, missing[0])) is not None:
            return replace(response, error=str(problem), is_mismatch=True)
        if missing:
            return replace(response, absent=(request,))
        return self._completed(request, response, requests)

    def _completed(self, request: Request, response: Response, requests: dict[int, Request]) -> Response:
        ordered = [requests[rank] for rank in self.sets[request.set_id]]
        if request.kind == Kind.ALLGATHER:
            rows = (tuple(each.tensors[index].shape[0] for each in ordered) for index in range(len(request.tensors)))
            return replace(response, rows=(tuple(rows),))
        if request.kind == Kind.ALLTOALL:
            return replace(response, rows=(tuple(each.rows for each in ordered),))
        if request.kind == Kind.JOIN:
            last = self._joined[-1]
            self._joined.clear()
            return replace(response, value=last)
        if request.kind == Kind.ADD_SET:
            return replace(response, value=self._add_set(request.rows), absent=(request,))
        if request.kind == Kind.REMOVE_SET:
            self._remove_set(request.rows[0])
            return replace(response, value=request.rows[0])
        return response

    def _add_set(self, ranks: tuple[int, ...]) -> int:
        """Number a new set; -1 if its ranks are a set already."""
        if ranks in self.sets.values():
            return -1
        number, self._next_set = self._next_set, self._next_set + 1
        self.sets[number] = self._members[number] = ranks
        return number

    def _remove_set(self, number: int) -> None:
        """Drop a set, and fail what waits in it."""
        self.sets.pop(number, None)
        for key in [key for key in self._waiting if key[0] == number]:
            request = next(iter(self._waiting.pop(key).requests.values()))
            what = f"{request.kind} {request.name!r} waits in process set {number}, which was removed"
            error = str(Problem("H005", what, "hvd.synchronize(handle) before hvd.remove_process_set(...)"))
            self._ready.append((request, Response(kind=request.kind, set_id=number, names=key[1:], error=error)))


def _fused(responses: list[Response]) -> Response:
    if len(responses) == 1:
        return responses[0]
    return replace(
        responses[0],
        names=tuple(name for response in responses for name in response.names),
        rows=tuple(table for response in responses for table in response.rows),
        absent=tuple(request for response in responses for request in response.absent),
    )
