"""Run an action on every rank, and fail on every rank if it failed on one, so that no rank waits for a failed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shoal.comm.shared_board import ON_EVERY_RANK
from shoal.comm.world import World
from shoal.errors import LostPeer, Problem, RunFailed, ShoalError

T = TypeVar("T")


def all_or_none(world: World, act: Callable[[], T], *, failed: str, fix: str, kinds: Sequence[type] = ()) -> list[T]:
    """Return an action's result on every rank, by rank. If it fails on a rank, all ranks raise the first rank's error.

    An error that is not a `ShoalError` is reported as `failed`, with the rank. `kinds`: the dataclasses in the results.
    """
    error: ShoalError | None = None
    value: T | None = None
    try:
        value = act()
    except ShoalError as raised:
        error = raised
    except OSError as raised:
        why = f"{raised.strerror}: {raised.filename}" if raised.strerror else f"{type(raised).__name__}: {raised}"
        error = RunFailed(f"{failed}: rank {world.rank}: {why}", fix=fix, code="N021")
    except Exception as raised:
        error = RunFailed(f"{failed}: rank {world.rank}: {type(raised).__name__}: {raised}", fix=fix, code="N021")
    if world.size == 1:
        if error is not None:
            raise error
        return [value]  # type: ignore[list-item]  # no error: there is a value
    try:
        outcomes: list[tuple[Any, Any]] = world.all_gather_object(
            (value, None if error is None else _encoded(error)), (*kinds, Problem)
        )
    except RuntimeError as raised:  # from gloo
        if error is not None:
            raise error from None
        raise _lost_peer(world, failed, str(raised)) from raised
    for _, theirs in outcomes:
        if theirs is not None:
            raise _decoded(*theirs)
    return [theirs for theirs, _ in outcomes]


def on_main(
    world: World, act: Callable[[], T], *, failed: str, fix: str = "check that it can be read and written"
) -> T:
    """Run an action on rank 0 and return its result on every rank; if it fails, every rank raises."""
    values: list[Any] = all_or_none(world, lambda: act() if world.is_main else None, failed=failed, fix=fix)
    return values[0]  # type: ignore[no-any-return]  # rank 0 is the main rank


def _encoded(error: ShoalError) -> tuple[str, tuple[Problem, ...], str, bool]:
    """Encode an error as plain data, its class by name: a rank never creates a class that another rank sends."""
    return type(error).__name__, error.problems, error.title, getattr(error, "may_pass", False)


def _decoded(name: str, problems: tuple[Problem, ...], title: str, may_pass: bool) -> ShoalError:
    known = {kind.__name__: kind for kind in _kinds_of(ShoalError)}
    error = known.get(name, ShoalError)(*problems, title=title)
    if isinstance(error, RunFailed):
        error.may_pass = may_pass
    return error


def _kinds_of(kind: type[ShoalError]) -> Iterator[type[ShoalError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds_of(narrower)


def _lost_peer(world: World, failed: str, why: str) -> LostPeer:
    is_late = "timed out" in why.lower() or "timeout" in why.lower()
    what = f"waited {world.timeout:g} s for the other ranks" if is_late else "lost the connection to another rank"
    return LostPeer(
        f"{failed}: rank {world.rank} {what}",
        fix=f"--launch.timeout {2 * world.timeout:g}, if a rank is slow but still runs; {ON_EVERY_RANK}",
        code="N012",
    )
