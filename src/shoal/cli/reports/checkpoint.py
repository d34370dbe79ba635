"""The output of `shoal checkpoint`, as tables and as JSON. Nothing here imports torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.storage.locate import Listed, SavedStep

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.checkpoint.diff import Comparison, Difference
    from shoal.checkpoint.verify import StepVerdict


# ---- ls -------------------------------------------------------------------------------------------------------------


def of_listing(found: Sequence[Listed], *, with_tensors: bool) -> dict[str, Any]:
    """The listing as JSON."""
    return {"checkpoints": [_of_listed(one, with_tensors) for one in found]}


def _of_listed(one: Listed, with_tensors: bool) -> dict[str, Any]:
    step = one.step
    result: dict[str, Any] = {
        "path": str(one.path),
        "step": step.manifest.step if step else None,
        "is_latest": one.is_latest,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(one.when)),
        "bytes": step.num_bytes if step else None,
        "tensors": len(step.manifest.tensors) if step else None,
        "parameters": step.num_parameters if step else None,
        "plan": plan_of(step) if step else None,
        "files": len(step.manifest.files) if step else None,
        "problem": one.trouble or None,
    }
    if with_tensors:
        entries = step.manifest.tensors if step else {}
        result["tensor_list"] = [
            {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "shards": len(entry.pieces)}
            for name, entry in entries.items()
        ]
    return result


def draw_listing(console: Console, directory: str, found: Sequence[Listed], *, with_tensors: bool) -> None:
    """A table of checkpoints, and one of the tensors of each."""
    from rich.table import Table

    table = Table(title=str(directory), title_justify="left")
    for name in ("step", "saved at", "size", "tensors", "parameters", "files", "plan", ""):
        table.add_column(
            name, justify="right" if name in ("step", "size", "tensors", "parameters", "files") else "left"
        )
    for one in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.when))
        note = ", ".join(filter(None, ("latest" * one.is_latest, one.trouble)))
        if (step := one.step) is None:
            table.add_row(one.path.name, when, "", "", "", "", "", note)
            continue
        counts = (f"{len(step.manifest.tensors):,}", f"{step.num_parameters:,}", f"{len(step.manifest.files):,}")
        table.add_row(f"{step.manifest.step:,}", when, size_of(step.num_bytes), *counts, plan_of(step) or "?", note)
    console.print(table)
    for one in found if with_tensors else ():
        if one.step:
            console.print(_tensors_of(one.step))


def _tensors_of(step: SavedStep) -> Any:
    from rich.table import Table

    table = Table(title=f"tensors of step {step.manifest.step:,}", title_justify="left")
    table.add_column("tensor")
    table.add_column("dtype")
    table.add_column("shape", justify="right")
    table.add_column("shards", justify="right")
    for name, entry in step.manifest.tensors.items():
        table.add_row(name, entry.dtype, " × ".join(map(str, entry.shape)) or "scalar", str(len(entry.pieces)))
    return table


def plan_of(step: SavedStep) -> str | None:
    """The plan that wrote a step, in few words; None: it is not recorded."""
    plan = step.manifest.state.get("plan")
    if not isinstance(plan, str):
        imported = step.manifest.state.get("imported")
        return f"import of {imported.get('format')}" if isinstance(imported, dict) else None
    from shoal.blueprint.plan import Plan
    from shoal.errors import ShoalError

    try:
        return Plan.parse(plan).brief()
    except ShoalError:  # of another version
        return plan[:200]


def size_of(num_bytes: int) -> str:
    """A number of bytes with a unit.

    >>> size_of(1234), size_of(5_000_000_000)
    ('1.2 kB', '5.0 GB')
    """
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:,.0f} B" if unit == "B" else f"{amount:,.1f} {unit}"


# ---- verify ---------------------------------------------------------------------------------------------------------


def of_verdicts(verdicts: Mapping[Path, StepVerdict]) -> dict[str, Any]:
    """The verdicts as JSON."""
    return {
        "intact": all(verdict.is_intact for verdict in verdicts.values()),
        "checkpoints": [
            {
                "path": str(path),
                "intact": verdict.is_intact,
                "bytes": verdict.num_bytes,
                "damages": [
                    {"file": d.file, "what": d.what, "begin": d.begin, "end": d.end, "tensors": list(d.tensors)}
                    for d in verdict.damages
                ],
                "unlisted_files": list(verdict.unlisted),
            }
            for path, verdict in verdicts.items()
        ],
    }


def draw_verdicts(console: Console, verdicts: Mapping[Path, StepVerdict]) -> None:
    """One line for an intact step, and one for each damage."""
    for path, verdict in verdicts.items():
        if verdict.is_intact:
            _say(console, f"intact   {path}: all {size_of(verdict.num_bytes)} have their hashes")
        for damage in verdict.damages:
            is_part = damage.begin is not None and damage.end is not None
            place = f" bytes {damage.begin:,} to {damage.end:,}" if is_part else ""
            many = f" and {len(damage.tensors) - 3} more" if len(damage.tensors) > 3 else ""
            held = f", in {', '.join(damage.tensors[:3])}{many}" if damage.tensors else ""
            _say(console, f"damaged  {path}/{damage.file}{place} {damage.what}{held}")
        if verdict.unlisted:
            _say(console, f"         files that are not in the manifest: {', '.join(verdict.unlisted[:5])}")


# ---- diff -----------------------------------------------------------------------------------------------------------


def of_comparison(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    return {
        "equal": found.is_equal,
        "equal_tensors": found.num_equal,
        "differences": [
            {
                "name": d.name,
                "first": d.kinds[0],
                "second": d.kinds[1],
                "elements": d.num_elements,
                "different": d.num_different,
                "max_abs": _number(d.max_abs),
                "relative": _number(d.relative),
                "nans": list(d.num_nans),
            }
            for d in found.differences
        ],
        "only_first": list(found.only[0]),
        "only_second": list(found.only[1]),
        "state": [{"key": key, "first": one, "second": other} for key, one, other in found.state],
    }


def _number(value: float) -> float | None:
    """The number, or None if it is not finite, since JSON cannot express that."""
    return value if isfinite(value) else None


def draw_comparison(console: Console, found: Comparison, steps: tuple[SavedStep, SavedStep], *, top: int) -> None:
    """The verdict, the tensors that differ most, and other differences."""
    verdict = "equal" if found.is_equal else "different"
    shared = found.num_equal + len(found.differences)
    names = " and ".join(str(step.path) for step in steps)
    _say(console, f"{verdict}: {found.num_equal:,} of {shared:,} shared tensors are equal in {names}")
    if found.differences:
        console.print(_table_of(found.differences[:top]))
        if (more := len(found.differences) - top) > 0:
            _say(console, f"and {more:,} more: --top {len(found.differences)}")
    for names_of_one, step in zip(found.only, steps, strict=True):
        if names_of_one:
            _say(console, f"only in {step.path}: {_some(names_of_one)}")
    for key, one, other in found.state[:top]:
        _say(console, f"state {key}: {_short(one)} and {_short(other)}")
    if (more := len(found.state) - top) > 0:
        _say(console, f"and {more:,} more entries of the state")


def _table_of(differences: Sequence[Difference]) -> Any:
    from rich.table import Table

    table = Table()
    for name in ("tensor", "first", "second"):
        table.add_column(name)
    for name in ("different", "max abs", "relative", "NaNs"):
        table.add_column(name, justify="right")
    for d in differences:
        second = "the same" if d.kinds[0] == d.kinds[1] else d.kinds[1]
        if d.num_different is None:
            table.add_row(d.name, d.kinds[0], second, "another shape", "", "", "")
            continue
        nans = " and ".join(map(str, d.num_nans)) if any(d.num_nans) else ""
        part = f"{d.num_different:,} of {d.num_elements:,}"
        table.add_row(d.name, d.kinds[0], second, part, f"{d.max_abs:.2e}", f"{d.relative:.2e}", nans)
    return table


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 100 else text[:100] + "..."


# ---- export and import ----------------------------------------------------------------------------------------------


def draw_export(console: Console, result: Mapping[str, Any]) -> None:
    """The result of an export."""
    what = f"{result['tensors']:,} tensors, {size_of(result['bytes'])}"
    _say(console, f"exported step {result['step']:,} to {result['to']}: {what}, as {result['format']}")
    if result["format"] == "huggingface" and not result["config"]:
        _say(console, "no config.json was written: no recipe names a llama. fix: --recipe FILE")


def draw_import(console: Console, result: Mapping[str, Any], to: Path) -> None:
    """The result of an import."""
    states = (
        f" and {result['optimizer_states']:,} optimizer states"
        if result["optimizer_states"]
        else ", no optimizer state"
    )
    what = f"{result['tensors']:,} weights{states}, {size_of(result['bytes'])}"
    _say(console, f"imported {result['from']} ({result['format']}) as step {result['step']:,} to {to}: {what}")
    if result["skipped"]:
        _say(console, f"skipped: {_some(result['skipped'])}")
    if result["model"]:
        words = ", ".join(f"{key}: {value}" for key, value in result["model"].items())
        _say(console, f"the model section for a recipe:\n  model: {{{words}}}")
    _say(console, f"train from it: --run.start_from {to}, or run.load({str(to)!r})")


def _say(console: Console, text: str) -> None:
    """Print a line unchanged: no line breaks in paths, and no markup in brackets."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
