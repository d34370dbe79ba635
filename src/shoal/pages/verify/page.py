"""The page of `shoal verify`: the verdict, the difference of every tensor, communication, memory and the layout."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.blueprint.plan import Plan
from shoal.errors import ShoalError
from shoal.pages.html import page, section, table, text
from shoal.pages.run.metrics_table import number
from shoal.pages.sections.layout import layout_of
from shoal.pages.words import figure
from shoal.version import __version__

LEAST = 1e-18
"""Differences are drawn from here to 1, on a logarithmic scale."""
MOST = 20_000
"""Tensors on a page, the worst first."""


class TensorError(NamedTuple):
    """The largest differences of one tensor over all steps, relative."""

    name: str
    gradient: float
    weight: float

    @property
    def worst(self) -> float:
        """The larger one; infinite if one of them is not finite."""
        return max(self.gradient, self.weight)


def verify_page(result: Mapping[str, Any], tensors: Sequence[TensorError]) -> str:
    """The page of a result as `shoal verify --json` prints it, and of its tensors."""
    plan = str(result["plan"])
    body = _header(plan, result) + _verdict(result, tensors) + _tensors(result, tensors)
    body += _counts(result)
    try:
        body += layout_of(Plan.parse(plan).resolve(int(result["ranks"])))
    except ShoalError:
        body += ""
    return page(f"{plan[:80]} – shoal verify", body)


def _header(plan: str, result: Mapping[str, Any]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    ranks = int(result["ranks"])
    return (
        f'<header><p class="brand">shoal verify</p><h1><bdi>{text(plan, 200)}</bdi></h1><p class="made">'
        f"{ranks} rank{'s' * (ranks != 1)} beside one process, {result['steps']} steps in"
        f" {figure(result['seconds'], 3)} s. Made {made}, shoal {__version__}</p></header>"
    )


def _verdict(result: Mapping[str, Any], tensors: Sequence[TensorError]) -> str:
    is_equal, worst = bool(result["equal"]), result["worst"]
    headline = "Equal: the plan computes the same as one process" if is_equal else "NOT equal to one process"
    first = result["first_difference"]
    reason = "" if first is None else _first(first)
    lines = "".join(f'<p class="reason">{text(line, 1500)}</p>' for line in (reason, *result["notes"]) if line)
    facts = [
        ("Tolerance", _short(result["tolerance"]), "relative difference"),
        ("Loss", _short(worst["loss"]), "largest difference"),
        ("Gradients", _short(worst["grad"]), f"of {len(tensors):,} tensors"),
        ("Weights", _short(worst["weight"]), "after the update"),
    ]
    cards = "".join(
        f'<div class="fact"><dt>{text(name)}</dt><dd>{text(value)}</dd><dd class="remark">{text(remark)}</dd></div>'
        for name, value, remark in facts
    )
    return (
        f'<section class="verdict {"ended" if is_equal else "dead"}"><p class="headline"><span class="dot"></span>'
        f'{headline}</p>{lines}<dl class="facts">{cards}</dl></section>'
    )


def _first(first: Mapping[str, Any]) -> str:
    """The first difference in words."""
    tensor = f" of {first['tensor']}" if first["tensor"] else ""
    cause = f". {first['cause']}" if first["cause"] else ""
    return f"first: step {first['step']}, {first['kind']}{tensor}{cause}"


def _tensors(result: Mapping[str, Any], tensors: Sequence[TensorError]) -> str:
    """Every tensor, the worst first: its differences, and a bar from 1e-18 to 1 with the tolerance."""
    tolerance = number(result["tolerance"])
    ordered = sorted(tensors, key=lambda one: -one.worst)[:MOST]
    rows = "".join(
        f"<tr><td>{text(one.name)}</td><td>{_short(one.gradient)}</td><td>{_short(one.weight)}</td>"
        f"<td>{_bar(one.worst, tolerance)}</td></tr>"
        for one in ordered
    )
    head = "<tr><th>tensor</th><th>gradient</th><th>weight</th><th>1e-18 … tolerance … 1</th></tr>"
    body = f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>' if rows else ""
    note = "The largest relative difference of each tensor from one process, over all steps. The line is the tolerance."
    return section("Tensors", body, name="tensors", note=note)


def _bar(worst: float, tolerance: float) -> str:
    kind = "good" if worst <= tolerance else "bad"
    bar = f'<rect class="{kind}" x="0" y="2" width="{_place(worst):.1f}" height="8"/>'
    limit = f'<path class="rule" d="M{_place(tolerance):.1f} 0V12"/>'
    return f'<svg class="gauge" viewBox="0 0 200 12" role="img">{bar}{limit}</svg>'


def _place(value: float) -> float:
    if not value > LEAST:
        return 0.0
    return 200.0 if not math.isfinite(value) else min(200.0, 200 * (1 - math.log(value) / math.log(LEAST)))


def _counts(result: Mapping[str, Any]) -> str:
    """Communication and memory, predicted beside counted."""
    rows = [
        (axis, f"{operation} calls", *_pair(count))
        for axis, calls in result["collectives"].items()
        for operation, count in calls.items()
    ]
    rows += [(axis, "bytes", *_pair(count)) for axis, count in result["bytes"].items()]
    body = section(
        "Communication of one step",
        table(("axis", "quantity", "predicted", "counted"), sorted(rows, key=lambda row: row[0])),
        name="communication",
    )
    held = [(kind, *_pair(count), _grouped(count.get("measured"))) for kind, count in result["memory"].items()]
    head = ("kind", "predicted", "counted", "measured")
    return body + section("Memory of the rank that holds most, bytes", table(head, held), name="memory")


def _pair(count: Mapping[str, Any]) -> tuple[str, str]:
    return _grouped(count.get("predicted")), _grouped(count.get("counted"))


def _grouped(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _short(value: Any) -> str:
    found = math.inf if value == "inf" else number(value)
    return "∞" if not math.isfinite(found) else f"{found:.1e}" if found else "0"
