"""Texts with labels, from JSONL or Parquet: a class of each text, or another text.

    format: classes   {"text": "a good film", "label": "good"}          a name, or a number from 0
    format: pairs     {"source": "ein Haus", "target": "a house"}

    tokens           [c t t t s . . .]    c, s: what the tokenizer puts around a text; `.` is padding
    attention_mask   [1 1 1 1 1 0 0 0]
    labels of pairs  [c t t s _ _ _ _]    the target, tokenized the same way; `_` is IGNORE

Longer texts are cut, before the token at their end. Rows are numbered in a fixed shuffled order, as images are, so
that the held-out last ones are of all classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data.batch import IGNORE
from shoal.data.dataset import Batch, Ids
from shoal.data.order import sample_ids
from shoal.data.sources.digest import Tokens, digest_of_streams
from shoal.data.sources.files import JSONL_ENDINGS, PARQUET_ENDINGS, files_under, read_bytes
from shoal.data.sources.images import LISTING_SEED
from shoal.data.sources.parquet.read import dict_rows
from shoal.data.sources.tokenizer import Tokenizer
from shoal.data.task import FLAGS, Task
from shoal.errors import ShoalError

LABEL, SOURCE, TARGET = "label", "source", "target"
FIXES = {LABEL: FLAGS["text class"], TARGET: FLAGS["target text"]}
"""The key of the labels → an example of a row."""


class LabelledTexts:
    """A batch has `tokens` and `attention_mask` (B, T), and `labels`: (B) for classes, (B, T) for texts."""

    is_in_memory = True

    def __init__(
        self, rows: Iterable[tuple[str, Any, str]], tokenizer: Tokenizer, *, task: Task, sequence: int, path: Path
    ) -> None:
        """`rows`: the text, its label and its place."""
        texts, labels, places = zip(*rows, strict=True) if (rows := list(rows)) else ((), (), ())
        if not texts:
            raise ShoalError(f"{path} must have at least one row, got none", fix="--data.source PATH", code="D007")
        order = sample_ids(LISTING_SEED, len(texts), 0, len(texts))
        whole = [tokenizer.around(texts[number]) for number in order]
        self.task: Task = task
        self.tokens_per_sample = sequence
        self.vocabulary: int | None = tokenizer.vocabulary
        self.classes: tuple[str, ...] = ()
        self.num_classes: int | None = None
        self._padding = tokenizer.end_token
        self._texts = [_cut(tokens, sequence, tokenizer) for tokens in whole]
        num_cut = sum(len(tokens) > sequence for tokens in whole)
        if task == "text class":
            self.labels_per_sample: int | None = 1
            self.classes, numbers = numbered(labels, places)
            self.num_classes = max(numbers) + 1
            self._labels = [np.array([numbers[number]]) for number in order]
        else:
            self.labels_per_sample = None
            targets = [tokenizer.around(_text(labels[number], TARGET, places[number])) for number in order]
            self._labels = [_cut(_ended(tokens, tokenizer), sequence, tokenizer) for tokens in targets]
            num_cut += sum(len(tokens) > sequence for tokens in targets)
        self._origin = f"{len(texts):,} texts in {path}, {_described(self)}"
        self._origin += f", {num_cut:,} texts cut at {sequence:,} tokens" if num_cut else ""

    def __len__(self) -> int:
        return len(self._texts)

    def batch(self, ids: Ids) -> Batch:
        """Pad the texts of these samples, and their labels, to the length of a sample."""
        shape = (len(ids), self.tokens_per_sample)
        tokens = np.full(shape, self._padding, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape if self.labels_per_sample is None else (len(ids), 1), IGNORE, dtype=np.int64)
        for row, number in enumerate(ids):
            text, label = self._texts[number], self._labels[number]
            tokens[row, : len(text)], mask[row, : len(text)], labels[row, : len(label)] = text, 1, label
        own = labels if self.labels_per_sample is None else labels[:, 0].copy()
        parts = {"tokens": tokens, "attention_mask": mask, "labels": own}
        return {key: torch.from_numpy(part) for key, part in parts.items()}

    def describe(self) -> str:
        """Origin, size, and classes."""
        return self._origin

    def digest(self) -> str:
        """The digest of all tokens and labels."""
        return digest_of_streams([*self._texts, *self._labels])


def read_labelled(path: Path, text: str, label: str) -> Iterator[tuple[str, Any, str]]:
    """The text, the label and the place of each row of a file, or of all JSONL and Parquet files below a folder."""
    for row, place in _rows(path, (text, label)):
        for key in (text, label):
            if row.get(key) is None:
                keys = ", ".join(map(str, row)) or "none"
                raise ShoalError(f"{place} must have the key {key!r}, got {keys}", fix=FIXES[label], code="D103")
        yield _text(row[text], text, place), row[label], place


def numbered(labels: Sequence[Any], places: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """The names of the classes, in sorted order, and the number of each label. Numbers have no names.

    >>> numbered(["no", "yes", "no"], ["a", "b", "c"])
    (('no', 'yes'), [0, 1, 0])
    """
    kind = str if isinstance(labels[0], str) else int
    for label, place in zip(labels, places, strict=True):
        if not isinstance(label, kind) or isinstance(label, bool) or (isinstance(label, int) and label < 0):
            wanted = "a name, as in the first row" if kind is str else "a number of at least 0"
            what = f"{place}: label must be {wanted}, got {label!r:.40}"
            raise ShoalError(what, fix="labels that are all names, or all numbers from 0", code="D104")
    if kind is int:
        return (), list(labels)
    names = tuple(sorted(set(labels)))
    number_of = {name: number for number, name in enumerate(names)}
    return names, [number_of[label] for label in labels]


def _rows(path: Path, keys: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    for file in files_under(path, JSONL_ENDINGS | PARQUET_ENDINGS):
        if file.suffix.lower() in PARQUET_ENDINGS:
            yield from ((row, f"{file} row {number}") for number, row in enumerate(dict_rows(file, keys), start=1))
            continue
        for number, line in enumerate(read_bytes(file).split(b"\n"), start=1):
            if line.strip():
                yield _parsed(line, f"{file} line {number}", keys[1]), f"{file} line {number}"


def _parsed(line: bytes, place: str, label: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{place} must be JSON: {error}", fix=FIXES[label], code="D017") from error
    if not isinstance(row, dict):
        raise ShoalError(f"{place} must be a JSON object, got {type(row).__name__}", fix=FIXES[label], code="D017")
    return row


def _text(found: Any, key: str, place: str) -> str:
    if not isinstance(found, str):
        what = f"{place}: {key!r} must be text, got {type(found).__name__}"
        raise ShoalError(what, fix="a text under that key", code="D019")
    return found


def _ended(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """A target with the end token, which a tokenizer may not add: a model could not learn where to stop."""
    return tokens if tokens and tokens[-1] == tokenizer.end_token else [*tokens, tokenizer.end_token]


def _cut(tokens: list[int], length: int, tokenizer: Tokenizer) -> Tokens:
    """At most `length` tokens. An end token stays at the end."""
    cut = tokens[:length]
    if len(tokens) > length and tokens[-1] == tokenizer.end_token:
        cut[-1] = tokens[-1]
    return np.array(cut, dtype=np.int64)


def _described(data: LabelledTexts) -> str:
    if data.task == "target text":
        return "each with a target"
    names = ", ".join(f"{number} {name}" for number, name in enumerate(data.classes[:8]))
    names += f" and {len(data.classes) - 8} more" if len(data.classes) > 8 else ""
    return f"{data.num_classes} classes" + (f": {names}" if names else "")
