"""Run directories that no training has made: sound, hostile and large ones, for the tests of pages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RECIPE = """\
model: {name: llama, preset: tiny}
data: {global_batch: 16, seq_len: 64}
optim: {lr: 0.003}
plan: dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=2 ep=1 zero=0 v=1 1f1b mb=2
run: {name: tiny, duration: 400step}
"""
EVIL = '"><img src=x onerror="pwned=1"></script><script>pwned=1</script>'
EVENTS = (
    {"event": "started", "step": 0, "time": 1.79e9},
    {"event": "saved", "step": 50, "time": 1.79e9 + 20},
    {
        "event": "failed",
        "step": 70,
        "time": 1.79e9 + 40,
        "code": "N024",
        "reason": "rank 1 of 2 was killed by signal 9",
    },
)


def record(step: int, **more: Any) -> dict[str, Any]:
    """The metrics of one step."""
    seconds = 0.4 + 0.01 * (step % 7)
    return {
        "step": step, "loss": 2 + 4 * math.exp(-step / 80) + 0.05 * math.sin(step), "grad_norm": 1 + math.cos(step),
        "lr": 3e-3 / (1 + step / 100), "tokens": step * 4096, "epoch": step / 1e4, "step_seconds": seconds,
        "data_wait_seconds": 0.1 * seconds, "tokens_per_s": 4096 / seconds, "mfu": None, "memory_gib": 1.5,
        "loss_scale": 1.0, "skipped": False, "comm_seconds": 0.2 * seconds, "comm_overlap_fraction": 0.5, **more,
    }  # fmt: skip


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))


def make_run(path: Path, steps: int = 100, *, ranks: int = 0, summary: Mapping[str, Any] | None = None) -> Path:
    """A run of so many steps; without a summary it is dead."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(RECIPE)
    (path / "environment.json").write_text(json.dumps({"command": ["/bin/shoal", "train", "a b.yaml"], "host": None}))
    evaluations = [{"step": step, "eval_loss": 2.2 + 4 * math.exp(-step / 80)} for step in range(20, steps, 20)]
    write_lines(path / "metrics.jsonl", [*map(record, range(1, steps + 1)), *evaluations])
    write_lines(path / "events.jsonl", EVENTS)
    for rank in range(ranks):
        slow = [
            record(step, step_seconds=0.9 if rank == 1 and step > steps / 2 else 0.4) for step in range(1, steps + 1)
        ]
        write_lines(path / f"metrics.rank{rank}.jsonl", slow)
    if summary is not None:
        (path / "summary.json").write_text(json.dumps({"steps": steps, "saved_step": steps, **summary}))
    return path


def make_hostile_run(folder: Path) -> Path:
    """A run whose every text tries to become a script, and whose every number is none."""
    path = make_run(folder / EVIL.replace("/", "\N{DIVISION SLASH}"), 60)
    (path / "recipe.yaml").write_text(json.dumps({"run": {"name": EVIL, "duration": EVIL}, EVIL: EVIL, "plan": EVIL}))
    (path / "environment.json").write_text(
        json.dumps({"command": [EVIL] * 3, EVIL: EVIL, "host": EVIL, "torch": [EVIL]})
    )
    names = ("loss", "grad_norm", "lr", "tokens", "step_seconds", "memory_gib", "mfu", "straggler_rank", EVIL)
    texts = [
        record(step, **dict.fromkeys(names, value)) for step, value in enumerate((EVIL, "nan", "inf", None, [1], 1e308))
    ]
    write_lines(path / "metrics.jsonl", [*map(record, range(6, 60)), *texts, {"step": 60, "eval_loss": EVIL}])
    summary = dict.fromkeys(
        ("steps", "loss_first", "plan", "unit", "straggler", "seconds_training", "saves_failed"), EVIL
    )
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "prediction.json").write_text(json.dumps({"step_seconds": EVIL, "memory_gib": 1}))
    profile = {"steps": EVIL, "verdict": dict.fromkeys(("title", "evidence", "next"), EVIL)}
    parts = [
        EVIL,
        {"part": EVIL, "seconds": 1},
        {"part": [EVIL], "seconds": 1e308},
        {"part": f"{EVIL}.late", "seconds": 1},
    ]
    ranks = [EVIL, {"rank": EVIL, "name": EVIL, "parts": {EVIL: EVIL, f"{EVIL}.late": 1}, "waited_for": {EVIL: 1}},
             {"rank": 1, "parts": [EVIL], "waited_for": EVIL}]  # fmt: skip
    causes = ("total", "parameters", "gradients", "optimizer", "other", "part")
    moments = [EVIL, dict.fromkeys(causes, EVIL), {**dict.fromkeys(causes, 1), "part": EVIL}]
    memory = {"over_time": moments, "predicted": {"total": 9, EVIL: EVIL}, "measured_peak": "inf"}
    kernels = [EVIL, {"kernel": EVIL, "operator": EVIL, "calls": EVIL, "fraction": 1}]
    gpu = {"utilization": EVIL, "clock_mhz": 1, "clock_mhz_max": EVIL, "kernels": kernels, "mfu": [EVIL]}
    more = {"ranks": ranks, "memory": memory, "operators": kernels, "gpu": gpu, "overlap": {EVIL: EVIL}}
    (path / "profile.json").write_text(json.dumps({**profile, **more, "parts": parts}))
    events = [{"event": "failed", "step": 9, "time": EVIL, "reason": EVIL, "code": EVIL}, {"event": EVIL, "step": 3}]
    write_lines(path / "events.jsonl", events)
    return path
