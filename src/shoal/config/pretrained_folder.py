"""The folder of a pretrained model.

`hf:PATH` is a folder. `hf:OWNER/NAME` is a model of the hub: its snapshot in the local cache, else it is downloaded.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from shoal.errors import ShoalError, needs

PREFIX = "hf:"
CONFIG = "config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,95})?")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What is downloaded: no pickle, and no code."""
_CODE = "*.py"


def folder_of(name: str, *, with_code: bool = False) -> Path:
    """The folder of `hf:PATH` or `hf:OWNER/NAME`."""
    place = name.removeprefix(PREFIX)
    path = Path(place).expanduser()
    if path.exists() or not _HUB_NAME.fullmatch(place):
        return _checked(path)
    return _checked(_snapshot(place, [*_FILES, _CODE] if with_code else _FILES))


def _checked(path: Path) -> Path:
    if path.is_dir() and (path / CONFIG).is_file():
        return path
    if not path.exists():
        what = f"there is no folder {str(path)!r} to take the model from"
    elif path.is_dir():
        what = f"{str(path)!r} must have a {CONFIG}, got none"
    else:
        what = f"{str(path)!r} must be a folder with a {CONFIG}, got a file"
    raise ShoalError(what, fix=f"--model.name {PREFIX}FOLDER, as save_pretrained writes it", code="M070")


def _snapshot(name: str, files: list[str]) -> Path:
    """The folder of a model of the hub in the local cache, downloaded if it is not there."""
    hub = needs("huggingface_hub", what=f"model.name {PREFIX}{name}", extra="hf")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        try:
            return Path(hub.snapshot_download(name, allow_patterns=files, local_files_only=True))
        except hub.errors.LocalEntryNotFoundError:
            print(f"shoal: {name!r} is no folder here; asking the Hugging Face hub", file=sys.stderr)
            return Path(hub.snapshot_download(name, allow_patterns=files))
    except Exception as error:  # of the network, the hub or the name: dozens of classes
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ShoalError(
            f"{name!r} is no folder, is not in the cache of huggingface_hub, and cannot be downloaded: {reason}",
            fix=f"--model.name {PREFIX}FOLDER; or, where there is a network: hf download {name}",
            code="M071",
        ) from None
