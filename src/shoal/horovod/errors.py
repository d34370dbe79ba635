"""Exceptions that scripts written for Horovod catch. Their texts have shoal's form: what, code, fix."""

from __future__ import annotations

from shoal.errors import Problem


class HorovodInternalError(RuntimeError):
    """A collective failed. `elastic.run` recovers from it."""


class MismatchError(HorovodInternalError):
    """Ranks called one name with different arguments. It is raised on every rank, and no retry helps."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of ranks changes. `elastic.run` joins again and keeps its state."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


def internal(problem: Problem) -> HorovodInternalError:
    """Return the error of a problem."""
    return HorovodInternalError(str(problem))
