"""State that all ranks share, with a committed copy in memory."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable
from typing import Any

from shoal.horovod.errors import HostsUpdatedInterrupt


class State:
    """What `elastic.run` synchronizes, commits and restores. Subclasses define `save`, `restore` and `sync`."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to call after the ranks have changed, such as one that scales the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after the ranks have changed."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts will change; the next `commit` interrupts."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, and interrupt if hosts change."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on every rank if rank 0 was notified of a change."""
        before, newest, update = self._last_updated_timestamp, self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, kind = self._host_messages.get()
            if timestamp > newest:
                newest, update = timestamp, update | kind
        before, self._last_updated_timestamp, update = self._bcast_object((before, newest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(skip_sync=update == _REMOVED)

    def save(self) -> None:
        """Copy the state to memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for other ranks, before `sync`."""


_REMOVED = 1
"""Of Horovod's HostUpdateResult: hosts were only removed, and the ranks that stay have the same state."""


class ObjectState(State):
    """Plain Python values as attributes: `ObjectState(..., epoch=0, batch=0)`."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **values: Any) -> None:
        self._saved_state = dict(values)
        self._set_attributes()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Copy the attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to the copies."""
        self._set_attributes()

    def sync(self) -> None:
        """Set the attributes to the copies of rank 0."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))
