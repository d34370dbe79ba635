"""Metrics that are too long to be parsed: their end is read, no mark in them is missed, and the page says so."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.observe.metrics import JsonLines
from shoal.pages.report import make_report
from shoal.pages.run import read_metrics
from shoal.pages.run.findings import findings
from shoal.pages.run.own_files import read_records, sample_records
from shoal.pages.run.read_run import read_run
from shoal.pages.run.verdict import verdict_of
from tests.run_directories import make_run, record, write_lines

STEPS = 20_000
SKIPPED, LOST = (7_001, 7_003, 12_345), (9_999, 15_001)
EVALUATED = {step: 2.0 if step == 8_000 else 3.0 for step in range(1_000, STEPS, 1_000)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20,000 steps, written as a run writes."""
    path = make_run(tmp_path_factory.mktemp("runs") / "run", 1)
    (path / "metrics.jsonl").unlink()
    sink = JsonLines(path / "metrics.jsonl")
    for step in range(1, STEPS + 1):
        loss = float("nan") if step in LOST else 2.0
        sink.write(record(step, loss=loss, skipped=step in SKIPPED, data_wait_seconds=0.0, comm_overlap_fraction=1.0))
        if step in EVALUATED:
            sink.write({"step": step, "eval_loss": EVALUATED[step]})
    sink.close()
    return path


def test_lines_at_even_distances_and_those_of_the_end(path: Path) -> None:
    file = path / "metrics.jsonl"
    steps = [each["step"] for each in read_records(file, most=file.stat().st_size - 1)]
    assert steps[0] == 1
    assert steps[-50:] == list(range(STEPS - 49, STEPS + 1))
    assert len(steps) == len(set(steps)) < STEPS / 5
    assert max(after - before for before, after in pairwise(steps)) < 30


@pytest.mark.parametrize("most", [1, 2**12, 2**16])
def test_each_line_is_read_once_however_few_are_read(tmp_path: Path, most: int) -> None:
    write_lines(tmp_path / "metrics.jsonl", map(record, range(1, 301)))
    steps = [each["step"] for each in read_records(tmp_path / "metrics.jsonl", most=most)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 300


@pytest.mark.parametrize("number", [2, 120])
def test_the_last_record_is_among_the_sampled_ones(path: Path, number: int) -> None:
    steps = [each["step"] for each in sample_records(path / "metrics.jsonl", number)]
    assert (len(steps), steps[0], steps[-1]) == (number, 1, STEPS)
    with open(path.parent / "torn", "w") as file:
        file.write("".join(f"{json.dumps(record(step))}\n" for step in range(1, 11)) + '{"step": 11, "lo')
    assert [each["step"] for each in sample_records(path.parent / "torn", 120)] == list(range(1, 11))


def test_nothing_that_a_page_names_is_missed_and_the_page_says_how_it_was_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_run(path)
    assert "too long to be read whole" not in make_report([whole])
    monkeypatch.setattr(read_metrics, "MOST_WHOLE", (path / "metrics.jsonl").stat().st_size - 1)
    run = read_run(path)
    assert len(run.metrics.steps) < STEPS / 5
    assert (run.step, run.metrics.skipped, run.metrics.not_finite) == (STEPS, [*SKIPPED], [*LOST])
    assert run.metrics.evaluations == whole.metrics.evaluations == sorted(EVALUATED.items())
    assert verdict_of(run) == verdict_of(whole)
    assert findings(run) == findings(whole)
    assert {"The loss is not finite", "The validation loss was lower before"} <= {each.what for each in findings(run)}
    page = make_report([run])
    assert "metrics.jsonl is too long to be read whole: 1 line in 11 was read, and all of its end." in page
    assert "were looked for in every line." in page


def test_of_a_very_long_file_the_page_says_how_much_was_searched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (path / "metrics.jsonl").stat().st_size
    for name, value in (("MOST_WHOLE", size - 1), ("MOST_SEARCHED", size // 2), ("BLOCK", 2**16)):
        monkeypatch.setattr(read_metrics, name, value)
    table = read_metrics.read_metrics(path / "metrics.jsonl", Counter())
    assert set(SKIPPED[:2]) <= set(table.skipped)
    assert "1 line in 11 was read" in table.sampled
    assert "GiB" in table.sampled


def test_a_long_file_without_lines_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'"loss": "' * 300_000)
    monkeypatch.setattr(read_metrics, "MOST_WHOLE", 2**20)
    assert read_metrics.read_metrics(tmp_path / "metrics.jsonl", Counter()).steps == []
