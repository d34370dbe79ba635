"""Rows of JSONL or Parquet for fine-tuning. A row is one of

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}         a user's message and its answer; input is optional
    {"prompt": [messages], "completion": [messages]}                messages, of which the completion is trained
    {"prompt": "...", "completion": "..."}                          plain text: no template is applied

Only answers are trained: messages of the assistant, or the completion.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.data.sources.files import JSONL_ENDINGS, PARQUET_ENDINGS, files_under, read_bytes
from shoal.data.sources.parquet.read import columns_of, dict_rows
from shoal.errors import ShoalError

KINDS = ({"messages"}, {"instruction", "output"}, {"prompt", "completion"})
"""Keys by which a row is recognised."""
KEYS = {"input"}.union(*KINDS)
"""All keys that are read."""
ROW_ENDINGS = JSONL_ENDINGS | PARQUET_ENDINGS
FIX = 'lines such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, or a piece of plain text, which has no role."""

    role: str
    content: str
    is_trained: bool


Row = tuple[Turn, ...]


def is_chat(path: Path) -> bool:
    """Whether the first row of JSONL files, or the columns of Parquet files, are one of the kinds above."""
    for file in files_under(path, ROW_ENDINGS):
        if file.suffix.lower() in PARQUET_ENDINGS:
            return any(kind <= set(columns_of(file)) for kind in KINDS)
        first = next((line for line in read_bytes(file).split(b"\n") if line.strip()), None)
        if first is not None:
            try:
                row = json.loads(first)
            except (ValueError, RecursionError):
                return False
            return isinstance(row, dict) and any(kind <= row.keys() for kind in KINDS)
    return False


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, or of all JSONL and Parquet files below a folder."""
    for file in files_under(path, ROW_ENDINGS):
        if file.suffix.lower() in PARQUET_ENDINGS:
            yield from (_row(row, f"{file} row {number}") for number, row in enumerate(dict_rows(file, KEYS), start=1))
            continue
        for number, line in enumerate(read_bytes(file).split(b"\n"), start=1):
            if line.strip():
                yield _row(_parsed(line, f"{file} line {number}"), f"{file} line {number}")


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{where} must be JSON: {error}", fix=FIX, code="D070") from error


def _row(found: Any, where: str) -> Row:
    if not isinstance(found, dict) or not any(kind <= found.keys() for kind in KINDS):
        keys = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ShoalError(
            f"{where} must have messages, instruction and output, or prompt and completion, got {keys or 'no key'}",
            fix=FIX,
            code="D070",
        )
    row = tuple(_turns(found, where))
    if not any(turn.is_trained for turn in row):
        raise ShoalError(f"{where} must have an answer to train on, got none", fix=FIX, code="D071")
    return row


def _turns(row: Mapping[str, Any], where: str) -> Iterator[Turn]:
    if "messages" in row:
        yield from _messages(row["messages"], where)
    elif "instruction" in row:
        given = _text(row.get("input") or "", where)
        question = _text(row["instruction"], where) + (f"\n\n{given}" if given else "")
        yield Turn("user", question, is_trained=False)
        yield Turn("assistant", _text(row["output"], where), is_trained=True)
    elif isinstance(row["prompt"], str):
        yield Turn("", row["prompt"], is_trained=False)
        yield Turn("", _text(row["completion"], where), is_trained=True)
    else:
        yield from (Turn(turn.role, turn.content, is_trained=False) for turn in _messages(row["prompt"], where))
        yield from _messages(row["completion"], where)


def _messages(found: Any, where: str) -> Iterator[Turn]:
    if not isinstance(found, list) or not found:
        raise ShoalError(f"{where} must have a list of messages, got {type(found).__name__}", fix=FIX, code="D070")
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ShoalError(
                f"{where}: a message must have a role and a content, got {message!r:.80}", fix=FIX, code="D070"
            )
        content = _text(message.get("content"), where)
        yield Turn(message["role"], content, is_trained=message["role"] == "assistant")


def _text(found: Any, where: str) -> str:
    if not isinstance(found, str):
        raise ShoalError(f"{where}: content must be text, got {type(found).__name__}", fix=FIX, code="D070")
    return found
