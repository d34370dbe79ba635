"""A collective that is under way, as the thread that requested it sees it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.horovod.engine.messages import Request


@dataclass(slots=True, eq=False)
class Ticket:
    """One request with its tensors, and later its result."""

    request: Request
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor | None] = field(default_factory=list)
    """None: the result is a new tensor."""
    is_group: bool = False
    """Whether the result is a list."""
    is_dispatched: bool = False
    """Whether every rank is ready, so that it will be executed."""
    result: Any = None
    error: Exception | None = None
    ready: torch.cuda.Event | None = None
    """CUDA: the inputs are computed."""
    finished: torch.cuda.Event | None = None
    """CUDA: the result is computed."""
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.inputs and self.inputs[0].device.type == "cuda":
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(self.inputs[0].device))

    def succeed(self, result: Any) -> None:
        """Wake the waiting thread with a result."""
        self.result = result
        self._done.set()

    def fail(self, error: Exception) -> None:
        """Wake the waiting thread with an exception."""
        if not self._done.is_set():
            self.error = error
            self._done.set()

    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._done.is_set() and (self.finished is None or self.finished.query())

    def wait(self) -> Any:
        """Return the result, or raise. On CUDA the current stream waits, not the thread."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        if self.finished is not None:
            stream = torch.cuda.current_stream(self.inputs[0].device)
            stream.wait_event(self.finished)
            for tensor in self.result if isinstance(self.result, list | tuple) else [self.result]:
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)  # it was allocated on the stream of the engine
        return self.result
