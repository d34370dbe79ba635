"""Checks of this host's memory: shared memory, the control group, open files and other limits of a process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from shoal.doctor.bounded import Check
from shoal.doctor.finding import GIB, MIB, Finding, ok, size, warning, will_fail
from shoal.launch import cgroup

SHM = Path("/dev/shm")
DOCKERS = 64 * MIB
"""The size of /dev/shm in a container of Docker without --shm-size."""
FEW_FILES = 1024
"""Open files below which loaders and process groups of a few ranks run out."""
FEW_PROCESSES = 512
"""Processes and threads; one rank has 20 to 60 threads."""
LITTLE = GIB
"""Available memory below which even a small run is likely to be killed."""


def checks() -> Iterator[Check]:
    """The checks of the memory of this host."""
    yield Check("shared memory", shared_memory, 1.0)
    yield Check("memory", memory)
    yield Check("out-of-memory kills", kills)
    yield Check("open files", open_files)
    yield Check("limits", limits)


def shared_memory(path: Path = SHM) -> Iterator[Finding]:
    """Loaders pass batches through shared memory. Where it is full, a loader ends with "Bus error"."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        yield will_fail("shared memory", f"{path}: {error.strerror}", f"sudo mount -t tmpfs -o size=8G tmpfs {path}")
        return
    if not os.access(path, os.W_OK):
        yield will_fail("shared memory", f"{path} is not writable for this user", f"sudo chmod 1777 {path}")
        return
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if total <= DOCKERS:
        whose = ", the default of Docker" if total == DOCKERS else ""
        evidence = f"{path} has {size(total)}{whose}; loaders die of a bus error when it is full"
        yield warning("shared memory", evidence, larger_shm("8g"))
    elif free < DOCKERS:
        yield warning(
            "shared memory", f"{path} has {size(free)} free of {size(total)}", f"ls -la {path}   # and remove"
        )
    else:
        yield ok("shared memory", f"{path} has {size(free)} free of {size(total)}")


def larger_shm(amount: str) -> str:
    """The command that makes /dev/shm larger."""
    mount = f"sudo mount -o remount,size={amount} {SHM}"
    in_container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    return f"docker run --shm-size={amount} ..." if in_container else f"{mount}   # in Docker: --shm-size={amount}"


def available() -> tuple[int, str]:
    """Bytes that new processes may use, and the limit that says so. 0: unknown."""
    info = meminfo()
    host = info.get("MemAvailable", 0)
    group = cgroup.room()
    if group is not None and (not host or group[0] < host):
        return group[0], f"the control group's limit of {size(group[1])}"
    return host, f"{size(info.get('MemTotal', 0))} of this host" if host else ""


def memory() -> Iterator[Finding]:
    """A control group may allow less than the host has."""
    free, where = available()
    if not where:
        return
    evidence = f"{size(free)} available of {where}"
    if free < LITTLE:
        yield warning("memory", evidence, "ps aux --sort -rss | head   # and end what is not needed")
    else:
        yield ok("memory", evidence)
    if _read_int("/proc/sys/vm/overcommit_memory") == 2:
        evidence = "vm.overcommit_memory=2: forks of large processes and pinned memory are rejected"
        yield warning("memory", evidence, "sudo sysctl -w vm.overcommit_memory=0")


def kills() -> Iterator[Finding]:
    """The kernel counts the processes that it has killed in this control group."""
    number = cgroup.oom_kills()
    if number:
        evidence = f"the kernel has killed processes of this control group for lack of memory: {number:,}"
        yield warning("out-of-memory kills", evidence, "shoal plan MODEL --cluster here   # which plans fit")
    elif number is not None:
        yield ok("out-of-memory kills", "none in this control group")


def open_files(needed: int = FEW_FILES) -> Iterator[Finding]:
    """Sockets between ranks, files of data and tensors of loaders are open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    shown = f"{_amount(soft)}, at most {_amount(hard)}"
    if soft != infinite and soft < needed:
        can_raise = hard == infinite or hard >= needed
        fix = f"ulimit -n {max(needed, 65536) if hard == infinite else max(needed, min(hard, 65536))}"
        fix = fix if can_raise else "echo '* hard nofile 65536' | sudo tee -a /etc/security/limits.conf   # then log in"
        evidence = f"{shown}; {needed:,} are needed"
        kind = warning if needed == FEW_FILES else will_fail
        yield kind("open files", evidence, fix)
    else:
        yield ok("open files", shown)


def limits() -> Iterator[Finding]:
    """Limits of a process that end runs with messages that name something else."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        evidence = f"ulimit -v is {size(address_space)}: torch and CUDA reserve far more addresses than they use"
        yield warning("limits", evidence, "ulimit -v unlimited")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        yield warning("limits", f"ulimit -l is {size(locked)}: InfiniBand registers memory", "ulimit -l unlimited")
    most, by = _most_processes()
    if most is not None and most < FEW_PROCESSES:
        fix = "ulimit -u unlimited" if by == "ulimit -u" else "docker run --pids-limit=-1 ...   # or a larger pids.max"
        yield warning("limits", f"only {most:,} processes and threads ({by})", fix)
    elif most is not None:
        yield ok("limits", f"{most:,} processes and threads ({by})")


def _most_processes() -> tuple[int | None, str]:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    found = {} if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else {"ulimit -u": soft}
    group = cgroup.most_processes()
    if group is not None:
        found["pids.max of the control group"] = group
    by = min(found, key=lambda name: found[name], default="")
    return found.get(by), by


def meminfo() -> dict[str, int]:
    """Key of /proc/meminfo → bytes."""
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdecimal()}


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
