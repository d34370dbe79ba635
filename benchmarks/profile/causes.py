"""Does a profile name the cause of slow steps? Causes are put in, and the verdict is compared.

python benchmarks/profile/causes.py [--seed 0] [--only link] [--docs]

A small llama makes four steps on two ranks or more, which a cause of random size slows down. A slow link is that of two
network namespaces (tests/far_link.py), for which it needs root. `--docs` writes the table into docs/profile.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from report import arguments, heading, table, write

from shoal.blueprint.faults import VARIABLE
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.init import initialise
from shoal.train.profile.profiler import Profiler
from shoal.train.run import Run

ROOT = Path(__file__).parents[2]
STEPS = 4
"""Of which the first one is not timed."""
PORT = 29741
SCALES = (1.0, 4.0)
"""Factors of the size of a cause, of its first and its second try."""
BEGIN, END = "<!-- causes: generated -->", "<!-- end of causes -->"


@dataclass(frozen=True)
class Injected:
    """A cause, its size, and the verdict that names it."""

    cause: str
    plan: str
    verdict: str
    ranks: int = 2
    seconds: float = 0.0
    """By which a step, a sample, a block, a disk operation or a round trip is longer."""
    rank: int = 0
    threads: int = 1

    @property
    def size(self) -> str:
        """In words."""
        if self.cause == "cores":
            return f"{self.ranks} ranks x {self.threads} threads"
        where = f" on rank {self.rank}" if self.cause == "rank" else ""
        return f"{self.seconds * 1e3:.0f} ms{where}"


def cases(seed: int) -> list[Injected]:
    """Twenty cases."""
    chance = random.Random(seed)

    def drawn(low: float, high: float) -> float:
        return round(chance.uniform(low, high), 3)

    found = [
        *(Injected("loader", plan, "data", seconds=drawn(0.04, 0.12)) for plan in ("ddp", "zero=3", "tp=2", "cp=2")),
        *(Injected("rank", plan, "straggler", seconds=drawn(0.5, 1.5), rank=chance.randrange(2))
          for plan in ("ddp", "zero=3", "tp=2")),
        Injected("rank", "zero=1", "straggler", ranks=3, seconds=drawn(0.5, 1.5), rank=chance.randrange(3)),
        *(Injected("link", plan, "link", seconds=drawn(0.04, 0.1)) for plan in ("ddp", "zero=3", "tp=2")),
        *(Injected("bucket", "ddp", "bucket", seconds=drawn(0.02, 0.05)) for _ in range(2)),
        *(Injected("recompute", f"{plan} recompute=full", "recompute", seconds=drawn(0.1, 0.4))
          for plan in ("ddp", "zero=3", "tp=2")),
        *(Injected("cores", "ddp", "cores", ranks=ranks, threads=threads) for ranks, threads in ((2, 4), (4, 2))),
        *(Injected("disk", plan, "saving", seconds=drawn(0.05, 0.15)) for plan in ("ddp", "zero=3")),
    ]  # fmt: skip
    return [replace(each, plan=each.plan.replace("ddp", f"dp_replicate={each.ranks}")) for each in found]


class Slow(Dataset[dict[str, torch.Tensor]]):
    """Samples that take a while to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        tokens = torch.randint(0, 64, (17,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def profiled(placement: Placement | None, store: Any, case: Injected) -> dict[str, Any]:
    """The profile of one rank's steps under a cause."""
    world = World.start(placement, device="cpu", store=store, threads=case.threads)
    settings: dict[str, Any] = {"bucket_mb": 0.001} if case.cause == "bucket" else {}
    run = Run(f"{case.plan} fp32", world=world, **settings)
    width = 512 if case.cause == "cores" else 32
    config = LlamaConfig(hidden=width, num_layers=2, num_heads=4, num_kv_heads=4, ffn=2 * width, vocabulary=64)
    model = Llama(config)
    initialise(model, 0)
    if case.cause == "recompute":
        for block in model.model.layers:
            block.self_attn.register_forward_pre_hook(lambda *_: time.sleep(case.seconds))
    data = DataLoader(Slow(case.seconds if case.cause == "loader" else 0.0), batch_size=12)
    _, _, loader = run.prepare(model, torch.optim.AdamW(model.parameters()), data)
    with run, _disk(case) as save, Profiler(run) as profiler:
        for batch in itertools.islice(run.batches(loader), STEPS):
            if case.cause == "rank" and world.rank == case.rank:
                time.sleep(case.seconds)
            run.step(batch)
            save(run)
    found = profiler.result
    return {"verdict": found.verdict.to_mapping(), "parts": found.parts}


@contextmanager
def _disk(case: Injected) -> Iterator[Callable[[Run], None]]:
    """A function that saves to a slow disk after every step; nothing, where the disk is not the cause."""
    if case.cause != "disk":
        yield lambda run: None
        return
    folder = _folder(os.getppid())
    os.environ[VARIABLE] = f"slow_disk_at=seconds:{case.seconds}"
    try:
        yield lambda run: run.save(folder, keep=1)
    finally:
        os.environ.pop(VARIABLE)


def _folder(started_by: int) -> Path:
    """Where the ranks of one process save."""
    return Path(tempfile.gettempdir()) / f"shoal-causes-{started_by}"


def outcome(case: Injected) -> dict[str, Any]:
    """What rank 0 says of a case."""
    if case.cause not in ("link", "bucket"):
        try:
            return launch(profiled, (case,), nproc=case.ranks)[0]
        finally:
            shutil.rmtree(_folder(os.getpid()), ignore_errors=True)
    from tests.far_link import far_hosts

    with far_hosts(round_trip=case.seconds) as link:
        started = [_start(name, rank, link.hosts[0][1], case) for rank, (name, _) in enumerate(link.hosts)]
        texts = [process.communicate(timeout=300) for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("\n".join(error[-1500:] for _, error in texts))
    found: dict[str, Any] = json.loads(texts[0][0].splitlines()[-1])
    return found


def _start(host: str, rank: int, main: str, case: Injected) -> subprocess.Popen[str]:
    """Start one rank in a network of its own."""
    environment = {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": main, "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "far0",
    }  # fmt: skip
    command = ["ip", "netns", "exec", host, sys.executable, __file__, "--rank-of", json.dumps(vars(case))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_named(case: Injected, verdict: dict[str, Any]) -> bool:
    """Whether the verdict is the cause: of a rank, that rank; of a bucket, with the advice about buckets."""
    if verdict["kind"] != case.verdict:
        return False
    if case.cause == "rank":
        return bool(verdict["rank"] == case.rank)
    return case.cause != "bucket" or "bucket" in verdict["next"]


def row(number: int, case: Injected) -> dict[str, str]:
    """One line of the table. On a busy machine a cause may be smaller than the rest: then it is tried again, larger."""
    tries = 0
    for scale in SCALES:
        tries += 1
        tried = replace(case, seconds=round(case.seconds * scale, 3))
        try:
            verdict = outcome(tried)["verdict"]
            found, cost, named = verdict["title"], f"{verdict['cost']:.0%}", is_named(tried, verdict)
        except Exception as error:
            verdict, found, cost, named = str(error), f"not measured: {type(error).__name__}", "", False
        print(number, tried, verdict, file=sys.stderr, flush=True)
        if named:
            break
    return {
        "": str(number), "cause": case.cause, "size": tried.size, "plan": f"`{case.plan}`", "verdict": found,
        "cost": cost, "named": f"at try {tries}" if named else "no",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--most", type=int, default=20, help="cases")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    asked = arguments(parser, only="recompute", most=1)
    if asked.rank_of:
        from shoal.comm.rendezvous.launcher_environment import read_environment

        print(json.dumps(profiled(read_environment(os.environ), None, Injected(**json.loads(asked.rank_of)))))
        return
    before = os.getloadavg()[0]
    chosen = [(n, case) for n, case in enumerate(cases(asked.seed), 1) if asked.only in ("", case.cause)]
    rows = [row(number, case) for number, case in chosen[: asked.most]]
    named, first = (
        sum(each["named"] in wanted for each in rows) for wanted in (("at try 1", "at try 2"), ("at try 1",))
    )
    load = f"The load of this machine was {before:.0f} before and {os.getloadavg()[0]:.0f} after it"
    text = heading(
        "Causes that were put in", f"{named} of {len(rows)} are the verdict, {first} of them at the first size. {load}."
    )
    text += "\n" + table(rows)
    print(text)
    print(write("profile-causes", text))
    if asked.docs:
        _write_docs(text)


def _write_docs(text: str) -> None:
    path = ROOT / "docs" / "profile.md"
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    body = text.partition("\n")[2].strip()
    body = re.sub(r"commit (\w{7})(\w*)\n- date: (\S+)", r"commit \1\2\n- date: \3, \1", body)
    path.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


if __name__ == "__main__":
    main()
