"""The result of a translation, and the reader that collects it: each key of a config is read once.

{"zero_optimization": {"stage": 2, "overlap_comm": true}}

Reader("zero_optimization")  stage         → Line  zero_optimization.stage 2        --plan.zero 2
                             overlap_comm  → Line  zero_optimization.overlap_comm   no effect here: ...
                             stagee        → Problem E004, did you mean stage?
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.errors import Problem, nearest
from shoal.safe_parsing import short

Target = Literal["train", "plan", "initialize"]
"""What a config is translated for: a recipe, the planner, or an engine with DeepSpeed's own semantics."""

AUTO = "auto"
"""The word of the Trainer of transformers, which fills it in; it stays open here."""


@dataclass(frozen=True, slots=True)
class Line:
    """One key of a config, and its counterpart."""

    key: str
    value: Any
    flag: str = ""
    """The setting to type here, such as `--plan.zero 2`; empty: there is none."""
    remark: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """The line as JSON."""
        return {"key": self.key, "value": self.value, "setting": self.flag or None, "remark": self.remark}


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """The optimizer of a config, with DeepSpeed's defaults filled in."""

    name: str
    """adamw, adam, sgd or lion."""
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """The schedule of a config, with DeepSpeed's defaults filled in. `warmup_max_lr` None: that of the optimizer."""

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class Translation:
    """A config in words of shoal."""

    target: Target
    plan: dict[str, Any] = field(default_factory=dict)
    """Keys of a plan; None: the key stays open, whatever a recipe has."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of a recipe."""
    form: dict[str, Any] = field(default_factory=dict)
    """Of a model: fields of the planner's `Workload`."""
    lines: list[Line] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    num_accumulated: int | None = None
    """Microbatches of a step on one rank; None: it follows from the batch."""
    optimizer: OptimizerChoice | None = None
    schedule: ScheduleChoice | None = None
    rounds_gradients: bool = False
    """Whether an engine rounds gradients to bfloat16, as DeepSpeed does at stage 0 in bf16."""

    def overrides(self) -> list[tuple[str, str]]:
        """The settings as overrides of a recipe, in the words of the command line."""
        both = {**{f"plan.{key}": value for key, value in self.plan.items()}, **self.settings}
        return [(key, _typed(value)) for key, value in both.items()]


def _typed(value: Any) -> str:
    if value is None:
        return "None"
    return value if isinstance(value, str) else json.dumps(value)


class Reader:
    """Reads one object of a config into a translation."""

    def __init__(self, values: Any, into: Translation, prefix: str = "") -> None:
        self.into, self.prefix = into, prefix
        self.seen: set[str] = set()
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        if not isinstance(values, dict):
            self._wrong(prefix.rstrip("."), values, "an object", "{}")

    def name(self, key: str) -> str:
        """The dotted name of a key."""
        return f"{self.prefix}{key}"

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null and auto. The latter is noted as open."""
        self.seen.add(key)
        value = self.values.get(key)
        if value == AUTO and not any(line.key == self.name(key) for line in self.into.lines):
            self.into.lines.append(Line(self.name(key), AUTO, "", "left open"))
        return value is not None and value != AUTO

    # ---- values of a type --------------------------------------------------------------------------------------------

    def whole(self, key: str, *, least: int = 1) -> int | None:
        """A whole number; None: it is missing, open or wrong. 5e8 is whole."""
        value: Any = self.values.get(key)
        if not self.has(key):
            return None
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not is_whole or value < least:
            self._wrong(
                self.name(key), value, f"a whole number of at least {least}", _number_in(value) or str(max(least, 1))
            )
            return None
        return int(value)

    def number(self, key: str, *, least: float = 0.0) -> float | None:
        """A number; None: it is missing, open or wrong."""
        value = self.values.get(key)
        if not self.has(key):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
            self._wrong(self.name(key), value, f"a number of at least {least:g}", _number_in(value) or "1e-3")
            return None
        return float(value)

    def flag(self, key: str) -> bool | None:
        """True or false; None: it is missing, open or wrong."""
        value = self.values.get(key)
        if not self.has(key):
            return None
        if not isinstance(value, bool):
            self._wrong(self.name(key), value, "true or false", "true")
            return None
        return value

    def word(self, key: str, known: Iterable[str] = ()) -> str | None:
        """A text; None: it is missing, open or wrong."""
        value, words = self.values.get(key), list(known)
        if not self.has(key):
            return None
        if not isinstance(value, str) or (words and value not in words):
            rule = f"one of {', '.join(words)}" if words else "a text"
            self._wrong(self.name(key), value, rule, nearest(str(value), words) or (words or ["TEXT"])[0])
            return None
        return value

    def section(self, key: str) -> Reader | None:
        """An object inside; None: it is missing or open."""
        return Reader(self.values[key], self.into, f"{self.name(key)}.") if self.has(key) else None

    # ---- what becomes of a key ---------------------------------------------------------------------------------------

    def plan(self, key: str, word: str, value: Any, remark: str = "") -> None:
        """The key becomes a word of the plan. The value of a missing key follows from others, or is DeepSpeed's."""
        self.into.plan[word] = value
        self._line(key, f"--plan.{word} {value}", remark)

    def setting(self, key: str, setting: str, value: Any, remark: str = "") -> None:
        """The key becomes a setting of a recipe."""
        self.into.settings[setting] = value
        shown = " ".join(map(str, value)) if isinstance(value, list) else f"{value:g}" if _is_short(value) else value
        self._line(key, f"--{setting} {str(shown).lower() if isinstance(value, bool) else shown}", remark)

    def same(self, key: str, remark: str) -> None:
        """The key says what is so anyway, or what other keys say."""
        self._line(key, "", remark)

    def no_effect(self, key: str, why: str) -> None:
        """The key has no effect here, which is said once."""
        if self.has(key):
            self._line(key, "", f"no effect here: {why}")

    def reject(self, key: str, fix: str, why: str = "") -> None:
        """The key needs something that shoal does not have."""
        shown = short(self.values.get(key), 60)
        what = f"{self.name(key)} {shown} has no counterpart in shoal{f': {why}' if why else ''}"
        self.into.problems.append(Problem("E008", what, fix))
        self.seen.add(key)

    def finish(self, known: Iterable[str] = ()) -> None:
        """Reject the keys that were not read, and say of the others that nothing changes. `known` are keys that may
        follow from others."""
        names = sorted({*self.seen, *known})
        said = {line.key for line in self.into.lines}
        for key, value in self.values.items():
            if key in self.seen and self.name(key) not in said and not isinstance(value, dict | None):
                self.same(key, "the same here")
            elif key not in self.seen:
                near = nearest(key, names)
                fix = f'"{near}"' if near else f"remove it; {self.prefix.rstrip('.') or 'a config'} has {_few(names)}"
                self.into.problems.append(Problem("E004", f"DeepSpeed has no key {self.name(key)!r}", fix))

    def _line(self, key: str, flag: str, remark: str) -> None:
        self.seen.add(key)
        self.into.lines.append(Line(self.name(key), self.values.get(key), flag, remark))

    def _wrong(self, name: str, value: Any, rule: str, usual: str) -> None:
        last = name.rpartition(".")[2]
        problem = Problem("E005", f"{name} must be {rule}, got {short(value, 80)}", f'"{last}": {usual}')
        self.into.problems.append(problem)


def _is_short(value: Any) -> bool:
    return isinstance(value, float)


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _number_in(value: Any) -> str:
    """The number that was written as a text, to suggest it without quotes."""
    return value if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", value) else ""
