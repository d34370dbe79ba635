"""Read a `ds_config.json`: plain JSON, of a bounded size, without duplicate keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, nearest
from shoal.safe_parsing import parse_json, read_text

Config = dict[str, Any]


def read_config(source: str | Path | Mapping[str, Any]) -> Config:
    """The config in a file, or a mapping as it is."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        text = read_text(path, fix="a file of JSON, such as ds_config.json")
    except OSError as error:
        raise _unreadable(path, error) from None
    config = parse_json(text, str(path), "plain JSON: no comments, no trailing commas, quotes around keys")
    if not isinstance(config, dict):
        raise ShoalError(
            f"{path} must hold a JSON object, got a {type(config).__name__}",
            fix='start with {, for example {"train_batch_size": 32}',
            code="E003",
        )
    _reject_duplicates(text, path)
    return config


def _unreadable(path: Path, error: OSError) -> ShoalError:
    """The error of a file that cannot be read. The fix names the file of this folder with the nearest name."""
    names = {file.stem: file for file in path.parent.glob("*.json")} if path.parent.is_dir() else {}
    near = names.get(nearest(path.stem, names) or "")
    what = f"the config {str(path)!r} of DeepSpeed cannot be read: {error.strerror or error}"
    return ShoalError(what, fix=f"--deepspeed {near or 'ds_config.json'}", code="E001")


def _reject_duplicates(text: str, path: Path) -> None:
    """Raise if an object has a key twice. `json` takes the last one without a word, and DeepSpeed rejects the file."""
    twice: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice.extend(dict.fromkeys(key for key in keys if keys.count(key) > 1))
        return dict(pairs)

    json.loads(text, object_pairs_hook=note)
    if twice:
        names = ", ".join(map(repr, twice))
        raise ShoalError(f"{path} has the key {names} twice in one object", fix="remove one of them", code="E002")
