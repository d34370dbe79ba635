"""Documents from text: Python's own library, files, folders, JSONL. A document is its bytes in UTF-8."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.data.sources.chat.turns import FIX, KINDS
from shoal.data.sources.files import JSONL_ENDINGS, TEXT_ENDINGS, files_under, megabytes, read_bytes
from shoal.errors import ShoalError, nearest

NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


@dataclass(frozen=True)
class Corpus:
    """Documents, and a description of their origin."""

    documents: list[bytes]
    origin: str


def standard_library() -> Corpus:
    """The source of Python's standard library without its tests: some 10 MB of real text that every machine has."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = files_under(folder, {".py"}, excluded=NOT_THE_LIBRARY)
    documents = _read_all(files)
    if not documents:
        raise ShoalError(
            f"Python has no source of its standard library in {folder}", fix="--data.source synthetic", code="D015"
        )
    return Corpus(documents, _origin(documents, "files of Python's standard library"))


def text_files(path: Path) -> Corpus:
    """A text file, whatever its ending, or all text files below a folder; one document each."""
    files = files_under(path, TEXT_ENDINGS)
    if not files:
        raise ShoalError(
            f"no text files in {path} (known endings: {' '.join(sorted(TEXT_ENDINGS))})",
            fix=f"--data.source {path}/FILE, which is read whatever its ending",
            code="D016",
        )
    documents = _read_all(files)
    if not documents:
        raise ShoalError(
            f"{path} must have text in it, got {len(files)} text file(s) of 0 bytes",
            fix="--data.source PATH with text in it",
            code="D007",
        )
    kind = "text files in" if path.is_dir() else "text file"
    return Corpus(documents, _origin(documents, f"{kind} {path}"))


def jsonl_files(path: Path, field: str) -> Corpus:
    """A JSONL file, or all of them below a folder; one document per line, under the key `field`."""
    files = files_under(path, JSONL_ENDINGS)
    documents = [text for file in files for text in _lines(file, field) if text]
    if not documents:
        raise ShoalError(f"no JSONL lines with text in {path}", fix='lines such as {"text": "..."}', code="D007")
    return Corpus(documents, _origin(documents, f"JSONL documents in {path}"))


def _lines(file: Path, field: str) -> Iterator[bytes]:
    for number, line in enumerate(read_bytes(file).split(b"\n"), start=1):
        if line.strip():
            yield _text_of(line, field, f"{file} line {number}")


def _text_of(line: bytes, field: str, where: str) -> bytes:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{where} must be JSON: {error}", fix='lines such as {"text": "..."}', code="D017") from error
    if not isinstance(row, dict):
        what = f"{where} must be a JSON object, got a {type(row).__name__}"
        raise ShoalError(what, fix='lines such as {"text": "..."}', code="D017")
    if field not in row:
        raise _without_text(row, field, where)
    if not isinstance(row[field], str):
        what = f"{where}: {field!r} must be text, got {type(row[field]).__name__}"
        raise ShoalError(what, fix="--data.text_field KEY", code="D019")
    text: str = row[field]
    return text.encode("utf-8", errors="replace")


def _without_text(row: dict[str, object], field: str, where: str) -> ShoalError:
    """The error of a row without the text key: a key of another name, or a misspelt one of fine-tuning."""
    keys = sorted(key for key, value in row.items() if isinstance(value, str))
    misspelt = {key: meant for key in row if (meant := nearest(key, sorted(set().union(*KINDS))))}
    fixes = [f"--data.text_field {nearest(field, keys) or next(iter(keys), 'KEY')}"] if keys else []
    fixes += [f"the key {meant!r} instead of {key!r}" for key, meant in misspelt.items() if key != meant]
    if isinstance(row.get("conversations"), list):  # of ShareGPT
        fixes = [f"{FIX} in place of conversations with from and value"]
    return ShoalError(
        f"{where} has no key {field!r}; its text keys are: {', '.join(keys) or 'none'}",
        fix=", or ".join(fixes) or 'lines such as {"text": "..."}',
        code="D018",
    )


def _read_all(files: list[Path]) -> list[bytes]:
    return [content for content in map(read_bytes, files) if content]


def _origin(documents: list[bytes], what: str) -> str:
    number = "" if what.startswith("text file ") else f"{len(documents):,} "
    return f"{number}{what}, {megabytes(sum(map(len, documents)))}"
