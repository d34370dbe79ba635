"""Time limits in the spelling of Slurm."""

from __future__ import annotations

import re

from shoal.errors import ShoalError

MOST = 366 * 86400

_FORMS = (
    re.compile(r"(?P<m>\d+)"),
    re.compile(r"(?P<m>\d+):(?P<s>[0-5]?\d)"),
    re.compile(r"(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)"),
    re.compile(r"(?P<d>\d+)-(?P<h>[01]?\d|2[0-3])(:(?P<m>[0-5]?\d)(:(?P<s>[0-5]?\d))?)?"),
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def read_time(text: str) -> int:
    """Seconds of MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS or DAYS-HOURS:MINUTES:SECONDS.

    >>> read_time("24:00:00") == read_time("1-0") == read_time("1440") == 86400
    True
    """
    for form in _FORMS:
        if found := form.fullmatch(text.strip()):
            seconds = sum(int(value) * _SECONDS[unit] for unit, value in found.groupdict().items() if value)
            if 0 < seconds <= MOST:
                return seconds
    what = f"--time must be a time limit such as 24:00:00 or 2-12, got {text[:80]!r}"
    raise ShoalError(what, fix="--time 24:00:00", code="J003")


def spell_time(seconds: int) -> str:
    """A time limit as Slurm prints it.

    >>> spell_time(86400), spell_time(90)
    ('1-00:00:00', '00:01:30')
    """
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
