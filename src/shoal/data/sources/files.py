"""Find data files: the format of a path, the files below a folder, and errors for missing ones."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

from shoal.errors import ShoalError, nearest
from shoal.files import open_regular, opened, read_regular

_PROSE = (
    ".txt .text .md .markdown .rst .org .adoc .tex .html .htm .xml .csv .tsv .json .yaml .yml .toml .ini .cfg "
    ".sql .log "
)
_CODE = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .scala .js .ts .jsx .tsx .css .go .rs .rb .php .pl .lua "
    ".r .jl .hs .ml .sh .swift .cs "
)
TEXT_ENDINGS = frozenset((_PROSE + _CODE).split())
JSONL_ENDINGS = frozenset({".jsonl", ".ndjson"})
TOKEN_ENDINGS = frozenset({".bin", ".npy"})
PARQUET_ENDINGS = frozenset({".parquet", ".pq"})
IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
ENDINGS = {
    "text": TEXT_ENDINGS,
    "jsonl": JSONL_ENDINGS,
    "tokens": TOKEN_ENDINGS,
    "parquet": PARQUET_ENDINGS,
    "images": IMAGE_ENDINGS,
}

_ARRAY_OF_OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
_MOST_BEFORE_A_ROW = 4096  # bytes of white space and brackets
_TO_LINES = "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1], 'rb'))]"

CLEAR_MAJORITY = 0.9
"""The fraction of a folder's known files that must be of one kind for `data.format: auto`."""


def existing(source: str, words: Iterable[str] = (), setting: str = "data.source") -> Path:
    """The existing path of `source`. `words` are legal values that are no paths."""
    path = Path(source).expanduser().absolute()
    if os.path.exists(path):  # False for an inaccessible path, where Path.exists raises
        return path
    folder = next(parent for parent in path.parents if os.path.isdir(parent))
    missing = path.relative_to(folder).parts[0]
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    meant = nearest(source, words) or nearest(missing, names)
    others = ", or ".join([*words, "PATH"])
    if meant in names:
        meant = str(folder / meant)
    where = "" if folder == path.parent else f" ({folder} exists, {missing} in it does not)"
    raise ShoalError(
        f"no such file or folder: {path}{where}",
        fix=f"--{setting} {meant}" if meant else f"--{setting} {others}",
        code="D001",
    )


def files_under(path: Path, endings: Collection[str] | None = None, excluded: Collection[str] = ()) -> list[Path]:
    """The file itself, or all files below a folder in sorted order, without hidden ones and excluded folders."""
    if not path.is_dir():
        return [path]
    found: list[str] = []
    for folder, folders, names in os.walk(path, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith((".", "__pycache__"))]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    return [Path(name) for name in sorted(found) if endings is None or os.path.splitext(name)[1].lower() in endings]


def read_bytes(path: Path) -> bytes:
    """The content of a regular file."""
    try:
        with opened(path) as file:
            return bytes(file.read())
    except OSError as error:
        raise unreadable(path, error) from error


def reject_irregular(path: Path) -> None:
    """Raise if a path is no regular file, before a package opens it and blocks on a FIFO."""
    try:
        os.close(open_regular(path))
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> ShoalError:
    """The error for an existing file that cannot be read."""
    return ShoalError(f"cannot read {path}: {error.strerror or error}", fix=f"ls -l {path}", code="D002")


def reject_arrays(path: Path) -> None:
    """Raise if the source is rows in one JSON array, as Alpaca's: read as text, its punctuation would be trained.

    A folder is rejected if all its text is such arrays: one among other files is a part of a corpus.
    """
    files = files_under(path, TEXT_ENDINGS)
    if not files or not all(map(_is_array_of_objects, files)):
        return
    file = files[0]
    lines = file.with_suffix(".jsonl")
    raise ShoalError(
        f"{file} has its rows in one JSON array, and must have one JSON object per line",
        fix=f'python -c "{_TO_LINES}" {shlex.quote(str(file))} > {shlex.quote(str(lines))}, and --data.source'
        f" {shlex.quote(str(lines))}; or --data.format text, which trains on the file as it is",
        code="D038",
    )


def _is_array_of_objects(file: Path) -> bool:
    if file.suffix.lower() != ".json":
        return False
    try:
        return _ARRAY_OF_OBJECTS.match(read_regular(file, _MOST_BEFORE_A_ROW)) is not None
    except OSError as error:
        raise unreadable(file, error) from error


def kind_of(path: Path) -> str:
    """The format of a path by its endings: text, jsonl, tokens, parquet or images.

    A single file of unknown ending is text, since it was named on purpose. A folder has the format of nearly all its
    files.
    """
    if not path.is_dir():
        kind = next((kind for kind, endings in ENDINGS.items() if path.suffix.lower() in endings), "text")
        if kind == "images":
            raise ShoalError(
                f"data.source must be a folder with one folder of images per class, got the image {path}",
                fix=f"--data.source {path.parent.parent}",
                code="D003",
            )
        return kind
    found = [file.suffix.lower() for file in files_under(path)]
    counts = {kind: sum(ending in endings for ending in found) for kind, endings in ENDINGS.items()}
    total = sum(counts.values())
    kind = max(counts, key=lambda name: counts[name])
    if not total:
        raise ShoalError(
            f"{path} must hold text, JSONL, token shards, Parquet or images, got {len(found)} files with other endings",
            fix=f"--data.source {path}/FILE, which is read whatever its ending",
            code="D004",
        )
    if counts[kind] < CLEAR_MAJORITY * total:
        mixture = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        raise ShoalError(f"{path} must hold files of one kind, got {mixture}", fix=f"--data.format {kind}", code="D005")
    return kind


def megabytes(size: int) -> str:
    """Format a size in MB, small ones in bytes.

    >>> megabytes(10_300_000), megabytes(512)
    ('10.3 MB', '512 bytes')
    """
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} bytes"


def _raise_unreadable(error: OSError) -> None:
    raise unreadable(Path(error.filename), error) from error
