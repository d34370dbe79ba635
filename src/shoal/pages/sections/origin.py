"""Where a run comes from: predicted beside measured, its environment, its recipe, and the commands to repeat it."""

from __future__ import annotations

import math
import shlex
from typing import Any

from shoal.pages.html import details, section, table, text
from shoal.pages.run.metrics_table import number
from shoal.pages.run.read_run import RunRecord
from shoal.pages.run.verdict import step_seconds
from shoal.pages.words import duration, figure

MOST_RECIPE = 60_000
"""Characters of a recipe on a page."""


def predicted(run: RunRecord) -> str:
    """Step time and memory, predicted beside measured; empty: the run directory has no prediction."""
    measured = number(run.summary.get("memory_gib_max"))
    rows = [
        ("step time", number(run.prediction.get("step_seconds")), step_seconds(run) or math.nan, duration),
        ("memory, fullest rank", number(run.prediction.get("memory_gib")), measured, lambda x: f"{figure(x, 3)} GiB"),
    ]
    lines = [
        (name, say(before), say(after), _difference(after / before))
        for name, before, after, say in rows
        if before > 0 and math.isfinite(before) and math.isfinite(after)
    ]
    note = "The prediction is that of the planner for this plan and machine."
    if run.prediction.get("is_calibrated") is False:
        note += " No calibration was found, so defaults were used: <code>shoal calibrate</code> measures this machine."
    if run.environment.get("cuda") is None:
        note += " On a CPU, measured memory is the resident size of a process, with Python and torch in it."
    return section(
        "Predicted beside measured",
        table(("", "predicted", "measured", "difference"), lines),
        name="predicted",
        note=note,
    )


def _difference(ratio: float) -> str:
    """How far a measurement is from its prediction.

    >>> _difference(1.06), _difference(4.2)
    ('+6 %', '4.2 times')
    """
    return f"{100 * (ratio - 1):+.0f} %" if 0.5 <= ratio <= 2 else f"{ratio:.2g} times"


def origin(run: RunRecord) -> str:
    """Commands, environment and recipe."""
    commands = [("started with", command(run)), ("repeats it", repeat(run))]
    lines = "".join(
        f"<dt>{text(name)}</dt><dd><code>{text(words, 2000)}</code></dd>" for name, words in commands if words
    )
    known = [(name, _short(value)) for name, value in list(run.environment.items())[:40] if name != "command"]
    body = f'<dl class="commands">{lines}</dl>'
    body += details("environment", table((), known, kind="plain"))
    body += details("recipe, every setting", f"<pre>{text(run.recipe_text, MOST_RECIPE)}</pre>")
    return section("To reproduce", body, name="reproduce")


def command(run: RunRecord) -> str:
    """The command that started the run."""
    words = run.environment.get("command")
    if not isinstance(words, list) or not words:
        return ""
    return "shoal " + shlex.join(str(word)[:500] for word in words[1:200])


def repeat(run: RunRecord) -> str:
    """The command that repeats the run elsewhere."""
    return shlex.join(["shoal", "train", str(run.path / "recipe.yaml"), "--run.dir", f"{run.path}-again"])


def _short(value: Any) -> str:
    return "none" if value is None else str(value)[:300]
