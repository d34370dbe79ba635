"""Stream a Hugging Face dataset: rows are read once, one after the other, and only their tokens are stored.

A stream has no random access, and a shuffle buffer of the package `datasets` depends on the number of workers and on
its own position. So rows are not drawn from the stream during training. They are read in the order of the dataset,
shard by shard, and their tokens are appended to a file of the cache (cache/tokens.py). From there on, the order of the
samples is the same pure function as for any other source, on any number of ranks and after any resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.config.data_source import spelled
from shoal.config.recipe import DataSection
from shoal.data.sources.cache.documents import cached_documents
from shoal.data.sources.cache.tokens import identity_of_files
from shoal.data.sources.digest import Tokens
from shoal.data.sources.files import files_under
from shoal.data.sources.huggingface.table import SPLIT, cannot_open, is_saved, reject_column, split_of
from shoal.data.sources.tokenizer import Tokenizer
from shoal.errors import ShoalError, needs


def reject_idle_streaming(section: DataSection) -> None:
    """Raise if streaming is set, and no source is a Hugging Face dataset."""
    has_any = any(str(one.source).startswith("hf:") for one in section.each)
    if section.streaming_tokens is not None and not (section.streaming and has_any):
        raise ShoalError(
            f"--data.streaming_tokens {section.streaming_tokens} has no effect without --data.streaming true",
            fix="--data.streaming true with --data.source hf:NAME, or --data.streaming_tokens null",
            code="D096",
        )
    if section.streaming and not has_any:
        raise ShoalError(
            f"--data.streaming true needs a source hf:NAME, got {spelled(section.source)}",
            fix="--data.streaming false: other sources are never read into memory as a whole, or are small",
            code="D096",
        )


def streamed_text(section: DataSection, tokenizer: Tokenizer) -> tuple[Tokens, str]:
    """The tokens of the column `text_field` of all rows, or of the first rows, and their origin."""
    source = str(section.source)
    datasets = needs("datasets", what=f"data.source {source}", extra="hf")
    name = source.removeprefix("hf:")
    rows, identity = _open(datasets, name)
    return cached_documents(
        section,
        tokenizer,
        {"dataset": name, "split": SPLIT, "identity": identity},
        lambda: _texts(rows, source, section.text_field),
        what=source,
    )


def _open(datasets: Any, name: str) -> tuple[Any, Any]:
    """The rows, and what decides their content: files and their times, or the commit of the hub."""
    folder = Path(name).expanduser()
    try:
        if is_saved(folder):
            table = split_of(datasets.load_from_disk(str(folder)), name)
            return table.to_iterable_dataset(), list(identity_of_files(files_under(folder.absolute())))
        if folder.exists():
            rows = datasets.load_dataset(str(folder.absolute()), split=SPLIT, streaming=True)
            return rows, list(identity_of_files(files_under(folder.absolute())))
        hub = needs("huggingface_hub", what=f"data.source hf:{name}", extra="hf")
        path, *config = name.split(":", maxsplit=1)
        commit = hub.HfApi().dataset_info(path).sha  # so that all hosts, and the next run, read the same rows
        return datasets.load_dataset(path, *config, split=SPLIT, streaming=True, revision=commit), commit
    except ShoalError:
        raise
    except Exception as error:  # the package raises many kinds
        raise cannot_open(name, error) from error


def _texts(rows: Any, source: str, field: str) -> Iterator[bytes]:
    """The text of each row that has some."""
    for number, row in enumerate(_errors_named(rows, source)):
        if field not in row:
            raise reject_column(source, field, list(map(str, row)))
        text = row[field]
        if text is not None and not isinstance(text, str):
            what = f"{source} row {number + 1}: {field!r} must be text, got {type(text).__name__}"
            raise ShoalError(what, fix="--data.text_field KEY", code="D019")
        if text:
            yield text.encode("utf-8", errors="replace")


def _errors_named(rows: Any, source: str) -> Iterator[Any]:
    """The rows; an error of the network, or of a damaged file, names the source."""
    try:
        yield from rows
    except Exception as error:
        raise cannot_open(source.removeprefix("hf:"), error) from error
