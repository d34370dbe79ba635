"""Several hosts on one machine: network namespaces, joined by a switch, each with a cable of a known rate.

    with made(2, rate="100mbit") as hosts:
        ended = run(hosts, [sys.executable, "script.py"], per_host=2)

    host 0 ── cable ──┐
                      ├── switch        every cable carries `rate` in each direction, and `rate` alone is shaped:
    host 1 ── cable ──┘                 messages between ranks of one host stay inside of it

Needs root, and the programs ip and tc (iproute2). The next run removes what a killed run has left;
a process has one set of hosts of a prefix at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PORT = 29500
"""Of rank 0, in a namespace of its own, where no other process is."""


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    """Of its namespace."""
    address: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    rank: int
    host: Host
    code: int
    stdout: str
    stderr: str


def bytes_per_second(rate: str) -> float:
    """
    >>> bytes_per_second("100mbit")
    12500000.0
    """
    match = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", rate)
    if not match:
        raise ValueError(f"{rate!r} is not a rate; say 100mbit or 1gbit")
    return float(match[1]) * UNITS[match[2]] / 8


def missing() -> str:
    """What this machine lacks for it; empty: nothing."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"needs the program {program} (package iproute2)"
    return "" if os.geteuid() == 0 else "needs root, to make network namespaces"


@contextlib.contextmanager
def made(
    count: int, *, rate: str | None = None, prefix: str = "shoal-host", network: str = "10.78.0"
) -> Iterator[list[Host]]:
    """So many hosts. `rate` None: as fast as the kernel copies."""
    owner = f"{prefix}-{os.getpid()}"
    switch = f"{owner}-switch"
    names = [f"{owner}-{number}" for number in range(count)]
    _remove_orphans(prefix)
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            _ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{network}.{number + 1}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate is not None:
                _shape(name, "cable", rate)
                _shape(switch, port, rate)
        yield [Host(name, f"{network}.{number + 1}") for number, name in enumerate(names)]
    finally:
        _remove(owner)


def run(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    per_host: int = 1,
    environ: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> list[Ended]:
    """The command once for every rank, with what torchrun would put into its environment; by rank. When one fails, or
    time is up, the others are ended."""
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(per_host * len(hosts))]
        try:
            for rank, output in enumerate(outputs):
                variables = {**os.environ, **(environ or {}), **variables_of(rank, hosts, per_host)}
                with output.with_suffix(".out").open("wb") as out, output.with_suffix(".err").open("wb") as err:
                    processes.append(
                        subprocess.Popen(
                            ["ip", "netns", "exec", hosts[rank // per_host].name, *command],
                            stdout=out, stderr=err, env=variables, start_new_session=True,
                        )
                    )  # fmt: skip
            _wait(processes, timeout)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [
            Ended(
                rank,
                hosts[rank // per_host],
                processes[rank].returncode,
                output.with_suffix(".out").read_text(errors="replace"),
                output.with_suffix(".err").read_text(errors="replace"),
            )
            for rank, output in enumerate(outputs)
        ]


def checked(ended: Sequence[Ended]) -> list[Ended]:
    """The same, if all went well."""
    for each in ended:
        if each.code:
            raise RuntimeError(f"rank {each.rank} on {each.host.name} ended with {each.code}:\n{each.stderr[-3000:]}")
    return list(ended)


def variables_of(rank: int, hosts: Sequence[Host], per_host: int) -> dict[str, str]:
    """As torchrun sets them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(per_host * len(hosts)),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Until all have ended, one has failed, or time is up."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return
        if any(codes):
            time.sleep(2.0)  # for the others to say what they make of it
            return
        time.sleep(0.05)


def _shape(namespace: str, device: str, rate: str) -> None:
    """A bucket that holds what may go in a few ticks of the kernel's clock, and a queue of a tenth of a second."""
    burst = max(32 * 1024, int(bytes_per_second(rate) / 400))
    words = f"qdisc replace dev {device} root tbf rate {rate} burst {burst} latency 100ms"
    _command("tc", "-n", namespace, *words.split())


def _remove(owner: str) -> None:
    """Its namespaces, and whoever is still in them."""
    for name in _namespaces():
        if name.startswith(f"{owner}-"):
            inside = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True).stdout
            for number in inside.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _remove_orphans(prefix: str) -> None:
    """Those whose maker, by whose number they are called, is gone. Others may be in use."""
    for name in _namespaces():
        made_by = re.match(rf"{re.escape(prefix)}-(\d+)-", name)
        if made_by and not Path(f"/proc/{made_by[1]}").exists():
            _remove(f"{prefix}-{made_by[1]}")


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def _ip(*words: str) -> None:
    _command("ip", *words)


def _command(*words: str) -> None:
    ended = subprocess.run(words, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise OSError(f"{' '.join(words)}: {ended.stderr.strip()}")
