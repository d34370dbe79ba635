"""Durations with a unit: `1000step`, `2epoch`, `1e9tok`, `10min`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shoal.errors import ShoalError, listed

SECONDS = {"sec": 1.0, "min": 60.0, "h": 3600.0}
UNITS = ("step", "epoch", "tok", "sample", *SECONDS)
_SPELLINGS = {
    **{unit: unit for unit in UNITS},
    **{unit + "s": unit for unit in ("step", "epoch", "sample", "min")},
    **{"token": "tok", "tokens": "tok", "ep": "epoch", "ba": "step", "hour": "h", "hours": "h"},
    **{"s": "sec", "second": "sec", "seconds": "sec", "m": "min", "minute": "min", "minutes": "min"},
}


@dataclass(frozen=True, slots=True)
class Duration:
    """A number of steps, epochs, tokens or samples, or a length of time.

    >>> Duration.parse("1e9tok")
    Duration(amount=1000000000.0, unit='tok')
    >>> str(Duration.parse("2 epochs"))
    '2epoch'
    """

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: str | int) -> Duration:
        """Read `100step`; a bare number counts steps."""
        match = re.fullmatch(r"\s*([0-9_.]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
        unit = _SPELLINGS.get(match[2] or "step") if match else None
        try:
            amount = float(match[1]) if match else math.nan
        except ValueError:  # 1.2.3step
            amount = math.nan
        if unit is None or not math.isfinite(amount):
            raise ShoalError(
                f"a duration must be a number and a unit ({listed(UNITS)}), got {text!r}",
                fix="1000step, 2epoch, 1e9tok or 10min",
                code="R016",
            )
        return cls(amount, unit)

    def __str__(self) -> str:
        return f"{int(self.amount) if self.amount == int(self.amount) else self.amount}{self.unit}"

    @property
    def seconds(self) -> float | None:
        """Its length if it is a length of time; None if it counts work."""
        return self.amount * SECONDS[self.unit] if self.unit in SECONDS else None

    def steps(self, *, batch: int, samples_per_epoch: int, tokens_per_sample: int) -> int | None:
        """The optimizer steps that reach it, rounded up; None for a length of time.

        >>> Duration.parse("2epoch").steps(batch=8, samples_per_epoch=100, tokens_per_sample=1)
        25
        """
        samples = {
            "step": self.amount * batch,
            "sample": self.amount,
            "epoch": self.amount * samples_per_epoch,
            "tok": self.amount / tokens_per_sample,
        }.get(self.unit)
        return None if samples is None else math.ceil(samples / batch)
