"""Open `data.source` as two datasets: one to train on, one held out. Only this file imports all kinds of sources."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.config.data_source import WeightedSource
from shoal.config.recipe import DataSection
from shoal.data.dataset import Dataset, split_last
from shoal.data.interleave import counts_of
from shoal.data.mixture import Mixture, Union
from shoal.data.sources.chat.examples import Examples
from shoal.data.sources.chat.open import open_chat_tokenizer
from shoal.data.sources.chat.rows import first_keys, is_chat, read_rows
from shoal.data.sources.digest import Tokens
from shoal.data.sources.files import existing, kind_of, reject_arrays
from shoal.data.sources.huggingface.stream import reject_idle_streaming, streamed_text
from shoal.data.sources.huggingface.table import hugging_face
from shoal.data.sources.images import ImageFolder
from shoal.data.sources.labelled import LABEL, SOURCE, TARGET, LabelledTexts, read_labelled
from shoal.data.sources.mixing.checks import check_fit, check_overlaps, too_uneven
from shoal.data.sources.packing import PackedTokens, split_streams
from shoal.data.sources.parquet.read import column_kind, parquet_files
from shoal.data.sources.parquet.tokens import cached_ids, cached_text
from shoal.data.sources.remote.download import is_url, local_copy
from shoal.data.sources.synthetic import SyntheticImages, SyntheticTokens
from shoal.data.sources.text import Corpus, jsonl_files, standard_library, text_files
from shoal.data.sources.tokenizer import Tokenizer, open_tokenizer
from shoal.data.sources.tokens import Shards, open_shards
from shoal.data.task import Task
from shoal.errors import Findings, Problem, ShoalError, raise_if

WORDS = ("python", "synthetic")
"""Sources that are no paths. A file of that name is `./python`."""
TOKENIZED = ("text", "jsonl", "chat", "parquet text", "classes", "pairs")
"""Kinds of sources that `data.tokenizer` makes the tokens of."""
BY_LINES = ("jsonl", "chat", "classes", "pairs")
"""Formats whose rows are lines of JSON, unless they are Parquet."""


def open_datasets(section: DataSection, seed: int) -> tuple[Dataset, Dataset]:
    """The training samples and the held-out ones: the last `validation` of all samples, at least one unless it is 0.

    They share no token. The seed matters only for `synthetic`, where it decides the rule.
    """
    reject_idle_streaming(section)
    return _open_one(section, seed) if isinstance(section.source, str) else _open_mixture(section, seed)


def _open_mixture(section: DataSection, seed: int) -> tuple[Dataset, Dataset]:
    """All sources, each with its own held-out samples; raises the problems of all of them at once."""
    assert not isinstance(section.source, str)
    names = [one.source for one in section.source]
    found, pairs = Findings(), list[tuple[Dataset, Dataset]]()
    found += check_overlaps(names)
    for one, entry in zip(section.each, section.source, strict=True):
        try:
            pairs.append(_open_one(one, seed))
        except ShoalError as error:
            found += (_of_source(problem, entry).within(entry.source) for problem in error.problems)
    found.raise_all()
    training, held_out = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    raise_if(check_fit(names, training, [source_kind(one) in TOKENIZED for one in section.each]))
    counts = counts_of([one.weight for one in section.source])
    if counts is None:
        raise too_uneven({one.source: one.weight for one in section.source})
    return Mixture(training, counts), Union(held_out)


def _of_source(problem: Problem, entry: WeightedSource) -> Problem:
    """The problem of one source of a mixture. `--data.text_field` would be for all of them, which may have others."""
    flag, _, field = problem.fix.partition(" ")
    if flag != "--data.text_field":
        return problem
    own = f"{{source: {entry.source}, weight: {entry.weight:g}, text_field: {field}}}"
    return replace(problem, fix=f"{own} in --data.source")


def source_kind(section: DataSection) -> str:
    """The kind of a single source: synthetic, or a format; Parquet with the kind of its column."""
    assert isinstance(section.source, str)
    if section.source == "synthetic":
        return "synthetic"
    if section.source == "python" or section.source.startswith("hf:"):
        return "text"
    path = local_path(section)
    kind = kind_of(path) if section.format == "auto" else section.format
    if (kind == "text" and section.format == "auto") or (kind in BY_LINES and path.is_file()):
        reject_arrays(path)
    keys = first_keys(path) if kind in ("jsonl", "parquet") and section.format == "auto" else ()
    if is_chat(keys):
        return "chat"
    if {SOURCE, TARGET} <= set(keys) and section.text_field not in keys:
        return "pairs"
    return f"parquet {column_kind(parquet_files(path), section.text_field)}" if kind == "parquet" else kind


def local_path(section: DataSection) -> Path:
    """The path of a source; of a URL, that of its local copy."""
    source = str(section.source)
    return existing(str(local_copy(source, section.cache, section.format)) if is_url(source) else source, WORDS)


def _open_one(section: DataSection, seed: int) -> tuple[Dataset, Dataset]:
    kind = source_kind(section)
    assert isinstance(section.source, str)
    if kind == "synthetic":
        return _synthetic(section, seed)
    if section.source == "python":
        return _text(section, standard_library())
    if section.source.startswith("hf:"):
        if section.streaming:
            return _cached_text(section, functools.partial(streamed_text, section))
        return _text(section, hugging_face(section.source, section.text_field))
    path = local_path(section)
    if kind == "tokens":
        return _shards(section, open_shards(path, section.token_dtype))
    if kind == "images":
        images = ImageFolder(path, section.image_size)
        return split_last(images, section.validation, images.describe())
    if kind == "chat":
        return _chat(section, path)
    if kind in ("classes", "pairs"):
        return _labelled(section, path, kind)
    if kind == "parquet text":
        return _cached_text(section, functools.partial(_parquet_text, section, path))
    if kind == "parquet tokens":
        return _shards(section, cached_ids(section, parquet_files(path), path))
    return _text(section, jsonl_files(path, section.text_field) if kind == "jsonl" else text_files(path))


def _chat(section: DataSection, path: Path) -> tuple[Dataset, Dataset]:
    chat = open_chat_tokenizer(section.tokenizer)
    rows = list(read_rows(path))
    whole = Examples(
        map(chat.encode, rows),
        sequence=section.seq_len,
        vocabulary=chat.tokenizer.vocabulary,
        end_token=chat.tokenizer.end_token,
        pack=section.pack,
        origin=f"{len(rows):,} conversations in {path}",
        has_conversations=any(row.turns[0].role for row in rows),
    )
    return split_last(whole, section.validation, whole.describe())


def _labelled(section: DataSection, path: Path, kind: str) -> tuple[Dataset, Dataset]:
    task: Task = "text class" if kind == "classes" else "target text"
    keys = (section.text_field, LABEL) if kind == "classes" else (SOURCE, TARGET)
    tokenizer, rows = open_tokenizer(section.tokenizer), read_labelled(path, *keys)
    whole = LabelledTexts(rows, tokenizer, task=task, sequence=section.seq_len, path=path)
    return split_last(whole, section.validation, whole.describe())


def _text(section: DataSection, corpus: Corpus) -> tuple[Dataset, Dataset]:
    tokenizer = open_tokenizer(section.tokenizer)
    stream = tokenizer.encode(corpus.documents)
    return _packed(section, [stream], tokenizer.vocabulary, corpus.origin, tokenizer.end_token)


def _parquet_text(section: DataSection, path: Path, tokenizer: Tokenizer) -> tuple[Tokens, str]:
    return cached_text(section, tokenizer, parquet_files(path), path)


def _cached_text(section: DataSection, tokens: Callable[[Tokenizer], tuple[Tokens, str]]) -> tuple[Dataset, Dataset]:
    tokenizer = open_tokenizer(section.tokenizer)
    stream, origin = tokens(tokenizer)
    return _packed(section, [stream], tokenizer.vocabulary, origin, tokenizer.end_token)


def _shards(section: DataSection, shards: Shards) -> tuple[Dataset, Dataset]:
    if section.mask_documents and section.end_token is None:
        raise ShoalError(
            "--data.mask_documents True needs --data.end_token for token ids, got none",
            fix="--data.end_token 50256, the end token of GPT-2, or that of your tokenizer",
            code="D013",
        )
    return _packed(section, shards.streams, shards.vocabulary, shards.origin, section.end_token)


def _packed(
    section: DataSection, streams: Sequence[Tokens], vocabulary: int | None, origin: str, end_token: int | None
) -> tuple[Dataset, Dataset]:
    training, held_out = split_streams(streams, section.seq_len, section.validation)

    def packed(part: Sequence[Tokens], name: str) -> PackedTokens:
        return PackedTokens(
            part,
            sequence=section.seq_len,
            vocabulary=vocabulary,
            origin=name,
            end_token=end_token,
            documents=section.mask_documents,
        )

    return packed(training, origin), packed(held_out, f"held out of {origin}")


def _synthetic(section: DataSection, seed: int) -> tuple[Dataset, Dataset]:
    whole: SyntheticTokens | SyntheticImages
    if section.synthetic_kind == "tokens":
        whole = SyntheticTokens(
            seed=seed,
            num_samples=section.synthetic_samples,
            sequence=section.seq_len,
            vocabulary=section.vocabulary,
            documents=section.mask_documents,
        )
    else:
        whole = SyntheticImages(
            seed=seed, num_samples=section.synthetic_samples, size=section.image_size, classes=section.vocabulary
        )
    return split_last(whole, section.validation, whole.describe())
