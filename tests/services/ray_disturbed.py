"""A run on a Ray cluster of two nodes that loses a worker, then a node, and gets a node back: 2 → 2 → 1 → 2 workers.

    python ray_disturbed.py FOLDER

The model waits while FOLDER/hold exists, so every event comes in the middle of the run, however fast the machine is.
Prints one JSON object: the plans in order, the steps that were resumed from, and the reported steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import yaml
from ray.cluster_utils import Cluster

import shoal.ray

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
LONGEST = 900.0
"""Seconds to wait for one event. Processes of Ray start slowly on a busy machine."""


class Reported(ray.train.UserCallback):
    """Writes down what arrives at Ray's controller."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        with self.path.open("a") as file:
            for record in metrics[0].get("records", []):
                file.write(json.dumps(record) + "\n")


def until(condition: Any, what: str) -> Any:
    start = time.monotonic()
    while not (found := condition()):
        if time.monotonic() - start > LONGEST:
            print(f"waited in vain for: {what}", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.1)
    print(f"{time.monotonic() - start:6.1f} s  {what}", file=sys.stderr, flush=True)
    return found


class Run:
    """The files of the run, as far as they exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def starts(self) -> list[dict[str, Any]]:
        lines = self._lines("events.jsonl")
        return [line for line in lines if line["event"] in ("started", "resumed")]

    def step(self) -> int:
        return max((line["step"] for line in self._lines("metrics.jsonl")), default=0)

    def plan(self) -> str:
        return str(yaml.safe_load((self.folder / "recipe.yaml").read_text())["plan"])

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        whole = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in whole if line.endswith("\n")]


def disturb(run: Run, cluster: Cluster, other: Any, hold: Path) -> list[str]:
    """Make all events; the plan of each start."""
    plans: list[str] = []

    def next_start(number: int) -> None:
        until(lambda: len(run.starts()) == number, f"start {number}")
        plans.append(run.plan())

    next_start(1)
    until(lambda: run.step() >= 3, "step 3")
    hold.touch()
    [os.kill(pid, signal.SIGKILL) for pid in workers_of(other)]
    next_start(2)
    hold.unlink()
    step = run.step()
    until(lambda: run.step() >= step + 3, "three more steps, with a worker in place of the killed one")
    hold.touch()
    cluster.remove_node(other)
    next_start(3)
    hold.unlink()
    step = run.step()
    until(lambda: run.step() >= step + 3, "three more steps of one worker")
    hold.touch()
    cluster.add_node(**NODE)
    next_start(4)
    hold.unlink()
    return plans


def workers_of(node: Any) -> list[int]:
    """The processes of Ray Train that a node has started."""
    [raylet] = node.all_processes["raylet"]
    found = []
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet.process.pid and b"RayTrainWorker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def main(folder: Path) -> None:
    start = time.monotonic()
    hold = folder / "hold"
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    other = cluster.add_node(**NODE)
    ray.init(address=cluster.address)
    print(f"{time.monotonic() - start:6.1f} s  start of Ray", file=sys.stderr, flush=True)
    trainer = shoal.ray.Trainer(
        folder / "recipe.yaml",
        ray.train.ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=2),
        ray.train.RunConfig(
            name="disturbed", storage_path=str(folder / "storage"), callbacks=[Reported(folder / "reported.jsonl")]
        ),
        settings={"model.hold": str(hold), "model.seconds": 0.25},
    )
    run, results = Run(Path(trainer.directory)), []
    start = time.monotonic()
    training = threading.Thread(target=lambda: results.append(trainer.fit()), daemon=True)
    training.start()
    plans = disturb(run, cluster, other, hold)  # here: nodes are started by the main thread alone
    training.join()
    [result] = results
    found = {
        "plans": plans,
        "starts": [each["step"] for each in run.starts()],
        "summary": result.return_value,
        "checkpoint": result.checkpoint.path,
        "seconds": time.monotonic() - start,
    }
    print(json.dumps(found), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
