"""Two hosts without a shared disk (namespaces of the kernel): one is lost with its memory, and is replaced."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.cli.host import Host, until
from tests.cli.test_hosts import hosts, ip
from tests.cli.test_lost_host import SLOW
from tests.cli.test_lost_host import WORDS as WITH_JSON
from tests.cli.test_train import losses, records

__all__ = ["hosts"]  # a fixture

PORT = "29678"
NUM_STEPS = 40
WORDS = [word for word in WITH_JSON if word != "--json"]  # the headline says from where a run resumes
EDITED = [*WORDS, "--plan", "zero=3 fp64", "--run.duration", f"{NUM_STEPS}step", "--checkpoint.every", "1000step"]


def newest_in(memory: Path) -> int:
    """The newest step that is complete in a folder of all runs."""
    found = [path.parent.name for path in memory.glob("shoal-run-*/step-*/manifest.json")]
    return max((int(name.split("-")[1]) for name in found), default=0)


def test_a_host_that_shares_no_disk_is_lost_and_replaced(
    host: Host, hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    (first, here), (second, there) = hosts
    memories = {}
    for name in (first, second):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(SLOW)
        memories[name] = Path("/dev/shm") / name
    env = {"SHOAL_KEY": "a key for a test of two hosts"}
    # A relative path, so that each host has a memory of its own, as two machines have.
    saves = ["--checkpoint.memory_every", "1step", "--checkpoint.memory_dir", "memory", "--run.dir", "run"]
    meeting = ["--hosts", f"{here}:2,{there}:2", "--min-hosts", "1", "--ssh", "none", "--listen", f"{here}:{PORT}"]
    words = [*EDITED, *saves, *meeting]
    for name, memory in memories.items():
        memory.mkdir(mode=0o700)
        (tmp_path / name / "memory").symlink_to(memory)
    try:
        started = host.start(*words, cwd=tmp_path / first, env=env, network=first)
        agent = ["agent", "--join", f"{here}:{PORT}", "--name"]
        kept = host.start(*agent, here, cwd=tmp_path / first, env=env, network=first)
        lost = host.start(*agent, there, cwd=tmp_path / second, env=env, network=second)
        until(lambda: newest_in(memories[second]) >= 5, started)
        ip("-n", second, "link", "set", "cable1", "down")
        lost.kill_all()
        known = newest_in(memories[first])
        for folder in (memories[second], tmp_path / second / "run"):
            shutil.rmtree(folder, ignore_errors=True)
        memories[second].mkdir(mode=0o700)
        began = time.monotonic()
        until(lambda: newest_in(memories[first]) > known + 2, started)
        resumed = time.monotonic() - began
        ip("-n", second, "link", "set", "cable1", "up")
        back = host.start(*agent, there, cwd=tmp_path / second, env=env, network=second)
        until(lambda: newest_in(memories[second]) > known + 3, started)
        for name in (first, second):
            (tmp_path / name / "fast").touch()
        assert started.wait() == 0, started.said
        assert [each.wait() for each in (kept, back)] == [0, 0]
    finally:
        for memory in memories.values():
            left = sorted(path.name for path in memory.glob("*"))
            shutil.rmtree(memory, ignore_errors=True)
    assert f"resume from step {known}, saved by 4 ranks" in started.said  # no committed step is lost
    assert resumed < 30, started.said  # 4.8 s on an idle machine
    assert left == []  # the run has ended, and its copies are removed
    assert "is not that of 10.77.0.2: each host saves to its own" in started.said
    assert f"host {there} (ranks 2 to 3) is lost" in started.said
    assert "continuing on 1 of 2 hosts: dp_shard=2" in started.said
    assert "continuing on 2 of 2 hosts: dp_shard=4" in started.said
    assert "cannot be used" not in started.said
    assert [record["step"] for record in records(tmp_path / first / "run")] == list(range(1, NUM_STEPS + 1))
    plain = host.run(*EDITED, "--run.dir", "plain", "--nproc", "1", cwd=tmp_path / first)
    assert plain.code == 0, plain.said
    assert losses(tmp_path / first / "run") == pytest.approx(losses(tmp_path / first / "plain"), rel=1e-12)
