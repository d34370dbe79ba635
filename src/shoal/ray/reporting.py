"""Send the records of a run to Ray without holding up training.

`ray.train.report` is a barrier of all workers. It returns when Ray's controller has fetched the report before it, and
the controller looks every two seconds. So a thread of each worker sends all records since its last report in one:

    training     log 1  log 2  log 3  log 4  log 5 ...
    thread       ├ agree: 1 ─ report {1} ────┤ agree: 4 ─ report {4, records: 2, 3, 4} ──── ...

Every worker must report equally often. So rank 0's thread decides how many records a report has. The others wait until
they have as many, which they do, since all ranks log the same steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

Record = Mapping[str, Any]
Count = tuple[int, bool]
"""The number of records so far, and whether they are all."""


class Records(list[dict[str, Any]]):
    """A list that is short in Ray's log, where every report is printed."""

    def __repr__(self) -> str:
        return f"<{len(self)} records>"


class Reporter:
    """A sink of records that sends them in a thread.

    send   `ray.train.report`
    agree  `ray.train.collective.broadcast_from_rank_zero`: returns what rank 0 has given
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], agree: Callable[[Count], Count]) -> None:
        self._send, self._agree = send, agree
        self._waiting = Records()
        self._newest: dict[str, Any] = {}
        """The newest value of every key."""
        self._num_sent = 0
        self._is_finished = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="shoal-ray-reports", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Send a record soon. Every rank writes the same number of records."""
        with self._changed:
            self._waiting.append(dict(record))
            self._changed.notify()

    def close(self) -> None:
        """Do nothing: a run that fails is closed too, and then the thread would wait for a lost worker."""

    def finish(self) -> dict[str, Any]:
        """Return when all records are sent, with the newest value of every key. Every rank calls it."""
        with self._changed:
            self._is_finished = True
            self._changed.notify()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._newest

    def _run(self) -> None:
        try:
            while not self._send_waiting():
                pass
        except Exception as error:
            self._error = error

    def _send_waiting(self) -> bool:
        """Send the waiting records in one report; returns whether they were the last."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._is_finished)
            own = (self._num_sent + len(self._waiting), self._is_finished)
        count, is_last = self._agree(own)
        number = count - self._num_sent
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) >= number)
            records = Records(self._waiting[:number])
            del self._waiting[:number]
        for record in records:
            self._newest |= record
        if records:
            self._send({**self._newest, "records": records})
            self._num_sent = count
        return is_last
