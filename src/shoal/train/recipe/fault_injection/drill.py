"""The part of `shoal chaos` inside a rank: record the samples of each step, and carry out orders.

Only the variable SHOAL_CHAOS switches it on. It names the folder of a drill:

    ranks/3.json              the process of rank 3, written when it has loaded
    samples/3-PID.jsonl       a line for each step: its number, and a digest of each sample
    steps.jsonl               a line for each step of rank 0: its number and the time on the monotonic clock
    orders/3.json             written by `shoal chaos`; rank 3 removes it and carries it out in its next step
    settings.json             `pace`: the least seconds of a step
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.blueprint.faults import DRILL
from shoal.train.recipe.fault_injection.faults import hold_gil
from shoal.train.run import Run

_CHUNK = 2**22
_held: list[bytearray] = []


def join_drill(run: Run, generation: int) -> None:
    """Take part in the drill that the environment names; without one, do nothing."""
    if folder := os.environ.get(DRILL):
        drill = _Drill(run, Path(folder), generation)
        before = run.on_gradients

        def act() -> None:
            drill.act()
            if before is not None:
                before()

        run.on_gradients = act


class _Drill:
    """One rank of a drill."""

    def __init__(self, run: Run, folder: Path, generation: int) -> None:
        self.run, self.folder, rank = run, folder, run.world.rank
        self.order = folder / "orders" / f"{rank}.json"
        self.samples = folder / "samples" / f"{rank}-{os.getpid()}.jsonl"
        self.pace = float(json.loads((folder / "settings.json").read_text())["pace"])
        self.last = time.monotonic()
        self.own = {"pid": os.getpid(), "generation": generation}
        part = folder / "ranks" / f".{rank}-{os.getpid()}"
        part.write_text(json.dumps(self.own))
        part.replace(folder / "ranks" / f"{rank}.json")

    def act(self) -> None:
        """Record the step that is under way, and carry out an order."""
        step, now = self.run.steps_done + 1, time.monotonic()
        time.sleep(max(0.0, self.last + self.pace - now))
        self.last = time.monotonic()
        made = {"step": step, "at": self.last, **self.own}
        _append(self.samples, {**made, "samples": self._digests()})
        if self.run.is_main:
            _append(self.folder / "steps.jsonl", made)
        with suppress(FileNotFoundError):
            text = self.order.read_text()
            self.order.unlink()
            _carry_out(json.loads(text))

    def _digests(self) -> list[str]:
        batch = self.run.open_step.given if self.run.open_step is not None else None
        return sample_digests(batch) if isinstance(batch, Mapping) else []


def sample_digests(batch: Mapping[str, Any]) -> list[str]:
    """A short digest of each sample of a batch: what the rank has really got, not what it should have got."""
    parts = [batch[name].cpu() for name in sorted(batch) if isinstance(batch[name], Tensor) and batch[name].dim()]
    if not parts:
        return []
    number = len(parts[0])
    rows = (b"".join(part[row].numpy().tobytes() for part in parts if len(part) == number) for row in range(number))
    return [hashlib.blake2b(row, digest_size=8).hexdigest() for row in rows]


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _carry_out(order: dict[str, Any]) -> None:
    """Fail as ordered: hold the GIL, take memory until the kernel ends this process, or see another wall clock."""
    seconds = float(order.get("seconds", 0.0))
    if order["do"] == "hold_gil":
        hold_gil()
    elif order["do"] == "take_memory":
        for _ in range(int(order["bytes"]) // _CHUNK):
            _held.append(bytearray(os.urandom(4096) * (_CHUNK // 4096)))  # written to, so that it is really taken
        _held.clear()
    elif order["do"] == "jump_clock":
        _jump(seconds)


def _jump(seconds: float) -> None:
    """Let `time.time` and `time.time_ns` of this process be off. The kernel's clock is that of all processes."""
    now, now_ns = time.time, time.time_ns
    vars(time).update(time=lambda: now() + seconds, time_ns=lambda: now_ns() + int(seconds * 1e9))
