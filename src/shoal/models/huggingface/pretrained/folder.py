"""The folder of a pretrained model, and its config.json. Both are untrusted until they are checked.

`hf:PATH` is a folder. `hf:OWNER/NAME` is a model of the hub: its snapshot in the local cache, else it is downloaded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.blueprint.validation.bounds import MOST_LAYERS
from shoal.checkpoint.formats.huggingface import CONFIG, INDEX, SINGLE, read_json
from shoal.errors import ShoalError, needs

PREFIX = "hf:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,95})?")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What is downloaded: no pickle, and no code."""
_CODE = "*.py"
TOKENIZER = "tokenizer.json"
MOST_CONFIG = 2**24
"""Bytes of a config.json. Large ones list thousands of labels."""
_DEPTHS = re.compile(r"(num_\w*layers|n_layers?|depth|num_experts|num_local_experts|n_routed_experts)")
"""Keys of a config.json whose value is a number of modules."""


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
            return Path(hub.snapshot_download(name, allow_patterns=files))
    except Exception as error:  # of the network, the hub or the name: dozens of classes
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ShoalError(
            f"{name!r} is no folder, is not in the cache of huggingface_hub, and cannot be downloaded: {reason}",
            fix=f"--model.name {PREFIX}FOLDER; or, where there is a network: hf download {name}",
            code="M071",
        ) from None


def config_of(folder: Path) -> dict[str, Any]:
    """The content of a config.json within bounds. Raises for weights that are quantized."""
    path = folder / CONFIG
    if path.stat().st_size > MOST_CONFIG:
        raise ShoalError(
            f"{path} must have at most {MOST_CONFIG:,} bytes", fix="the file as save_pretrained writes it", code="M073"
        )
    config = read_json(path)
    for key, value in _numbers(config):
        if _DEPTHS.fullmatch(key) and value > 16 * MOST_LAYERS:
            raise ShoalError(
                f"{path}: {key} must be at most {16 * MOST_LAYERS}, got {str(value)[:40]}",
                fix="the file as save_pretrained writes it",
                code="M073",
            )
    if config.get("quantization_config"):
        raise ShoalError(
            f"{path} says that its weights are quantized, and shoal trains weights that are not",
            fix="the folder of the model without quantization",
            code="M076",
        )
    return config


def _numbers(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    found = [(key, value) for key, value in config.items() if isinstance(value, int)]
    for inner in (value for value in config.values() if isinstance(value, dict)):  # the config of a part of the model
        found += [(key, value) for key, value in inner.items() if isinstance(value, int)]
    return found


def tokenizer_of(name: str, *, trust_remote_code: bool = False, **_: Any) -> str | None:
    """The tokenizer.json of a folder; None: it has none."""
    path = folder_of(name, with_code=trust_remote_code) / TOKENIZER
    return str(path) if path.is_file() else None


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file() or any(folder.glob("*.safetensors"))


def no_weights(folder: Path) -> ShoalError:
    """The error of a folder without safetensors."""
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        return ShoalError(
            f"the weights in {str(folder)!r} are pickles ({pickles[0]}), which can run code, and are never read",
            fix="transformers.AutoModel.from_pretrained(FOLDER).save_pretrained(NEW), if you trust them; or"
            " --model.init random",
            code="M074",
        )
    return ShoalError(
        f"{str(folder)!r} must have weights to start from ({SINGLE} or {INDEX}), got none",
        fix="--model.init random to start from random weights, or a folder with weights",
        code="M074",
    )
