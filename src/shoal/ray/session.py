"""What a function of `shoal.ray.Trainer` can call on its worker: where to save, and how to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import ShoalError
from shoal.ray.reporting import Reporter


@dataclass(frozen=True)
class Session:
    """The run of this worker."""

    reporter: Reporter
    directory: str
    """The run's folder below Ray's storage path, or its URL."""


_sessions: list[Session] = []


def begin(session: Session) -> None:
    """Make a session the one of this process."""
    _sessions[:] = [session]


def end() -> None:
    """Forget the session of this process."""
    _sessions.clear()


def checkpoint_directory() -> str:
    """The directory below Ray's storage path for `run.save` and `run.load`, the same on every worker."""
    return f"{_current('checkpoint_directory').directory}/checkpoints"


def report(metrics: Mapping[str, Any]) -> None:
    """Report numbers to Ray, without waiting for it. Every worker must call it equally often.

    Ray gets the newest value of every key, and all reports since it has last looked as `records`.
    """
    _current("report").reporter.write(metrics)


def _current(name: str) -> Session:
    if not _sessions:
        raise ShoalError(
            f"shoal.ray.{name}() was called outside of a function that shoal.ray.Trainer runs",
            fix="shoal.ray.Trainer(function, scaling_config).fit(), and call it in the function",
            code="Y001",
        )
    return _sessions[0]
