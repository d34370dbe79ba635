"""Mistakes on several hosts: after how many seconds does a command end, or say what is wrong, with the fix?

python benchmarks/faults/mistakes.py

Three hosts are network namespaces of this machine (needs root): a coordinator, and two agents.
"""

from __future__ import annotations

import argparse
import os
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

LIMIT = 10.0
MOST_SECONDS = 40.0
SHOAL = [sys.executable, "-m", "shoal"]
WORDS = [
    *["train", "--model.num_layers", "1", "--model.hidden", "32", "--model.ffn", "48", "--data.source", "synthetic"],
    *["--data.seq_len", "16", "--data.global_batch", "4", "--data.synthetic_samples", "64", "--data.validation", "0"],
    *["--data.workers", "0", "--device", "cpu", "--launch.threads", "1", "--run.dir", "run", "--run.duration", "5step"],
    *["--run.fast_dev_run", "false"],
]
OTHER_VERSION = """
import sys
import shoal.version
shoal.version.__version__ = "0.0.1"
from shoal.cli import main
sys.exit(main())
"""


@dataclass
class Lab:
    """Three hosts, and what runs on them."""

    network: Network
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, host: int, *words: str, key: str = "a key for one benchmark", python: list[str] | None = None
    ) -> Path:
        said = self.folder / f"said-{len(self.started)}"
        command = ["ip", "netns", "exec", self.network.names[host], *(python or SHOAL), *words]
        environ = {**os.environ, "SHOAL_KEY": key, "CUDA_VISIBLE_DEVICES": ""}
        with said.open("wb") as file:
            self.started.append(subprocess.Popen(command, cwd=self.folder, env=environ, stderr=file, stdout=file))
        return said

    def train(self, names: str, *more: str) -> Path:
        return self.start(0, *WORDS, "--hosts", names, "--ssh", "none", *more)

    def agent(self, host: int, **options: object) -> Path:
        words = ["agent", "--join", f"{self.network.addresses[0]}:29400", "--name", self.network.addresses[host]]
        return self.start(host, *words, **options)  # type: ignore[arg-type]

    def listen(self) -> tuple[str, ...]:
        return ("--listen", f"{self.network.addresses[0]}:29400")

    def members(self) -> str:
        return ",".join(f"{address}:1" for address in self.network.addresses[1:])

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def other_key(lab: Lab) -> Path:
    lab.train(lab.members(), *lab.listen())
    _wait_to_listen(lab)
    return lab.agent(1, key="another key for one benchmark")


def closed_port_of_the_coordinator(lab: Lab) -> Path:
    lab.train(lab.members(), *lab.listen())
    _wait_to_listen(lab)
    lab.network.cut(1)
    return lab.agent(1)


def closed_ports_between_hosts(lab: Lab) -> Path:
    _, second, third = lab.network.addresses
    for host, address in ((1, third), (2, second)):
        words = f"ip -n {lab.network.names[host]} route add prohibit {address}/32"
        subprocess.run(words.split(), check=True)
    said = lab.train(lab.members(), *lab.listen())
    lab.agent(1)
    lab.agent(2)
    return said


def name_of_the_loopback(lab: Lab) -> Path:
    return lab.train(lab.members(), "--listen", "127.0.0.1:29400")


def name_without_an_address(lab: Lab) -> Path:
    return lab.start(0, *WORDS, "--hosts", f"no-such-host:1,{lab.network.addresses[1]}:1")


def other_version(lab: Lab) -> Path:
    said = lab.train(lab.members(), *lab.listen())
    _wait_to_listen(lab)
    lab.agent(1, python=[sys.executable, "-c", OTHER_VERSION])
    return said


def nothing_listens(lab: Lab) -> Path:
    words = ["agent", "--join", f"{lab.network.addresses[0]}:29400", "--name", "a", "--wait", "2"]
    return lab.start(1, *words)


CASES: dict[str, tuple[Callable[[Lab], Path], str]] = {
    "an agent has another key": (other_key, "N052"),
    "the port of the coordinator is closed": (closed_port_of_the_coordinator, "N053"),
    "ports between two hosts are closed": (closed_ports_between_hosts, "N066"),
    "the address is that of the loopback": (name_of_the_loopback, "N051"),
    "a name has no address": (name_without_an_address, "N074"),
    "a host has another version of shoal": (other_version, "N056"),
    "no coordinator listens": (nothing_listens, "N072"),
}
"""Mistake → how it is made, and the code of its message."""


def _wait_to_listen(lab: Lab) -> None:
    _wait(lambda: b"waiting for" in (lab.folder / "said-0").read_bytes())


def _wait(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + MOST_SECONDS
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def measured(name: str) -> dict[str, str]:
    """Make one mistake; a row of the table."""
    make, code = CASES[name]
    with tempfile.TemporaryDirectory() as folder, hosts(3, f"shoal-err-{os.getpid()}") as network:
        lab = Lab(network, Path(folder))
        try:
            said = make(lab)
            began = time.monotonic()
            is_said = _wait(lambda: f"[{code}]" in said.read_text() or f"explain {code}" in said.read_text())
            seconds, text = time.monotonic() - began, said.read_text()
        finally:
            with suppress(ProcessLookupError):
                lab.close()
    message = next(
        (line for line in text.splitlines() if code in line), text[-300:].replace("\n", " / ")
    )  # what it says in its place
    return {
        "mistake": name,
        "code": code if is_said else "NONE",
        "seconds": f"{seconds:.1f}",
        "within 10 s, with a fix": "yes" if is_said and seconds <= LIMIT and "fix:" in text else "NO",
        "message": message[:110],
    }


def main() -> None:
    """Make all mistakes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = arguments(parser, cases=["the address is that of the loopback"])
    rows = [measured(name) for name in options.cases]
    question = (
        f"{__doc__.splitlines()[0]} The load average was {os.getloadavg()[0]:.1f}. Python starts within the time."
    )
    print(table(rows))
    print(write("mistakes", f"{heading('Mistakes', question)}\n{table(rows)}"))


if __name__ == "__main__":
    main()
