"""A host is lost: how long until the others have made the next step, and was anything lost?

python benchmarks/faults/lost_host.py [--repeats 3]

Two hosts with two ranks each are network namespaces of this machine (needs root). The link of the second one is cut,
or all its processes are killed, and its copies in memory are removed. When the run continues on two ranks, that
host comes back. With the program `etcd` (Debian: etcd-server), a third host and an etcd on each, the host of the
leading coordinator and of rank 0 is killed, too. Losses are compared with those of an undisturbed run, in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.chaos.machine.network import Network, hosts

STEPS = 150
SLOW = """
import os, time
from torch import nn

class Bigram(nn.Module):
    num_outputs = 256

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        if not os.path.exists("fast"):
            time.sleep(0.05)
        return self.head(self.embedding(tokens))
"""
WORDS = [
    *["train", "--model.name", "own.py:Bigram", "--data.source", "synthetic", "--data.seq_len", "16"],
    *["--data.global_batch", "4", "--data.synthetic_samples", "64", "--data.validation", "0", "--data.workers", "0"],
    *["--plan", "zero=3 fp64", "--device", "cpu", "--launch.threads", "1", "--run.log_every", "1", "--run.dir", "run"],
    *["--run.duration", f"{STEPS}step", "--checkpoint.every", "10000step", "--checkpoint.memory_every", "1step"],
    *["--checkpoint.memory_dir", "memory"],
]
SHOAL = [sys.executable, "-m", "shoal"]
KEY = "a key for one benchmark"
MOST_SECONDS = 120.0
KINDS = ("link down", "killed", "killed, with the coordinator (etcd)")


@dataclass(frozen=True)
class Outcome:
    """What came of one loss, in seconds after it."""

    noticed: float
    resumed: float
    """Until the first step on the hosts that are left that had not been made before."""
    steps_again: int
    """Steps that were made before the loss, and again after it; those that were saved are never made again."""
    is_once: bool
    """Whether the metrics have each step once."""
    difference: float
    """The largest relative difference of a loss from the undisturbed run."""


@dataclass
class Lab:
    """Hosts with a folder each, and what runs on them."""

    network: Network
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, host: int, *words: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "SHOAL_KEY": KEY, "CUDA_VISIBLE_DEVICES": ""}
        command = ["ip", "netns", "exec", self.network.names[host], *words]
        with (self.home(host) / f"said-{len(self.started)}").open("wb") as said:
            process = subprocess.Popen(command, cwd=self.home(host), env=environ, stderr=said, stdout=said)
        self.started.append(process)
        return process

    def home(self, host: int) -> Path:
        return self.folder / str(host)

    def prepare(self, host: int) -> None:
        home, memory = self.home(host), self.memory(host)
        home.mkdir()
        memory.mkdir(mode=0o700)
        (home / "memory").symlink_to(memory)
        (home / "own.py").write_text(SLOW)

    def memory(self, host: int) -> Path:
        return Path("/dev/shm") / f"{self.network.names[host]}-memory"

    def says(self, host: int, text: str) -> bool:
        return any(text in path.read_text(errors="replace") for path in self.home(host).glob("said-*"))

    def losses(self, *of: int) -> dict[int, list[float]]:
        """Step → its losses in the metrics of some hosts."""
        found: dict[int, list[float]] = {}
        for path in [self.home(host) / "run" / "metrics.jsonl" for host in of]:
            for line in path.read_text().splitlines() if path.exists() else []:
                if line.endswith("}"):
                    record = json.loads(line)
                    found.setdefault(record["step"], []).append(record["loss"])
        return found

    def wait(self, what: str, holds: Callable[[], bool]) -> float:
        deadline = time.monotonic() + MOST_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                said = {str(path): path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*/said-*")}
                raise SystemExit(f"{what} did not happen in {MOST_SECONDS:g} s: {json.dumps(said, indent=1)}")
            time.sleep(0.01)
        return time.monotonic()

    def kill(self, host: int) -> None:
        """Kill all processes of a host, and remove its memory."""
        found = subprocess.run(["ip", "netns", "pids", self.network.names[host]], capture_output=True, text=True)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        shutil.rmtree(self.memory(host), ignore_errors=True)

    def close(self) -> None:
        for host in range(len(self.network.names)):
            self.kill(host)
        for process in self.started:
            process.kill()
            process.wait()


def two_hosts(lab: Lab, kind: str) -> Outcome:
    """The second host is lost, and comes back."""
    names, address = lab.network.addresses, lab.network.addresses[0]
    for host in range(2):
        lab.prepare(host)
    members = ["--hosts", f"{names[0]}:2,{names[1]}:2", "--min-hosts", "1", "--ssh", "none"]
    run = lab.start(0, *SHOAL, *WORDS, *members, "--listen", f"{address}:29400")
    agent = [*SHOAL, "agent", "--join", f"{address}:29400", "--name"]
    for host in range(2):
        lab.start(host, *agent, names[host])
    lab.wait("the fifth step", lambda: max(lab.losses(0), default=0) >= 5)
    began = time.monotonic()
    lab.network.cut(1)
    if kind == "killed":
        lab.kill(1)
    noticed = lab.wait("the message", lambda: lab.says(0, "is lost"))
    known = set(lab.losses(0))
    resumed = lab.wait("a step on one host", lambda: max(lab.losses(0)) > max(known))
    lab.wait("five steps on one host", lambda: max(lab.losses(0)) > max(known) + 5)
    lab.network.heal(1)
    if kind == "killed":
        lab.memory(1).mkdir(mode=0o700)
        lab.start(1, *agent, names[1])
    lab.wait("the return", lambda: lab.says(0, "continuing on 2 of 2 hosts"))
    (lab.home(0) / "fast").touch()
    (lab.home(1) / "fast").touch()
    if run.wait(MOST_SECONDS):
        raise SystemExit((lab.home(0) / "said-0").read_text())
    found = lab.losses(0)
    steps_again = sum(len(losses) - 1 for losses in found.values())
    return Outcome(noticed - began, resumed - began, steps_again, *compared(lab, found))


def with_etcd(lab: Lab, kind: str) -> Outcome:
    """The host of the leading coordinator and of rank 0 is lost: its processes, its etcd, its memory and its files."""
    addresses = lab.network.addresses
    url = f"etcd://{','.join(f'{address}:2379' for address in addresses)}/benchmark"
    cluster = ",".join(f"{host}=http://{address}:2380" for host, address in enumerate(addresses))
    for host, address in enumerate(addresses):
        lab.prepare(host)
        urls = [f"--{each}=http://{address}:2379" for each in ("listen-client-urls", "advertise-client-urls")]
        urls += [f"--{each}=http://{address}:2380" for each in ("listen-peer-urls", "initial-advertise-peer-urls")]
        lab.start(host, "etcd", f"--name={host}", f"--initial-cluster={cluster}", "--data-dir=etcd", *urls)
    train = [*SHOAL, *WORDS, "--hosts", f"{addresses[0]}:2,{addresses[1]}:2", "--min-hosts", "1", "--ssh", "none"]
    train += ["--store", url, "--listen"]
    time.sleep(3)  # until etcd has elected a leader
    lab.start(0, *train, addresses[0])
    for host in range(2):
        lab.start(host, *SHOAL, "agent", "--store", url, "--name", addresses[host])
    lab.wait("the first coordinator", lambda: lab.says(0, "waiting for"))
    standby = lab.start(2, *train, addresses[2])
    lab.wait("the fifth step", lambda: max(lab.losses(0), default=0) >= 5)
    began = time.monotonic()
    lab.network.cut(0)
    lab.kill(0)
    known = lab.losses(0)
    noticed = lab.wait("the next coordinator", lambda: lab.says(2, "taking over"))
    resumed = lab.wait("a step on the second host", lambda: max(lab.losses(1), default=0) > max(known))
    (lab.home(1) / "fast").touch()
    if standby.wait(MOST_SECONDS):
        raise SystemExit(lab.folder)
    found = lab.losses(1)
    again = [step for step in known if step in found]
    return Outcome(noticed - began, resumed - began, len(again), *compared(lab, {**known, **found}))


def compared(lab: Lab, found: dict[int, list[float]]) -> tuple[bool, float]:
    """Whether each step is there once, and how far losses are from those of a run on one host."""
    last = len(lab.network.names) - 1
    lab.network.heal(last)
    home = lab.folder / "plain"
    home.mkdir()
    (home / "own.py").write_text(SLOW)
    (home / "fast").touch()
    own = WORDS[: WORDS.index("--checkpoint.memory_every")]
    subprocess.run([*SHOAL, *own, "--nproc", "2", "--quiet"], cwd=home, check=True, capture_output=True)
    plain = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = {record["step"]: record["loss"] for record in plain}
    is_once = sorted(found) == sorted(expected) and all(len(losses) == 1 for losses in found.values())
    differences = [abs(loss - expected[step]) / expected[step] for step in found for loss in found[step]]
    return is_once, max(differences)


def measured(kind: str) -> Outcome:
    """Lose a host once."""
    number = 3 if "etcd" in kind else 2
    with tempfile.TemporaryDirectory() as folder, hosts(number, f"shoal-lost-{os.getpid()}") as network:
        lab = Lab(network, Path(folder))
        try:
            return with_etcd(lab, kind) if number == 3 else two_hosts(lab, kind)
        finally:
            lab.close()


def row(kind: str, found: list[Outcome]) -> dict[str, str]:
    """One row of the table."""
    resumed = [each.resumed for each in found]
    return {
        "lost": kind,
        "runs": str(len(found)),
        "noticed, s": f"{statistics.median(each.noticed for each in found):.1f}",
        "next step, s: median": f"{statistics.median(resumed):.1f}",
        "longest": f"{max(resumed):.1f}",
        "steps made again": str(max(each.steps_again for each in found)),
        "each step once": "yes" if all(each.is_once for each in found) else "NO",
        "losses differ by": f"{max(each.difference for each in found):.0e}",
    }


def main() -> None:
    """Lose hosts by turns, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    options = arguments(parser, repeats=1, kinds=["link down"])
    kinds = [kind for kind in options.kinds if "etcd" not in kind or shutil.which("etcd")]
    found: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    for _ in range(options.repeats):
        for kind in kinds:
            found[kind].append(measured(kind))
    rows = [row(kind, each) for kind, each in found.items()]
    question = f"{__doc__.splitlines()[0]} 2 hosts with 2 ranks each; the load average was {os.getloadavg()[0]:.1f}."
    print(table(rows))
    print(write("lost-host", f"{heading('A lost host', question)}\n{table(rows)}"))


if __name__ == "__main__":
    main()
