"""Metrics on a disk that takes a part of a line, or nothing: the file has whole lines, and each loss is reported."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.config.recipe import Recipe
from shoal.observe.metrics import Guarded, JsonLines
from shoal.observe.run_directory import RunDirectory


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Limit how long a file may become, as a quota does; the system then takes a part of a write, and no more. Only
    inside of the test: pytest writes to a file too when its output is redirected."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def steps(path: Path) -> list[int]:
    """Every line has to be whole."""
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_a_line_is_written_as_a_whole_or_later(tmp_path: Path) -> None:
    messages: list[str] = []
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, messages.append)
    size = len(json.dumps({"step": 1, "loss": 1.5})) + 1
    with limited(2 * size + size // 2):
        for step in range(1, 6):
            sink.write({"step": step, "loss": 1.5})
            assert steps(path) == list(range(1, min(step, 2) + 1))
    assert len(messages) == 1
    assert "metrics.jsonl lacks its lines since step 3: File too large" in messages[0]
    sink.write({"step": 6, "loss": 1.5})
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert "no line is lost" in messages[1]
    sink.close()
    assert len(messages) == 2


def test_lines_that_are_lost_are_reported_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are waiting when the run ends, and those that were too many to wait."""
    messages: list[str] = []
    monkeypatch.setattr(JsonLines, "MOST_WAITING", 3)
    sink = JsonLines(tmp_path / "metrics.jsonl", messages.append)
    sink.write({"step": 1})
    with limited(len('{"step": 1}\n')):
        for step in range(2, 12):
            sink.write({"step": step})
        sink.close()
    assert steps(tmp_path / "metrics.jsonl") == [1]
    assert len(messages) == 2
    assert "was not finished: File too large; the lines of steps 2 to 11 are lost" in messages[1]


def test_a_full_disk_is_reported_with_its_free_bytes(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], check=False).returncode:
        pytest.skip("only root can mount a small file system")
    messages: list[str] = []
    try:
        sink = JsonLines(disk / "metrics.jsonl", messages.append)
        for step in range(4000):
            sink.write({"step": step})
        sink.close()
        whole = steps(disk / "metrics.jsonl")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert whole == list(range(len(whole)))
    assert f"lacks its lines since step {len(whole)}: No space left on device (0 bytes free)" in messages[0]
    assert f"the lines of steps {len(whole)} to 3999 are lost" in messages[1]


def test_a_reader_skips_what_a_power_loss_has_torn(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    whole = b'{"step": 1, "eval_loss": 2.5}\n'
    for torn in (b'{"step": 2, "eval_loss": 1.', b"\0" * 40, b"\xff\xfe{", b'{"step": 2, "eval_loss": 1.0}\n\0\0'):
        (tmp_path / "metrics.jsonl").write_bytes(whole + torn)
        expected = (2, 1.0) if torn.startswith(b'{"step": 2, "eval_loss": 1.0}') else (1, 2.5)
        assert directory.last_evaluation() == expected
        directory.drop_metrics_after(1)
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_metrics_are_not_cut_when_there_is_no_room_for_the_copy(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(f'{{"step": {step}}}\n' for step in range(100))
    path.write_text(text)
    with limited(50), pytest.raises(ValueError, match=r"metrics.jsonl' cannot be written: File too large"):
        RunDirectory(tmp_path).drop_metrics_after(90)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_summary_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    directory = RunDirectory.claim(Recipe.model_validate({"run": {"dir": str(tmp_path / "run")}}))
    with limited(20), pytest.raises(ValueError, match=r"summary.json' cannot be written: File too large"):
        directory.write_summary({"steps": 2, "a long name of a value": 1.0})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock"]
    directory.close()


class Broken:
    """A tracker whose disk is full."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, record: Any) -> None:
        self.count += 1
        if record["step"] > 1:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise AssertionError


def test_a_tracker_that_fails_does_not_end_the_run() -> None:
    messages: list[str] = []
    broken = Broken()
    sink = Guarded("tensorboard", broken, messages.append)
    for step in range(1, 6):
        sink.write({"step": step})
    sink.close()
    assert broken.count == 2
    assert len(messages) == 1
    assert "the tracker tensorboard has no records since step 2: OSError: [Errno 28] No space left" in messages[0]
