"""The short help of a verb that takes a recipe: two screens. `--help-all` has every setting with its meaning."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import Any

from shoal.config.recipe import Recipe

COMMON = (
    *("model.name", "model.preset", "data.source", "data.seq_len", "data.global_batch", "optim.lr", "run.duration"),
    *("run.dir", "run.compile", "checkpoint.every", "launch.nproc", "launch.device"),
)
"""Settings that are explained here."""
COLUMN = 22
"""Where the explanation of an option begins."""


def short_help(kind: type[Any], prog: str) -> str:
    """The text, for a terminal of the present width."""
    width = min(110, max(60, shutil.get_terminal_size().columns - 1))
    about = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    parts = [f"usage: {prog} [RECIPE] [--option ...] [--section.key value ...]", ""]
    parts += [line for each in about for line in (*textwrap.wrap(" ".join(each.split()), width), "")]
    parts += ["options", *_options(kind, width), "", "common settings of a recipe", *_common(width), ""]
    parts += ["all settings of a recipe", *_all(width), ""]
    return "\n".join([*parts, f"{prog} --help-all explains each; docs/recipes.md has the words of --plan", ""])


def _options(kind: type[Any], width: int) -> Iterator[str]:
    about = attribute_docs(kind)
    for each in fields(kind):
        is_switch = each.type in (bool, "bool")
        flag = f"--{each.name.replace('_', '-')}" + ("" if is_switch else " VALUE")
        name = each.name.upper() if "Positional" in str(each.type) else flag
        yield from _entry(name, _sentence(about.get(each.name, "")), width)
    yield from _entry("--help, --help-all", "Print this; print all settings with their meaning.", width)


def _common(width: int) -> Iterator[str]:
    for name in COMMON:
        section, _, key = name.partition(".")
        info = _keys(section)[key]
        yield from _entry(f"--{name}", _sentence(info.description or ""), width)
    yield from _entry("--plan", 'How model and batch are distributed: "tp=2 zero=1 mb=4", or auto.', width)


def _all(width: int) -> Iterator[str]:
    """The keys of every section, by name alone."""
    for section in Recipe.model_fields:
        if keys := ", ".join(_keys(section)):
            yield from _entry(f"--{section}.", keys, width)


def _keys(section: str) -> dict[str, Any]:
    found: dict[str, Any] = getattr(Recipe.model_fields[section].annotation, "model_fields", {})
    return found


def _entry(name: str, about: str, width: int) -> list[str]:
    """A name and its explanation in the second column; below the name if that is long."""
    lines = textwrap.wrap(about, width - COLUMN, break_on_hyphens=False) or [""]
    if len(name) > COLUMN - 4:
        return [f"  {name}", *(" " * COLUMN + line for line in lines)]
    return [f"  {name:<{COLUMN - 2}}{lines[0]}", *(" " * COLUMN + line for line in lines[1:])]


def _sentence(about: str) -> str:
    """The first sentence, and of a short one the next.

    >>> _sentence("Show no progress. It is long.")
    'Show no progress. It is long.'
    """
    first, *rest = re.split(r"(?<!\.)\. ", " ".join(about.split()).rstrip("."))
    both = ". ".join([first, *rest[:1]])
    return f"{both if len(both) < 90 else first}."


def attribute_docs(kind: type[Any]) -> dict[str, str]:
    """The text below each attribute of a class, and of those it extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body  # type: ignore[attr-defined]
        for one, after in pairwise(body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and is_text:
                found[one.target.id] = str(after.value.value)
    return found
