"""The tokens at which the answer of a trained model ends."""

from __future__ import annotations

from pathlib import Path

from shoal.config.recipe import ModelSection
from shoal.data.sources.chat.encode import ChatTokenizer
from shoal.train.model_prefix import function_for, value_for


def end_tokens(model: ModelSection, chat: ChatTokenizer, tokenizer: str) -> frozenset[int]:
    """Those of the tokenizer and its chat template, and those of the model's folder if that has the same tokenizer:
    with another one, its ids mean other tokens. `tokenizer`: its path."""
    own, function = value_for("TOKENIZERS", model), function_for("END_TOKENS", model.name)
    if own is None or function is None or not _is_same(Path(own), Path(tokenizer).expanduser()):
        return chat.end_tokens()
    of_folder: frozenset[int] = function(model.name, **model.arguments)
    return chat.end_tokens() | of_folder


def _is_same(own: Path, other: Path) -> bool:
    file = other / own.name if other.is_dir() else other
    return file.is_file() and file.read_bytes() == own.read_bytes()
