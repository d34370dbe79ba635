"""Parquet files have the samples of the same rows as JSONL or token shards, in bounded memory, from a cache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.config.recipe import DataSection
from shoal.data.dataset import Dataset
from shoal.data.fingerprint import Fingerprint
from shoal.data.sources.cache import tokens as token_cache
from shoal.data.sources.digest import Tokens
from shoal.data.sources.open import open_datasets
from shoal.data.sources.packing import PackedTokens
from shoal.data.sources.parquet import read
from shoal.data.sources.tokenizer import HuggingFaceTokenizer
from shoal.errors import to_install
from tests.rejects import rejects

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = ["one", "", "three and more", None, "fünf", "x" * 50]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shoal" / "data" / "tokens"


def opened(source: object, **settings: Any) -> tuple[Dataset, Dataset]:
    return open_datasets(DataSection(source=str(source), **{"seq_len": 4, "validation": 0, **settings}), seed=0)


def same(one: Dataset, other: Dataset) -> bool:
    first, second = (dataset.batch(np.arange(len(dataset))) for dataset in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def write(path: Path, rows: dict[str, list[Any]], **options: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table(rows), path, **options)
    return path


def no_reading(*_: object) -> Iterator[Tokens]:
    raise AssertionError("rows were read again")


def test_text_has_the_samples_of_the_same_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [text for text in TEXTS if text] * 30
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    monkeypatch.setattr(read, "ROWS_AT_ONCE", 7)
    for number in range(3):  # 60 rows each, in groups of 25
        write(tmp_path / "rows" / f"{number}.parquet", {"text": TEXTS * 10, "id": [0] * 60}, row_group_size=25)
    training, held_out = opened(tmp_path / "rows", validation=0.1)
    assert same(training, opened(tmp_path / "a.jsonl", validation=0.1)[0])
    assert same(held_out, opened(tmp_path / "a.jsonl", validation=0.1)[1])
    assert isinstance(training, PackedTokens)
    assert not training.is_in_memory  # mapped from the cache
    assert "120 rows of 'text'" in training.describe()
    assert same(training, opened(tmp_path / "rows", validation=0.1, cache=str(tmp_path / "other"))[0])
    assert list((tmp_path / "other" / "tokens").glob("*.bin"))


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", {"text": ["some text of a row"] * 9, "other": ["one more row"] * 9})
    before = Fingerprint.of(*opened(file))
    with monkeypatch.context() as patch:
        patch.setattr("shoal.data.sources.parquet.tokens.text_rows", no_reading)
        assert Fingerprint.of(*opened(file, mask_documents=True)) == before  # the tokens are the same
        with pytest.raises(AssertionError, match="again"):
            opened(file, text_field="other")
    found, size = file.stat(), file.stat().st_size
    changed = file.read_bytes().replace(b"some text", b"same text")
    file.write_bytes(changed)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))  # neither its size nor its time shows the change
    assert file.stat().st_size == size
    after = Fingerprint.of(*opened(file))
    assert after.difference(before.to_mapping()).startswith("fingerprint: ")
    assert not list(cache.glob(".*"))


def test_another_tokenizer_under_the_same_path_is_seen(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    file = write(tmp_path / "a.parquet", {"text": ["a b a b a b"] * 9})
    found = []
    for words in ({"a": 0, "b": 1, "</s>": 2}, {"a": 1, "b": 0, "</s>": 2}):
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "tokenizer.json"))
        batch = opened(file, tokenizer=str(tmp_path / "tokenizer.json"))[0].batch(np.arange(2))
        found.append(batch["tokens"].tolist())
    assert found == [[[0, 1, 0, 1], [0, 1, 2, 0]], [[1, 0, 1, 0], [1, 0, 2, 1]]]


def test_tokens_without_a_beginning_are_not_used_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    file = write(tmp_path / "a.parquet", {"text": ["a b"] * 9})
    words = {"a": 0, "b": 1, "</s>": 2, "<s>": 3}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json")}
    before = Fingerprint.of(*opened(file, **settings))
    monkeypatch.setattr(HuggingFaceTokenizer, "_begin_tokens", lambda *_: (3,))  # of the same files
    after, _ = opened(file, **settings)
    assert after.batch(np.arange(1))["tokens"].tolist() == [[3, 0, 2, 3]]
    assert Fingerprint.of(after, after).difference(before.to_mapping())


def test_an_incomplete_cache_is_written_again(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "a.parquet", {"text": ["some text of a row"] * 9})
    before = opened(file)[0].digest()
    (stored,) = cache.glob("*.bin")
    os.truncate(stored, 10)
    assert opened(file)[0].digest() == before
    stored.with_suffix(".json").write_text("{")
    assert opened(file)[0].digest() == before


def test_a_failure_leaves_nothing_that_looks_complete(tmp_path: Path, cache: Path) -> None:
    def parts() -> Iterator[token_cache.Encoded]:
        yield np.arange(9), 1
        raise KeyError("row")

    cache.mkdir(parents=True)
    with pytest.raises(KeyError):
        token_cache.cached_tokens(cache, {}, parts, dtype="uint16", what="rows")
    assert [file.suffix for file in cache.iterdir()] == [".lock"]
    with rejects("D023", "65,536"):
        token_cache.cached_tokens(cache, {}, lambda: [(np.array([65_536]), 1)], dtype="uint16", what="rows")


def test_token_ids_are_those_of_a_shard(tmp_path: Path) -> None:
    rows = [[5, 6, 9], [], None, [7, 8], [1, 2, 3, 4, 9]] * 4
    np.array([5, 6, 9, 7, 8, 9, 1, 2, 3, 4, 9] * 4, dtype=np.uint16).tofile(tmp_path / "a.bin")
    file = write(tmp_path / "a.parquet", {"input_ids": rows})
    settings: dict[str, Any] = {"end_token": 9, "mask_documents": True}
    training, _ = opened(file, text_field="input_ids", **settings)
    assert same(training, opened(tmp_path / "a.bin", **settings)[0])
    assert training.vocabulary == 10
    plain, _ = opened(file, text_field="input_ids")  # without an end token nothing is added
    assert plain.batch(np.arange(2))["tokens"].tolist() == [[5, 6, 9, 7], [8, 1, 2, 3]]
    with rejects("D013", "--data.end_token"):
        opened(file, text_field="input_ids", mask_documents=True)


def test_conversations_are_those_of_jsonl(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 5)
    file = write(tmp_path / "a.parquet", {"messages": [talk] * 5, "text": ["plain"] * 5})
    settings: dict[str, Any] = {"seq_len": 40}
    chat, _ = opened(file, **settings)
    assert same(chat, opened(tmp_path / "a.jsonl", **settings)[0])
    assert "5 conversations" in chat.describe()
    assert "5 rows of 'text'" in opened(file, format="parquet")[0].describe()
    odd = write(tmp_path / "odd.parquet", {"messages": [talk, None]})
    with rejects("D070", "odd.parquet row 2"):
        opened(odd, **settings)


def test_it_mixes_with_text(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": ["some text of a row"] * 9, "ids": [[300, 300]] * 9})
    (tmp_path / "a.txt").write_text("some text of a file")
    rows = {str(tmp_path / "a.txt"): 1, str(tmp_path / "a.parquet"): 1}
    assert open_datasets(DataSection.model_validate({"source": rows, "seq_len": 4}), 0)[0].vocabulary == 257
    with rejects("D085", "up to 300"):
        open_datasets(DataSection.model_validate({"source": rows, "text_field": "ids", "seq_len": 4}), 0)


def test_wrong_files_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", {"texts": ["a"], "number": [1], "gaps": [[1, None]]})
    with rejects("D006", "texts, number, gaps", "--data.text_field texts"):
        opened(file)
    with rejects("D087", "'number'", "int64"):
        opened(file, text_field="number")
    with rejects("D087", "a null"):
        opened(file, text_field="gaps")
    with rejects("D007", "no row with text"):
        opened(write(tmp_path / "b.parquet", {"text": ["", None]}))
    both = write(tmp_path / "both" / "a.parquet", {"text": ["a"]}).parent
    write(both / "b.parquet", {"text": [[1]]})
    with rejects("D087", "text in", "tokens in"):
        opened(both)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with rejects("D088", "a.parquet"):
        opened(file)
    (tmp_path / "both" / "README.md").write_text("read me")
    with rejects("D005", "1 text, 2 parquet", "--data.format parquet"):
        opened(both)
    with rejects("D089", "a.parquet/tokens"):
        opened(write(tmp_path / "c.parquet", {"text": ["a" * 9]}), cache=str(file))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with rejects("R027", "pyarrow", to_install("parquet")):
        opened(tmp_path / "c.parquet")
