"""Results of benchmarks as their JSON has them, with any names: for tests of pages."""

from __future__ import annotations

from typing import Any

SPREAD = {"median": 0.8, "low": 0.7, "high": 0.9}
MEMORY = {"parameters": 4e6, "gradients": 4e6, "optimizer": 8e6, "other": 3e7, "process": 2e8, "total": 2.46e8}


def machine(name: str = "node") -> dict[str, Any]:
    return {
        "model": name, "recipe": name, "host": name, "torch": "2.13.0", "date": "2026-11-18", "load_before": 0.1,
        "load_after": 2.1,
        "seconds": 12.0, "cores": 2, "threads": 1, "device": "cpu", "steps": 30, "rounds": 3, "warmup_steps": 3,
        "cluster": {"source": name, "date": name, "is_measured": True},
    }  # fmt: skip


def scale_row(mode: str, plan: str, ranks: int, **more: Any) -> dict[str, Any]:
    measured = {
        "step_seconds": {"median": 0.02, "low": 0.01, "high": 0.03}, "peak_bytes": 3e8, "loss": 5.5,
        "predicted": {"seconds": 0.021, "peak": 2.9e8}, "step_error": 0.05,
    }  # fmt: skip
    row = {"mode": mode, "plan": plan, "ranks": ranks, "global_batch": 16, "is_base": ranks == 1, "reason": None}
    scaled = {"efficiency": SPREAD, "speedup": 0.8 * ranks, "predicted_efficiency": 0.85} if ranks > 1 else {}
    return {**row, "note": None, **measured, **scaled, **more}


def scale(name: str = "zero=3") -> dict[str, Any]:
    rows = [row for mode in ("strong", "weak") for row in (scale_row(mode, "ddp", 1), scale_row(mode, name, 2))]
    illegal = {
        "mode": "strong",
        "plan": name,
        "ranks": 4,
        "global_batch": 16,
        "is_base": False,
        "reason": name,
        "note": name,
    }
    losses = {
        "global_batch": 16, "compared_with": name, "steps": 13, "loss": 5.5, "differences": {name: 1e-7},
        "norm_differences": {name: 1e-6}, "largest": 1e-7, "largest_of_norm": 1e-6, "tolerance": 1e-3,
        "are_equal": True,
    }  # fmt: skip
    errors = {"step_error": {"median": 0.04, "worst": 0.08, "rows": 4}, "peak_error": None}
    alone = [{"ranks": 2, "step_seconds": SPREAD}]
    found = {"rows": [*rows, illegal], "losses": [losses], "alone": alone, "prediction": errors}
    return {**machine(name), "benchmark": "scale", **found}


def step(name: str = "recompute full") -> dict[str, Any]:
    row = {
        "name": name, "overrides": ["--plan.recompute", name], "note": name, "reason": None, "step_seconds": SPREAD,
        "ratio": SPREAD, "predicted_ratio": 0.9, "peak_bytes": 3e8, "peak_ratio": 0.8, "loss": 5.5, "is_faster": True,
        "is_smaller": True,
    }  # fmt: skip
    failed = {"name": name, "overrides": [], "note": None, "reason": name}
    found = {"benchmark": "step", "plan": name, "ranks": 2, "rows": [row, failed], "best": name, "paste": [name]}
    return {**machine(name), **found}


def memory(name: str = "zero=3") -> dict[str, Any]:
    row = {"plan": name, "ranks": 2, "reason": None, "measured": MEMORY, "predicted": MEMORY, "error": 0.0}
    rows = [row, {"plan": name, "ranks": 2, "reason": name}]
    return {**machine(name), "benchmark": "memory", "rows": rows, "worst_error": 0.02}


def comm(name: str = "gloo", ranks: int = 4) -> dict[str, Any]:
    sizes = [2**power for power in range(10, 24, 2)]
    timings = [
        {
            "tier": "within", "kind": "all_reduce", "algorithm": algorithm, "ranks": ranks, "bytes": size,
            "seconds": 1e-4 + size / 1e9, "bandwidth": size / (1e-4 + size / 1e9), "rounds": 6,
            "bus_bandwidth": 2.5e8, "link_fraction": 0.5,
            "critical_path_bytes": size, "best": algorithm == "ring",
        }
        for algorithm in ("ring", "halving", "tree", name) for size in sizes
    ]  # fmt: skip
    fits = [
        {"tier": "within", "kind": "all_reduce", "algorithm": each, "alpha": 2e-5, "beta": 1e-9}
        for each in ("ring", name)
    ]
    return {
        "ranks": ranks, "hosts": 1, "backend": name, "torch": name, "date": name, "timings": timings, "fits": fits,
        "link_bandwidth": {"within": {"pair": 1e9, "together": 5e8}},
        "validation": {"number": 3, "median": 0.04, "worst": 0.1},
    }  # fmt: skip


RESULTS = {"scale": scale, "step": step, "memory": memory, "comm": comm}
