"""Rows of JSONL or Parquet for fine-tuning. A row is one of

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}         a user's message and its answer; input is optional
    {"prompt": [messages], "completion": [messages]}                messages, of which the completion is trained
    {"prompt": "...", "completion": "..."}                          plain text: no template is applied

Only answers are trained: messages of the assistant, or the completion.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from shoal.data.sources.chat.turns import FIX, KEYS, KINDS, Row, row_of
from shoal.data.sources.files import JSONL_ENDINGS, PARQUET_ENDINGS, files_under, read_bytes
from shoal.data.sources.parquet.read import columns_of, dict_rows
from shoal.errors import ShoalError

ROW_ENDINGS = JSONL_ENDINGS | PARQUET_ENDINGS


def is_chat(keys: Collection[str]) -> bool:
    """Whether rows with these keys are one of the kinds above."""
    return any(kind <= set(keys) for kind in KINDS)


def first_keys(path: Path) -> tuple[str, ...]:
    """The keys of the first row of JSONL files, or the columns of Parquet files; none, if that is no row."""
    for file in files_under(path, ROW_ENDINGS):
        if file.suffix.lower() in PARQUET_ENDINGS:
            return tuple(columns_of(file))
        first = next((line for line in read_bytes(file).split(b"\n") if line.strip()), None)
        if first is not None:
            try:
                row = json.loads(first)
            except (ValueError, RecursionError):
                return ()
            return tuple(row) if isinstance(row, dict) else ()
    return ()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, or of all JSONL and Parquet files below a folder."""
    for file in files_under(path, ROW_ENDINGS):
        if file.suffix.lower() in PARQUET_ENDINGS:
            for number, row in enumerate(dict_rows(file, KEYS), start=1):
                values = {key: _without_nulls(value) for key, value in row.items()}
                yield row_of(values, f"{file} row {number}")
            continue
        for number, line in enumerate(read_bytes(file).split(b"\n"), start=1):
            if line.strip():
                yield row_of(_parsed(line, f"{file} line {number}"), f"{file} line {number}")


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{where} must be JSON: {error}", fix=FIX, code="D070") from error


def _without_nulls(value: Any) -> Any:
    """A value without keys that are null: the objects of a column of Parquet have all keys that one of them has."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
