"""The content of the folder of a pretrained model: its config.json, tokenizer and weights. All of it is untrusted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.blueprint.validation.bounds import MOST_LAYERS
from shoal.checkpoint.formats.huggingface import CONFIG, INDEX, SINGLE, read_json
from shoal.config.pretrained_folder import folder_of
from shoal.errors import ShoalError

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
MOST_CONFIG = 2**24
"""Bytes of a config.json. Large ones list thousands of labels."""
_DEPTHS = re.compile(r"(num_\w*layers|n_layers?|depth|num_experts|num_local_experts|n_routed_experts)")
"""Keys of a config.json whose value is a number of modules."""


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


def with_floats(value: Any) -> Any:
    """Values of a config.json, with the floats that JSON does not have: transformers writes {"__float__": "Infinity"}.

    >>> with_floats({"limit": [0.0, {"__float__": "Infinity"}]})
    {'limit': [0.0, inf]}
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: with_floats(one) for key, one in value.items()}
    return [with_floats(one) for one in value] if isinstance(value, list) else value


def _numbers(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    found = [(key, value) for key, value in config.items() if isinstance(value, int)]
    for inner in (value for value in config.values() if isinstance(value, dict)):  # the config of a part of the model
        found += [(key, value) for key, value in inner.items() if isinstance(value, int)]
    return found


def tokenizer_of(name: str, *, trust_remote_code: bool = False, **_: Any) -> str | None:
    """The tokenizer.json of a folder; None: it has none."""
    path = folder_of(name, with_code=trust_remote_code) / TOKENIZER
    return str(path) if path.is_file() else None


def end_tokens_of(name: str, *, trust_remote_code: bool = False, **_: Any) -> frozenset[int]:
    """All tokens that end a text by generation_config.json and config.json: each names none, one or several."""
    folder, found = folder_of(name, with_code=trust_remote_code), set[int]()
    for path in (folder / GENERATION, folder / CONFIG):
        config = read_json(path) if path.is_file() and path.stat().st_size <= MOST_CONFIG else {}
        parts = (config, config.get("text_config"))  # that of a model with several parts
        for said in (part.get("eos_token_id") for part in parts if isinstance(part, dict)):
            found.update(one for one in (said if isinstance(said, list) else [said]) if type(one) is int)
    return frozenset(found)


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file() or any(folder.glob("*.safetensors"))


def _class_of(folder: Path) -> str:
    """The class that a config.json names, which has the head."""
    named = read_json(folder / CONFIG).get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) and name.isidentifier() else "AutoModelForCausalLM"


def no_weights(folder: Path) -> ShoalError:
    """The error of a folder without safetensors."""
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        return ShoalError(
            f"the weights in {str(folder)!r} are pickles ({pickles[0]}), which can run code, and are never read",
            fix=f"if you trust them: transformers.{_class_of(folder)}.from_pretrained(FOLDER).save_pretrained(NEW),"
            " and the same with AutoTokenizer; or --model.init random",
            code="M074",
        )
    return ShoalError(
        f"{str(folder)!r} must have weights to start from ({SINGLE} or {INDEX}), got none",
        fix="--model.init random to start from random weights, or a folder with weights",
        code="M074",
    )
