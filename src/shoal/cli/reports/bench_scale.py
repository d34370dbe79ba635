"""The table of `shoal bench scale`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Found = Mapping[str, Any]
MODES = {
    "strong": "strong scaling: the same batch on every number of ranks",
    "weak": "weak scaling: the batch grows with the ranks",
}
COLUMNS = (
    *("plan", "ranks", "batch", "step", "range", "predicted", "error", "efficiency", "predicted", "peak", "predicted"),
    "loss",
)


def render(console: Console, found: Found) -> None:
    """Print a table for each mode, and the sentences below them."""
    for mode in dict.fromkeys(row["mode"] for row in found["rows"]):
        console.print(_table(found, mode))
    for line in sentences(found):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _table(found: Found, mode: str) -> Table:
    from rich.table import Table

    table = Table(title=f"{found['model']}, {MODES[mode]}", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "plan" else "right", overflow="fold")
    rows = [row for row in found["rows"] if row["mode"] == mode]
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Found) -> list[str]:
    """The cells of a row; dashes where there is no figure."""
    name = "one rank, the base" if row["is_base"] else row["plan"]
    first = [name, str(row["ranks"]), str(row["global_batch"])]
    if "step_seconds" not in row:
        return [*first, *["–"] * (len(COLUMNS) - 3)]
    step, efficiency, predicted = row["step_seconds"], row.get("efficiency"), row.get("predicted")
    return [
        *first,
        ms(step["median"]),
        f"{ms(step['low'])} to {ms(step['high'])}",
        ms(predicted["seconds"]) if predicted and predicted["seconds"] is not None else "–",
        signed(row.get("step_error")),
        percent(efficiency["median"]) if efficiency else "–",
        percent(row["predicted_efficiency"]) if "predicted_efficiency" in row else "–",
        mib(row["peak_bytes"]),
        mib(predicted["peak"]) if predicted else "–",
        f"{row['loss']:.5f}",
    ]


def sentences(found: Found) -> Iterator[str]:
    """What the table means, what it leaves out, and why."""
    for plan, ranks, reason in dict.fromkeys((row["plan"], row["ranks"], row["reason"]) for row in found["rows"]):
        if reason:
            yield f"{plan} on {ranks} ranks: {reason}"
    yield from dict.fromkeys(row["note"] for row in found["rows"] if row["note"])
    if slots := found.get("hosts"):
        each = " and ".join(map(str, slots))
        yield f"{sum(slots)} ranks are {each} of {len(slots)} hosts; fewer are of this host alone"
        if not any(row.get("predicted") for row in found["rows"] if row["ranks"] == sum(slots)):
            yield "predictions between hosts need --cluster, such as h100:8x2 or a file of shoal calibrate"
    yield from map(_compared, found["losses"])
    yield from alone(found)
    for key, what in (
        ("step_error", "step times are"),
        ("efficiency_error", "efficiencies are"),
        ("peak_error", "memory is"),
    ):
        if (error := found["prediction"].get(key)) is not None:
            yield f"predicted {what} off by {percent(error['median'])} (median), {percent(error['worst'])} (worst)"
    yield machine(found)


def _compared(each: Found) -> str:
    """Whether all plans with one batch have the same losses and norms of gradients."""
    batch, largest, of_norm = each["global_batch"], each["largest"], each["largest_of_norm"]
    if each["are_equal"]:
        what = f"losses of {each['steps']} steps of batch {batch} are equal over all plans, to {largest:.0e} (rounding)"
        return f"{what}, and norms of gradients to {of_norm:.0e}"
    if max(largest, of_norm) == math.inf:
        return f"losses or gradients of batch {batch} are NOT FINITE; a lower --optim.lr, or shoal verify"
    is_loss = largest > each["tolerance"]
    what, values = ("losses", each["differences"]) if is_loss else ("norms of gradients", each["norm_differences"])
    worst = max(values, key=lambda name: values[name])
    return (
        f"{what} of batch {batch} DIFFER: {worst} by {values[worst]:.1e}, and rounding explains"
        f" {each['tolerance']:.0e} at most; shoal verify compares every gradient"
    )


def alone(found: Found) -> Iterator[str]:
    """How fast ranks compute that send nothing: the most that a plan can reach on this machine."""
    for each in found.get("alone", ()):
        if "reason" in each:
            why = f"{each['reason']}; --cluster predicts them without it"
            yield f"{each['ranks']} ranks that send nothing cannot be measured, so their rows are not predicted: {why}"
            continue
        step = ms(each["step_seconds"]["median"])
        yield f"{each['ranks']} ranks that send nothing: {step} a step; predictions begin with that, and with the base"


def machine(found: Found) -> str:
    """One line about the machine, the load and the source of the predictions."""
    threads = f", {found['threads']} thread{'s' * (found['threads'] > 1)} a rank on {found['cores']} cores"
    calibrated = "" if found["cluster"]["is_measured"] else "; predicted for a preset, which was not measured here"
    load = f"load {found['load_before']:.1f} before and {found['load_after']:.1f} after"
    return (
        f"measured in {found['seconds']:.0f} s on {found['host']}{threads}, {load}, torch {found['torch']},"
        f" {found['date']}{calibrated}"
    )


def ms(seconds: float) -> str:
    """Seconds, as milliseconds where they are less than one."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def mib(size: float) -> str:
    """Bytes as MiB or GiB."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 10 * 2**20 or not size else f"{size / 2**20:.2f} MiB"


def percent(value: float) -> str:
    """A fraction in percent."""
    return f"{100 * value:.0f} %"


def signed(value: float | None) -> str:
    """A relative error with its sign."""
    return "–" if value is None else f"{100 * value:+.0f} %"
