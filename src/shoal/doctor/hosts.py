"""Checks between hosts: a process on each, started as `shoal train --hosts` starts its agents, connects to all others.

Each ordered pair is tried, since firewalls and routes may differ by direction.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.doctor.checks.files import nearest_existing
from shoal.doctor.checks.versions import MUST_AGREE, PACKAGES
from shoal.doctor.finding import Finding, ok, size, warning, will_fail
from shoal.doctor.link import LENGTH
from shoal.doctor.link import SECONDS as LINK_SECONDS
from shoal.doctor.needs import Folder, Needs, data_paths, folders
from shoal.doctor.peer import MARK
from shoal.errors import ShoalError
from shoal.launch.hosts.hostlist import HostSpec
from shoal.launch.hosts.ssh import MOST_SAID, NOBODY, SSH, Command, python_command, why_ended

START_SECONDS = 20.0
APART = 2.0
"""Seconds between two clocks from which logs of hosts cannot be compared."""
SLOWER = 4.0
"""A link is slow if the median one is at least this many times as fast, and it has less than a gigabit."""
GIGABIT = 125e6
MOST_BYTES = 2**20
"""Bytes that one host may print."""


@dataclass(slots=True)
class Peer:
    """The doctor's process on one host."""

    spec: HostSpec
    command: Command
    facts: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    findings: list[Finding] = field(default_factory=list)
    looked: Mapping[str, Any] = field(default_factory=dict)
    """The findings about a recipe's paths there, and how large its data is."""
    said: bytearray = field(default_factory=bytearray)
    """Output that was not read as an answer."""
    number: int = 0
    """That of the last request."""

    @property
    def name(self) -> str:
        """The name of the host, without a user."""
        return self.spec.bare_name

    def ask(self, **asked: Any) -> None:
        """Send a request. Answers to those before it are no longer read: they came too late."""
        self.number += 1
        assert self.command.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: there will be no answer
            self.command.process.stdin.write(json.dumps({**asked, "number": self.number}).encode() + b"\n")
            self.command.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """The answer to the last request; None: there is none."""
        deadline = time.monotonic() + seconds
        while True:
            has_ended = self.command.process.poll() is not None
            self._read()
            for line in bytes(self.said).splitlines(keepends=True):
                if line.startswith(MARK.encode()) and line.endswith(b"\n"):
                    del self.said[: self.said.index(line) + len(line)]
                    found: dict[str, Any] = json.loads(line)["peer"]
                    if found.get("number", self.number) == self.number:  # other versions of shoal send none
                        return found
            if has_ended or time.monotonic() > deadline:
                self.command.said[:] = self.said[-MOST_SAID:]
                return None
            time.sleep(0.005)

    def _read(self) -> None:
        """Read what it has printed, without waiting."""
        assert self.command.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while len(self.said) < MOST_BYTES and (data := os.read(self.command.process.stdout.fileno(), 2**16)):
                self.said += data


def check_hosts(hosts: Sequence[HostSpec], ssh: str | None = None, needs: Needs | None = None) -> list[Finding]:
    """The findings of all hosts and of the connections between them. `needs`: of a recipe, whose data and directories
    every host has to have."""
    template = ssh or os.environ.get("SHOAL_SSH") or SSH
    if template == NOBODY:
        raise ShoalError("--ssh none starts nothing on other hosts", fix="shoal doctor, on each host", code="N102")
    peers = [_start(host, template) for host in hosts]
    look = None if needs is None else {"data": data_paths(needs.recipe), "folders": _as_json(folders(needs))}
    token = secrets.token_hex(16)
    try:
        for peer in peers:
            peer.ask(token=token, look=look)
        found = [finding for peer in peers for finding in _join(peer)]
        there = [peer for peer in peers if peer.port]
        found += _compare_versions(there)
        found += _compare_clocks(there)
        found += _connect(there)
        folder = Path.cwd()
        if needs is not None:
            found += compare_paths(there)
            saves = [path for name, path, *_ in folders(needs) if name == "checkpoints"]
            folder = nearest_existing(saves[0]) if saves else folder
        found += _shared_directory(there, folder)
        return [*found, *_merged(there)]
    finally:
        for peer in peers:
            assert peer.command.process.stdin is not None
            with contextlib.suppress(OSError):
                peer.command.process.stdin.close()
            peer.command.end(0.5)


def _merged(peers: Sequence[Peer]) -> Iterator[Finding]:
    """The findings of other hosts, with the names of all that have the same one."""
    by_finding: dict[Finding, list[str]] = {}
    for peer in peers:
        for each in peer.findings if not peer.spec.is_local else ():
            by_finding.setdefault(each, []).append(peer.name)
    for finding, names in by_finding.items():
        yield finding.on(", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""))


def _start(host: HostSpec, template: str) -> Peer:
    words = [sys.executable, "-m", "shoal.doctor.peer"]
    if not host.is_local:
        words = python_command(host, "-m shoal.doctor.peer", template)
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )
    except OSError as error:
        what = f"{words[0]!r} cannot be started: {error.strerror}"
        raise ShoalError(what, fix=f"--ssh 'COMMAND {{host}}'; the default is {SSH!r}", code="N054") from None
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return Peer(host, Command(host, words, process))


def _join(peer: Peer) -> Iterator[Finding]:
    """Read the first answer of a host."""
    said = peer.answer(START_SECONDS)
    if said is not None:
        peer.facts, peer.port = said["facts"], int(said["port"])
        peer.findings = [Finding.parse(each) for each in said["findings"]]
        peer.looked = said["looked"] or {}
        return
    if peer.command.process.poll() is None:
        fix = f"ssh {peer.spec.name} true   # must work without a password"
        yield will_fail("ssh", f"{peer.name} gave no answer for {START_SECONDS:g} s", fix)
        return
    problem = why_ended(peer.command).problems[0]
    yield will_fail("ssh", f"{problem.what.splitlines()[0]} [{problem.code}]", problem.fix)


def _compare_versions(peers: Sequence[Peer]) -> Iterator[Finding]:
    """Name versions that differ, each with its hosts."""
    names = list(dict.fromkeys(name for peer in peers for name in peer.facts))
    differing = [name for name in names if len({peer.facts.get(name, "none") for peer in peers}) > 1]
    for name in differing:
        here = {peer.name: peer.facts.get(name, "none") for peer in peers}
        usual = Counter(here.values()).most_common(1)[0][0]
        evidence = f"{name}: " + ", ".join(f"{host} has {version}" for host, version in here.items())
        if name in MUST_AGREE:
            others = [host for host, version in here.items() if version != usual]
            fix = f"ssh {others[0]} {sys.executable} -m pip install '{name}=={usual}'"
            yield will_fail(
                "versions", evidence, fix if name in ("torch", "shoal") else f"install {name} {usual} there"
            )
        else:
            others = [host for host, version in here.items() if version != usual]
            yield warning("versions", evidence, _same(name, usual, others[0]))
    if not differing and len(peers) > 1:
        yield ok("versions", f"{', '.join(names)} are the same on {len(peers)} hosts")


def _same(name: str, usual: str, host: str) -> str:
    """The command that gives a host what most others have."""
    if name == "code":
        folder = shlex.quote(str(Path.cwd()))
        return f"ssh {host} git -C {folder} checkout {usual.partition('+')[0]}   # and copy what was changed since"
    if name == "encoding":
        return f"export LC_ALL=C.UTF-8   # in ~/.bashrc of {host}"
    if name in PACKAGES:
        wanted = f"install '{name}=={usual}'" if usual != "none" else f"uninstall {name}"
        return f"ssh {host} {sys.executable} -m pip {wanted}"
    return "install the same everywhere, if results differ between hosts"


def _compare_clocks(peers: Sequence[Peer]) -> Iterator[Finding]:
    offsets = {}
    for peer in peers:
        began = time.time()
        peer.ask(clock=True)
        said = peer.answer(LINK_SECONDS)
        if said is not None:
            offsets[peer.name] = float(said["clock"]) - (began + time.time()) / 2
    if len(offsets) < 2:
        return
    early, late = (pick(offsets, key=lambda name: offsets[name]) for pick in (min, max))
    apart = offsets[late] - offsets[early]
    if apart > APART:
        evidence = f"the clock of {late} is {apart:,.0f} s ahead of that of {early}"
        yield warning("clock", evidence, "sudo timedatectl set-ntp true   # on both")
    else:
        yield ok("clock", f"the clocks differ by at most {apart:.2f} s")


def _connect(peers: Sequence[Peer]) -> Iterator[Finding]:
    """Connect each host to each other one, in both directions."""
    links: dict[tuple[str, str], Mapping[str, Any]] = {}
    for peer in peers:  # one after the other: links are measured alone
        targets = [each for each in peers if each is not peer]
        peer.ask(reach=[[each.name, each.port] for each in targets])
        said = peer.answer(2 + 3 * LINK_SECONDS * len(targets))
        results = said["reached"] if said else [{"failed": "connect", "why": "the host gave no answer"}] * len(targets)
        links |= {(peer.name, each.name): result for each, result in zip(targets, results, strict=True)}
    for (source, target), found in links.items():
        if found["failed"]:
            yield _broken(source, target, found)
    rates = {pair: found["rate"] for pair, found in links.items() if not found["failed"]}
    if not rates:
        return
    usual = statistics.median_high(rates.values())
    for (source, target), rate in rates.items():
        if rate * SLOWER < usual and rate < GIGABIT:
            evidence = f"{source} → {target} has {rate / 1e6:,.0f} MB/s, the median link {usual / 1e6:,.0f} MB/s"
            yield warning("connections", evidence, f"ethtool {links[source, target]['interface'] or 'eth0'}   # duplex")
    if len(rates) == len(links):
        slowest = min(rates, key=lambda pair: rates[pair])
        delay = max(found["seconds"] for found in links.values())
        said_rate = f"slowest {slowest[0]} → {slowest[1]}, {rates[slowest] / 1e6:,.0f} MB/s"
        evidence = f"all {len(links)} open at free ports; {said_rate}; round trips of at most {delay * 1e3:.1f} ms"
        yield ok("connections", evidence)


def _broken(source: str, target: str, found: Mapping[str, Any]) -> Finding:
    pair, why = f"{source} → {target}", found["why"]
    interface = found.get("interface") or "eth0"
    at = f"{found.get('address') or target}"
    match found["failed"]:
        case "name":
            shown = f" ({found['address']})" if found.get("address") else ""
            evidence = f"{source} does not find {target}{shown}: {why}"
            return will_fail("host name", evidence, f"ssh {source} sudo vi /etc/hosts   # the address of {target}")
        case "large":
            evidence = f"{pair} connects, but {size(LENGTH)} do not arrive: {why}; packets of full size are lost (MTU)"
            return will_fail("connections", evidence, f"sudo ip link set {interface} mtu 1500   # on both hosts")
        case _:
            evidence = f"{pair} cannot connect to a free port of {at}: {why}"
            fix = (
                f"ssh {target} sudo ufw allow from ADDRESS_OF_{source}   # ranks listen at free ports; all must be open"
            )
            return will_fail("connections", evidence, fix)


def _as_json(found: Iterable[Folder]) -> list[list[Any]]:
    return [[name, str(path), *more] for name, path, *more in found]


def compare_paths(peers: Sequence[Peer]) -> Iterator[Finding]:
    """Data and directories of a recipe as every host sees them: a rank reads and writes on its own host."""
    seen: dict[str, dict[str, str]] = {}
    for peer in peers:
        for each in peer.looked.get("found", ()) if not peer.spec.is_local else ():  # those of this host are known
            yield Finding.parse(each).on(peer.name)
        for path, words in peer.looked.get("contents", {}).items():
            seen.setdefault(path, {})[peer.name] = words
    for path, by_host in seen.items():
        if len(set(by_host.values())) > 1:
            evidence = f"{path}: " + ", ".join(f"{host} has {words or 'nothing'}" for host, words in by_host.items())
            usual = Counter(by_host.values()).most_common(1)[0][0]
            source, other = (next(host for host, words in by_host.items() if (words == usual) is is_usual)
                             for is_usual in (True, False))  # fmt: skip
            fix = f"ssh {source} rsync -a --delete {shlex.quote(path)} {other}:{shlex.quote(path)}   # or a shared disk"
            yield will_fail("data", evidence, fix)
        elif len(by_host) > 1:
            yield ok("data", f"{path}: {next(iter(by_host.values()))} on each of {len(by_host)} hosts")


def _shared_directory(peers: Sequence[Peer], folder: Path) -> Iterator[Finding]:
    """A file that is written here must be seen by all hosts: checkpoints need a shared directory."""
    others = [peer for peer in peers if not peer.spec.is_local]
    if not others:
        return
    text = secrets.token_hex(16)
    try:
        with tempfile.NamedTemporaryFile("w", prefix=".shoal-doctor-", dir=folder.resolve()) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            for peer in others:
                peer.ask(see=file.name, text=text)
            answers = {peer.name: peer.answer(LINK_SECONDS) for peer in others}
    except OSError as error:
        yield will_fail("shared directory", f"{folder}: {error.strerror}", "cd SOMEWHERE_ELSE")
        return
    silent = [name for name, said in answers.items() if said is None]
    blind = [name for name, said in answers.items() if said is not None and not said["sees"]]
    if silent:
        evidence = f"{', '.join(silent)} gave no answer for {LINK_SECONDS:g} s, so {folder.resolve()} is not compared"
        yield warning("shared directory", evidence, f"ssh {silent[0]} ls {shlex.quote(str(folder.resolve()))}")
    if blind:
        evidence = f"{', '.join(blind)} does not see what this host writes to {folder.resolve()}"
        yield warning("shared directory", evidence, "--checkpoint.dir A_SHARED_DIRECTORY   # or s3://bucket/run")
    elif not silent:
        yield ok("shared directory", f"{folder.resolve()} is the same on all hosts")
