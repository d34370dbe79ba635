"""The summary of a training run, as a table or as JSON."""

from __future__ import annotations

import json
from typing import Any, TextIO

from shoal.blueprint.plan import Plan
from shoal.observe.jsonable import jsonable


def show_summary(summary: dict[str, Any], *, as_json: bool, out: TextIO) -> None:
    """Print the summary of a run as a table, or as one JSON object."""
    if as_json:
        print(json.dumps(jsonable(summary)), file=out)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="stopped early" if summary["was_stopped"] else "done", show_header=False, title_justify="left")
    for name, value in _rows(summary):
        table.add_row(name, value)
    Console(file=out).print(table)


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the summary table; every figure says whether it is measured or counted."""
    ranks = f"{summary['ranks']} rank{'s' if summary['ranks'] > 1 else ''}"
    last = f"{summary['loss_last']:.4f} over the last {min(summary['steps'], 10)}"
    unit = summary["unit"]
    validation = (
        "validation loss",
        "not evaluated" if summary["eval_loss"] is None else f"{summary['eval_loss']:.4f}",
    )
    if summary["seconds_to_first_step"] is None:  # the run was resumed at its end
        made = ("steps", f"{summary['steps']:,}, all made before")
        return [made, validation, ("run directory", summary["run_directory"] or ""), *_to_resume(summary)]
    rows = [
        ("steps", f"{summary['steps']:,} ({summary['tokens']:,} {unit})"),
        ("loss", f"{summary['loss_first']:.4f} at the first step, {last}"),
        validation,
        ("plan", f"{Plan.parse(summary['plan']).brief()} on {ranks}"),
        (
            "speed, measured",
            f"{summary['tokens_per_s']:,.0f} {unit}/s, {summary['step_seconds_median'] * 1e3:.1f} ms a step",
        ),
        ("data wait", f"{summary['data_wait_fraction']:.1%} of the time, measured"),
        *_gradient_sync(summary),
        *_axes(summary),
        *_straggler(summary),
        ("memory, measured", f"{summary['memory_gib_max']:.2f} GiB peak, largest over ranks"),
        (
            "time, measured",
            f"{summary['seconds_to_first_step']:.1f} s to the first step, {summary['seconds_training']:.1f} s training",
        ),
        ("run directory", summary["run_directory"] or "none"),
    ]
    if summary.get("saves"):
        rows.insert(-1, ("checkpoints", f"step {summary['saved_step']:,} saved; {_times(summary['saves'], 'save')}"
                         f" stalled training for {summary['save_stall_seconds']:.2f} s, measured"))  # fmt: skip
    if summary.get("saves_failed"):
        rows.insert(-1, ("NOT saved", f"{_times(summary['saves_failed'], 'save')} failed; see above"))
    rows += _to_resume(summary)
    if summary["resumed_from"] is not None or summary["restarts"]:
        rows.insert(
            0, ("resumed", f"from step {summary['resumed_from'] or 0:,}; {_times(summary['restarts'], 'restart')}")
        )
    if summary["mfu"] is not None:
        rows.insert(5, ("MFU", f"{summary['mfu']:.1%} of the datasheet's peak"))
    if summary["skipped_steps"]:
        rows.insert(1, ("skipped steps", f"{summary['skipped_steps']} with gradients that were not finite"))
    return rows


def _to_resume(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """How to resume a stopped run whose last step is saved."""
    if not summary["was_stopped"] or summary.get("saved_step") != summary["steps"]:
        return []
    return [("to resume", f"give the same command; it starts at step {summary['steps']:,}")]


def _straggler(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A row about the rank for which the others wait, if there is one."""
    found = summary.get("straggler")
    if not found or found["cost_fraction"] < 0.01:
        return []
    if not found["stands_out"]:
        text = f"ranks are late in turns; rank {found['rank']} costs most, {found['cost_fraction']:.0%} of the time"
        return [("slowest, measured", text)]
    last, late = f"{found['last_fraction']:.0%}", f"{found['late_seconds'] * 1e3:.1f} ms"
    text = f"rank {found['rank']}: last in {last} of collectives, {late} late (median)"
    return [("slowest, measured", f"{text}; costs {found['cost_fraction']:.0%} of the time")]


def _gradient_sync(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The time of communication between replicas, where it is known."""
    if summary["comm_overlap_fraction"] is None:
        return []
    text = (
        f"{summary['comm_fraction']:.1%} of the time, {summary['comm_overlap_fraction']:.0%} of that overlapped,"
        f" measured; {summary['comm_bytes'] / 1e6:,.3f} MB a step from rank 0, counted"
    )
    return [("gradient sync", text)]


def _axes(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A row about the communication of each axis; that of replicas has a row of its own."""
    every = summary.get("comm_axes", {})
    found = {axis: each for axis, each in every.items() if axis != "dp_replicate" or not _gradient_sync(summary)}
    words = (
        f"{axis} {each['fraction']:.1%}, {each['overlap_fraction']:.0%} of it hidden" for axis, each in found.items()
    )
    return [("communication", f"{'; '.join(words)}: of the time, measured")] if found else []


def _times(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
