"""Process sets: parts of all ranks that run collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.errors import ShoalError
from shoal.horovod import context
from shoal.horovod.engine.messages import Kind, Request


class ProcessSet:
    """Some of the ranks. `process_set_id` is set once `init` or `add_process_set` has registered it."""

    process_set_id: int | None
    ranks: list[int]

    def __init__(self, ranks: Iterable[int]) -> None:
        found = sorted(ranks) if isinstance(ranks, Iterable) else [ranks]
        if any(not isinstance(rank, int) for rank in found):
            what = f"a process set must be a list of ranks, got {str(ranks)[:80]}"
            raise ShoalError(what, fix="hvd.ProcessSet([0, 1]); MPI communicators are not supported", code="H010")
        self.process_set_id, self.ranks = None, found

    def size(self) -> int | None:
        """The number of ranks; None if it is not registered."""
        return None if self._unknown() else len(self.ranks)

    def rank(self) -> int | None:
        """This process's index in the set; None if it is not registered."""
        if self._unknown() or not self.included():
            return None
        return self.ranks.index(context.engine().world.rank)

    def included(self) -> bool:
        """Whether this process is in the set."""
        return context.engine().world.rank in self.ranks

    def _unknown(self) -> bool:
        return self.process_set_id is None or not context.is_initialized()

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def register_at_start(process_sets: Sequence[ProcessSet]) -> None:
    """Register the sets of `init`, after all of them were checked."""
    for process_set in process_sets:
        add_process_set(process_set)


def check_distinct(process_sets: Sequence[ProcessSet], size: int | None) -> None:
    """Reject two sets of the same ranks, one of which may be the set of all ranks."""
    seen = [] if size is None else [list(range(size))]
    for process_set in process_sets:
        if process_set.ranks in seen:
            _reject_duplicate(process_set.ranks)
        seen.append(process_set.ranks)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks; every rank of the run calls it with the same ranks."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    engine = context.engine()
    if not added.ranks or not 0 <= added.ranks[0] <= added.ranks[-1] < engine.world.size:
        what = f"a process set must have ranks from 0 to {engine.world.size - 1}, got {added.ranks}"
        raise ShoalError(what, fix="hvd.ProcessSet([0])", code="H010")
    name = engine.unnamed(Kind.ADD_SET, 0)
    number = engine.call(Request(kind=Kind.ADD_SET, name=name, rows=tuple(added.ranks)))
    if number < 0:
        _reject_duplicate(added.ranks)
    added.process_set_id = number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set; every rank of the run calls it. Returns whether there was one: the set of all ranks stays."""
    number = process_set.process_set_id
    if not number:
        return False
    engine = context.engine()
    engine.call(Request(kind=Kind.REMOVE_SET, name=engine.unnamed(Kind.REMOVE_SET, 0), rows=(number,)))
    process_set.process_set_id = None
    return True


def ids_and_ranks() -> dict[int, list[int]]:
    """The registered sets."""
    return {number: list(each.ranks) for number, each in sorted(context.engine().sets.items())}


def _reject_duplicate(ranks: Sequence[int]) -> None:
    what = f"a process set of ranks {list(ranks)} exists already"
    raise ShoalError(what, fix="use the ProcessSet object that was registered first", code="H010")
