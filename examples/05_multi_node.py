"""One run on two hosts: `shoal train --hosts` starts an agent on each, and the agents start the ranks.

    python examples/05_multi_node.py

With ssh between two machines the command would be

    shoal train recipes/tiny.yaml --hosts a:1,b:1

Here the hosts are two network namespaces of this machine with a cable between them, and `ip netns exec` takes the place
of ssh. That needs root; without it, two addresses of the loopback are the hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES, ADDRESSES = ("shoal-a", "shoal-b"), ("10.78.0.1", "10.78.0.2")
SETTINGS = "--run.duration 5step --data.seq_len 32 --data.global_batch 4 --data.validation 0 --launch.threads 1 --json"


def ip(words: str) -> None:
    """Run `ip`, which configures networks."""
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Make two namespaces and connect them; yields the command prefix of the first host, and the options of a run."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield [], ["--hosts", "127.0.0.1:1,127.0.0.2:1"]
        return
    try:
        for name in NAMES:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {NAMES[0]} type veth peer name eth0 netns {NAMES[1]}")
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip(f"-n {name} address add {address}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
        options = ["--hosts", "shoal-a:1,shoal-b:1", "--ssh", "ip netns exec {host}", "--listen", ADDRESSES[0]]
        yield ["ip", "netns", "exec", NAMES[0]], options
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def main() -> None:
    """Train on both hosts, and show what the coordinator reports."""
    with two_hosts() as (prefix, options), tempfile.TemporaryDirectory() as folder:
        recipe = str(ROOT / "recipes" / "tiny.yaml")
        train = [sys.executable, "-m", "shoal", "train", recipe, *SETTINGS.split(), "--run.dir", f"{folder}/run"]
        ended = subprocess.run([*prefix, *train, *options], stdout=subprocess.PIPE, text=True, check=True)
        summary = json.loads(ended.stdout)
        print(f"{summary['ranks']} ranks on {options[1]} made {summary['steps']} steps")
        print(f"loss {summary['loss_first']:.4f} at the first step; step {summary['saved_step']} is saved")


if __name__ == "__main__":
    main()
