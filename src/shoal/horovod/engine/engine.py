"""One rank's engine: takes requests of the script, sends them to the control plane, and executes what comes back.

script thread       submit ──► pending[name], control plane ─┐            synchronize: waits for the ticket
control thread                       response "names ready" ◄┘─► queue
executing thread                                                 └─► torch.distributed ─► ticket done
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.comm.group_lifetime import can_cut, cut_groups
from shoal.comm.world import World
from shoal.errors import Problem, ShoalError
from shoal.horovod.engine.executor import Executor, SetGroup
from shoal.horovod.engine.hub import ControlPlane
from shoal.horovod.engine.messages import Kind, Request, Response, TensorShape
from shoal.horovod.engine.ticket import Ticket
from shoal.horovod.errors import HorovodInternalError, MismatchError

SECONDS_TO_STOP = 10.0


@dataclass(slots=True)
class Engine:
    """The state of `hvd.init()` until `hvd.shutdown()`."""

    world: World
    control: ControlPlane
    sets: dict[int, SetGroup]
    _pending: dict[tuple[int, str], Ticket] = field(default_factory=dict)
    _handles: dict[int, Ticket] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)
    _unnamed: dict[tuple[str, int], Any] = field(default_factory=lambda: defaultdict(itertools.count))
    _epoch: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _executor: Executor | None = None
    failure: str = ""
    """Why nothing works any more; empty: it works."""

    def start(self) -> None:
        """Start the threads."""
        self._executor = Executor(
            self.sets, self._take, self._change_sets, self.control.executed, self._failed, self.world.device
        )
        self._executor.start()
        self.control.start(self._on_response, self._on_end)

    def stop(self) -> None:
        """Execute what is under way, leave the other ranks, and end the threads."""
        assert self._executor is not None
        self._executor.stop(SECONDS_TO_STOP)
        self.control.close(is_lost=bool(self.failure))
        self._fail_pending(str(Problem("H005", "this rank has called hvd.shutdown()", "hvd.init()")))

    # ---- requests ---------------------------------------------------------------------------------------------------

    def unnamed(self, kind: str, set_id: int) -> str:
        """Return the name of the next collective without one. Ranks agree if they call these in one order."""
        with self._lock:
            return f"{kind}.noname.{self._epoch}.{next(self._unnamed[kind, set_id])}"

    def submit(
        self, request: Request, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = (), *, is_group: bool = False
    ) -> int:
        """Ask for a collective; returns a handle. `outputs` empty: the results are new tensors."""
        ticket = Ticket(request, list(inputs), list(outputs) or [None] * len(inputs), is_group)
        key = (request.set_id, request.name)
        with self._lock:
            if self.failure:
                raise HorovodInternalError(self.failure)
            if key in self._pending:
                what = f"{request.kind} {request.name!r} is already under way on this rank"
                raise ShoalError(
                    what, fix="give each tensor a name of its own, or hvd.synchronize(handle)", code="H003"
                )
            self._pending[key] = ticket
            handle: int = next(self._numbers)
            self._handles[handle] = ticket
        self.control.submit(request)
        return handle

    def poll(self, handle: int) -> bool:
        """Whether `wait` returns at once."""
        ticket = self._handles.get(handle)
        return ticket is None or ticket.is_done()

    def wait(self, handle: int) -> Any:
        """Return the result of a handle, once; None for an unknown one."""
        ticket = self._handles.pop(handle, None)
        return None if ticket is None else ticket.wait()

    def call(self, request: Request) -> Any:
        """Ask for a collective without tensors, and wait for it."""
        return self.wait(self.submit(request))

    def is_member(self, set_id: int) -> bool:
        """Whether this rank is in a process set."""
        return set_id in self.sets and self.world.rank in self.sets[set_id].ranks

    # ---- what comes back --------------------------------------------------------------------------------------------

    def _on_response(self, response: Response) -> None:
        assert self._executor is not None
        if response.error:
            kind = MismatchError if response.is_mismatch else HorovodInternalError
            for name in response.names:
                if (ticket := self._take(response.set_id, name)) is not None:
                    ticket.fail(kind(response.error))
            self.control.executed(response)
            return
        with self._lock:
            for name in response.names:
                if (ticket := self._pending.get((response.set_id, name))) is not None:
                    ticket.is_dispatched = True
        self._executor.queue.put(response)

    def _take(self, set_id: int, name: str) -> Ticket | None:
        with self._lock:
            return self._pending.pop((set_id, name), None)

    def _change_sets(self, response: Response) -> int:
        """Execute what has no tensors. A new group is created by all ranks of the world, in the same order."""
        if response.kind == Kind.JOIN:
            with self._lock:
                self._epoch += 1
                self._unnamed.clear()  # ranks that joined early have counted less
        elif response.kind == Kind.ADD_SET and response.value >= 0:
            ranks = response.absent[0].rows
            options = {} if self.world.is_owner else {"backend": "gloo"}  # as the group of all ranks
            group = self.world.new_group(ranks, **options) if len(ranks) > 1 else None
            self.sets[response.value] = SetGroup(ranks, group if self.world.rank in ranks else None)
        elif response.kind == Kind.REMOVE_SET:
            self.sets.pop(response.value, None)
        return response.value

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> Exception:
        """A collective failed in torch.distributed: the groups are of no use any more, here and elsewhere."""
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._on_end(f"torch.distributed failed: {text}", True)
        self.control.close(is_lost=True)
        return HorovodInternalError(self.failure)

    def _on_end(self, how: str, is_lost: bool) -> None:
        problem = Problem("H006", f"collectives have ended: {how}", "look at the output of that rank first")
        with self._lock:
            is_first, self.failure = not self.failure, self.failure or str(problem)
        self._fail_pending(self.failure, also_dispatched=is_lost)
        if is_lost and is_first and self.world.is_owner and can_cut():
            cut_groups()  # a rank that waits for another one than the lost would wait for the timeout

    def _fail_pending(self, text: str, *, also_dispatched: bool = True) -> None:
        """Fail what waits for other ranks. A rank that has left in order has executed what was dispatched before."""
        with self._lock:
            failed = {key: each for key, each in self._pending.items() if also_dispatched or not each.is_dispatched}
            for key in failed:
                del self._pending[key]
        for ticket in failed.values():
            ticket.fail(HorovodInternalError(text))


def describe(tensors: Sequence[Tensor]) -> tuple[TensorShape, ...]:
    """The dtypes and shapes of tensors, as a request carries them."""
    return tuple(map(TensorShape.of, tensors))
