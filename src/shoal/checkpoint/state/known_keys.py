"""Types of the values in a manifest's `state` that shoal reads. A hash shows that a value is unchanged, not that it is
valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _mapping(*of: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(check(one) for one in value.values() for check in of)


def _list(*of: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(one) for one in value for check in of)


def _loader(value: Any) -> bool:
    return isinstance(value, dict) and _list(_count)(value.get("position")) and len(value["position"]) > 0


def _local_sgd(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _mapping(_count)(value.get("waiting", {}))
        and _list(_number)(value.get("step_scale", []))
    )


KNOWN: dict[str, Check] = {
    "recipe": _mapping(),
    "model": _mapping(),
    "imported": _mapping(),
    "history": _mapping(),
    "extra": _mapping(),
    "scalars": _mapping(_mapping(_number)),
    "loss_scale": _mapping(_number),
    "lr": _list(_mapping(_number)),
    "loaders": _list(_loader),
    "local_sgd": _local_sgd,
    "ema": _count,
    "ranks": _count,
    "num_calls": _count,
    "plan": _text,
}


def wrong_in(state: Mapping[str, Any]) -> str | None:
    """Return the first name whose value has not the type that shoal writes; None: all are valid."""
    return next((name for name, check in KNOWN.items() if name in state and not check(state[name])), None)
