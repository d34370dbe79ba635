"""Do something on every rank, and fail on every rank if it failed on one: nobody is left waiting for who has raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shoal.comm.world import World
from shoal.errors import RunFailed, ShoalError

T = TypeVar("T")


def together(world: World, act: Callable[[], T], *, failed: str, fix: str) -> list[T]:
    """What an action gave on every rank, by rank. Else all raise what the first rank to fail has raised; what was not
    meant for people is told as `failed`, with the rank."""
    error: ShoalError | None = None
    value: T | None = None
    try:
        value = act()
    except ShoalError as raised:
        error = raised
    except OSError as raised:
        why = f"{raised.strerror}: {raised.filename}" if raised.strerror else f"{type(raised).__name__}: {raised}"
        error = RunFailed(f"{failed}: rank {world.rank}: {why}", fix=fix)
    except Exception as raised:
        error = RunFailed(f"{failed}: rank {world.rank}: {type(raised).__name__}: {raised}", fix=fix)
    outcomes = world.all_gather_object((value, error))
    for _, theirs in outcomes:
        if theirs is not None:
            raise theirs
    return [theirs for theirs, _ in outcomes]  # type: ignore[misc]  # nobody has failed


def on_main(world: World, act: Callable[[], T], *, failed: str, fix: str = "see that it can be read and written") -> T:
    """What an action of the main rank gave, on every rank; if it failed, it has failed on all."""
    values: list[Any] = together(world, lambda: act() if world.is_main else None, failed=failed, fix=fix)
    return values[0]  # type: ignore[no-any-return]  # the first one is that of the main rank
