"""Save a run asynchronously: a step waits only for the copy of the state.

training   step 4 ─ copy [2] ─ step 5 ─ step 6 ─ ... ─ step 9 ─ [1] copy ─ ...
thread                └─ hash, write, fsync, rename [3] ─┘            └─ ...

[1] There is one copy, and so one save at a time: the next save waits for the one in progress, and `seconds_waited`
    counts that.
[2] The copy is what training waits for. Its memory is allocated once, in the background, and pinned for a GPU.
[3] The threads of all ranks use their own connections: training uses the others at the same time.
[4] A save that fails is reported by `take_results`, and training continues.
[5] A save in which a rank waits for another one longer than `launch.timeout` ends the run: the connections cannot be
    used after that, and no later step could be saved.
[6] So does a save to an object store in which another run saves now.

When to save: `shoal.train.recipe.saving.autosave`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.peers.host_ranks import HostRanks
from shoal.checkpoint.save import Snapshot, save
from shoal.checkpoint.state.model_state import Holder
from shoal.checkpoint.storage.manifest import Shape
from shoal.checkpoint.storage.store import Store
from shoal.comm.group_lifetime import note_thread
from shoal.comm.world import World
from shoal.errors import LostPeer, RunFailed, ShoalError, StoreTaken

SLACK = 1.0
"""Seconds that the main thread waits longer than the thread of a save, whose message is more precise."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The outcome of a save."""

    step: int
    seconds: float
    """From the copy to the disk."""
    num_bytes: int
    """Bytes of this rank."""
    failure: ShoalError | None = None
    """Why the save failed; None: it succeeded."""
    note: str = ""
    """A problem of a save that succeeded."""


@dataclass(slots=True)
class AsyncSaver:
    """The saves of one run to one store. Every rank has one, and calls `begin` and `finish` after the same steps."""

    store: Store
    world: World
    """[3] The ranks, over connections of their own: `world.with_own_connections()`."""
    keep: int | None = 2
    """How many of the newest steps are kept; None: all."""
    on_saved: Callable[[int], None] | None = None
    """Called by the main rank with a step that was saved, in the thread that saved it."""
    hosts: HostRanks | None = None
    """The ranks that share a store; None: all of them."""
    seconds_held: float = 0.0
    """How long steps have waited for copies."""
    seconds_waited: float = 0.0
    """How long steps have waited for the previous save."""
    _copies: dict[tuple[str, Shape], Tensor] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _results: deque[Saved] = field(default_factory=deque)
    _error: BaseException | None = None
    _step: int = 0
    """The step that is being saved."""

    def make_room(self, holder: Holder) -> None:
        """[2] Allocate the memory for the copy during the next steps: allocating it takes longer than filling it."""
        values = Snapshot.of(holder, step=0, state={})
        self._start(lambda: self._room_for(values))

    def begin(self, holder: Holder, *, step: int, state: Mapping[str, Any]) -> float:
        """Copy the run after a step, and write the copy in the background; return the seconds that the copy took."""
        with _timed() as waited:  # [1] the thread still reads the copy
            self.finish()
        self.seconds_waited += waited[0]
        with _timed() as held:  # [2]
            snapshot = self._copied(Snapshot.of(holder, step=step, state=state))
        self._step = step
        self.seconds_held += held[0]
        self._start(lambda: self._write(snapshot))
        return held[0]

    def finish(self) -> None:
        """Wait until the save in progress has ended, with or without success."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self.world.timeout + SLACK)  # [5]
            if thread.is_alive():
                raise LostPeer(
                    f"rank {self.world.rank} waited {self.world.timeout:g} s for its save of step {self._step} to"
                    f" {self.store.where}, which has not ended",
                    fix=f"--launch.timeout {2 * self.world.timeout:g}, or --checkpoint.dir on a faster disk",
                    code="C014",
                )
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the exception that ended the thread of a save, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def take_results(self) -> list[Saved]:
        """Return the saves that have ended since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def _start(self, act: Any) -> None:
        def guarded() -> None:
            try:
                act()
            except BaseException as error:  # a defect of ours: `save` reports expected failures
                self._error = error

        self._thread = threading.Thread(target=guarded, name="shoal-save", daemon=True)
        note_thread(self._thread)
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        failure: ShoalError | None = None
        note = ""
        try:
            note = save(self.store, self.world, snapshot, self.hosts)
        except (LostPeer, StoreTaken):
            raise  # [5] [6]
        except ShoalError as error:
            failure = error  # [4]
        except Exception as error:
            what = f"the checkpoint of step {snapshot.step} was not finished: {type(error).__name__}: {error}"
            failure = RunFailed(what, fix="--checkpoint.dir OTHER_DIRECTORY", code="C015")
        else:
            if self.world.is_main and self.on_saved is not None:
                self.on_saved(snapshot.step)
            is_leader = self.world.is_main if self.hosts is None else self.hosts.is_leader
            if is_leader and self.keep is not None and not note:
                with suppress(Exception):  # the step is saved; the next save removes surplus steps
                    self.store.retain(self.keep)
        self._results.append(Saved(snapshot.step, time.perf_counter() - began, snapshot.num_bytes, failure, note))

    def _room_for(self, snapshot: Snapshot) -> list[Tensor]:
        """Return a tensor in host memory for every value, reused by the next save; pinned if there is a GPU."""
        room = []
        for piece, value in zip(snapshot.pieces, snapshot.values, strict=True):
            copy = self._copies.get((piece.name, piece.begin))
            if copy is None or (copy.shape, copy.dtype) != (value.shape, value.dtype):
                copy = torch.zeros(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                self._copies[piece.name, piece.begin] = copy
            room.append(copy)
        return room

    def _copied(self, snapshot: Snapshot) -> Snapshot:
        room = self._room_for(snapshot)
        with torch.no_grad():
            for copy, value in zip(room, snapshot.values, strict=True):
                copy.copy_(value, non_blocking=True)
        if any(value.is_cuda for value in snapshot.values):  # the next step changes the values
            torch.cuda.current_stream().synchronize()
        # The pieces refer to the run's own tensors, which the thread must not touch.
        pieces = [replace(piece, value=copy) for piece, copy in zip(snapshot.pieces, room, strict=True)]
        return replace(snapshot, pieces=pieces, values=room)


@contextmanager
def _timed() -> Iterator[list[float]]:
    began, seconds = time.perf_counter(), [0.0]
    try:
        yield seconds
    finally:
        seconds[0] = time.perf_counter() - began
