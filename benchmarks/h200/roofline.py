"""Where the time of a step goes: a trace of kernels, by kind, compared with the limits of the device.

python benchmarks/h200/roofline.py TRACE.json [--steps 3] [--top 30]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

KINDS = {
    "attention": ("fmha", "flash", "sdpa", "cudnn_generated", "attention"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "s16816", "s64x", "splitk"),
    "optimizer": ("adam", "multi_tensor", "foreach", "lpnorm", "_update", "_squares"),
    "softmax of the loss": ("_exponentials", "_rows", "_tiles"),
    "copy": ("memcpy", "memset"),
}
"""Kind → words of which one is in the kernel's name, the first kind that fits; the rest is memory-bound."""


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "memory-bound")


def kernels(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e for e in events if e.get("cat") in kinds), key=lambda event: event["ts"])


def busy(events: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def summary(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    span = max(e["ts"] + e["dur"] for e in events) - events[0]["ts"]
    by_kind: dict[str, float] = defaultdict(float)
    for event in events:
        by_kind[kind_of(event["name"])] += event["dur"] / steps / 1e3
    to_host = [event for event in events if "dtoh" in event["name"].lower()]
    return {
        "step_ms": span / steps / 1e3,
        "busy": busy(events) / span,
        "kernels": len(events) / steps,
        "copies_to_host": len(to_host) / steps,
        "copies_before_update": sum(is_amid_a_step(event, events) for event in to_host) / steps,
        "ms": {kind: round(ms, 2) for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1])},
    }


def is_amid_a_step(copy: dict[str, Any], events: list[dict[str, Any]]) -> bool:
    """Whether products have been computed since the last update, or updates follow before the next product."""
    kinds = ("matmul", "optimizer")
    before = [kind_of(e["name"]) for e in events if e["ts"] < copy["ts"] and kind_of(e["name"]) in kinds]
    after = [kind_of(e["name"]) for e in events if e["ts"] > copy["ts"] and kind_of(e["name"]) in kinds]
    return before[-1:] == ["matmul"] or after[:1] == ["optimizer"]


def top(events: list[dict[str, Any]], steps: int, number: int) -> list[tuple[float, float, str]]:
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event["name"]].append(event["dur"] / 1e3)
    rows = [(sum(all_of) / steps, len(all_of) / steps, name) for name, all_of in times.items()]
    return sorted(rows, reverse=True)[:number]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top", type=int, default=30)
    arguments = parser.parse_args()
    events = kernels(arguments.trace)
    print(json.dumps(summary(events, arguments.steps)))
    for ms, calls, name in top(events, arguments.steps, arguments.top):
        print(f"{ms:8.2f} ms {calls:7.1f} x  {kind_of(name):12} {name[:110]}")


if __name__ == "__main__":
    main()
