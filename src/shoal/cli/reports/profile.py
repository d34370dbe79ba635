"""A profile, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from shoal.observe.profile.words import spoken

BAR, SHORT_BAR, WIDE = 16, 9, 90
"""Characters of the longest bar; of it where a line has less than the third."""
NEGLIGIBLE = 5e-4
"""Fraction of a step: a smaller part would be shown as 0.0 %."""


def show_profile(found: Mapping[str, Any], *, as_json: bool, out: TextIO) -> None:
    """Print where a step goes, and the verdict."""
    if as_json:
        print(json.dumps(found), file=out)
        return
    from rich.console import Console

    console = Console(file=out)
    console.print(_parts(found, BAR if console.width >= WIDE else SHORT_BAR))
    for line in _lines(found):  # each in one line, to be copied
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _parts(found: Mapping[str, Any], widest: int) -> Any:
    from rich.table import Table

    predicted = found["predicted_step_seconds"]
    title = f"{found['plan']}: {found['steps']} steps of {_ms(found['step_seconds'])} on {found['ranks_count']} ranks"
    table = Table(title=title.replace("on 1 ranks", "on 1 rank"), title_justify="left")
    for name in ("part", "measured", "", "of a step", *(["predicted"] if predicted else [])):
        table.add_column(name, justify="left" if name in ("part", "") else "right", no_wrap=True)
    longest = max(part["fraction"] for part in found["parts"])
    for part in found["parts"]:
        if not (part["fraction"] >= NEGLIGIBLE or part["predicted_seconds"]):
            continue
        bar = "█" * round(widest * part["fraction"] / longest)
        row = [spoken(part["part"]), _ms(part["seconds"]), bar, f"{part['fraction']:.1%}"]
        seconds = part["predicted_seconds"]
        table.add_row(*row, *([_ms(seconds) if seconds is not None else ""] if predicted else []))
    table.add_section()
    total = ["step", _ms(found["step_seconds"]), "", "100.0%"]
    table.add_row(*total, *([_ms(predicted)] if predicted else []))
    return table


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    verdict = found["verdict"]
    yield f"verdict   {verdict['title']}: {verdict['evidence']}"
    yield f"next      {verdict['next']}"
    for axis, hidden in found.get("overlap", {}).items():
        yield f"hidden    {hidden:.0%} of the communication of {axis} is beside computation"
    if found.get("is_calibrated") is False:
        yield "predicted from rates of presets, which were not measured on these machines; see shoal calibrate"
    if memory := found.get("memory"):
        predicted, peak = memory.get("predicted", {}), memory["measured_peak"] / 2**20
        beside = f", {predicted['total'] / 2**20:,.0f} MiB predicted" if predicted else ""
        yield f"memory    {peak:,.0f} MiB at the peak of the fullest rank, {memory['fullest_rank']}{beside}"
    yield from _gpu(found)
    if operators := found.get("operators"):
        yield "operators " + ", ".join(f"{each['operator']} {each['fraction']:.0%}" for each in operators[:5])
    if found["trace"]:
        yield f"trace     {found['trace']}, for https://ui.perfetto.dev"


def _gpu(found: Mapping[str, Any]) -> Iterator[str]:
    """How the GPU of rank 0 is used."""
    gpu = found.get("gpu")
    if not gpu:
        return
    mfu = f", {gpu['mfu']:.1%} of the peak FLOPs" if gpu["mfu"] is not None else ""
    busy, count = _ms(gpu["busy_seconds"]), gpu["kernels_per_step"]
    yield f"GPU       kernels run {gpu['utilization']:.1%} of a step ({busy}, {count:,.0f} kernels){mfu}"
    if "clock_mhz" in gpu:
        power = f", {gpu['power_watts']:.0f} W of {gpu['power_watts_limit']:.0f}" if "power_watts" in gpu else ""
        yield f"clock     {gpu['clock_mhz']:.0f} MHz of {gpu['clock_mhz_max']:.0f}{power}"
    if gpu["communication_seconds"]:
        sent, seen = gpu["communication_seconds"], gpu["exposed_seconds"]
        yield f"NCCL      {_ms(sent)} of a step, {1 - seen / sent:.0%} of it beside other kernels"
    yield "kernels   " + ", ".join(f"{each['kernel']} {each['fraction']:.0%}" for each in gpu["kernels"][:5])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
