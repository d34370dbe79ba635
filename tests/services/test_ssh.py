"""`shoal train --hosts` through a real ssh, to a server in another network namespace. Run by `make test-ssh`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_hosts import SETTINGS, hosts, losses

__all__ = ["hosts"]  # a fixture

SOURCE = Path(__file__).parents[2] / "src"
SERVER = shutil.which("sshd") or "/usr/sbin/sshd"

pytestmark = pytest.mark.skipif(
    not os.environ.get("SHOAL_SERVICES"), reason="needs sshd (package openssh-server): make test-ssh"
)


@pytest.fixture
def ssh(hosts: list[tuple[str, str]], tmp_path: Path) -> Iterator[str]:
    """A command of ssh that knows the second host as `far`; its server runs there, with keys of its own."""
    (_, (network, address)) = hosts
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("server", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "sshd_config").write_text(
        f"Port 2222\nListenAddress {address}\nHostKey {folder}/server\nAuthorizedKeysFile {folder}/user.pub\n"
        f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nSetEnv PYTHONPATH={SOURCE}\n"
    )
    known = (folder / "server.pub").read_text()
    (folder / "known").write_text(f"[{address}]:2222 {known}")
    (folder / "config").write_text(
        f"Host far\n  HostName {address}\n  Port 2222\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking yes\n"
    )
    command = [SERVER, "-D", "-e", "-f", str(folder / "sshd_config")]
    server = subprocess.Popen(["ip", "netns", "exec", network, *command], stderr=subprocess.PIPE)
    yield f"ssh -F {folder}/config -o BatchMode=yes -o ConnectTimeout=6 {{host}}"
    server.terminate()
    server.communicate(timeout=10)


def start(network: str, cwd: Path, *words: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", network, sys.executable, "-m", "shoal", "train", *words]
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(SOURCE)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_one_command_trains_on_two_hosts_through_ssh(ssh: str, hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    ((network, here), (_, there)) = hosts
    words = [*SETTINGS.split(), "--run.dir", "two", "--hosts", f"{here}:1,far:1", "--ssh", ssh]
    run = start(network, tmp_path, *words)
    out, said = run.communicate(timeout=90)
    assert run.returncode == 0, said
    assert json.loads(out)["ranks"] == 2
    alone = start(network, tmp_path, *SETTINGS.split(), "--run.dir", "one", "--nproc", "1")
    assert alone.communicate(timeout=90)[1] is not None
    one, two = (losses(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-12)
    assert there not in said  # no warning
    assert "rejected" not in said


def test_a_run_through_ssh_is_stopped_and_leaves_nothing(
    ssh: str, hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    ((network, here), _) = hosts
    words = [*SETTINGS.split(), "--run.dir", "run", "--run.duration", "100000step", "--hosts", f"{here}:1,far:1"]
    run = start(network, tmp_path, *words, "--ssh", ssh)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    out, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    summary = json.loads(out)
    assert summary["saved_step"] == summary["steps"]
    _until_nothing_is_left(tmp_path)


def test_a_killed_run_through_ssh_leaves_nothing(ssh: str, hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    ((network, here), _) = hosts
    words = [*SETTINGS.split(), "--run.dir", "run", "--run.duration", "100000step", "--hosts", f"{here}:1,far:1"]
    run = start(network, tmp_path, *words, "--ssh", ssh)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.kill()
    run.communicate(timeout=10)
    _until_nothing_is_left(tmp_path)


def test_a_wrong_key_is_reported_with_the_words_of_ssh(ssh: str, hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    ((network, here), _) = hosts
    (tmp_path / "ssh" / "user.pub").write_text("")
    run = start(network, tmp_path, *SETTINGS.split(), "--hosts", f"{here}:1,far:1", "--ssh", ssh)
    out, said = run.communicate(timeout=60)
    assert run.returncode == 2, said
    (problem,) = json.loads(out)["error"]["problems"]
    assert problem["code"] == "N054"
    assert "Permission denied (publickey" in problem["what"]


def test_names_that_ssh_does_not_know_are_listed_together(
    ssh: str, hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    ((network, here), _) = hosts
    run = start(
        network, tmp_path, *SETTINGS.split(), "--hosts", f"{here}:1,no-such-a:1,far:1,no-such-b:1", "--ssh", ssh
    )
    out, _ = run.communicate(timeout=60)
    problems = json.loads(out)["error"]["problems"]
    assert [problem["what"].split()[1] for problem in problems] == ["no-such-a", "no-such-b"]
    assert {problem["code"] for problem in problems} == {"N074"}


def _until_nothing_is_left(directory: Path) -> None:
    """Wait until no process has a directory as its current one, but the server's."""
    deadline = time.monotonic() + 15
    while found := [pid for pid in Path("/proc").glob("[0-9]*") if _cwd(pid) == directory]:
        assert time.monotonic() < deadline, [(pid / "cmdline").read_text() for pid in found]
        time.sleep(0.1)


def _cwd(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:
        return None
