"""A rank is killed in the middle of a run, which recovers: its losses are those of an undisturbed run, bit for bit.

    python examples/11_fault_tolerance.py               # then a host is lost; as root, with `ip netns`
    python examples/11_fault_tolerance.py --one-host

Two ranks train and save every step. Rank 1 kills itself with SIGKILL, as the kernel would for lack of memory. The
launcher sees it at once, ends the other and starts both of them again, and they resume from the last saved step.
`shoal train` does all of this by itself; this file does it in a script, with `launch`, `with_restarts`, `run.save` and
`run.load`.

Then `shoal train --hosts` trains on two hosts, which are network namespaces of this machine. The cable of the second is
pulled, and the run continues on the first with the same batches.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.comm.world import World
from shoal.elastic.restart import RestartBudget, with_restarts
from shoal.launch.local import launch

STEPS, DIES_IN, HOST_STEPS = 6, 4, 40
NAMES, ADDRESSES = ("shoal-c", "shoal-d"), ("10.79.0.1", "10.79.0.2")
SETTINGS = "--data.seq_len 16 --data.global_batch 4 --data.validation 0 --launch.threads 1 --checkpoint.every 1step"


def train(placement, store, folder: Path, generation: int, dying: int | None) -> dict[int, float]:
    """Train on one rank, from the last saved step on; returns the loss of each step that was made here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = {}
    with shoal.Run(world=World.start(placement, device="cpu", store=store)) as run:
        model, optimizer = run.prepare(model, optimizer)
        if generation:
            run.load(folder)
        while run.steps_done < STEPS:
            step = run.steps_done + 1
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + placement.rank))
            if (placement.rank, step, generation) == (dying, DIES_IN, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            losses[step] = run.step((inputs, inputs.argmax(1) % 4)).item()
            run.save(folder, keep=2)
    return losses


def run_of(folder: Path, dying: int | None = None) -> dict[int, float]:
    """The loss of each step of a run of two ranks, which restarts when a rank dies."""

    def start(generation: int) -> dict[int, float]:
        return launch(train, (folder, generation, dying), nproc=2)[0]

    return with_restarts(start, RestartBudget(most=3, say=lambda text: print(text.splitlines()[0])))


def lose_a_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = run_of(Path(folder, "plain"))
        after = run_of(Path(folder, "killed"), dying=1)  # the losses since the restart
    assert min(after) == DIES_IN
    assert after == {step: plain[step] for step in after}, "the losses differ"
    print(f"steps {DIES_IN} to {STEPS} after the restart: {' '.join(f'{loss:.4f}' for loss in after.values())}")
    print("without a fault:                   ", " ".join(f"{plain[step]:.4f}" for step in after), "(the same bits)")


def ip(words: str) -> None:
    """Run `ip`, which configures networks."""
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Make two namespaces with a cable between them."""
    try:
        for name in NAMES:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {NAMES[0]} type veth peer name eth0 netns {NAMES[1]}")
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip(f"-n {name} address add {address}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def losses_in(run: Path) -> dict[int, float]:
    """The loss of each step that a run has made."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines}


def lose_a_host() -> None:
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "shoal", "train", str(root / "recipes" / "tiny.yaml"), *SETTINGS.split()]
        words += ["--plan", "fp64", "--run.duration", f"{HOST_STEPS}step", "--quiet"]
        hosts = ["--hosts", f"{NAMES[0]}:1,{NAMES[1]}:1", "--min-hosts", "1", "--listen", ADDRESSES[0]]
        hosts += ["--ssh", "ip netns exec {host}", "--run.dir", f"{folder}/cut"]
        with two_hosts():
            command = ["ip", "netns", "exec", NAMES[0], *words, *hosts]
            training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            while len(losses_in(Path(folder, "cut"))) < 3 and training.poll() is None:
                time.sleep(0.02)
            ip(f"-n {NAMES[1]} link set eth0 down")
            _, said = training.communicate(timeout=120)
        assert training.returncode == 0, said
        print(next(line for line in said.splitlines() if "is lost" in line).strip())
        print(next(line for line in said.splitlines() if "continuing on" in line).strip())
        subprocess.run([*words, "--nproc", "1", "--run.dir", f"{folder}/plain"], check=True, capture_output=True)
        cut, plain = losses_in(Path(folder, "cut")), losses_in(Path(folder, "plain"))
    difference = max(abs(cut[step] - plain[step]) for step in range(1, HOST_STEPS + 1))
    print(f"{len(cut)} steps; the largest difference of a loss from a run on one host is {difference:.0e}")
    assert difference < 1e-10


def main() -> None:
    """Lose a rank, then a host."""
    lose_a_rank()
    if "--one-host" in sys.argv:
        return
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("the loss of a host is skipped: it needs root, and the program ip")
        return
    lose_a_host()


if __name__ == "__main__":
    main()
