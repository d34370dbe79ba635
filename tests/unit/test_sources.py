"""Every kind of source opens to the same samples that a plain loop would cut, and every bad one says what to type."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.recipe import DataSection
from shoal.data.batch import IGNORE
from shoal.data.dataset import Dataset
from shoal.data.sources.open import open_datasets
from shoal.data.sources.packing import PackedTokens, split_streams
from shoal.data.sources.synthetic import NOISE, SyntheticImages, SyntheticTokens
from shoal.errors import ShoalError, to_install
from tests.rejects import rejects

END = 256


def opened(source: object, **settings: Any) -> tuple[Dataset, Dataset]:
    return open_datasets(DataSection(source=str(source), **settings), seed=0)


def everything(dataset: Dataset) -> dict[str, torch.Tensor]:
    return dataset.batch(np.arange(len(dataset)))


def reference_samples(stream: list[int], sequence: int) -> list[list[int]]:
    """Samples of T + 1 tokens, cut by a plain loop."""
    starts = range(0, len(stream), sequence)
    return [stream[start : start + sequence + 1] for start in starts if start + sequence + 1 <= len(stream)]


# ── packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4), sequence=st.integers(1, 12), seed=st.integers(0, 9)
)
@settings(max_examples=80, deadline=None)
def test_packed_samples_are_those_of_a_plain_loop(lengths: list[int], sequence: int, seed: int) -> None:
    streams, start = [], 0
    for length in lengths:
        streams.append(np.arange(start, start + length, dtype=np.uint16))
        start += length
    expected = [sample for stream in streams for sample in reference_samples(stream.tolist(), sequence)]
    packed = PackedTokens(streams, sequence=sequence, vocabulary=None, origin="numbers")
    assert len(packed) == len(expected)
    ids = np.random.default_rng(seed).permutation(len(packed))
    batch = packed.batch(ids)
    assert batch["tokens"].shape == batch["labels"].shape == (len(packed), sequence)
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert batch["tokens"].tolist() == [expected[number][:-1] for number in ids]
    assert batch["labels"].tolist() == [expected[number][1:] for number in ids]


def test_documents_neither_see_nor_predict_each_other() -> None:
    stream = np.array([1, 2, END, 3, END, 4, 5, 6, 7, END, 8], dtype=np.uint16)
    packed = PackedTokens([stream], sequence=5, vocabulary=257, origin="", end_token=END, documents=True)
    batch = everything(packed)
    assert batch["tokens"].tolist() == [[1, 2, END, 3, END], [4, 5, 6, 7, END]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[2, END, IGNORE, END, IGNORE], [5, 6, 7, END, IGNORE]]
    assert batch["documents"].dtype == torch.int32


@given(
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=4),
    sequence=st.integers(1, 9),
    fraction=st.floats(0.001, 0.9),
)
@settings(max_examples=150, deadline=None)
def test_training_and_held_out_have_no_token_in_common(lengths: list[int], sequence: int, fraction: float) -> None:
    streams = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    total = sum(len(reference_samples(stream.tolist(), sequence)) for stream in streams)
    try:
        parts = split_streams(streams, sequence, fraction)
    except ShoalError:
        assert total < 3 or fraction > 0.4 or max(lengths) < 3 * sequence
        return
    training, held_out = (PackedTokens(part, sequence=sequence, vocabulary=None, origin="") for part in parts)
    assert len(held_out) == max(1, round(fraction * total))
    assert total - 1 <= len(training) + len(held_out) <= total
    seen, unseen = (
        {*b["tokens"].ravel().tolist(), *b["labels"].ravel().tolist()} for b in map(everything, (training, held_out))
    )
    assert max(seen) < min(unseen)


def test_ids_outside_are_rejected() -> None:
    packed = PackedTokens([np.arange(20)], sequence=4, vocabulary=None, origin="")
    with pytest.raises(IndexError, match="0 to 4 of a dataset of 4"):
        packed.batch(np.array([0, 4]))


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.alone
def test_python_needs_nothing_and_is_quick() -> None:
    opened("python")
    began = time.perf_counter()
    training, held_out = opened("python")
    assert time.perf_counter() - began < 0.5
    assert training.vocabulary == 257
    assert 5e6 < len(training) * training.tokens_per_sample < 20e6
    assert len(held_out) == pytest.approx(0.01 * (len(training) + len(held_out)), rel=0.01)
    assert "files of Python's standard library, " in training.describe()
    assert f"{len(training):,} samples of 256 tokens" in training.describe()


def test_text_file(tmp_path: Path) -> None:
    file = tmp_path / "a.anything"
    file.write_bytes(bytes(range(100)))
    training, held_out = opened(file, seq_len=8, validation=0)
    expected = reference_samples([*range(100), END], 8)
    assert everything(training)["labels"].tolist() == [sample[1:] for sample in expected]
    assert len(held_out) == 0
    assert training.describe() == f"text file {file}, 100 bytes; 12 samples of 8 tokens (4 tokens at the end not used)"


def test_folder_of_text_is_read_sorted_and_without_the_rest(tmp_path: Path) -> None:
    for name, text in {
        "b.md": "bbb",
        "a/z.txt": "zz",
        "a.py": "a",
        ".git/x.txt": "no",
        "c.o": "no",
        "e.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    training, _ = opened(tmp_path, seq_len=1, validation=0, mask_documents=True)
    stream = [*b"a", END, *b"zz", END, *b"bbb", END] if "a.py" < "a/z.txt" else [*b"zz", END, *b"a", END, *b"bbb", END]
    batch = everything(training)
    assert batch["tokens"].ravel().tolist() == stream[:-1]
    assert "3 text files in" in training.describe()


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "h\\u00e9"}\n\n{"text": "you", "id": 3}\n')
    training, _ = opened(file, seq_len=2, validation=0)
    assert everything(training)["tokens"].ravel().tolist() == [*"hé".encode(), END, *b"yo"]
    assert "2 JSONL documents" in training.describe()


# ── token shards ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_shards_are_mapped_and_samples_stay_inside_one(tmp_path: Path) -> None:
    first, second = np.arange(11, dtype=np.uint16), np.arange(100, 108, dtype=np.uint16)
    first.tofile(tmp_path / "0.bin")
    np.save(tmp_path / "1.npy", second)
    training, _ = opened(tmp_path, seq_len=3, validation=0)
    assert isinstance(training, PackedTokens)
    assert all(isinstance(stream, np.memmap) for stream in training._streams)
    expected = reference_samples(first.tolist(), 3) + reference_samples(second.tolist(), 3)
    assert everything(training)["tokens"].tolist() == [sample[:-1] for sample in expected]
    assert training.vocabulary == 108
    held_in_memory = opened(tmp_path, seq_len=3, validation=0.2)
    assert all(isinstance(stream, np.memmap) for part in held_in_memory for stream in part._streams)  # type: ignore[attr-defined]


def test_shards_with_an_end_token_have_documents(tmp_path: Path) -> None:
    np.array([5, 9, 6, 7, 9, 8], dtype=np.int32).tofile(tmp_path / "a.bin")
    training, _ = opened(
        tmp_path / "a.bin", seq_len=5, validation=0, token_dtype="int32", mask_documents=True, end_token=9
    )
    batch = everything(training)
    assert batch["documents"].tolist() == [[0, 0, 1, 1, 1]]
    assert batch["labels"].tolist() == [[9, IGNORE, 7, 9, IGNORE]]


def test_vocabulary_of_very_large_shards_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "a.bin")
    monkeypatch.setattr("shoal.data.sources.tokens.READ_AT_MOST", 99)
    assert opened(tmp_path, seq_len=3)[0].vocabulary is None


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def paint(folder: Path, classes: int, each: int) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(each):
            image.new("RGB", (5, 9), (255, 0, 40 * label)).save(folder / f"class{label}" / f"{number}.png")


def test_image_folder(tmp_path: Path) -> None:
    paint(tmp_path, classes=3, each=8)
    training, held_out = opened(tmp_path, image_size=6, validation=0.25)
    assert (len(training), len(held_out), training.vocabulary, training.tokens_per_sample) == (18, 6, 3, None)
    batch = everything(training)
    assert batch["images"].shape == (18, 3, 6, 6)
    assert batch["images"].dtype == torch.float32
    blue = (40 * batch["labels"] / 255 - 0.5) / 0.5
    torch.testing.assert_close(batch["images"][:, 2], blue[:, None, None].expand(-1, 6, 6).float())
    torch.testing.assert_close(batch["images"][:, :2].mean((0, 2, 3)), torch.tensor([1.0, -1.0]))
    assert len(everything(held_out)["labels"].unique()) > 1
    assert "24 images of 3 classes" in training.describe()


# ── synthetic ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_synthetic_tokens_follow_their_rule() -> None:
    training, held_out = opened("synthetic", synthetic_samples=400, vocabulary=16, seq_len=64, validation=0.1)
    assert (len(training), len(held_out), training.vocabulary) == (360, 40, 16)
    batch = everything(training)
    torch.testing.assert_close(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    counts = torch.zeros(16, 16).index_put_((batch["tokens"].ravel(), batch["labels"].ravel()), torch.tensor(1.0), True)
    rule = counts.argmax(1)
    assert rule.unique().numel() == 16  # one successor each
    unseen = everything(held_out)
    followed = (rule[unseen["tokens"]] == unseen["labels"]).float().mean()
    assert followed == pytest.approx(1 - NOISE + NOISE / 16, abs=0.03)


def test_best_loss_of_synthetic_tokens_is_what_the_true_rule_reaches() -> None:
    dataset = SyntheticTokens(seed=1, num_samples=2000, sequence=64, vocabulary=8)
    batch = everything(dataset)
    counts = torch.zeros(8, 8).index_put_((batch["tokens"].ravel(), batch["labels"].ravel()), torch.tensor(1.0), True)
    reached = -(counts * (counts / counts.sum(1, keepdim=True)).log()).sum() / counts.sum()
    assert reached == pytest.approx(dataset.best_loss, abs=0.01)
    assert dataset.best_loss < math.log(8) / 2


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_synthetic_samples_depend_on_id_and_seed_alone(kind: str) -> None:
    dataset, _ = opened("synthetic", synthetic_kind=kind, vocabulary=10)
    again, _ = opened("synthetic", synthetic_kind=kind, vocabulary=10)
    other, _ = open_datasets(DataSection(source="synthetic", synthetic_kind=kind, vocabulary=10), seed=1)  # type: ignore[arg-type]
    ids = np.array([7, 3, 7])
    for key, tensor in dataset.batch(ids).items():
        assert torch.equal(tensor[0], tensor[2])
        assert torch.equal(tensor[1], again.batch(np.array([3]))[key][0])
    assert not torch.equal(next(iter(dataset.batch(ids).values())), next(iter(other.batch(ids).values())))


def test_synthetic_images_are_distinguishable() -> None:
    dataset = SyntheticImages(seed=0, num_samples=600, size=16, classes=5)
    batch = everything(dataset)
    assert batch["images"].shape == (600, 3, 16, 16)
    images, labels = batch["images"].flatten(1), batch["labels"]
    means = torch.stack([images[:300][labels[:300] == label].mean(0) for label in range(5)])
    guesses = torch.cdist(images[300:], means).argmin(1)
    assert (guesses == labels[300:]).float().mean() > 0.95


# ── hugging face ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_hugging_face_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = datasets.Dataset.from_dict({"text": ["one", "", "three"], "title": ["a", "b", "c"]})
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    rows.to_json(tmp_path / "files" / "train.jsonl")
    for name in ("rows", "splits", "files"):
        training, _ = opened(f"hf:{tmp_path / name}", seq_len=2, validation=0)
        assert everything(training)["tokens"].ravel().tolist() == [*b"one", END, *b"three"][:8], name
    with rejects("D006", "'titles'", "--data.text_field title"):
        opened(f"hf:{tmp_path / 'rows'}", text_field="titles")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "untrained")
    with rejects("D009", "'train'"):
        opened(f"hf:{tmp_path / 'untrained'}")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with rejects("D008", "'nobody/nothing'"):
        opened("hf:nobody/nothing")


def test_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    words = tokenizers.models.WordLevel({"the": 0, "cat": 1, "sat": 2, "</s>": 3}, unk_token="the")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "the cat sat"}) + "\n" for _ in range(3)))
    settings: dict[str, Any] = {"seq_len": 4, "validation": 0, "mask_documents": True}
    training, _ = opened(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer.json"), **settings)
    assert training.vocabulary == 4
    assert everything(training)["tokens"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert everything(training)["labels"].tolist() == [[1, 2, 3, IGNORE]] * 2
    with rejects("D020", "tokenizer.json", "broken.json"):
        opened(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "broken.json"))
    with rejects("D001", "--data.tokenizer bytes"):
        opened(tmp_path / "a.jsonl", tokenizer="byts")


# ── bad input: what is wrong, and what to type ───────────────────────────────────────────────────────────────────────


def write(path: Path, content: bytes | str = "x" * 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


BAD: list[tuple[Callable[[Path], Any], dict[str, Any], str, str]] = [
    (lambda d: write(d / "corpus.txt").parent / "corpsu.txt", {}, "no such file or folder: {d}/corpsu.txt",
     "--data.source {d}/corpus.txt"),
    (lambda d: d / "none" / "a.txt", {}, "no such file or folder: {d}/none/a.txt ({d} exists, none in it does not)",
     "--data.source python, or synthetic, or PATH"),
    (lambda d: "python3", {}, "no such file or folder: ", "--data.source python"),
    (lambda d: write(d / "a.txt", ""), {}, "must have text in it, got 1 text file(s) of 0 bytes", "text in it"),
    (lambda d: write(d / "a.txt"), {"seq_len": 256},
     "take 514 tokens, but the longest document stream has 101", "--data.seq_len 49 or --data.validation 0"),
    (lambda d: write(d / "a.txt"), {"seq_len": 256, "validation": 0},
     "one sample of --data.seq_len 256 takes 257 tokens, but the longest document stream has 101",
     "--data.seq_len 100 or more data"),
    (lambda d: write(d / "a.txt"), {"seq_len": 4, "validation": 0.999}, "(--data.validation 0.999)",
     "--data.validation 0"),
    (lambda d: write(d / "a.o").parent, {}, "got 1 files with other endings", "--data.source {d}/FILE"),
    (lambda d: write(d / "a.o").parent, {"format": "text"}, "no text files in {d}", "--data.source {d}/FILE"),
    (lambda d: (write(d / "a.txt"), write(d / "b.bin"))[0].parent, {}, "of one kind, got 1 text, 1 tokens",
     "--data.format text"),
    (lambda d: write(d / "a.jsonl", '{"text": "a"}\n{"text": \n'), {}, "a.jsonl line 2 must be JSON", "lines such as"),
    (lambda d: write(d / "a.jsonl", '\n{"texts": "a"}\n'), {},
     "a.jsonl line 2 has no key 'text'; its text keys are: texts", "--data.text_field texts"),
    (lambda d: write(d / "a.jsonl", '{"message": [{"role": "user"}]}'), {},
     "a.jsonl line 1 has no key 'text'", "the key 'messages' instead of 'message'"),
    (lambda d: write(d / "a.jsonl", "[1]"), {}, "line 1 must be a JSON object, got a list", "lines such as"),
    (lambda d: write(d / "a.jsonl", '{"text": 3}'), {}, "'text' must be text, got int", "--data.text_field"),
    (lambda d: write(d / "a.jsonl", "\n"), {}, "no JSONL lines with text", "lines such as"),
    (lambda d: write(d / "a.bin", "x" * 101), {}, "whole number of uint16 tokens of 2 bytes, got 101 bytes",
     "--data.token_dtype"),
    (lambda d: write(d / "a.bin", ""), {}, "got 0 bytes", "--data.source PATH without a.bin"),
    (lambda d: write(d / "a.bin", b"\xff" * 96), {"token_dtype": "int32"}, "at least 0, got -1", "uint32"),
    (lambda d: write(d / "a.npy"), {}, "a.npy must be a .npy file", "numpy.save"),
    (lambda d: write(d / "a.bin", "x" * 100), {"mask_documents": True}, "needs --data.end_token", "--data.end_token"),
    (lambda d: write(d / "a.txt").parent, {"format": "tokens"}, "no token shards", "--data.format auto"),
    (lambda d: write(d / "a.png").parent, {}, "got 0 folders and 1 images", "one folder per class: {d}/cat/1.png"),
    (lambda d: write(d / "a.png"), {}, "got the image {d}/a.png", "--data.source "),
    (lambda d: "synthetic", {"synthetic_samples": 1}, "holding out 0.01 of 1 samples", "--data.validation 0"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "settings", "what", "fix"), BAD, ids=[row[2][:40] for row in BAD])
def test_bad_input(tmp_path: Path, make: Callable[[Path], Any], settings: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        opened(make(tmp_path), **settings)
    (problem,) = caught.value.problems
    assert what.format(d=tmp_path) in problem.what
    assert fix.format(d=tmp_path) in problem.fix


def test_npy_of_another_shape_or_type(tmp_path: Path) -> None:
    for content in (np.zeros((2, 3), dtype=np.int64), np.zeros(30)):
        np.save(tmp_path / "a.npy", content)
        with rejects("D022", match="must hold one row of integers"):
            opened(tmp_path / "a.npy")


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(path: str, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path / "a.txt")
    monkeypatch.setattr("shoal.files.open_regular", reject)
    with rejects("D002", "a.txt"):
        opened(tmp_path / "a.txt")


def test_an_image_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    for name in ("a/1.png", "b/2.png"):
        write(tmp_path / name)
    training, _ = opened(tmp_path)
    with rejects("D011", match=r"cannot decode the image .*\.png"):
        everything(training)


@pytest.mark.parametrize(
    ("module", "source", "settings", "what"),
    [
        ("datasets", "hf:name", {}, "data.source hf:name needs the package datasets"),
        ("tokenizers", "python", {"tokenizer": "t.json"}, "data.tokenizer needs the package tokenizers"),
        ("PIL.Image", ".", {"format": "images"}, "a folder of images needs the package Pillow"),
    ],
)
def test_missing_extras(
    monkeypatch: pytest.MonkeyPatch, module: str, source: str, settings: dict[str, Any], what: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with rejects("R027", match=what) as caught:
        opened(source, **settings)
    assert caught.value.problems[0].fix == to_install("images" if module == "PIL.Image" else "hf")
