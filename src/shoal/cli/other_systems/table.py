"""A translation as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config.deepspeed.translation import Line
from shoal.safe_parsing import short


def table(title: str, lines: Sequence[Line], typed: Sequence[str]) -> str:
    """The translation, a line for each key. `typed` are settings that were given otherwise, which replace these."""
    rows = [(_given(line), line.flag or "-", _remark(line, typed)) for line in lines]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    shown = [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]
    return "\n".join([f"{title} in settings of shoal:", *shown])


def _given(line: Line) -> str:
    if line.key.startswith("--"):
        return f"{line.key} {line.value if line.value is not None else ''}".rstrip()[:80]
    return f"{line.key} {'(default)' if line.value is None else short(line.value, 40)}"


def _remark(line: Line, typed: Sequence[str]) -> str:
    setting = line.flag.partition(" ")[0].removeprefix("--")
    by = next((name for name in typed if setting and _is_of(setting, name)), "")
    return f"overridden by --{by}" if by else line.remark


def _is_of(setting: str, typed: str) -> bool:
    return typed == setting or (typed == "plan" and setting.startswith("plan."))
