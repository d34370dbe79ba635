"""A Slurm cluster of two virtual nodes on this machine, as child processes: no systemd, no cgroups, keys of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
EnforcePartLimits=ALL
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdTimeout=10
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=2000
PartitionName=main Nodes=n1,n2 Default=YES State=UP PriorityTier=1 GraceTime=20 MaxTime=1-0
PartitionName=urgent Nodes=n1,n2 State=UP PriorityTier=2 PreemptMode=OFF
"""
"""A requeued job waits for as long as a credential lives (cred_expire): 120 s by default, and 5 is the least."""


@dataclass
class Cluster:
    """The daemons of a cluster."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """Variables with which Slurm's programs find this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            environ = {**os.environ, **self.env}
            self.daemons[name] = subprocess.Popen(words, stdout=log, stderr=log, env=environ, start_new_session=True)

    def start_node(self, name: str) -> None:
        self.start(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def call(self, *words: str) -> str:
        ended = subprocess.run(words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon and all processes that it has started, as a machine that loses its power does."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        for process in Path("/proc").glob("[0-9]*"):
            if f"SLURMD_NODENAME={name}\0".encode() in _read(process / "environ") or _is_step_of(process, name):
                os.kill(int(process.name), 9)

    def stop(self) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            daemon.wait(30)


def _is_step_of(process: Path, node: str) -> bool:
    return b"slurmstepd" in _read(process / "cmdline") and f"/spool/{node}".encode() in _read(process / "environ")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster whose two nodes are idle."""
    cluster = Cluster(folder)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    ports = dict(zip(("controller", "first", "second"), _free_ports(3), strict=True))
    cluster.conf.write_text(CONF.format(host=socket.gethostname(), folder=folder, **ports))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    try:
        own = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        cluster.start("munged", "munged", "--force", "--foreground", f"--socket={folder}/munge.socket", *own)
        cluster.start("slurmctld", "slurmctld", "-D", "-i", "-f", str(cluster.conf))
        for name in ("n1", "n2"):
            cluster.start_node(name)
        _wait_for_nodes(cluster)
        yield cluster
    finally:
        cluster.stop()


def _wait_for_nodes(cluster: Cluster) -> None:
    deadline = time.monotonic() + 60
    while True:
        found = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"],
            env={**os.environ, **cluster.env}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if found.stdout.split() == ["idle", "idle"]:
            return
        logs = {path.name: path.read_text()[-1000:] for path in cluster.folder.glob("*.log")}
        assert time.monotonic() < deadline, (found, logs)
        time.sleep(0.2)


def missing() -> list[str]:
    """The programs that a cluster needs, and that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return found
