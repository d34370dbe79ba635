"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

GIB, MIB = 2**30, 2**20


class Level(Enum):
    """How bad a finding is; the worst first."""

    FAIL = "will fail"
    WARNING = "warning"
    HINT = "hint"
    OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    """A stable name, under which docs/doctor.md explains it."""
    level: Level
    evidence: str
    """A number or a path."""
    fix: str = ""
    """A command to type; empty: there is nothing to do."""
    host: str = ""
    """The host, where several are checked."""

    def on(self, host: str) -> Finding:
        """The same finding with the name of its host."""
        return replace(self, host=host)

    def as_mapping(self) -> dict[str, Any]:
        """The finding as JSON has it."""
        return {**asdict(self), "level": self.level.value}

    @classmethod
    def parse(cls, written: Mapping[str, Any]) -> Finding:
        """A finding from another process. Unknown keys raise `TypeError`, unknown levels `ValueError`."""
        return cls(**{**written, "level": Level(written["level"])})


def ok(check: str, evidence: str) -> Finding:
    """Nothing to do."""
    return Finding(check=check, level=Level.OK, evidence=evidence)


def hint(check: str, evidence: str, fix: str) -> Finding:
    """Runs work without it."""
    return Finding(check=check, level=Level.HINT, evidence=evidence, fix=fix)


def warning(check: str, evidence: str, fix: str) -> Finding:
    """Some runs fail or are slow."""
    return Finding(check=check, level=Level.WARNING, evidence=evidence, fix=fix)


def will_fail(check: str, evidence: str, fix: str) -> Finding:
    """A run that needs it fails."""
    return Finding(check=check, level=Level.FAIL, evidence=evidence, fix=fix)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; within a level, in the order of the checks."""
    order = list(Level)
    return sorted(findings, key=lambda each: order.index(each.level))


def size(number: float) -> str:
    """Bytes in a unit that suits them.

    >>> size(4096), size(64 * 2**20), size(3.5 * 2**30)
    ('4 KiB', '64 MiB', '3.5 GiB')
    """
    if number < MIB:
        return f"{number / 2**10:,.0f} KiB"
    return f"{number / GIB:,.1f} GiB" if number >= GIB else f"{number / MIB:,.0f} MiB"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "core"), counted(2, "core")
    ('1 core', '2 cores')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
