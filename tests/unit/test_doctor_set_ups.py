"""Set-ups that are really broken, and the check of `shoal doctor` that finds each: one list, for tests and docs.

Each is broken in a child process, with namespaces, mounts and limits of its own; then the doctor's own check of that
name runs in it. `python -m tests.unit.test_doctor_set_ups` writes the table of docs/doctor.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.config.load import load_recipe
from shoal.doctor import hosts
from shoal.doctor.bounded import run_checks
from shoal.doctor.checks import files
from shoal.doctor.finding import Finding, Level
from shoal.doctor.host import host_checks
from shoal.doctor.needs import Needs
from shoal.launch.hosts.hostlist import HostSpec
from tests.far_link import far_hosts
from tests.unit.test_doctor import LIBC, NEW_NETWORK, READ_ONLY, after, called, mount, only, own_mounts, own_name

PAGE = Path(__file__).parents[2] / "docs/doctor.md"
BEGIN, END = "<!-- set-ups: generated -->\n", "<!-- end of set-ups -->"
FREEZE, THAW = 0xC0045877, 0xC0045878
"""ioctls that stop all writes to a file system, and let them continue."""
PORT = 29517
Find = Callable[[Path], list[Finding]]


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """One broken thing."""

    what: str
    how: str
    """How the test breaks it."""
    check: str
    level: Level
    words: tuple[str, ...]
    """Of the evidence and the fix."""
    find: Find
    host: str = ""
    """The one that the finding is of, if it is another one."""


# ── this host ────────────────────────────────────────────────────────────────────────────────────────────────────────


def broken(check: str, breaking: Callable[[Path], object], ports: Iterable[int] = ()) -> Find:
    """The findings of the doctor's own checks of this name, in a process that has broken its surroundings."""

    def found() -> list[Finding]:
        return run_checks([each for each in host_checks(ports) if each.name == check])

    return lambda folder: after(lambda: breaking(folder), found)


def named_loopback(folder: Path) -> None:
    (folder / "hosts").write_text("127.0.1.1 node7\n")
    own_name(folder / "hosts")
    os.environ["SLURM_JOB_NUM_NODES"] = "2"


def unnamed(folder: Path) -> None:
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    own_name(folder / "hosts")
    called("unshare", NEW_NETWORK)  # no name server either


def few_ports(folder: Path) -> None:
    called("unshare", NEW_NETWORK)
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("50000 50099")


def held_port(folder: Path) -> None:
    called("unshare", NEW_NETWORK)
    holder = "import socket, time; s = socket.create_server(('', 29517)); print(flush=True); time.sleep(30)"
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # the group of the check is killed at its end, and this process with it


def small_shm(folder: Path) -> None:
    own_mounts()
    mount("tmpfs", Path("/dev/shm"), "tmpfs", 0, "size=64m")


def no_shm(folder: Path) -> None:
    own_mounts()
    mount("tmpfs", Path("/dev"), "tmpfs")


def limited(kind: int, value: int) -> Callable[[Path], None]:
    return lambda _: resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def variable(name: str, value: str) -> Callable[[Path], None]:
    return lambda folder: os.environ.__setitem__(name, value.format(folder))


def full_disk(folder: Path) -> None:
    own_mounts()
    mount("tmpfs", folder, "tmpfs", 0, "size=1m")
    with contextlib.suppress(OSError):
        (folder / "large").write_bytes(bytes(2**21))
    os.chdir(folder)


def read_only(folder: Path) -> None:
    own_mounts()
    mount("tmpfs", folder, "tmpfs", READ_ONLY, "size=1m")
    os.chdir(folder)


def frozen(seconds: float) -> Callable[[Path], None]:
    """A disk of its own in the working directory, whose writes wait for so long."""

    def breaking(folder: Path) -> None:
        image, disk = folder / "image", folder / "disk"
        image.touch()
        os.truncate(image, 2**31)
        disk.mkdir()
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        own_mounts()
        subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
        handle = os.open(disk, os.O_RDONLY)
        ready, done = os.pipe()
        if os.fork() == 0:  # it thaws the disk, whatever becomes of the others
            os.setsid()
            LIBC.ioctl(handle, ctypes.c_ulong(FREEZE), 0)
            os.write(done, b"1")
            time.sleep(seconds)
            LIBC.ioctl(handle, ctypes.c_ulong(THAW), 0)
            os._exit(0)
        os.read(ready, 1)
        os.close(handle)
        os.chdir(disk)

    return breaking


def hanging_disk(folder: Path) -> None:
    files.SECONDS = 0.5  # in this process alone: the test need not wait for the usual 4 s
    frozen(1.5)(folder)


def few_cores(folder: Path) -> list[Finding]:
    """Of a control group with a fifth of a core."""
    group = Path(f"/sys/fs/cgroup/cpu/shoal-doctor-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs the cpu controller of version 1: {error.strerror}")

    def breaking(_: Path) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)
        (group / "cpu.cfs_quota_us").write_text("20000")
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        return broken("cores", breaking)(folder)
    finally:
        for _ in range(100):  # the kernel counts a process for a moment after its end
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


ELSEWHERE = """
import json, sys
from shoal.doctor.bounded import run_checks
from shoal.doctor.host import host_checks
found = run_checks([each for each in host_checks(()) if each.name == sys.argv[1]])
print(json.dumps([each.as_mapping() for each in found]))
"""


def started_with(check: str, **variables: str) -> Find:
    """The findings of a check in an interpreter that is started with these variables: `{}` is a folder."""

    def find(folder: Path) -> list[Finding]:
        own = {name: value.format(folder) for name, value in variables.items()}
        command = [sys.executable, "-c", ELSEWHERE, check]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=True)
        return [Finding.parse(each) for each in json.loads(done.stdout)]

    return find


def read_only_cache(folder: Path) -> None:
    own_mounts()
    mount("tmpfs", folder, "tmpfs", READ_ONLY, "size=1m")
    os.environ["HF_HOME"] = str(folder)


# ── between hosts ────────────────────────────────────────────────────────────────────────────────────────────────────


def peer_with(**modules: str) -> Find:
    """The findings about this host and another one, a real process that finds these files first."""

    def find(folder: Path) -> list[Finding]:
        for name, text in modules.items():
            path = folder / name.replace("__", ".")
            path = path / "METADATA" if path.suffix == ".dist-info" else path
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        enter = folder / "enter"
        enter.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={folder}:$PYTHONPATH exec "$@"\n')
        enter.chmod(0o700)
        return hosts.check_hosts([HostSpec("localhost", 1), HostSpec("node7", 1)], f"{enter} {{host}}")

    return find


def other_code(folder: Path) -> list[Finding]:
    """Of a host whose working directory is at another commit."""
    here, there = folder / "here", folder / "there"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C"]
    for where, text in ((here, "1"), (there, "2")):
        subprocess.run(["git", "init", "-q", str(where)], check=True)
        (where / "train.py").write_text(text)
        subprocess.run([*git, str(where), "add", "-A"], check=True)
        subprocess.run([*git, str(where), "commit", "-q", "-m", "a"], check=True)
    with contextlib.chdir(here):
        return peer_with(sitecustomize__py=f"import os\nos.chdir({str(there)!r})\n")(folder)


def recipe_on(there: Callable[[Path, Path], str]) -> Find:
    """The findings about the data and the directories of a recipe on another host, which `there` makes different."""

    def find(folder: Path) -> list[Finding]:
        data, saves = folder / "data", folder / "saves"
        data.mkdir()
        saves.mkdir()
        (data / "a.txt").write_text("text of this host")
        words = [("data.source", str(data)), ("data.format", "text"), ("checkpoint.dir", str(saves))]
        needs = Needs(recipe=load_recipe(None, words), ranks=1, world_size=2)
        enter = folder / "enter"
        enter.write_text(f"#!/bin/sh\nshift\n{there(data, saves)}")
        enter.chmod(0o700)
        return hosts.check_hosts([HostSpec("localhost", 1), HostSpec("node7", 1)], f"{enter} {{host}}", needs)

    return find


def mounted(lines: str) -> str:
    """A shell script that runs a command behind other mounts."""
    return f'exec unshare -m sh -c \'{lines}; exec "$@"\' sh "$@"\n'


def other_data(data: Path, saves: Path) -> str:
    return mounted(f"mount -t tmpfs tmpfs {data} && echo other > {data}/a.txt")


def read_only_saves(data: Path, saves: Path) -> str:
    return mounted(f"mount -t tmpfs -o ro tmpfs {saves}")


def other_saves(data: Path, saves: Path) -> str:
    return mounted(f"mount -t tmpfs tmpfs {saves}")


LISTEN = """
import time
from shoal.doctor import link
print(link.listen(bytes(16)), flush=True)
time.sleep(60)
"""
REACH = """
import json, sys
from shoal.doctor import link
link.SECONDS = 1.0
print(json.dumps(link.reach(sys.argv[1], int(sys.argv[2]), bytes(16))))
"""


def over_link(**broken_by: int) -> Find:
    """The finding about a link of two network namespaces."""

    def find(folder: Path) -> list[Finding]:
        with far_hosts(round_trip=0.002, **broken_by) as far:  # type: ignore[arg-type]
            (here, _), (there, address) = far.hosts
            command = ["ip", "netns", "exec", there, sys.executable, "-c", LISTEN]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                try:
                    assert server.stdout is not None
                    command = ["ip", "netns", "exec", here, sys.executable, "-c", REACH, address]
                    command.append(server.stdout.readline())
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                finally:
                    server.kill()
        found = json.loads(done.stdout)
        return [hosts._broken("node7", "node8", found)] if found["failed"] else []

    return find


FAIL, WARNING = Level.FAIL, Level.WARNING
SET_UPS = (
    SetUp(what="the host's name is the loopback, in a job of two nodes", how="own `/etc/hosts`", check="host name",
          level=WARNING, words=("node7 resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME="),
          find=broken("host name", named_loopback)),
    SetUp(what="the host's name does not resolve", how="no name server", check="host name", level=WARNING,
          words=("node7 does not resolve",), find=broken("host name", unnamed)),
    SetUp(what="an interface that does not exist", how="`GLOO_SOCKET_IFNAME=eth99`", check="interfaces", level=FAIL,
          words=("GLOO_SOCKET_IFNAME=eth99",), find=broken("interfaces", variable("GLOO_SOCKET_IFNAME", "eth99"))),
    SetUp(what="the loopback is down", how="a network namespace", check="loopback", level=FAIL,
          words=("ip link set lo up",), find=broken("loopback", lambda _: called("unshare", NEW_NETWORK))),
    SetUp(what="100 free ports", how="`ip_local_port_range`", check="ephemeral ports", level=WARNING,
          words=("100 ports (50000 to 50099)", "sysctl -w"), find=broken("ephemeral ports", few_ports)),
    SetUp(what="a port that another process holds", how="a server at it", check="port", level=FAIL,
          words=(f"{PORT} is taken by process", "MASTER_PORT="), find=broken("port", held_port, (PORT,))),
    SetUp(what="`/dev/shm` of 64 MiB", how="a tmpfs", check="shared memory", level=WARNING,
          words=("64 MiB, the default of Docker", "shm-size"), find=broken("shared memory", small_shm)),
    SetUp(what="no `/dev/shm`", how="a `/dev` without it", check="shared memory", level=FAIL,
          words=("No such file", "mount -t tmpfs"), find=broken("shared memory", no_shm)),
    SetUp(what="64 open files", how="`ulimit -Sn 64`", check="open files", level=WARNING,
          words=("64, at most", "ulimit -n"),
          find=broken("open files", limited(resource.RLIMIT_NOFILE, 64))),
    SetUp(what="8 GiB of addresses", how="`ulimit -v`", check="limits", level=WARNING,
          words=("ulimit -v is 8.0 GiB", "ulimit -v unlimited"),
          find=broken("limits", limited(resource.RLIMIT_AS, 2**33))),
    SetUp(what="a fifth of a core", how="a control group's quota", check="cores", level=WARNING,
          words=("cpu.max is 0.2 of",),
          find=few_cores),
    SetUp(what="more threads than cores", how="`OMP_NUM_THREADS=512`", check="cores", level=WARNING,
          words=("OMP_NUM_THREADS=512",), find=broken("cores", variable("OMP_NUM_THREADS", "512"))),
    SetUp(what="a full disk", how="a tmpfs that is full", check="working directory", level=FAIL,
          words=("No space left on device", "--run.dir"), find=broken("working directory", full_disk)),
    SetUp(what="a directory that cannot be written", how="a mount that is read-only", check="working directory",
          level=FAIL,
          words=("Read-only file system", "--run.dir"), find=broken("working directory", read_only)),
    SetUp(what="a slow disk", how="ext4, frozen for 1.5 s", check="working directory", level=WARNING,
          words=("s to sync 4 KiB", "--run.dir"), find=broken("working directory", frozen(1.5))),
    SetUp(what="a disk that hangs", how="ext4, frozen", check="working directory", level=FAIL,
          words=("the file system hangs", "--run.dir"), find=broken("working directory", hanging_disk)),
    SetUp(what="temporary files that go elsewhere", how="`TMPDIR` without a directory", check="temporary files",
          level=WARNING, words=("cannot be used", "unset TMPDIR"),
          find=broken("temporary files", variable("TMPDIR", "{}/none"))),
    SetUp(what="a locale without other letters", how="`LC_ALL=C`, which Python may not replace", check="locale",
          level=WARNING, words=("text is read as", "LC_ALL=C)", "export LC_ALL=C.UTF-8"),
          find=started_with("locale", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")),
    SetUp(what="a cache of models that cannot be written", how="a mount that is read-only", check="HF cache",
          level=WARNING, words=("Read-only file system", "export HF_HOME="),
          find=broken("HF cache", read_only_cache)),
    SetUp(what="no network, and no model", how="`HF_HUB_OFFLINE=1` and an empty cache", check="HF cache",
          level=WARNING, words=("HF_HUB_OFFLINE is set, and", "unset HF_HUB_OFFLINE"),
          find=started_with("HF cache", HF_HUB_OFFLINE="1", HF_HUB_CACHE="{}/none")),
    SetUp(what="another commit on a host", how="two repositories", check="versions", level=WARNING,
          words=("code: localhost has", "node7 has", "ssh node7 git -C", "checkout"), find=other_code),
    SetUp(what="another transformers on a host", how="a real process that finds transformers 4.0.0", check="versions",
          level=WARNING, words=("transformers: ", "node7 has 4.0.0", "pip install 'transformers=="),
          find=peer_with(**{"transformers-4__0__0__dist-info": "Metadata-Version: 2.1\nName: transformers\n"
                                                               "Version: 4.0.0\n"})),
    SetUp(what="other data on a host", how="a mount of the other host", check="data", level=FAIL,
          words=("localhost has 1 file of 17 bytes, node7 has 1 file of 6 bytes", "rsync -a"),
          find=recipe_on(other_data)),
    SetUp(what="checkpoints that a host cannot write", how="a mount that is read-only there", check="checkpoints",
          level=FAIL, words=("Read-only file system", "--checkpoint.dir"), find=recipe_on(read_only_saves),
          host="node7"),
    SetUp(what="checkpoints that hosts do not share", how="a mount of the other host", check="shared directory",
          level=WARNING, words=("node7 does not see what this host writes to", "--checkpoint.dir A_SHARED_DIRECTORY"),
          find=recipe_on(other_saves)),
    SetUp(what="another torch on a host", how="a real process that finds torch 2.4.0", check="versions", level=FAIL,
          words=("node7 has 2.4.0", "pip install 'torch=="),
          find=peer_with(**{"torch-2__4__0__dist-info": "Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n"})),
    SetUp(what="clocks that are 15 minutes apart", how="a real process whose clock is ahead", check="clock",
          level=WARNING,
          words=("the clock of node7 is 900 s ahead", "set-ntp true"),
          find=peer_with(sitecustomize__py="import time\nreal = time.time\ntime.time = lambda: real() + 900\n")),
    SetUp(what="a firewall that opens one port", how="a link between namespaces that drops other ports",
          check="connections", level=FAIL, words=("cannot connect to a free port", "no answer for 1 s", "ufw allow"),
          find=over_link(only_port=PORT)),
    SetUp(what="packets of full size are lost (MTU)", how="a link that drops packets above 1,000 bytes",
          check="connections", level=FAIL, words=("4 MiB do not arrive", "mtu 1500"), find=over_link(largest=1000)),
)  # fmt: skip


def table() -> str:
    """The list as Markdown."""
    rows = [f"| {each.what} | {each.how} | {each.check} | {each.level.value} |\n" for each in SET_UPS]
    return "| broken | how | check | level |\n|---|---|---|---|\n" + "".join(rows)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make namespaces and mounts")
@pytest.mark.parametrize("set_up", SET_UPS, ids=lambda each: each.what.replace(" ", "-"))
def test_a_broken_set_up_is_found(set_up: SetUp, tmp_path: Path) -> None:
    if "ext4" in set_up.how and not (shutil.which("mkfs.ext4") and os.path.exists("/dev/loop-control")):
        pytest.skip("needs mkfs.ext4 and /dev/loop-control")
    found = [each for each in set_up.find(tmp_path) if each.check == set_up.check and each.host in ("", set_up.host)]
    only(found, set_up.level, *set_up.words)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make namespaces")
def test_a_sound_link_has_no_finding(tmp_path: Path) -> None:
    assert over_link()(tmp_path) == []


def test_the_page_lists_every_set_up() -> None:
    """Written by `python -m tests.unit.test_doctor_set_ups`."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    assert rest.partition(END)[0] == table()
    assert len(SET_UPS) >= 15
    assert len({each.what for each in SET_UPS}) == len(SET_UPS)


def written() -> Iterator[str]:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    yield from (before, BEGIN, table(), END, rest.partition(END)[2])


if __name__ == "__main__":
    PAGE.write_text("".join(written()))
