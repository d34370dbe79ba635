"""The rest of a profile: every rank, memory over a step by cause, operators, and the use of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.observe.profile.words import spoken
from shoal.pages.bar_rows import BarRow, bar_rows
from shoal.pages.html import text
from shoal.pages.run.metrics_table import number
from shoal.pages.words import duration, figure, memory_size, percent, times

MOST_RANKS = 64
MOST_OPERATORS = 12
MOST_MOMENTS = 40
CAUSES = ("parameters", "gradients", "optimizer", "other")
GROUPS = {
    "computation": ("forward", "backward", "recompute", "optimizer"),
    "waiting for data": ("data",),
    "waiting for a late rank": ("late",),
    "communication": ("wire", "wait"),
    "pipeline bubble": ("bubble",),
    "saving and other": ("save", "other"),
}
"""Parts of a step, which have a name or, of a wait, an axis and a kind."""


def details_of(profile: Mapping[str, Any]) -> str:
    """All that a profile has beside its parts; of each, nothing if it is not there."""
    titles: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "Every rank": _ranks, "Memory over a step": _memory, "Operators": _operators, "GPU of rank 0": _gpu,
    }  # fmt: skip
    bodies = {title: make(profile) for title, make in titles.items()}
    return "".join(f"<h3>{title}</h3>{body}" for title, body in bodies.items() if body)


def _ranks(profile: Mapping[str, Any]) -> str:
    """A bar for each rank: the one that the others wait for computes longest."""
    every = [each for each in _list(profile.get("ranks")) if isinstance(each, dict)]
    rows = [_rank(each) for each in every[:MOST_RANKS]]
    head = ("rank", "of a step", "step", "waits most for", "no free core")
    drawn = bar_rows(head, tuple(GROUPS), rows)
    left = f'<p class="note">The first {MOST_RANKS} of {len(every):,} ranks.</p>' if len(every) > MOST_RANKS else ""
    return left + drawn if drawn else ""


def _rank(each: Mapping[str, Any]) -> BarRow:
    parts = _mapping(each.get("parts"))
    sizes = [
        sum(_size(seconds) for name, seconds in parts.items() if name.rpartition(".")[2] in names)
        for names in GROUPS.values()
    ]
    waited = {rank: _size(seconds) for rank, seconds in _mapping(each.get("waited_for")).items()}
    last = max(waited, key=waited.__getitem__, default=None)
    waits = f"rank {last[:8]}, {duration(waited[last])}" if last is not None and waited[last] > 0 else "–"
    figures = (duration(each.get("step_seconds")), waits, percent(each.get("core_wait_fraction")))
    return BarRow(str(each.get("name") or f"rank {figure(each.get('rank'))}"), sizes, figures)


def _memory(profile: Mapping[str, Any]) -> str:
    """A bar for the end of each part of a step, and those of the peak."""
    memory = _mapping(profile.get("memory"))
    moments = [each for each in _list(memory.get("over_time"))[:MOST_MOMENTS] if isinstance(each, dict)]
    found = [
        (f"after {spoken(str(each.get('part'))[:40])}", [_size(each.get(cause)) for cause in CAUSES])
        for each in moments
    ]
    predicted = _mapping(memory.get("predicted"))
    if peak := _size(predicted.get("total")):
        states = [_size(predicted.get(cause)) for cause in CAUSES[:3]]
        found.append(("peak, predicted", [*states, max(0.0, peak - sum(states))]))
    whole = max((sum(sizes) for _, sizes in found), default=0.0)
    rows = [BarRow(name, sizes, (memory_size(sum(sizes), whole),)) for name, sizes in found]
    drawn = bar_rows(("", "by cause", "bytes"), CAUSES, rows)
    if not drawn:
        return ""
    measured = _size(memory.get("measured_peak"))
    fullest = number(memory.get("fullest_rank"))
    where = f", on rank {fullest:.0f}" if math.isfinite(fullest) else ""
    highest = f" The measured peak of the run is {memory_size(measured, whole)}{where}." if measured else ""
    note = "On rank 0, at the end of each part of a step that is not timed. Other: activations, buffers, the process."
    return f'<p class="note">{note}{text(highest)}</p>{drawn}'


def _operators(profile: Mapping[str, Any]) -> str:
    return _shares(profile.get("operators"), "operator")


def _shares(found: Any, key: str) -> str:
    """Operators or kernels by their share of the time of all."""
    every = [each for each in _list(found) if isinstance(each, dict)][:MOST_OPERATORS]
    rows = [
        BarRow(str(each.get(key)), [_size(each.get("fraction"))], (percent(each.get("fraction")), _calls(each)))
        for each in every
    ]
    return bar_rows((key, "of the time of all", "", "calls"), (key,), rows)


def _calls(each: Mapping[str, Any]) -> str:
    calls = number(each.get("calls"))
    return f"{calls:,.0f}" if math.isfinite(calls) else "–"


def _gpu(profile: Mapping[str, Any]) -> str:
    """How the GPU of rank 0 is used, and its kernels."""
    gpu = _mapping(profile.get("gpu"))
    if not gpu:
        return ""
    sent, seen = _size(gpu.get("communication_seconds")), _size(gpu.get("exposed_seconds"))
    power, watts = _of(gpu, "power_watts", "W"), _of(gpu, "clock_mhz", "MHz")
    heat = number(gpu.get("temperature_celsius"))
    facts = [
        ("kernels run", percent(gpu.get("utilization")), f"of a step, {duration(gpu.get('busy_seconds'))}"),
        ("kernels", figure(gpu.get("kernels_per_step")), "a step"),
        ("MFU", percent(gpu.get("mfu")), "of the peak FLOPs"),
        ("clock", *watts), ("power", *power),
        ("temperature", f"{heat:.0f} °C" if math.isfinite(heat) else "–", "median"),
        ("NCCL", duration(sent) if sent else "–", f"of a step, {percent(seen / sent)} not hidden" if sent else ""),
    ]  # fmt: skip
    cards = "".join(
        f'<div class="fact"><dt>{text(name)}</dt><dd>{text(value)}</dd><dd class="remark">{text(remark)}</dd></div>'
        for name, value, remark in facts
        if value != "–"
    )
    return f'<dl class="facts">{cards}</dl>{_shares(gpu.get("kernels"), "kernel")}'


def _of(gpu: Mapping[str, Any], name: str, unit: str) -> tuple[str, str]:
    """A median, and the highest value that is allowed."""
    limits = {"clock_mhz": "clock_mhz_max", "power_watts": "power_watts_limit"}
    now, most = number(gpu.get(name)), number(gpu.get(limits[name]))
    if not math.isfinite(now):
        return "–", ""
    return f"{now:,.0f} {unit}", f"of {most:,.0f}" if math.isfinite(most) else ""


def summary_of(profile: Mapping[str, Any]) -> str:
    """The steps in one sentence: how long they are, how even, and which communication is hidden."""
    mean, middle, high = (profile.get(f"step_seconds{end}") for end in ("", "_median", "_p95"))
    found = [f"{times(profile.get('steps'), 'step')}, the mean over ranks"]
    if _size(mean):
        found.append(f"a step takes {duration(mean)}, median {duration(middle)}, 95th percentile {duration(high)}")
    for axis, hidden in _mapping(profile.get("overlap")).items():
        found.append(f"{percent(hidden)} of the communication of {axis[:20]} is hidden")
    return "; ".join(found[:12])


def _size(value: Any) -> float:
    """A size of a part; 0: there is none."""
    found = number(value)
    return found if 0 < found < math.inf else 0.0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
