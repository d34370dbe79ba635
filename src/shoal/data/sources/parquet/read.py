"""Read columns of Parquet files, some rows at a time, so that memory holds a part of one row group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.data.sources.digest import Tokens
from shoal.data.sources.files import PARQUET_ENDINGS, files_under, reject_irregular
from shoal.errors import ShoalError, nearest, needs

ROWS_AT_ONCE = 1024


def parquet_files(path: Path) -> list[Path]:
    """The file itself, or all Parquet files below a folder in sorted order."""
    files = files_under(path, PARQUET_ENDINGS)
    if not files:
        raise ShoalError(f"no Parquet files in {path}", fix="--data.format auto", code="D016")
    return files


def columns_of(file: Path) -> list[str]:
    """The names of the columns."""
    return [str(name) for name in _open(file).schema_arrow.names]


def column_kind(files: Sequence[Path], column: str) -> str:
    """`text` or `tokens`, by the type of the column, which must be the same in all files."""
    found = {_kind(file, column): file for file in reversed(files)}
    if len(found) > 1:
        kinds = ", ".join(f"{kind} in {file}" for kind, file in sorted(found.items()))
        raise ShoalError(
            f"the column {column!r} must have one type in all files, got {kinds}",
            fix=f"--data.source {files[0]}",
            code="D087",
        )
    return next(iter(found))


def _kind(file: Path, column: str) -> str:
    types = needs("pyarrow", what=f"{file}", extra="parquet").types
    schema = _open(file).schema_arrow
    kinds = {field.name: _kind_of_type(types, field.type) for field in schema}
    if column not in kinds:
        usable = [name for name, kind in kinds.items() if kind]
        raise ShoalError(
            f"data.text_field must be a column of {file} ({', '.join(kinds)}), got {column!r}",
            fix=f"--data.text_field {nearest(column, usable) or next(iter(usable), 'COLUMN')}",
            code="D006",
        )
    if not kinds[column]:
        usable = [name for name, kind in kinds.items() if kind]
        raise ShoalError(
            f"the column {column!r} of {file} must hold text or lists of token ids, got {schema.field(column).type}",
            fix=f"--data.text_field {next(iter(usable), 'COLUMN')}",
            code="D087",
        )
    return kinds[column]


def _kind_of_type(types: Any, found: Any) -> str:
    """`text`, `tokens`, or nothing."""
    if types.is_dictionary(found):
        found = found.value_type
    if any(check(found) for check in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        return "text"
    is_list = types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found)
    return "tokens" if is_list and types.is_integer(found.value_type) else ""


def text_rows(files: Sequence[Path], column: str) -> Iterator[bytes]:
    """The text of each row that has some, in UTF-8."""
    for file in files:
        for part in _batches(file, [column]):
            for text in part.column(0).to_pylist():
                if text:
                    yield text.encode("utf-8", errors="replace") if isinstance(text, str) else text


def token_rows(files: Sequence[Path], column: str) -> Iterator[tuple[Tokens, Tokens]]:
    """Some rows at a time: the token ids of all of them, and the number of ids of each that has some."""
    compute = needs("pyarrow.compute", what="Parquet", package="pyarrow", extra="parquet")
    for file in files:
        for part in _batches(file, [column]):
            lists = part.column(0)
            lengths = compute.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
            values = lists.flatten()  # without those of null rows
            if values.null_count:
                raise ShoalError(
                    f"the column {column!r} of {file} must hold text or lists of token ids, got a list with a null",
                    fix="--data.text_field COLUMN",
                    code="D087",
                )
            if len(values):
                yield values.to_numpy(zero_copy_only=False), lengths[lengths > 0]


def dict_rows(file: Path, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Those of these columns that are there, of each row."""
    for part in _batches(file, [name for name in columns_of(file) if name in columns]):
        yield from part.to_pylist()


def _batches(file: Path, columns: list[str]) -> Iterator[Any]:
    opened = _open(file)
    try:
        yield from opened.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
    except (OSError, ValueError) as error:  # errors of pyarrow are of these
        raise _damaged(file, error) from error


def _open(file: Path) -> Any:
    parquet = needs("pyarrow.parquet", what=f"{file}", package="pyarrow", extra="parquet")
    reject_irregular(file)
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ShoalError:
    return ShoalError(
        f"{file} must be a whole Parquet file: {error}", fix=f"--data.source PATH without {file.name}", code="D088"
    )
