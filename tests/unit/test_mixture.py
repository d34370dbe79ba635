"""A mixture has exact proportions, walks each source once per pass, and knows neither ranks nor restarts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.load import build_recipe, dump_recipe, load_recipe
from shoal.config.recipe import DataSection
from shoal.data import interleave
from shoal.data.dataset import Dataset
from shoal.data.fingerprint import Fingerprint
from shoal.data.interleave import counts_of, drawn, period
from shoal.data.loader import Loader, RankStream, evaluation_batches
from shoal.data.mixture import Mixture, batch_ids
from shoal.data.sources.open import open_datasets
from shoal.errors import ShoalError
from tests.rejects import rejects
from tests.unit.test_loader import Numbers, flat

weights = st.lists(st.integers(1, 40), min_size=2, max_size=6)


def mixture(sizes: Sequence[int], counts: Sequence[int]) -> Mixture:
    return Mixture([Numbers(size) for size in sizes], counts)


def opened(*sources: tuple[object, float], **settings: Any) -> tuple[Dataset, Dataset]:
    rows = [{"source": str(source), "weight": weight} for source, weight in sources]
    return open_datasets(DataSection.model_validate({"source": rows, "seq_len": 4, **settings}), seed=0)


# ── the order ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_drawing_in_the_docstring_is_true() -> None:
    for name, row in zip(("source", "draw"), drawn((5, 3, 2), np.arange(12)), strict=True):
        line = next(line for line in str(interleave.__doc__).splitlines() if line.strip().startswith(f"{name}  "))
        assert row.tolist() == [int(word) for word in line.replace("│", "").split("...")[0].split()[1:]]


@given(counts=weights, start=st.integers(0, 10**12), length=st.integers(1, 400))
@settings(max_examples=80, deadline=None)
def test_counts_are_within_one_of_the_weights_after_any_number_of_samples(
    counts: list[int], start: int, length: int
) -> None:
    exact = counts_of(counts)
    assert exact is not None
    which, draws = drawn(exact, np.arange(start, start + length))
    total = sum(counts)
    for source in set(which.tolist()):
        own = draws[which == source]
        assert own.tolist() == list(range(own[0], own[0] + len(own)))
        for n, count in enumerate(np.cumsum(which == source).tolist(), start + 1):
            assert abs((int(own[0]) + count) * total - n * counts[source]) < total  # whole numbers: no rounding


@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=40, deadline=None)
def test_each_sample_of_a_source_occurs_once_per_pass(sizes: list[int], seed: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 7), min_size=len(sizes), max_size=len(sizes)))
    mixed = mixture(sizes, counts)
    ids = mixed.ids_at(seed, np.arange(600))
    start = 0
    for size in sizes:
        own = ids[(ids >= start) & (ids < start + size)] - start
        for first in range(0, len(own) - size, size):
            assert sorted(own[first : first + size].tolist()) == list(range(size))
        start += size


def test_sources_of_equal_size_have_different_orders() -> None:
    ids = mixture([50, 50], [1, 1]).ids_at(0, np.arange(100))
    assert ids[ids < 50].tolist() != (ids[ids >= 50] - 50).tolist()
    assert mixture([50, 50], [1, 1]).ids_at(1, np.arange(100)).tolist() != ids.tolist()


def steps(mixed: Mixture, degree: int, position: int, count: int) -> list[list[int]]:
    """The samples of every step, put together over all ranks."""
    streams = [RankStream(mixed, seed=3, batch=12, coordinate=rank, degree=degree) for rank in range(degree)]
    parts = [Loader(stream, position=position, workers=0) for stream in streams]
    try:
        return [flat(next(part)["numbers"].tolist() for part in parts) for _ in range(count)]
    finally:
        for part in parts:
            part.close()


class Shifted(Numbers):
    """Numbers that differ between sources."""

    def __init__(self, size: int, start: int) -> None:
        super().__init__(size)
        self.start = start

    def batch(self, ids: Any) -> Any:
        return {"numbers": torch.from_numpy(ids + self.start)}


def test_any_number_of_ranks_and_any_resume_give_the_same_samples_in_the_same_order() -> None:
    mixed = Mixture([Shifted(100, 0), Shifted(17, 1000), Shifted(40, 2000)], (5, 3, 2))
    whole = steps(mixed, 1, 0, 30)
    for degree in (2, 3, 4):
        assert steps(mixed, degree, 0, 30) == whole
    assert steps(mixed, 4, 0, 7) + steps(mixed, 2, 7 * 12, 11) + steps(mixed, 1, 18 * 12, 12) == whole
    found = Counter(number // 1000 for number in flat(whole))
    assert [found[source] for source in range(3)] == [180, 108, 72]
    position = 0
    for step in whole:  # the shuffle of a batch keeps its samples
        position += 12
        seen = Counter(number // 1000 for number in flat(whole[: position // 12]))
        assert all(abs(seen[source] - position * count / 10) < 1 for source, count in enumerate((5, 3, 2))), step


def test_no_rank_is_bound_to_one_source() -> None:
    """With one sample per rank and step, an order of period two would give each rank one source for ever."""
    mixed = mixture([50, 50], [1, 1])
    for rank in range(2):
        part = slice(rank, rank + 1)
        first = [batch_ids(mixed, 0, position, 2, part)[0] >= 50 for position in range(0, 200, 2)]
        assert 30 < sum(first) < 70


def test_weights_are_the_numbers_that_were_typed() -> None:
    assert counts_of([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert counts_of([1 / 3, 2 / 3]) == (1, 2)
    rounded = counts_of([123_456_789, 987_654_321])
    assert rounded is not None
    assert sum(rounded) <= interleave.LONGEST_PERIOD
    assert rounded[0] / sum(rounded) == pytest.approx(123_456_789 / 1_111_111_110, rel=0.001)
    assert counts_of([1, 1e-9]) is None
    assert len(period((99_999, 1))[0]) == 100_000


# ── sources ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a" * 400)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": "b" * 40, "body": "d" * 40}) for _ in range(5)))
    np.full(200, ord("c"), dtype=np.uint16).tofile(tmp_path / "c.bin")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 9}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 8)
    return tmp_path


def test_text_jsonl_and_token_shards_mix(files: Path) -> None:
    training, held_out = opened((files / "a.txt", 2), (files / "b.jsonl", 1), (files / "c.bin", 1), validation=0.1)
    assert isinstance(training, Mixture)
    tokens = training.batch(training.ids_at(0, np.arange(400)))["tokens"]
    found = Counter(tokens[:, 0].tolist())
    assert abs(found[ord("a")] - 200) <= 10  # end tokens come first in some samples
    assert found[ord("c")] == 100
    assert training.vocabulary == 257
    evaluated = [batch["tokens"] for batch in evaluation_batches(held_out, batch=4)]
    assert sum(map(len, evaluated)) == len(held_out) == 10 + 5 + 5
    assert {*torch.cat(evaluated).ravel().tolist()} >= {ord("a"), ord("b"), ord("c")}
    assert "50.00% of text file" in training.describe()
    assert "passes per epoch" in training.describe()


def test_conversations_mix_with_text_that_has_the_same_tensors(files: Path) -> None:
    training, held_out = opened((files / "a.txt", 1), (files / "chat.jsonl", 1), seq_len=32, validation=0)
    assert len(held_out) == 0
    assert training.labels_per_sample is None
    batch = training.batch(np.array([0, len(training) - 1]))
    assert (batch["labels"][0] >= 0).all()
    assert (batch["labels"][1] == -100).any()
    with rejects("D083", "documents (32,) int32", "--data.pack true"):
        opened((files / "a.txt", 1), (files / "chat.jsonl", 1), seq_len=32, pack=True)


def test_a_source_has_settings_of_its_own(files: Path) -> None:
    rows = [{"source": str(files / "a.txt"), "weight": 1}, {"source": str(files / "b.jsonl"), "weight": 1}]
    rows[1]["text_field"] = "body"
    training, _ = open_datasets(DataSection.model_validate({"source": rows, "seq_len": 4}), seed=0)
    assert ord("d") in training.batch(np.arange(len(training)))["tokens"]


def test_sources_that_do_not_fit_are_rejected(files: Path, tmp_path: Path) -> None:
    with rejects("D083", "tokens (4,) int64", "images (3, 4, 4) float32"):
        rows = {"source": [{"source": "python", "weight": 1}, {"source": "synthetic", "weight": 1}]}
        open_datasets(
            DataSection.model_validate({**rows, "synthetic_kind": "images", "seq_len": 4, "image_size": 4}), 0
        )
    np.full(200, 50_256, dtype=np.uint16).tofile(tmp_path / "gpt2.bin")
    with rejects("D085", "50,256", "257 tokens"):
        opened((files / "a.txt", 1), (tmp_path / "gpt2.bin", 1))
    with rejects("D082", "a.txt"):
        opened((files, 1), (files / "a.txt", 1), format="text")
    with rejects("D086", "1e-09"):
        opened((files / "a.txt", 1), (files / "b.jsonl", 1e-9))
    (tmp_path / "empty.txt").write_text("")
    with rejects("D007", "empty.txt: ") as caught:  # both problems at once, each with its source
        opened((tmp_path / "empty.txt", 1), (tmp_path / "none.txt", 1))
    assert caught.value.codes == ("D007", "D001")


def test_images_mix_if_their_classes_are_the_same(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    for name in ("a/cat", "a/dog", "b/cat", "b/dog", "c/dog", "c/cow"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(3):
            images.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / name / f"{number}.bmp")
    assert opened((tmp_path / "a", 1), (tmp_path / "b", 1), image_size=4)[0].vocabulary == 2
    with rejects("D084", "cat, dog", "cow, dog"):
        opened((tmp_path / "a", 1), (tmp_path / "c", 1), image_size=4)


def test_the_fingerprint_covers_sources_and_weights(files: Path) -> None:
    one = Fingerprint.of(*opened((files / "a.txt", 1), (files / "b.jsonl", 1)))
    assert Fingerprint.of(*opened((files / "a.txt", 0.5), (files / "b.jsonl", 0.5))) == one
    for other in (
        opened((files / "a.txt", 1), (files / "b.jsonl", 2)),
        opened((files / "b.jsonl", 1), (files / "a.txt", 1)),
    ):
        assert Fingerprint.of(*other).difference(one.to_mapping()).startswith("fingerprint: ")


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sources_are_a_mapping_or_rows_and_are_stored_as_rows() -> None:
    for text in ("{a/: 0.7, b.jsonl: 3}", "[{source: a/, weight: 0.7}, {source: b.jsonl, weight: 3}]"):
        recipe = load_recipe(None, [("data.source", text)])
        assert [(one.source, one.weight) for one in recipe.data.source] == [("a/", 0.7), ("b.jsonl", 3.0)]  # type: ignore[union-attr]
        assert build_recipe(yaml.safe_load(dump_recipe(recipe)), title="") == recipe


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("[a, b]", "D080", ["source 2 ", "'b'", "--data.source '{a: 1, b: 1}'"]),
        ("{a: 1}", "D080", ["at least two", "got 1", "{a: 1, OTHER: 1}"]),
        ("[]", "D080", ["got 0"]),
        ("3", "D080", ["got 3"]),
        ("{a: 0, b: 1}", "D081", ["'a'", "got 0"]),
        ("{a: -0.5, b: 1}", "D081", ["got -0.5"]),
        ("{a: .nan, b: 1}", "D081", ["got nan"]),
        ("{a: true, b: 1}", "D081", ["got True"]),
        ("[{source: a, weight: 1}, {source: a, weight: 2}]", "D082", ["'a' 2 times"]),
        ("[{source: a, weight: 1, fields: text}, {source: b, weight: 2}]", "D080", ["fields"]),
        ("[{source: a, weight: 1, format: tex}, {source: b, weight: 2}]", "D080", ["'tex'"]),
    ],
)
def test_wrong_mixtures(text: str, code: str, values: list[str]) -> None:
    with rejects(code, *values):
        load_recipe(None, [("data.source", text)])


def test_a_wrong_field_of_a_source_is_fixed_in_that_source(tmp_path: Path) -> None:
    """One `--data.text_field` for all sources would be wrong for another one."""
    rows = []
    for name, key in (("one", "body"), ("two", "content")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({key: "words " * 20}) + "\n")
        rows.append({"source": str(tmp_path / f"{name}.jsonl"), "weight": 0.5})
    with pytest.raises(ShoalError) as caught:
        open_datasets(DataSection.model_validate({"source": rows, "seq_len": 4}), 0)
    fixes = [problem.fix for problem in caught.value.problems]
    assert fixes == [
        f"{{source: {row['source']}, weight: 0.5, text_field: {key}}} in --data.source"
        for row, key in zip(rows, ("body", "content"), strict=True)
    ]
