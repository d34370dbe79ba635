"""A disk that is full, or cannot be written to: a message with the path and the free bytes, and nothing is damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.host import Host, Started, until
from tests.cli.test_resume import WORDS, committed
from tests.cli.test_train import records
from tests.cover import wide

SHORT = [*WORDS, "--nproc", "1", "--run.duration", "6step"]
Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small file system in memory, with such options."""
    made: list[Path] = []

    def act(options: str) -> Path:
        path = tmp_path / f"disk{len(made)}"
        path.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("only root can mount a small file system")
        made.append(path)
        return path

    yield act
    for path in made:
        subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path, leave: int = 0) -> None:
    """Fill a disk but for so many bytes."""
    usage = os.statvfs(path)
    with (path / "fill").open("ab") as file:
        file.write(bytes(max(0, usage.f_bavail * usage.f_frsize - leave)))


@pytest.mark.parametrize("leave", [0, 4096, 12288])
def test_a_run_directory_on_a_full_disk(host: Host, tmp_path: Path, mount: Mount, leave: int) -> None:
    """No room for the recipe; for the recipe alone; and for all but the metrics, without which the run goes on."""
    disk = mount("size=256k")
    fill(disk, leave)
    words = [*SHORT, "--run.dir", f"{disk}/run", "--checkpoint.dir", str(tmp_path / "elsewhere")]
    ended = host.run(*words, cwd=tmp_path)
    assert "Traceback" not in ended.said
    if leave < 12288:
        assert ended.code == 2, ended.said
        assert f"the run directory '{disk}/run' cannot be written: No space left on device (" in ended.said
        assert "bytes free)" in ended.said
        assert "fix: make room, or --run.dir SOMEWHERE_ELSE" in ended.said
        assert not list(disk.rglob("*.part"))
    else:
        assert ended.code == 3, ended.said  # the summary has no room either
        assert ended.json["steps"] == 6
        assert "metrics.jsonl lacks its lines since step 1: No space left on device (0 bytes free)" in ended.said
        assert "summary.json' cannot be written: No space left on device (0 bytes free)" in ended.said
        assert ended.said.count("lacks its lines") == 1
        assert (disk / "run" / "metrics.jsonl").read_bytes() == b""
    (disk / "fill").unlink()
    again = host.run(*words, "--resume", "auto", cwd=tmp_path)
    assert (again.code, again.json["steps"]) == (0, 6), again.said


def test_a_run_directory_without_an_inode_for_the_metrics(host: Host, tmp_path: Path, mount: Mount) -> None:
    disk = mount("size=256k,nr_inodes=5")  # the root, the directory, lock, recipe and environment
    words = [*SHORT, "--run.dir", f"{disk}/run", "--checkpoint.dir", str(tmp_path / "elsewhere")]
    ended = host.run(*words, cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert "run/metrics.jsonl cannot be written: No space left on device (" in ended.said
    assert "no inode for a new file" in ended.said
    assert "Traceback" not in ended.said


def test_a_disk_that_fills_up_while_metrics_are_written(host: Host, tmp_path: Path, mount: Mount) -> None:
    """Lines are whole, the run goes on, and when there is room again no line is missing."""
    disk = mount("size=2m")
    words = [*SHORT, "--run.dir", f"{disk}/run", "--checkpoint.dir", str(tmp_path / "elsewhere")]
    started = host.start(*words, "--run.duration", "5000step", cwd=tmp_path)
    metrics = disk / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 10, started)
    fill(disk)
    until(lambda: "lacks its lines since step" in started.said, started)
    assert all(json.loads(line)["step"] == n for n, line in enumerate(metrics.read_text().splitlines(), 1))
    assert metrics.read_bytes().endswith(b"\n")
    (disk / "fill").unlink()
    until(lambda: "is written again; no line is lost" in started.said, started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
    assert [record["step"] for record in records(disk / "run")] == list(range(1, started.json["steps"] + 1))


def test_a_disk_that_fills_up_before_a_save(host: Host, tmp_path: Path, mount: Mount) -> None:
    """Every later save fails with the bytes that it needs and those that are free; the one before stays."""
    disk = mount("size=4m")
    words = [*SHORT, "--run.dir", "run", "--checkpoint.dir", f"{disk}/saves", "--checkpoint.every", "2step"]
    started = host.start(*words, "--run.duration", "5000step", cwd=tmp_path)
    saves = disk / "saves"
    until(lambda: committed(saves) >= 2, started)
    fill(disk)
    until(lambda: "NOT SAVED, training continues" in started.said, started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 3, started.said
    assert "No space left on device: this rank writes " in started.said
    assert "bytes, and " in started.said
    assert "are free" in started.said
    assert "the last step is not saved" in started.said
    kept = committed(saves)
    assert started.json["steps"] > started.json["saved_step"] == kept
    assert not list(saves.glob(".draft*"))
    (disk / "fill").unlink()
    again = host.run(*words, "--run.duration", f"{kept + 2}step", cwd=tmp_path)
    assert (again.code, again.json["resumed_from"], again.json["saved_step"]) == (0, kept, kept + 2), again.said


def test_a_run_restarts_while_the_disk_is_full(host: Host, tmp_path: Path, mount: Mount) -> None:
    """It ended with C009 or C026, though it trains without saves until there is room. The metrics of repeated steps are
    dropped all the same."""
    run = mount("size=4m") / "run"
    words = [*WORDS, "--nproc", "2", "--run.dir", str(run), "--checkpoint.every", "2step", "--run.duration", "5000step"]
    started = host.start(*words, "--launch.recovery", "restart", cwd=tmp_path)
    kept = filled(run, started)
    os.kill(started.workers[0], signal.SIGKILL)
    trains_without_saves(run, kept, started)


def test_a_run_is_resumed_while_the_disk_of_its_checkpoints_is_full(host: Host, tmp_path: Path, mount: Mount) -> None:
    """Another program may have taken the room."""
    run, disk = tmp_path / "run", mount("size=4m")
    words = [*WORDS, "--nproc", "2", "--run.dir", "run", "--checkpoint.dir", str(disk / "run" / "checkpoints")]
    words += ["--checkpoint.every", "2step", "--run.duration", "5000step"]
    started = host.start(*words, cwd=tmp_path)
    kept = filled(disk / "run", started)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    trains_without_saves(disk / "run", kept, host.start(*words, cwd=tmp_path), run)


def filled(run: Path, started: Started) -> int:
    """Fill the disk of a run once a step is saved, and wait for saves that fail; the step that is saved. A save that is
    under way at first gives back what it had written."""
    until(lambda: committed(run / "checkpoints") >= 2, started)
    for number in (1, 2, 3):
        with suppress(OSError):  # the run takes the last bytes meanwhile
            fill(run.parent)
        until(lambda number=number: started.said.count("NOT SAVED, training continues") >= number, started)
    return committed(run / "checkpoints")


def trains_without_saves(disk: Path, kept: int, started: Started, run: Path | None = None) -> None:
    """Wait until a run has reported that it may not save, has made steps, and saves again when there is room."""
    metrics = (run or disk) / "metrics.jsonl"
    until(lambda: "training continues, but saves may fail" in started.said, started)
    num_failed = started.said.count("NOT SAVED, training continues")
    until(lambda: started.said.count("NOT SAVED, training continues") > num_failed, started)
    assert committed(disk / "checkpoints") == kept
    (disk.parent / "fill").unlink()
    until(lambda: committed(disk / "checkpoints") > kept, started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
        *range(1, started.json["steps"] + 1)
    ]


@pytest.mark.parametrize("where", ["--run.dir", "--checkpoint.dir"])
def test_a_disk_that_is_read_only(host: Host, tmp_path: Path, mount: Mount, where: str) -> None:
    disk = mount("size=256k")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    ended = host.run(*SHORT, "--run.dir", "run", where, f"{disk}/here", cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert "cannot be written" in ended.said
    assert "Read-only file system" in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.parametrize("kind", [wide("folder"), wide("file"), "link"])
def test_something_else_has_the_name_of_a_step(host: Host, tmp_path: Path, kind: str) -> None:
    """It is moved aside, never removed; the save and a resume report it."""
    saves = tmp_path / "run" / "checkpoints"
    words = [*SHORT, "--run.dir", "run", "--checkpoint.every", "2step"]
    assert host.run(*words, "--run.duration", "2step", cwd=tmp_path).code == 0
    (tmp_path / "run" / "summary.json").unlink()
    place = saves / "step-00000004"
    if kind == "folder":
        place.mkdir()
        (place / "shard-00000.safetensors").write_text("of a person")
    elif kind == "file":
        place.write_text("of a person")
    else:
        place.symlink_to(tmp_path / "nowhere")
    ended = host.run(*words, cwd=tmp_path)
    assert (ended.code, ended.json["resumed_from"], ended.json["saves_failed"]) == (0, 2, 0), ended.said
    assert "step-00000004 has no manifest.json and is skipped" in ended.said
    assert "it was renamed to step-00000004.damaged-1" in ended.said
    moved = saves / "step-00000004.damaged-1"
    assert os.path.lexists(moved)
    assert kind == "link" or (moved / "shard-00000.safetensors" if kind == "folder" else moved).read_text()
    assert committed(saves) == 6
    assert (place / "manifest.json").is_file()
    listed = host.run("checkpoint", "ls", "run", cwd=tmp_path)
    assert "step-00000004.damaged-1" in listed.out.read_text() + listed.said
