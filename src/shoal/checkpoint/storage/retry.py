"""Requests to a store over a network: repeated while it is busy or cannot be reached.

A client repeats requests itself, for some seconds. That is too short for a store that limits its rate for a minute, and
a save must not fail for that: an hour of training may depend on it. So what has failed is tried again, with growing
pauses, until `PATIENCE` has passed. Pauses are random, so that ranks do not return all at once.

A store that has never answered is not waited for: its address is probably wrong.
"""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from shoal.url_filesystem import UNREACHABLE, error_code, is_of, reason

PATIENCE = 60.0
"""Seconds in which a request is repeated, beyond what the client does."""
LONGEST_PAUSE = 10.0
BUSY = (
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "OperationAborted",
    "500",
    "502",
    "503",
    "504",
)
"""Codes of S3 for a request that may succeed later."""
PASSING = (errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE)
CUT = (*UNREACHABLE, "ClientPayloadError", "IncompleteRead", "ResponseParserError", "FSTimeoutError")
"""Classes of errors of a connection that was cut, by name."""

_pauses = random.SystemRandom()  # the global generator belongs to the user's program


class Requests:
    """Makes requests to one store, and counts those that have failed."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        """Reason → requests that failed, since `take_notes`."""
        self._has_answered = False
        self._lock = threading.Lock()

    def __call__(self, function: Callable[..., Any], *words: Any, is_patient: bool = True, **named: Any) -> Any:
        """Call a function of a file system. Its errors become an `OSError`, which keeps the cause.

        `is_patient=False`: do not repeat it; for what is only tidied up."""
        end = time.monotonic() + PATIENCE
        for attempt in itertools.count():
            try:
                result = function(*words, **named)
            except Exception as error:
                self._has_answered |= bool(error_code(error))
                left = end - time.monotonic()
                if not (is_patient and self._has_answered and is_passing(error) and left > 0):
                    if isinstance(error, OSError):
                        raise
                    raise OSError(reason(error)) from error  # each store raises its own kind
                self.note(error_code(error) or type(error).__name__)
                time.sleep(min(left, pause(attempt)))
            else:
                self._has_answered = True
                return result
        raise AssertionError("unreachable")

    def note(self, why: str) -> None:
        """Count a request that failed."""
        with self._lock:
            self.failed[why] += 1

    def take_notes(self, where: str) -> list[str]:
        """Return a message about the requests that have failed since the last call."""
        with self._lock:
            failed, self.failed = self.failed, Counter()
        if not failed:
            return []
        kinds = ", ".join(f"{why} {number}" for why, number in failed.most_common(3))
        number = failed.total()
        requests = "request, which was" if number == 1 else "requests, which were"
        return [f"{where} did not answer {number} {requests} repeated: {kinds}"]


def is_passing(error: BaseException) -> bool:
    """Whether a request may succeed if it is repeated."""
    if code := error_code(error):
        return code in BUSY
    return is_of(error, CUT) or (isinstance(error, OSError) and error.errno in PASSING)


def pause(attempt: int) -> float:
    """Return the seconds before another attempt; the first is 0."""
    return float(min(LONGEST_PAUSE, 0.5 * 2**attempt) * _pauses.uniform(0.5, 1.0))
