"""A streamed Hugging Face dataset has the samples of the same one in memory; only its tokens are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.config.recipe import DataSection
from shoal.data.dataset import Dataset
from shoal.data.sources.huggingface import stream
from shoal.data.sources.open import open_datasets
from tests.rejects import rejects

datasets = pytest.importorskip("datasets", reason="needs the extra hf")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of JSONL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "rows").mkdir()
    for shard in range(3):
        rows = [{"text": f"row {number} of shard {shard}" if number % 5 else "", "id": number} for number in range(40)]
        (tmp_path / "rows" / f"train-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows"


def opened(source: object, **settings: Any) -> tuple[Dataset, Dataset]:
    return open_datasets(DataSection(source=f"hf:{source}", seq_len=8, **settings), seed=0)


def same(one: Dataset, other: Dataset) -> bool:
    first, second = (dataset.batch(np.arange(len(dataset))) for dataset in (one, other))
    return all(torch.equal(first[key], second[key]) for key in first)


def test_a_stream_has_the_samples_of_the_table(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = opened(folder)
    streamed = opened(folder, streaming=True)
    assert all(map(same, table, streamed))
    assert not streamed[0].is_in_memory
    assert "96 rows of 'text'" in streamed[0].describe()
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_texts", None)
        assert same(opened(folder, streaming=True)[0], table[0])  # from the cache
    datasets.Dataset.from_dict({"text": ["some text"] * 20}).save_to_disk(tmp_path / "saved")
    assert same(opened(tmp_path / "saved")[0], opened(tmp_path / "saved", streaming=True)[0])
    with (folder / "train-1.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more row", "id": 9}) + "\n")
    assert len(opened(folder, streaming=True)[0]) > len(table[0])


def test_the_first_tokens_of_a_stream(folder: Path) -> None:
    part, _ = opened(folder, streaming=True, streaming_tokens=81, validation=0)
    whole, _ = opened(folder, validation=0)
    assert len(part) == 10
    assert torch.equal(part.batch(np.arange(10))["labels"], whole.batch(np.arange(10))["labels"])


def test_wrong_streams(folder: Path, tmp_path: Path) -> None:
    with rejects("D006", "text, id", "--data.text_field text"):
        opened(folder, streaming=True, text_field="texts")
    with rejects("D019", "row 1", "int"):
        opened(folder, streaming=True, text_field="id")
    with rejects("D096", "'python'"):
        open_datasets(DataSection(streaming=True), 0)
    with rejects("D096", "--data.streaming true"):
        opened(folder, streaming_tokens=9)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with rejects("D008", "damaged"):
        opened(tmp_path / "damaged", streaming=True)
    assert not list((tmp_path / "cache").rglob("*.part"))
