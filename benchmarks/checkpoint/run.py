"""What does a checkpoint cost, compared with the minimal copy and write, and compared with torch's own?

python benchmarks/checkpoint/run.py [--gib 1] [--rounds 7] [--dir FOLDER]

A ZeRO-3 run on two ranks with AdamW; its state is saved and loaded by each method, alternating, so that all have the
same conditions. A time is that of the slower rank, from a moment when both are ready. `held`: how long a training loop
waits; `durable`: until all bytes are on the disk. `dd` writes zeros from one process. Before a cold
load, the files are dropped from the page cache.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.checkpoint import load as loading
from shoal.checkpoint.storage.shard_file import Reader
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.numerics.init import initialise
from shoal.numerics.local_tensor import to_local
from shoal.train.run import Run

WIDTH = 2048
WARMUP = 1
Times = dict[str, dict[str, list[float]]]


class Bench:
    """One rank's part of the measurement."""

    def __init__(self, world: World, gib: float, folder: Path) -> None:
        self.world, self.folder = world, folder
        layers = max(1, round(gib * 2**30 / (3 * 4 * WIDTH * WIDTH)))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        initialise(model, 0)
        self.run = Run("zero=3 mb=2", world=world, seed=0)
        self.run.prepare(model)
        self.optimizer = torch.optim.AdamW(self.run.parameters, lr=1e-3)
        self.run.prepare(self.optimizer)
        self.run.step((torch.randn(2, WIDTH), torch.randint(0, WIDTH, (2,))))
        self.whole = dict(self._state())
        self.of_async_save = world.new_group(backend="gloo")
        self.own = {name: to_local(value) for name, value in self.whole.items()}
        self.copies = {name: torch.zeros_like(value) for name, value in self.own.items()}
        size = sum(value.numel() * value.element_size() for value in self.own.values())
        self.num_bytes = int(world.all_reduce_host([float(size)]).wait()[0])
        self.times: Times = defaultdict(lambda: defaultdict(list))

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for number, parameter in enumerate(self.run.parameters):
            yield f"{number}", parameter.detach()
            for kind, value in self.optimizer.state[parameter].items():
                if value.dim():
                    yield f"{number}.{kind}", value

    def timed(self, what: str, kind: str, act: Callable[[], Any], began: float | None = None) -> float:
        """Note how long the slower rank takes, from now or from when something before it began; returns that time."""
        if began is None:
            self.world.barrier()
            began = time.perf_counter()
        act()
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.times[what][kind].append(float(seconds))
        return began

    def path(self, name: str, *, is_file: bool = False) -> Path:
        """An empty place on the disk, which has nothing else to do."""
        path = self.folder / name
        self.world.barrier()
        if self.world.is_main:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            os.sync()
        self.world.barrier()
        return path / f"{self.world.rank}" if is_file else path

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save_all(self) -> None:
        self.timed("a copy of the state", "held", self.copy)
        path = self.path("dd")
        self.timed("dd bs=4M conv=fsync", "durable", functools.partial(self.dd, path))
        path = self.path("shoal")
        began = self.timed("shoal, run.save()", "held", lambda: self.run.save(path, keep=1))
        self.timed("shoal, run.save()", "durable", lambda: None, began)
        path = self.path("shoal-async")
        began = self.timed("shoal, run.save(wait=False)", "held", lambda: self.run.save(path, wait=False))
        self.timed("shoal, run.save(wait=False)", "durable", lambda: self.run.wait_for_save(path), began)
        path = self.path("dcp")
        began = self.timed(
            "torch.distributed.checkpoint.save", "held", lambda: dcp.save(self.whole, checkpoint_id=path)
        )
        self.timed("torch.distributed.checkpoint.save", "durable", lambda: None, began)
        path = self.path("dcp-async")
        futures: list[Any] = []
        what = "torch.distributed.checkpoint.async_save"
        # Its thread meets those of other ranks beside `timed`, and needs connections of its own.
        save = functools.partial(dcp.async_save, self.whole, checkpoint_id=path, process_group=self.of_async_save)
        began = self.timed(what, "held", lambda: futures.append(save()))
        self.timed(what, "durable", lambda: futures[0].result(), began)
        path = self.path("torch", is_file=True)
        began = self.timed("torch.save, a file for each rank, fsync", "held", functools.partial(self.torch_save, path))
        self.timed("torch.save, a file for each rank, fsync", "durable", lambda: None, began)

    def copy(self) -> None:
        for name, value in self.own.items():
            self.copies[name].copy_(value)

    def dd(self, path: Path) -> None:
        if self.world.is_main:
            command = ["dd", "if=/dev/zero", f"of={path / 'x'}", "bs=4M", f"count={self.num_bytes // (4 * 2**20)}"]
            subprocess.run([*command, "conv=fsync"], check=True, stderr=subprocess.DEVNULL)
        self.world.barrier()

    def torch_save(self, path: Path) -> None:
        with path.open("wb") as file:
            torch.save(self.own, file)
            file.flush()
            os.fsync(file.fileno())

    # ---- loading ----------------------------------------------------------------------------------------------------

    def load_all(self, kind: str) -> None:
        """`kind` is `cold` or `warm`."""
        ways: list[tuple[str, str, Callable[[], Any]]] = [
            ("shoal, without a look at the hashes", "shoal", lambda: self.load(verify=False)),
            ("shoal, run.load()", "shoal", lambda: self.load(verify=True)),
            (
                "torch.distributed.checkpoint.load",
                "dcp",
                lambda: dcp.load(self.whole, checkpoint_id=self.folder / "dcp"),
            ),
            ("torch.load, mapped and copied", "torch", self.torch_load),
        ]
        for what, folder, act in ways:
            self.world.barrier()
            if self.world.is_main:
                self.touch(self.folder / folder, kind)
            self.timed(what, kind, act)

    def touch(self, folder: Path, kind: str) -> None:
        """Have the files in the page cache, or not."""
        for path in (path for path in folder.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                if kind == "cold":
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(2**24):
                        pass

    def load(self, *, verify: bool) -> None:
        loading.Reader = Reader if verify else functools.partial(Reader, verify=False)  # type: ignore[misc, assignment]
        self.run.load(self.folder / "shoal")

    def torch_load(self) -> None:
        read = torch.load(self.folder / "torch" / f"{self.world.rank}", mmap=True, weights_only=True)
        for name, value in self.own.items():
            value.copy_(read[name])


def measure(
    placement: Placement, store: dist.Store, gib: float, rounds: int, folder: Path
) -> tuple[int, dict[str, dict[str, list[float]]]]:
    warnings.filterwarnings("ignore")  # torch's own, about its own
    with World.start(placement, store=store, device="cpu", threads=1) as world:
        bench = Bench(world, gib, folder)
        for _ in range(rounds + WARMUP):
            bench.save_all()
            for kind in ("cold", "warm"):
                bench.load_all(kind)
        return bench.num_bytes, {what: dict(kinds) for what, kinds in bench.times.items()}


def median(times: dict[str, list[float]], kind: str) -> float | None:
    return statistics.median(times[kind][WARMUP:]) if kind in times else None


def fastest(times: dict[str, list[float]], kind: str) -> float:
    """About what it takes on an idle machine."""
    return min(times[kind][WARMUP:])


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of state, on both ranks together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk that is measured")
    asked = arguments(parser, gib=0.002, rounds=1)
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
        num_bytes, times = launch(measure, (asked.gib, asked.rounds, Path(folder)), nproc=2)[0]
    held = median(times["a copy of the state"], "held") or 0.0
    durable = median(times["dd bs=4M conv=fsync"], "durable") or 0.0
    dd = fastest(times["dd bs=4M conv=fsync"], "durable")
    saves, loads = [], []
    for what, kinds in times.items():
        if "cold" in kinds:
            plain = times["shoal, without a look at the hashes"]
            own = {kind: median(kinds, kind) or 0.0 for kind in ("cold", "warm")}
            loads.append(
                {
                    "load": what,
                    **{f"{kind}, s": f"{own[kind]:.2f}" for kind in own},
                    **{f"{kind}, GB/s": f"{num_bytes / own[kind] / 1e9:.2f}" for kind in own},
                    **{f"{kind}: speed ÷ unverified": f"{(median(plain, kind) or 0) / own[kind]:.2f}" for kind in own},
                    **{f"{kind}, fastest": f"{fastest(plain, kind) / fastest(kinds, kind):.2f}" for kind in own},
                }
            )
        else:
            own_held, own_durable = median(kinds, "held"), median(kinds, "durable")
            saves.append(
                {
                    "save": what,
                    "held, s": shown(own_held, ".2f"),
                    "durable, s": shown(own_durable, ".2f"),
                    "GB/s": shown(own_durable and num_bytes / own_durable / 1e9, ".2f"),
                    "held ÷ copy": shown(own_held and own_held / held, ".2f"),
                    "durable ÷ dd": shown(own_durable and own_durable / durable, ".2f"),
                    "fastest ÷ fastest": shown(own_durable and fastest(kinds, "durable") / dd, ".2f"),
                }
            )
    said = f"{num_bytes / 1e9:.2f} GB of state on 2 ranks, the ways in turns, medians of {asked.rounds} rounds."
    load = f"Load of the machine when it ended: {os.getloadavg()[0]:.1f}."
    text = "\n".join([heading("Checkpoints", f"{said} {load}"), table(saves), "", table(loads)])
    print(text)
    print("written to", write("checkpoint", text))


if __name__ == "__main__":
    main()
