"""From a row to tokens, and which of them are trained.

A tokenizer folder with a chat template renders conversations with it. Without one, shoal's own form is used:

    <|user|>
    What is 2 + 2?
    <|assistant|>
    4 END                   END: the tokenizer's end token

A token is trained if its first character belongs to an answer. So a template may put anything around one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.data.sources.chat.rows import Row, Turn
from shoal.data.sources.digest import Tokens
from shoal.data.sources.tokenizer import Tokenizer, open_tokenizer
from shoal.errors import ShoalError, needs


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of a row, and whether each is an answer's."""

    tokens: Tokens
    is_trained: Tokens


class ChatTokenizer(Protocol):
    """Turns rows into tokens, and tokens into text."""

    tokenizer: Tokenizer

    def encode(self, row: Row) -> Example:
        """All turns, one after the other."""

    def prompt(self, row: Row) -> list[int]:
        """All turns, and the beginning of an answer."""


class PlainChat:
    """shoal's own form of a conversation, for any tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, row: Row) -> Example:
        """Only an answer and the END after it are trained."""
        tokens: list[int] = []
        trained: list[bool] = []
        for turn in row:
            head = self.tokenizer.ids(f"<|{turn.role}|>\n") if turn.role else []
            body = self.tokenizer.ids(turn.content)
            body += [self.tokenizer.end_token] if turn.is_trained or turn.role == "assistant" else self._end_of(turn)
            tokens += head + body
            trained += [False] * len(head) + [turn.is_trained] * len(body)
        return Example(np.array(tokens, dtype=np.uint32), np.array(trained, dtype=np.uint8))

    def prompt(self, row: Row) -> list[int]:
        """The turns, with the head of an answer."""
        head = self.tokenizer.ids("<|assistant|>\n") if row and row[-1].role else []
        return [*map(int, self.encode(row).tokens), *head]

    def _end_of(self, turn: Turn) -> list[int]:
        return self.tokenizer.ids("\n") if turn.role else []


class TemplateChat(PlainChat):
    """The chat template of a tokenizer folder. Plain text is encoded without it."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        super().__init__(tokenizer)
        transformers = needs("transformers", what="the chat template of data.tokenizer", extra="hf")
        self.folder = folder
        self._own: Any = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def encode(self, row: Row) -> Example:
        """The rendered conversation; answers are found by their places in the text."""
        if not row[0].role:
            return super().encode(row)
        text = self._render(row)
        spans = [self._span(row, number, text) for number, turn in enumerate(row) if turn.is_trained]
        encoded = self._own(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [any(begin <= start < end for begin, end in spans) for start, _ in encoded["offset_mapping"]]
        return Example(np.array(encoded["input_ids"], dtype=np.uint32), np.array(trained, dtype=np.uint8))

    def prompt(self, row: Row) -> list[int]:
        """The rendered conversation, with the template's beginning of an answer."""
        if not row[0].role:
            return super().prompt(row)
        text = self._render(row, add_generation_prompt=True)
        return [int(token) for token in self._own(text, add_special_tokens=False)["input_ids"]]

    def _span(self, row: Row, number: int, text: str) -> tuple[int, int]:
        before = self._render(row[:number], add_generation_prompt=True) if number else ""
        until = self._render(row[: number + 1])
        if not (text.startswith(before) and text.startswith(until)):
            raise ShoalError(
                f"the chat template of {self.folder} changes earlier messages, so the place of an answer is not known",
                fix="one answer for each row, as the last message; or --data.tokenizer with another template",
                code="D073",
            )
        return len(before), len(until)

    def _render(self, row: Sequence[Turn], **options: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in row]
        try:
            return str(self._own.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # of the template's own language, or of the template itself
            raise ShoalError(
                f"the chat template of {self.folder} rejects a conversation: {type(error).__name__}: {error}",
                fix="roles in the order that the template takes, or --data.tokenizer with another template",
                code="D072",
            ) from error


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
