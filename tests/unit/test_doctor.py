"""`shoal doctor` finds set-ups that are really broken: limits, mounts, namespaces, files, ports and variables. The list
of them is test_doctor_set_ups.py; here are their variants, the harness, and what cannot be broken here (GPUs).

Each check runs in a child process, as in the doctor, and the child breaks its own surroundings first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.doctor.bounded import Check, run_checks
from shoal.doctor.checks import cores, environment, files, gpu, memory, network, versions
from shoal.doctor.checks.nvml import Driver, Gpu, NvmlError, read_driver
from shoal.doctor.finding import Finding, Level, ok
from shoal.doctor.host import host_checks
from shoal.launch import cgroup
from tests.dist.test_pool import is_alive, wait_until

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAMES, NEW_NETWORK = 0x20000, 0x4000000, 0x40000000
PRIVATE, READ_ONLY, BIND, REMOUNT = 0x40000 | 0x4000, 1, 0x1000, 0x20

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make namespaces and mounts")


def after(breaking: Callable[[], object], check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check in a process that has broken its surroundings."""

    def both() -> Iterator[Finding]:
        try:
            breaking()
        except PermissionError as error:
            yield ok("not permitted", str(error))
        else:
            yield from check()

    found = run_checks([Check("test", both, 10.0)])
    if found and found[0].check == "not permitted":
        pytest.skip(f"needs the right to do so: {found[0].evidence}")
    return found


def only(findings: list[Finding], level: Level, *words: str) -> Finding:
    """The one finding that is not ok; its level and words in its evidence and fix."""
    [found] = [each for each in findings if each.level is not Level.OK]
    assert found.level is level, found
    assert [word for word in words if word not in f"{found.evidence}\n{found.fix}"] == [], found
    return found


def called(name: str, *arguments: Any) -> None:
    """Call a function of the C library, and raise its error."""
    if getattr(LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    called("mount", source.encode(), str(target).encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def own_mounts() -> None:
    called("unshare", NEW_MOUNTS)
    mount("none", Path("/"), flags=PRIVATE)


def own_name(hosts: Path) -> None:
    """Another host name, and another /etc/hosts."""
    own_mounts()
    called("unshare", NEW_NAMES)
    socket.sethostname("node7")
    mount(str(hosts), Path("/etc/hosts"), flags=BIND)


def set_variable(name: str, value: str) -> Callable[[], None]:
    return lambda: os.environ.__setitem__(name, value)


@pytest.mark.alone
def test_a_sound_host_has_no_failure_and_takes_seconds() -> None:
    began = time.perf_counter()
    found = run_checks(list(host_checks([])))
    seconds = time.perf_counter() - began
    is_busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)  # then a check may exceed its limit
    assert [each for each in found if each.level is Level.FAIL and not (is_busy and "within" in each.evidence)] == []
    assert [each.check for each in found if "the check itself failed" in each.evidence] == []
    assert seconds < 5 or is_busy
    assert all(each.fix for each in found if each.level is not Level.OK)


# ── the harness ──────────────────────────────────────────────────────────────────────────────────────────────────────


def hang() -> Iterator[Finding]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
    yield from ()


def crash() -> Iterator[Finding]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def raises() -> Iterator[Finding]:
    raise ValueError("no such thing")
    yield


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_check_that_hangs_crashes_or_raises_hides_no_other() -> None:
    sound, before = Check("loopback", network.loopback), children()
    began = time.perf_counter()
    found = run_checks([Check("a", hang, 0.2), Check("b", crash), Check("c", raises), sound])
    assert time.perf_counter() - began < 30  # of 60
    assert [(each.check, each.level) for each in found] == [
        ("a", Level.WARNING),
        ("b", Level.WARNING),
        ("c", Level.WARNING),
        ("loopback", Level.OK),
    ]
    assert "0.2 s" in found[0].evidence
    assert "ended early" in found[1].evidence
    assert "no such thing" in found[2].evidence
    wait_until(lambda: not any(is_alive(int(pid)) for pid in children() - before), 5)  # nothing is left


def test_hanging_file_systems_and_drivers_will_fail(tmp_path: Path) -> None:
    slow_files = files.directory_check("checkpoints", tmp_path, "--checkpoint.dir OTHER")
    slow_driver = next(gpu.checks())
    of_driver = Level.FAIL if gpu.device_files() else Level.WARNING
    for each, word, level in ((slow_files, str(tmp_path), Level.FAIL), (slow_driver, "NVML", of_driver)):
        only(run_checks([Check(each.name, hang, 0.1, each.on_timeout)]), level, word, "0.1 s")


# ── network ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@is_root
def test_a_name_that_is_the_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 node7\n")
    found = after(lambda: own_name(hosts), network.host_name)
    only(found, Level.HINT, "node7 resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME=")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    only(after(lambda: own_name(hosts), network.host_name), Level.WARNING, "127.0.1.1")


def test_interfaces_that_do_not_exist() -> None:
    for value in ("^lo,docker0", "eth99"):
        found = after(set_variable("GLOO_SOCKET_IFNAME", value), network.interfaces)
        only(found, Level.FAIL, f"GLOO_SOCKET_IFNAME={value}", "one name, without ^")
    only(after(set_variable("NCCL_SOCKET_IFNAME", "ib7"), network.interfaces), Level.FAIL, "NCCL_SOCKET_IFNAME=ib7")
    found = after(set_variable("NCCL_SOCKET_IFNAME", "^docker0"), network.interfaces)
    assert all(each.level in (Level.OK, Level.HINT) for each in found)


@is_root
def test_several_interfaces_are_listed_with_the_one_to_set() -> None:
    def breaking() -> None:
        called("unshare", NEW_NETWORK)
        lines = ["link add w0 type veth peer name w1", "link set w0 up", "link set w1 up"]
        lines += ["address add 10.1.0.1/24 dev w0", "address add 10.2.0.1/24 dev w1", "route add default dev w1"]
        subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)

    only(after(breaking, network.interfaces), Level.HINT, "w0 10.1.0.1", "w1 10.2.0.1", "GLOO_SOCKET_IFNAME=w1")


def _unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_taken_port_and_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = run_checks([Check("port", lambda: network.port_free(port))])
    only(found, Level.FAIL, f"{port} is taken by process {os.getpid()}", "export MASTER_PORT=")
    free = [next(iter(network.port_free(_unused_port()))).level for _ in range(5)]
    assert Level.OK in free  # another process may take one in between


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@is_root
@pytest.mark.parametrize(
    ("options", "level", "words"),
    [
        ("size=64m", Level.WARNING, ("64 MiB, the default of Docker", "shm-size")),
        ("size=1m", Level.WARNING, ("has 1 MiB; loaders", "shm-size")),
    ],
)
def test_small_shared_memory(options: str, level: Level, words: tuple[str, ...]) -> None:
    def breaking() -> None:
        own_mounts()
        mount("tmpfs", Path("/dev/shm"), "tmpfs", 0, options)

    only(after(breaking, memory.shared_memory), level, *words)


def test_shared_memory_that_is_missing(tmp_path: Path) -> None:
    only(list(memory.shared_memory(tmp_path / "shm")), Level.FAIL, "No such file", "mount -t tmpfs")


def test_few_open_files() -> None:
    def soft() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    only(after(soft, memory.open_files), Level.WARNING, "64, at most", "ulimit -n")
    hard = after(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)), lambda: memory.open_files(300))
    only(hard, Level.FAIL, "300 are needed", "limits.conf")


@pytest.fixture(params=["version 1", "version 2"])
def group(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the files of a control group, as each version of the kernel has them."""
    is_old = request.param == "version 1"
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n1:cpu,cpuacct:/job\n8:pids:/job\n" if is_old else "0::/job\n")

    def write(controller: str, old: str, new: str, text: str, *, new_text: str = "") -> None:
        folder = tmp_path / controller / "job" if is_old else tmp_path / "job"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / (old if is_old else new)).write_text(text if is_old else new_text or text)

    for name in ("limit", "room", "oom_kills", "most_processes", "cores"):
        function = getattr(cgroup, name)
        monkeypatch.setattr(cgroup, name, lambda function=function: function(tmp_path, own))
    return write


def test_the_limits_of_a_control_group(group: Callable[..., None]) -> None:
    group("memory", "memory.limit_in_bytes", "memory.max", f"{2**30}\n")
    group("memory", "memory.usage_in_bytes", "memory.current", f"{900 * 2**20}\n")
    group("memory", "memory.stat", "memory.stat", f"inactive_file {400 * 2**20}\n")
    group("memory", "memory.oom_control", "memory.events", "under_oom 0\noom_kill 3\n")
    group("pids", "pids.max", "pids.max", "100\n")
    only(list(memory.memory()), Level.WARNING, "524 MiB available of the control group's limit of 1.0 GiB")
    only(list(memory.kills()), Level.WARNING, "lack of memory: 3")
    only(list(memory.limits()), Level.WARNING, "100 processes and threads (pids.max", "--pids-limit")


def test_the_cores_of_a_control_group(group: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    group("cpu", "cpu.cfs_quota_us", "unused", "50000\n")
    group("cpu", "cpu.cfs_period_us", "cpu.max", "100000\n", new_text="50000 100000\n")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    only(list(cores.cores()), Level.WARNING, "cpu.max is 0.5 of 8 cores", "--cpus=8")


def test_limits_of_the_groups_around_the_own_one(group: Callable[..., None], tmp_path: Path) -> None:
    """A group of its own without limits, in one of the job that has them: what all of the job uses counts."""
    group("memory", "memory.limit_in_bytes", "memory.max", f"{64 * 2**30}\n")
    group("memory", "memory.usage_in_bytes", "memory.current", f"{60 * 2**30}\n")
    cached = f"inactive_file {2**30}\n"
    group("memory", "memory.stat", "memory.stat", f"inactive_file 0\ntotal_{cached}", new_text=cached)
    group("cpu", "cpu.cfs_quota_us", "unused", "200000\n")
    group("cpu", "cpu.cfs_period_us", "cpu.max", "100000\n", new_text="200000 100000\n")
    group("pids", "pids.max", "pids.max", "100\n")
    own = tmp_path / "own"
    own.write_text(own.read_text().replace("/job", "/job/task"))
    is_old = (tmp_path / "memory").is_dir()
    for controller, name, text in (
        ("memory", "memory.usage_in_bytes" if is_old else "memory.current", f"{2**30}\n"),
        ("cpu", "cpu.cfs_quota_us" if is_old else "cpu.max", "-1\n" if is_old else "max 100000\n"),
        ("cpu", "cpu.cfs_period_us" if is_old else "unused", "100000\n"),
        ("pids", "pids.max", "max\n"),
    ):
        folder = tmp_path / controller / "job/task" if is_old else tmp_path / "job/task"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert (cgroup.cores(), cgroup.most_processes(), cgroup.limit()) == (2.0, 100, 64 * 2**30)
    assert cgroup.room() == (5 * 2**30, 64 * 2**30)


KILLED_BESIDE = """
import os, subprocess, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
subprocess.run([sys.executable, "-c", "x = bytearray(2**28)"])
from shoal.doctor.checks import memory
from shoal.doctor.finding import Level
for each in (*memory.kills(), *memory.memory()):
    if each.level is not Level.OK:
        print(each.evidence)
"""


@is_root
def test_a_real_kill_in_a_control_group() -> None:
    folder = Path(f"/sys/fs/cgroup/memory/shoal-doctor-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the memory controller of version 1: {error.strerror}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(64 * 2**20))
        ended = subprocess.run(  # a process of its own: a fork of this one may be larger than what is to be killed
            [sys.executable, "-c", KILLED_BESIDE, str(folder)], capture_output=True, text=True, check=False
        )
    finally:
        for _ in range(100):  # the kernel counts a process for a moment after its end
            time.sleep(0.02)
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
    assert ended.returncode == 0, ended.stderr
    kills, left = ended.stdout.splitlines()
    assert kills.endswith("lack of memory: 1")
    assert "the control group's limit of 64 MiB" in left


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def writable(path: Path, needed: int = 0) -> Callable[[], Iterator[Finding]]:
    return lambda: files.writable("checkpoints", path, "--checkpoint.dir OTHER", needed)


def open_for_all(folder: Path) -> None:
    """Let other users enter a folder of pytest."""
    os.chmod(folder, 0o755)
    for parent in [each for each in folder.parents if each.stat().st_uid == os.geteuid()]:
        if not parent.stat().st_mode & 0o001:
            os.chmod(parent, parent.stat().st_mode | 0o011)


@is_root
def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    def read_only() -> None:
        own_mounts()
        mount("tmpfs", tmp_path, "tmpfs", READ_ONLY, "size=1m")

    only(after(read_only, writable(tmp_path / "new")), Level.FAIL, "Read-only file system", "would be made in it")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    open_for_all(tmp_path)
    os.chown(closed, 65534, 65534)
    only(after(lambda: os.setuid(65534), writable(closed)), Level.FAIL, "Permission denied", "--checkpoint.dir OTHER")


@is_root
def test_directories_behind_one_that_cannot_be_entered(tmp_path: Path) -> None:
    """`Path.exists` raises there: it was a warning to report a bug, of a check that had failed itself."""
    closed = tmp_path / "closed"
    (closed / "in").mkdir(parents=True)
    closed.chmod(0o700)
    open_for_all(tmp_path)
    other_user = lambda: os.seteuid(65534)  # noqa: E731
    only(after(other_user, writable(closed / "in/checkpoints")), Level.FAIL, "Permission denied", "would be made in it")
    assert after(lambda: (os.environ.update(XDG_CACHE_HOME=str(closed)), other_user()), environment_checks) == []


def environment_checks() -> Iterator[Finding]:
    return (each for each in run_checks(list(environment.checks())) if each.check == "HF cache")


@is_root
def test_a_full_disk(tmp_path: Path) -> None:
    def small() -> None:
        own_mounts()
        mount("tmpfs", tmp_path, "tmpfs", 0, "size=1m")

    only(after(small, writable(tmp_path)), Level.WARNING, "has 1 MiB free")
    only(after(small, writable(tmp_path, 2**31)), Level.FAIL, "2.0 GiB are needed")


def test_temporary_files_that_go_elsewhere(tmp_path: Path) -> None:
    def breaking() -> None:
        os.environ["TMPDIR"], tempfile.tempdir = str(tmp_path / "none"), None

    words = (f"TMPDIR={tmp_path}/none cannot be used, and temporary files go to /", "unset TMPDIR")
    only(after(breaking, files.ignored_tmpdir), Level.WARNING, *words)
    (tmp_path / "none").mkdir()
    assert after(breaking, files.ignored_tmpdir) == []


def test_a_check_of_a_directory_leaves_nothing(tmp_path: Path) -> None:
    [found] = files.writable("checkpoints", tmp_path / "a" / "b", "", 4096)
    assert found.level is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    def data(path: Path) -> list[Finding]:
        return list(files.readable("data", path, f"ls -la {path}"))

    only(data(tmp_path / "none.bin"), Level.FAIL, "No such file", "ls -la")
    only(data(tmp_path), Level.FAIL, "has no files")
    (tmp_path / "empty.txt").write_text("")
    only(data(tmp_path), Level.FAIL, "is empty")
    (tmp_path / "full.txt").write_text("text")
    assert data(tmp_path)[0].level is Level.OK


# ── cores, clock, stacks ─────────────────────────────────────────────────────────────────────────────────────────────


def test_few_cores_and_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = after(set_variable("OMP_NUM_THREADS", "512"), cores.cores)
    only(found, Level.WARNING, "OMP_NUM_THREADS=512", "export OMP_NUM_THREADS=")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = after(lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}), cores.cores)
    only(found, Level.WARNING, "1 of 8 cores in the affinity mask", "taskset -cp 0-7 $$")


def test_a_clock_that_was_never_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)
    only(list(cores.clock()), Level.WARNING, "it says", "timedatectl")


def test_a_clock_of_which_nothing_is_known_has_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, levels in ((-1, []), (0, [Level.OK]), (5, [Level.HINT])):
        library = type("Library", (), {"adjtimex": lambda _, __, code=code: code})
        monkeypatch.setattr(ctypes, "CDLL", lambda _, library=library: library())
        assert [each.level for each in cores.clock()] == levels


@pytest.mark.parametrize(
    ("scope", "capabilities", "level"),
    [
        ("0", "0", Level.OK),
        ("1", "80000", Level.OK),
        ("1", "0", Level.HINT),  # root of a container, without CAP_SYS_PTRACE
        ("3", "1ffffffffff", Level.HINT),
    ],
)
def test_the_right_to_read_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str, capabilities: str, level: Level
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/py-spy")
    (tmp_path / "scope").write_text(f"{scope}\n")
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities:0>16}\n")
    (found,) = cores.stacks(tmp_path / "scope", tmp_path / "status")
    assert found.level is level, found


def test_stacks_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    only(list(cores.stacks()), Level.HINT, "py-spy is missing", "debug")


# ── GPUs and versions ────────────────────────────────────────────────────────────────────────────────────────────────

SOUND: dict[str, Any] = {"name": "H200", "memory": 140 * 2**30, "free": 139 * 2**30, "ecc_errors": 0}
SOUND |= {"remap_pending": False, "slowed_by": (), "temperature": 40, "utilization": 0}


def driver(cuda: tuple[int, int] = (99, 0), **changes: Any) -> Callable[[], Driver]:
    return lambda: Driver(version="570.1", cuda=cuda, gpus=(Gpu(**{**SOUND, **changes}),))


@pytest.fixture
def built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "torch_cuda", lambda: (13, 0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("built_for")
@pytest.mark.parametrize(
    ("read", "level", "words"),
    [
        (driver(cuda=(12, 2)), Level.FAIL, ("built for CUDA 13.0", "runs CUDA 12.2", "cu122")),
        (driver(ecc_errors=2), Level.FAIL, ("2 uncorrected memory errors", "nvidia-smi -r -i 0")),
        (driver(remap_pending=True), Level.WARNING, ("row of its memory", "nvidia-smi -r")),
        (driver(slowed_by=("hardware thermal slowdown",)), Level.WARNING, ("thermal slowdown, 40 °C", "cooling")),
        (driver(free=2**30), Level.WARNING, ("another program holds 139.0 GiB", "nvidia-smi -i 0")),
    ],
)
def test_sick_gpus(read: Callable[[], Driver], level: Level, words: tuple[str, ...]) -> None:
    only(list(gpu.gpus(read)), level, *words)


def test_drivers_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> Driver:
        raise NvmlError("Driver/library version mismatch")

    def missing() -> Driver:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert [each.level for each in gpu.gpus(missing)] == [Level.OK]
    assert gpu._hangs(3.0).level is Level.WARNING
    (tmp_path / "nvidia3").touch()  # as in a container that got --gpus device=3
    only(list(gpu.gpus(mismatch)), Level.FAIL, "version mismatch", "reboot")
    only(list(gpu.gpus(missing)), Level.FAIL, f"{tmp_path}/nvidia3 exists", "--gpus all")
    assert gpu._hangs(3.0).level is Level.FAIL
    monkeypatch.setattr(gpu, "torch_cuda", lambda: ())
    only(list(gpu.gpus(driver())), Level.WARNING, "built for CPUs alone", "pip install")


@pytest.mark.usefixtures("built_for")
def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    only(list(gpu.gpus(driver())), Level.FAIL, "'0,3' with 1 GPU", "CUDA_VISIBLE_DEVICES=0")


@pytest.mark.usefixtures("built_for")
def test_gpus_that_cuda_does_not_use_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Gpu(**{**SOUND, "free": 0, "ecc_errors": 2, "uuid": "GPU-11aa"})
    sound = Gpu(**{**SOUND, "uuid": "GPU-22bb"})
    read = lambda: Driver(version="570.1", cuda=(99, 0), gpus=(full, sound, full), apart=((0, 1), (0, 2)))  # noqa: E731
    for named, expected in (("1", [1]), ("GPU-22", [1]), (" 2, GPU-22bb", [2, 1]), ("1,7,0", [1]), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert gpu.visible(read().gpus) == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-22bb")
    assert {each.level for each in gpu.gpus(read)} == {Level.OK}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert [each.level for each in gpu.gpus(read) if each.check == "GPU pairs"] == [Level.OK]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-33cc")
    only(list(gpu.gpus(read)), Level.FAIL, "'GPU-33cc' with 3 GPUs", "export CUDA_VISIBLE_DEVICES=0,1,2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-44dd")
    assert gpu.visible(read().gpus) is None


def test_faults_in_the_log_of_the_kernel() -> None:
    log = "[1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    only(list(gpu.gpu_errors(log)), Level.WARNING, "Xid 79 of PCI:0000:3b:00", "dmesg")


class FakeNvml:
    """NVML's functions, as far as the doctor calls them; the pair of its first and its last GPU has no P2P.

    `p2p`: what the function of pairs returns, and its status of a pair with P2P.
    """

    def __init__(self, count: int = 1, p2p: tuple[int, int] = (0, 0)) -> None:
        self._count, self._p2p = count, p2p

    def __getattr__(self, name: str) -> Any:
        function = {
            "nvmlSystemGetDriverVersion": lambda text, _: setattr(text, "value", b"570.1"),
            "nvmlSystemGetCudaDriverVersion_v2": lambda number: setattr(number._obj, "value", 12080),
            "nvmlDeviceGetCount_v2": lambda number: setattr(number._obj, "value", self._count),
            "nvmlDeviceGetHandleByIndex_v2": lambda index, handle: setattr(handle._obj, "value", index.value + 1),
            "nvmlDeviceGetP2PStatus": self._read_p2p,
            "nvmlDeviceGetName": lambda _, text, __: setattr(text, "value", b"NVIDIA H200"),
            "nvmlDeviceGetUUID": lambda _, text, __: setattr(text, "value", b"GPU-11aa"),
            "nvmlDeviceGetMemoryInfo": lambda _, found: setattr(found._obj, "total", 2**37),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _, bits: setattr(bits._obj, "value", 0x48),
        }.get(name, lambda *_: None)
        return type("Function", (), {"__call__": lambda _, *arguments: function(*arguments) or 0})()

    def _read_p2p(self, one: Any, other: Any, _: int, status: Any) -> int:
        code, sound = self._p2p
        status._obj.value = 4 if (one.value, other.value) == (1, self._count) and not code and not sound else sound
        return code


def test_the_facts_of_nvml() -> None:
    found = read_driver(FakeNvml())
    assert (found.version, found.cuda, found.gpus[0].name) == ("570.1", (12, 8), "NVIDIA H200")
    assert found.gpus[0].uuid == "GPU-11aa"
    assert found.gpus[0].slowed_by == ("hardware slowdown", "hardware thermal slowdown")


@pytest.mark.usefixtures("built_for")
def test_gpus_that_cannot_read_each_other() -> None:
    found = read_driver(FakeNvml(4))
    assert (len(found.gpus), found.apart) == (4, ((0, 3),))
    pairs = [each for each in gpu.gpus(lambda: found) if each.check == "GPU pairs"]
    only(pairs, Level.WARNING, "GPUs 0 and 3 have no P2P, others have", "nvidia-smi topo -p2p r")
    pairs = [each for each in gpu.gpus(lambda: read_driver(FakeNvml(2))) if each.check == "GPU pairs"]
    only(pairs, Level.HINT, "no pair of the 2 GPUs has P2P")
    sound = replace(found, apart=())
    assert [each.level for each in gpu.gpus(lambda: sound) if each.check == "GPU pairs"] == [Level.OK]


@pytest.mark.usefixtures("built_for")
@pytest.mark.parametrize("p2p", [(3, 0), (0, 6)], ids=["the driver has no answer", "the driver says unknown"])
def test_pairs_of_which_nothing_is_known_have_no_finding(p2p: tuple[int, int]) -> None:
    found = read_driver(FakeNvml(2, p2p))
    assert found.apart is None
    assert [each for each in gpu.gpus(lambda: found) if each.check == "GPU pairs"] == []


@pytest.mark.parametrize(
    ("mems", "level", "words"),
    [("0-1", Level.OK, ()), ("0", Level.WARNING, ("cores of NUMA node 1, and memory of node 0 alone", "mems=0,1"))],
)
def test_cores_without_their_memory(tmp_path: Path, mems: str, level: Level, words: tuple[str, ...]) -> None:
    for node, owned in enumerate(("0-3", "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(f"{owned}\n")
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCpus_allowed_list:\t2-5\nMems_allowed_list:\t{mems}\n")
    (found,) = cores.numa(tmp_path, status)
    assert found.level is level
    assert all(word in f"{found.evidence} {found.fix}" for word in words)
    assert list(cores.numa(tmp_path / "node0", status)) == []


def test_the_code_of_a_folder_changes_with_every_change(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    assert versions.code_of(tmp_path) == ""
    (tmp_path / "train.py").write_text("1")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    commit = versions.code_of(tmp_path)
    assert len(commit) == 12
    (tmp_path / "train.py").write_text("2")
    assert versions.code_of(tmp_path).startswith(f"{commit}+")


def test_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    real = versions._installed
    monkeypatch.setattr(versions, "_installed", lambda name: "2.4.0" if name == "torch" else real(name))
    only(list(versions.versions()), Level.FAIL, "torch 2.4.0; shoal needs 2.", "pip install 'torch>=")


def test_the_cuda_of_torch_is_read_from_its_files() -> None:
    import torch

    expected = None if torch.version.cuda is None else tuple(map(int, torch.version.cuda.split(".")))
    assert gpu.torch_cuda() == (expected or ())


def test_another_nccl_than_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = versions._installed
    monkeypatch.setattr(versions, "_installed", lambda name: "2.30.4" if name.startswith("nvidia") else real(name))
    monkeypatch.setattr(versions, "loaded_nccl", lambda: "2.28.9")
    only(list(versions.versions()), Level.WARNING, "NCCL 2.28.9 would be loaded, but 2.30.4", "LD_LIBRARY_PATH")
