"""Rules for arguments of Python calls, such as `Run(seed=3)`. Each yields the problem of a wrong value.

The command line reads text, and `shoal.config.load` reports a value of the wrong type. A script can pass any object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any

from shoal.errors import Problem, listed, nearest
from shoal.safe_parsing import short

BOTH = (True, False)
DEVICES = ("auto", "cpu", "cuda")
MOST_SECONDS = 1e9
"""Thirty years. The clock of a process group overflows far above it."""
_OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda"}


def check_choice(name: str, value: Any, known: Sequence[Any]) -> Iterator[Problem]:
    """The value must be one of the known ones.

    >>> [str(problem) for problem in check_choice("on_nan", "skp", ("stop", "skip"))]
    ["on_nan must be 'stop' or 'skip', got 'skp' [R047]\\n    fix: on_nan='skip'"]
    """
    if not any(type(value) is type(each) and value == each for each in known):
        words = [each for each in known if isinstance(each, str)]
        meant = nearest(value.lower(), words) if isinstance(value, str) else None
        what = f"{name} must be {listed(map(repr, known))}, got {short(value)}"
        yield Problem("R047", what, f"{name}={meant or known[0]!r}")


def check_device(device: Any) -> Iterator[Problem]:
    """The device must be a kind that shoal knows; ranks choose the GPU of their own."""
    if device not in DEVICES:
        kind = device.partition(":")[0].lower() if isinstance(device, str) else ""
        near = _OTHER_NAMES.get(kind) or nearest(kind, DEVICES) or DEVICES[0]
        what = f"device must be {listed(DEVICES)}, got {short(device)}"
        yield Problem("R049", what, f"device={near!r}")


def check_number(
    name: str,
    value: Any,
    *,
    usual: Any,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Iterator[Problem]:
    """The value must be a number in a range. `above` excludes the bound; `least` and `most` include it."""
    limits = [
        *([] if above is None else [f"above {above:g}"]),
        *([] if least is None else [f"of at least {least:g}"]),
        *([] if most is None else [f"of at most {most:g}"]),
    ]
    is_number = not isinstance(value, bool) and isinstance(value, Real) and value == value
    is_low = is_number and ((above is not None and value <= above) or (least is not None and value < least))
    if not is_number or is_low or (most is not None and value > most):
        yield Problem(
            "R048", f"{name} must be a number {' and '.join(limits)}, got {short(value)}", f"{name}={usual!r}"
        )


def check_whole(name: str, value: Any, *, usual: Any, least: int | None = None) -> Iterator[Problem]:
    """The value must be a whole number, which `True` is not here."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):
        rule = "a whole number" if least is None else f"a whole number of at least {least}"
        yield Problem("R048", f"{name} must be {rule}, got {short(value)}", f"{name}={usual!r}")


def check_start(*, device: Any, timeout: Any, threads: Any) -> Iterator[Problem]:
    """The arguments with which a rank joins the others must be valid."""
    yield from check_device(device)
    yield from check_number("timeout", timeout, above=0, most=MOST_SECONDS, usual=600.0)
    if threads is not None:
        yield from check_whole("threads", threads, least=1, usual=1)
