"""From a row to tokens, and which of them are trained. Without a chat template, shoal's own form is used:

<|user|>
What is 2 + 2?
<|assistant|>
4 END                   END: the tokenizer's end token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.data.sources.chat.turns import SHOWN, Row, Turn, unhonoured
from shoal.data.sources.digest import Tokens
from shoal.data.sources.tokenizer import Tokenizer, begun


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

    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a text or an answer."""


class PlainChat:
    """shoal's own form of a conversation, for any tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, row: Row) -> Example:
        """Only an answer and the END after it are trained."""
        _reject_unshown(row)
        tokens: list[int] = []
        trained: list[bool] = []
        for turn in row.turns:
            head = self.tokenizer.ids(f"<|{turn.role}|>\n") if turn.role else []
            body = self.tokenizer.ids(turn.content)
            body += [self.tokenizer.end_token] if turn.is_trained or turn.role == "assistant" else self._end_of(turn)
            tokens += head + body
            trained += [False] * len(head) + [turn.is_trained] * len(body)
        tokens = begun(tokens, self.tokenizer.begin_tokens)
        trained = [False] * (len(tokens) - len(trained)) + trained
        return Example(np.array(tokens, dtype=np.uint32), np.array(trained, dtype=np.uint8))

    def prompt(self, row: Row) -> list[int]:
        """The turns, with the head of an answer."""
        head = self.tokenizer.ids("<|assistant|>\n") if row.turns[-1].role else []
        return [*map(int, self.encode(row).tokens), *head]

    def end_tokens(self) -> frozenset[int]:
        """The tokenizer's end token, which is after each answer."""
        return frozenset([self.tokenizer.end_token])

    def _end_of(self, turn: Turn) -> list[int]:
        return self.tokenizer.ids("\n") if turn.role else []


def _reject_unshown(row: Row) -> None:
    """Raise for keys of a message that this form has no place for."""
    keys = [*(["tools"] if row.tools else []), *(key for turn in row.turns for key in SHOWN if turn.rest.get(key))]
    if keys:
        raise unhonoured(row.where, keys[0], f"--data.tokenizer FOLDER with a chat template that shows {keys[0]}")
