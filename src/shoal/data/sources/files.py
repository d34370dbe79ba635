"""Finding files: what a path means, what lies under a folder, and what to say when it does not exist."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from shoal.errors import ShoalError, nearest
from shoal.files import open_regular, opened

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
IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
ENDINGS = {"text": TEXT_ENDINGS, "jsonl": JSONL_ENDINGS, "tokens": TOKEN_ENDINGS, "images": IMAGE_ENDINGS}

CLEAR_MAJORITY = 0.9
"""The part of a folder's known files that must be of one kind before that kind is taken without asking."""


def existing(source: str, words: Iterable[str] = (), setting: str = "data.source") -> Path:
    """The path that `source` names. `words` are other things that it could have been meant to be."""
    path = Path(source).expanduser().absolute()
    if os.path.exists(path):  # False, where Path.exists raises, for what may not be looked at
        return path
    folder = next(parent for parent in path.parents if os.path.isdir(parent))
    missing = path.relative_to(folder).parts[0]
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    meant = nearest(source, words) or nearest(missing, names)
    alternatives = "".join(f", or {word}" for word in words)
    if meant in names:
        meant = str(folder / meant)
    where = "" if folder == path.parent else f" ({folder} exists, {missing} in it does not)"
    raise ShoalError(
        f"no such file or folder: {path}{where}",
        fix=f"--{setting} {meant}" if meant else f"--{setting} with a path that exists{alternatives}",
    )


def files_under(path: Path, endings: Collection[str] | None = None, excluded: Collection[str] = ()) -> list[Path]:
    """The file itself, or all files below a folder in sorted order, except hidden ones and excluded folders."""
    if not path.is_dir():
        return [path]
    found: list[str] = []
    for folder, folders, names in os.walk(path, onerror=_refuse):
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


def refuse_irregular(path: Path) -> None:
    """Raise if a path is no regular file, before a package opens it: a FIFO would keep it waiting for ever."""
    try:
        os.close(open_regular(path))
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> ShoalError:
    """What to say of a file that is there and cannot be read."""
    return ShoalError(f"cannot read {path}: {error.strerror or error}", fix=f"check it with: ls -l {path}")


def kind_of(path: Path) -> str:
    """What a path holds, told from endings: text, jsonl, tokens or images.

    A single file of unknown ending is text, since it was named on purpose. A folder is what nearly all its files are.
    """
    if not path.is_dir():
        kind = next((kind for kind, endings in ENDINGS.items() if path.suffix.lower() in endings), "text")
        if kind == "images":
            raise ShoalError(f"{path} is one image, not a folder with one folder per class", fix="--data.source FOLDER")
        return kind
    found = [file.suffix.lower() for file in files_under(path)]
    counts = {kind: sum(ending in endings for ending in found) for kind, endings in ENDINGS.items()}
    total = sum(counts.values())
    kind = max(counts, key=lambda name: counts[name])
    if not total:
        raise ShoalError(
            f"{path} holds {len(found)} files, none of them text, JSONL, token shards or images by its ending",
            fix="--data.source with one file in it, which is read whatever its ending",
        )
    if counts[kind] < CLEAR_MAJORITY * total:
        mixture = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        raise ShoalError(f"{path} holds files of several kinds: {mixture}", fix=f"say which: --data.format {kind}")
    return kind


def megabytes(size: int) -> str:
    """`10.3 MB`; small sizes in bytes.

    >>> megabytes(10_300_000), megabytes(512)
    ('10.3 MB', '512 bytes')
    """
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} bytes"


def _refuse(error: OSError) -> None:
    raise unreadable(Path(error.filename), error) from error
