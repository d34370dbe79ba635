"""The thread that executes responses, in the order in which they come, while the script computes.

The order is the same on every rank, so torch.distributed sees matching calls.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.group_lifetime import note_thread
from shoal.horovod.engine import execute
from shoal.horovod.engine.messages import Kind, Request, Response
from shoal.horovod.engine.ticket import Ticket


@dataclass(slots=True)
class SetGroup:
    """A process set, and the group through which its members exchange tensors."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    """None: this rank is its only member, or none of it."""


@dataclass(slots=True)
class Executor:
    """Takes responses from a queue until it gets None."""

    sets: Mapping[int, SetGroup]
    take_ticket: Callable[[int, str], Ticket | None]
    """Return the ticket of a name, and forget it."""
    change_sets: Callable[[Response], Any]
    on_executed: Callable[[Response], None]
    on_failure: Callable[[Exception], Exception]
    """Note that torch.distributed has failed; return what the script gets."""
    device: torch.device
    queue: queue.SimpleQueue[Response | None] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="horovod-execute", daemon=True)
        note_thread(self._thread)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Execute what is in the queue, and end."""
        self.queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # CUDA stores the device of each thread
        while (response := self.queue.get()) is not None:
            tickets = {name: self.take_ticket(response.set_id, name) for name in response.names}
            waiting = [each for each in tickets.values() if each is not None]
            try:
                with torch.no_grad():
                    self._execute(response, tickets, waiting)
            except Exception as error:
                failure = self.on_failure(error)
                for ticket in waiting:
                    ticket.fail(failure)
            self.on_executed(response)

    def _execute(self, response: Response, tickets: dict[str, Ticket | None], waiting: list[Ticket]) -> None:
        if response.kind in (Kind.BARRIER, Kind.JOIN, Kind.ADD_SET, Kind.REMOVE_SET):
            value = self.change_sets(response)
            for ticket in waiting:
                ticket.succeed(value)
            return
        parts = [tickets[name] or _zeros(response, name) for name in response.names]
        with self._on_stream(parts):
            results = self._results(response, parts)
            for ticket in parts:
                if ticket.ready is not None:
                    ticket.finished = torch.cuda.Event()
                    ticket.finished.record()
        for ticket, result in zip(parts, results, strict=True):
            ticket.succeed(result)

    def _results(self, response: Response, parts: list[Ticket]) -> list[Any]:
        """The result of each ticket: a tensor, a list of them, or what arrived and from whom."""
        like, members = parts[0].request, self.sets[response.set_id]
        inputs = [tensor for ticket in parts for tensor in ticket.inputs]
        outputs = [tensor for ticket in parts for tensor in ticket.outputs]
        if like.kind == Kind.ALLTOALL:
            return [execute.alltoall(inputs[0], response.rows[0], members.group)]
        if like.kind == Kind.ALLREDUCE:
            flat = execute.allreduce(inputs, outputs, like, members.group)
        elif like.kind == Kind.BROADCAST:
            flat = execute.broadcast(inputs, outputs, members.ranks.index(like.root), members.group)
        elif like.kind == Kind.ALLGATHER:
            flat = execute.allgather(inputs, [rows for table in response.rows for rows in table], members.group)
        else:
            flat = [execute.reducescatter(tensor, like, members.group) for tensor in inputs]
        found = iter(flat)
        return [[next(found) for _ in ticket.inputs] if ticket.is_group else next(found) for ticket in parts]

    @contextmanager
    def _on_stream(self, parts: list[Ticket]) -> Iterator[None]:
        """On CUDA: a stream of its own, which waits until the inputs are computed."""
        events = [ticket.ready for ticket in parts if ticket.ready is not None]
        if not events:
            yield
            return
        device = next(ticket.inputs[0].device for ticket in parts if ticket.ready is not None)
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for event in events:
                stream.wait_event(event)
            for ticket in parts:
                for tensor in ticket.inputs:
                    if tensor.is_cuda:
                        tensor.record_stream(stream)  # else its memory could be used again too early
            yield


def _zeros(response: Response, name: str) -> Ticket:
    """What a rank that has joined contributes."""
    like: Request = next(request for request in response.absent if request.name == name)
    inputs = [torch.zeros(each.shape, dtype=each.torch_dtype, device=like.device) for each in like.tensors]
    return Ticket(like, inputs, list(inputs), is_group=True)
