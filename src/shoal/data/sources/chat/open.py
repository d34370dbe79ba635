"""Open the tokenizer of conversations: with the chat template of its folder, or in shoal's own form."""

from __future__ import annotations

from pathlib import Path

from shoal.data.sources.chat.encode import ChatTokenizer, PlainChat
from shoal.data.sources.chat.template import TemplateChat
from shoal.data.sources.tokenizer import open_tokenizer


def open_chat_tokenizer(name: str) -> ChatTokenizer:
    """`bytes`, a tokenizer.json, or a folder of one. A chat template in the same folder is used."""
    tokenizer, path = open_tokenizer(name), Path(name).expanduser()
    folder = path if path.is_dir() else path.parent
    if name not in ("bytes", "auto") and _has_template(folder):
        return TemplateChat(tokenizer, folder)
    return PlainChat(tokenizer)


def _has_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        config.is_file() and b'"chat_template"' in config.read_bytes()
    )
