"""Checks of the cores that this process may use, of the clock, and of the right to read stacks."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.affinity import num_cores
from shoal.doctor.bounded import Check
from shoal.doctor.finding import Finding, counted, hint, ok, warning
from shoal.errors import to_install
from shoal.launch import cgroup

UNSYNCHRONIZED = 5
"""TIME_ERROR of adjtimex(2)."""
CAP_SYS_PTRACE = 1 << 19
NEVER = 3
"""Of ptrace_scope: no process may read another one, until a reboot."""
NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
OLDEST = 1767225600
"""2026: a clock before it was never set."""


def checks() -> Iterator[Check]:
    """The checks of cores, clock and stacks."""
    yield Check("cores", cores)
    yield Check("NUMA", numa)
    yield Check("clock", clock)
    yield Check("stacks", stacks)


def usable() -> tuple[float, str]:
    """Cores that this process may use, and what limits them."""
    mask = num_cores()
    quota = cgroup.cores()
    if quota is not None and quota < mask:
        return quota, f"the control group's cpu.max is {quota:g} of {counted(os.cpu_count() or mask, 'core')}"
    return mask, f"{mask} of {counted(os.cpu_count() or mask, 'core')} in the affinity mask"


def whole_cores() -> int:
    """The same as a whole number, at least 1."""
    return max(1, math.floor(usable()[0]))


def cores() -> Iterator[Finding]:
    """Launchers and containers pin processes to fewer cores than the host has."""
    number, why = usable()
    all_cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > number:
        evidence = f"OMP_NUM_THREADS={threads} is more than the {number:g} usable cores: threads wait for each other"
        yield warning("cores", evidence, f"export OMP_NUM_THREADS={whole_cores()}")
    elif number <= all_cores / 4:
        is_mask = "mask" in why
        fix = f"taskset -cp 0-{all_cores - 1} $$" if is_mask else f"docker run --cpus={all_cores} ...   # or cpu.max"
        yield warning("cores", why, fix)
    else:
        load = os.getloadavg()[0]
        busy = f"; load {load:.1f}: other programs compute" if load > 2 * number else ""
        yield hint("cores", why + busy, "top") if busy else ok("cores", why)


def numa(nodes: Path = NODES, status: Path = STATUS) -> Iterator[Finding]:
    """A container may have cores of a NUMA node without its memory: then every read goes to another node."""
    found = {int(each.name[4:]): _numbers(_text(each / "cpulist")) for each in nodes.glob("node[0-9]*")}
    if len(found) < 2:
        return
    allowed = _status(status)
    mine = _numbers(allowed.get("Cpus_allowed_list", ""))
    memory = _numbers(allowed.get("Mems_allowed_list", ""))
    computing = {node for node, owned in found.items() if owned & mine}
    far = sorted(computing - memory)
    if far:
        here = ", ".join(map(str, far))
        evidence = f"cores of NUMA node {here}, and memory of node {', '.join(map(str, sorted(memory)))} alone"
        both = ",".join(map(str, sorted(computing)))
        fix = f"docker run --cpuset-mems={both} ...   # or another cpuset of the job"
        yield warning("NUMA", f"{evidence}: every read is a remote one", fix)
    else:
        yield ok("NUMA", f"{len(found)} nodes; cores of {counted(len(computing), 'node')}, each with its memory")


def _numbers(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it.

    >>> sorted(_numbers("0-2,8"))
    [0, 1, 2, 8]
    """
    pairs = [part.strip().partition("-") for part in text.split(",") if part.strip()]
    return {number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)}


def _status(path: Path) -> dict[str, str]:
    """The lines of a process's status, by their names."""
    return dict(line.partition(":")[::2] for line in _text(path).splitlines())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def clock() -> Iterator[Finding]:
    """Clocks that differ between hosts confuse logs and torchrun's rendezvous. shoal's waits do not use them."""
    if time.time() < OLDEST:
        yield warning("clock", f"it says {time.strftime('%Y-%m-%d')}", "sudo timedatectl set-ntp true")
        return
    state = _clock_state()
    if state == UNSYNCHRONIZED:
        yield hint("clock", "not synchronized with a time server", "sudo timedatectl set-ntp true")
    elif state is not None:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M:%S %z"))


def _clock_state() -> int | None:
    """The answer of adjtimex(2), which changes nothing with modes=0; None: this process may not call it."""
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024)))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state


def stacks(yama: Path = YAMA, status: Path = STATUS) -> Iterator[Finding]:
    """py-spy reads the stack of a rank that does not answer; Yama may forbid it."""
    text = _text(yama).strip()
    scope = int(text) if text.isdecimal() else 0
    effective = int(_status(status).get("CapEff", "0"), 16)
    may_read = scope == 0 or (scope < NEVER and bool(effective & CAP_SYS_PTRACE))  # root of a container may lack it
    if shutil.which("py-spy") is None:
        yield hint(
            "stacks", "py-spy is missing: ranks that hold the GIL are named without a stack", to_install("debug")
        )
    elif not may_read:
        evidence = f"kernel.yama.ptrace_scope={scope}: py-spy may not read the stacks of other processes"
        fix = "sudo sysctl -w kernel.yama.ptrace_scope=0   # or docker run --cap-add SYS_PTRACE ..."
        if scope == NEVER:
            fix = "sudo grep -rs ptrace_scope /etc/sysctl.conf /etc/sysctl.d   # set 0 there, and reboot"
        yield hint("stacks", evidence, fix)
    else:
        yield ok("stacks", "py-spy may read the stacks of ranks")
