"""Documents from a Hugging Face dataset: `hf:NAME`, `hf:NAME:CONFIG`, or `hf:/path` of one on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.data.sources.files import megabytes
from shoal.data.sources.text import Corpus
from shoal.errors import ShoalError, nearest, needs

SPLIT = "train"
_SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` writes; other folders hold plain files


def hugging_face(source: str, field: str) -> Corpus:
    """The column `field` of the training split; one document per row."""
    datasets = needs("datasets", what=f"data.source {source}", extra="hf")
    table = _load(datasets, source.removeprefix("hf:"))
    columns = [str(name) for name in table.column_names]
    if field not in columns:
        raise reject_column(source, field, columns)
    documents = [text.encode("utf-8", errors="replace") for text in table[field] if text]
    if not documents:
        raise ShoalError(
            f"{source} has {len(table)} rows, none with text in {field!r}", fix="--data.text_field COLUMN", code="D007"
        )
    return Corpus(documents, f"{len(documents):,} documents of {source}, {megabytes(sum(map(len, documents)))}")


def _load(datasets: Any, name: str) -> Any:
    """Open one table of rows. The package raises many kinds of errors (network, names, configs); their text is kept."""
    try:
        folder = Path(name).expanduser()
        if is_saved(folder):
            loaded = datasets.load_from_disk(str(folder))
        elif folder.exists():
            loaded = datasets.load_dataset(str(folder), split=SPLIT)
        else:
            loaded = datasets.load_dataset(*name.split(":", maxsplit=1), split=SPLIT)
    except Exception as error:
        raise cannot_open(name, error) from error
    return split_of(loaded, name)


def split_of(loaded: Any, name: str) -> Any:
    """The training split of several; a single table is that."""
    if not isinstance(loaded, dict):
        return loaded
    if SPLIT not in loaded:
        raise ShoalError(
            f"{name} must have the split {SPLIT!r}, got {', '.join(loaded)}",
            fix=f"--data.source hf:{name}/{next(iter(loaded))}",
            code="D009",
        )
    return loaded[SPLIT]


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return any((folder / mark).exists() for mark in _SAVED)


def reject_column(source: str, field: str, columns: Sequence[str]) -> ShoalError:
    """The error for a column that is not there."""
    return ShoalError(
        f"data.text_field must be a column of {source} ({', '.join(columns)}), got {field!r}",
        fix=f"--data.text_field {nearest(field, columns) or columns[0]}",
        code="D006",
    )


def cannot_open(name: str, error: Exception) -> ShoalError:
    """The error for a dataset that the package cannot open or read."""
    return ShoalError(
        f"the dataset {name!r} cannot be opened: {type(error).__name__}: {error}",
        fix="--data.source hf:NAME, hf:NAME:CONFIG, or hf:PATH of a folder",
        code="D008",
    )
