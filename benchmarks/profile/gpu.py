"""Does a profile on a GPU say what happens there, and what does it cost?

python benchmarks/profile/gpu.py [--plans "bf16 mb=32" "bf16 mb=16 recompute=full"] [--steps 5] [--rounds 3]

A llama makes steps on random tokens, in turns: without a profile, with one, and with torch's profiler. The sum of the
parts is compared with the clock of the host, from one synchronisation to another. The time in which kernels run, as a
profile has it, is compared with the union of the intervals in the Chrome trace that torch has exported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.comm.profile.intervals import length
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.init import initialise
from shoal.observe.profile.kernels import gpu_use
from shoal.predict.presets.peak_flops import peak_flops
from shoal.train.profile.operators import OperatorTrace
from shoal.train.profile.profiler import Profiler
from shoal.train.run import Run

SIZES = {"large": (1024, 8, 16, 4096, 8192), "tiny": (32, 2, 2, 48, 64)}
"""Hidden, layers, heads, ffn, vocabulary."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", nargs="+", default=["bf16 mb=32", "bf16 mb=16 recompute=full"])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="of every turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    asked = arguments(parser, plans=["fp32 mb=4"], size="tiny", batch=4, sequence=16, steps=1, rounds=1, device="cpu")
    found = []
    for plan in asked.plans:
        found.append(measured(asked, plan))
        print(json.dumps(found[-1]), flush=True)
    text = heading("A profile on a GPU", "Do the parts add to the step, are kernels busy for as long as CUPTI says?")
    text += "\n" + table([_row(each) for each in found])
    print(text)
    print(write("profile-gpu", text))


def measured(asked: argparse.Namespace, plan: str) -> dict[str, Any]:
    """All figures of a plan."""
    hidden, layers, heads, ffn, vocabulary = SIZES[asked.size]
    config = LlamaConfig(
        hidden=hidden, num_layers=layers, num_heads=heads, num_kv_heads=heads, ffn=ffn, vocabulary=vocabulary,
        max_sequence=asked.sequence,
    )  # fmt: skip
    with Run(plan, device=asked.device) as run:
        model = Llama(config)
        initialise(model, 0)
        flops = model.describe().training_flops
        run.prepare(model)
        run.prepare(torch.optim.AdamW(run.module.parameters(), lr=1e-4, fused=asked.device == "cuda"))
        tokens = torch.randint(0, vocabulary, (asked.batch, asked.sequence + 1))
        batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        for _ in range(3):
            run.step(batch)
        rounds = [_round(run, lambda: run.step(batch), asked.steps) for _ in range(asked.rounds)]
        per_step = flops((asked.batch, asked.sequence)) if flops is not None else None
        peak = peak_flops(torch.cuda.get_device_name(), run.plan.precision) if asked.device == "cuda" else None
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    mfu = per_step / middle["plain"] / peak if per_step and peak else None
    return {"plan": plan, **middle, "mfu": mfu, "rounds": rounds}


def _round(run: Run, step: Callable[[], Any], steps: int) -> dict[str, float]:
    """One turn of each; ratios are of one moment."""

    def clocked() -> float:
        _wait(run)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(run)
        return time.perf_counter() - start

    plain = clocked()
    profiler = Profiler(run)
    profiler.start()
    step()  # not timed by part
    timed = clocked()
    parts = sum(sum(each.values()) for each in profiler.finish().ranks[0].steps)
    trace = OperatorTrace.begin(run.device)
    traced = clocked()
    trace.stop()
    kernels = trace.kernels()
    use = gpu_use(kernels, steps=steps, step_seconds=plain / steps)
    exported = _exported_busy(trace.profiler)
    again = clocked()
    return {
        "plain": (plain + again) / 2 / steps,
        "parts_over_clock": parts / timed,
        "timer_cost": timed / ((plain + again) / 2) - 1,
        "trace_cost": traced / ((plain + again) / 2) - 1,
        "busy": length([(kernel.begin, kernel.end) for kernel in kernels]) / 1e9 / steps,
        "busy_of_trace": exported / steps,
        "utilization": use["utilization"],
        "kernels_per_step": use["kernels_per_step"],
    }


def _exported_busy(profiler: Any) -> float:
    """Seconds in which at least one kernel of the exported Chrome trace runs, by counting open intervals."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    borders = [(event["ts"], 1) for event in kernels] + [(event["ts"] + event["dur"], -1) for event in kernels]
    busy, num_open = 0.0, 0
    for (when, change), (then, _) in itertools.pairwise(sorted(borders)):
        num_open += change
        busy += (then - when) * (num_open > 0)
    return busy / 1e6


def _row(found: dict[str, Any]) -> dict[str, str]:
    return {
        "plan": f"`{found['plan']}`",
        "kernels": f"{found['kernels_per_step']:.0f}",
        "step": f"{found['plain'] * 1e3:.1f} ms",
        "parts / clock": f"{found['parts_over_clock']:.2%}",
        "kernels run": f"{found['busy'] * 1e3:.2f} ms",
        "by the exported trace": f"{found['busy_of_trace'] * 1e3:.2f} ms",
        "utilization": f"{found['utilization']:.1%}",
        "MFU": f"{found['mfu']:.1%}" if found["mfu"] is not None else "",
        "cost of the parts": f"{found['timer_cost']:+.1%}",
        "cost of the trace": f"{found['trace_cost']:+.1%}",
    }


def _wait(run: Run) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
