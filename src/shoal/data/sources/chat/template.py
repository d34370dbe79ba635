"""The chat template of a tokenizer folder.

A token is trained if its first character belongs to an answer. So a template may put anything around one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.sources.chat.encode import Example, PlainChat
from shoal.data.sources.chat.turns import SHOWN, Row, Turn, unhonoured
from shoal.data.sources.tokenizer import Tokenizer
from shoal.errors import ShoalError, needs

ANSWER = "yes"


class TemplateChat(PlainChat):
    """Conversations by a chat template. Plain text is encoded without it."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        super().__init__(tokenizer)
        transformers = needs("transformers", what="the chat template of data.tokenizer", extra="hf")
        self.folder = folder
        self._own: Any = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def encode(self, row: Row) -> Example:
        """The rendered conversation; answers are found by their places in the text."""
        if not row.turns[0].role:
            return super().encode(row)
        self._reject_unshown(row)
        text = self._render(row)
        spans = [self._span(row, number, text) for number, turn in enumerate(row.turns) if turn.is_trained]
        encoded = self._own(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [any(begin <= start < end for begin, end in spans) for start, _ in encoded["offset_mapping"]]
        return Example(np.array(encoded["input_ids"], dtype=np.uint32), np.array(trained, dtype=np.uint8))

    def prompt(self, row: Row) -> list[int]:
        """The rendered conversation, with the template's beginning of an answer."""
        if not row.turns[0].role:
            return super().prompt(row)
        text = self._render(row, add_generation_prompt=True)
        return [int(token) for token in self._own(text, add_special_tokens=False)["input_ids"]]

    def end_tokens(self) -> frozenset[int]:
        """The tokenizer's end token, and the special one that the template puts after an answer, if any."""
        text = self._render(Row((Turn("user", "?", is_trained=False), Turn("assistant", ANSWER, is_trained=True))))
        encoded = self._own(text, add_special_tokens=False, return_offsets_mapping=True)
        end, special = text.rfind(ANSWER) + len(ANSWER), self._own.added_tokens_decoder
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        after = [
            int(token) for token, (start, stop) in pairs if start >= end and str(special.get(token)) == text[start:stop]
        ]
        return super().end_tokens() | frozenset(after[:1])

    def _span(self, row: Row, number: int, text: str) -> tuple[int, int]:
        before = self._render(_first(row, number), add_generation_prompt=True) if number else ""
        until = self._render(_first(row, number + 1))
        if not (text.startswith(before) and text.startswith(until)):
            raise ShoalError(
                f"the chat template of {self.folder} changes earlier messages, so the place of an answer is not known",
                fix="one answer for each row, as the last message; or --data.tokenizer with another template",
                code="D073",
            )
        return len(before), len(until)

    def _reject_unshown(self, row: Row) -> None:
        """Raise for a key that the template leaves out: the text would be the same without it."""
        for key, given, other in _without_one(row):
            if self._render(given) == self._tried(other):
                raise unhonoured(row.where, key, f"--data.tokenizer FOLDER with a chat template that shows {key}")
        for given, other in _without_null(row):
            without = self._tried(other)
            if without is not None and self._render(given).count("None") > without.count("None"):
                raise unhonoured(row.where, "content", '"content": "", since the chat template shows null as None')

    def _tried(self, row: Row) -> str | None:
        """The text of a row that the template may not take."""
        try:
            return self._render(row)
        except ShoalError:
            return None

    def _render(self, row: Row, **options: bool) -> str:
        messages = [turn.message for turn in row.turns]
        tools = list(row.tools) or None
        apply = partial(self._own.apply_chat_template, tools=tools, tokenize=False, **options)
        try:
            return _rendered(apply, messages)
        except Exception as error:  # of the template's own language, or of the template itself
            raise ShoalError(
                f"the chat template of {self.folder} rejects {row.where}: {type(error).__name__}: {error}",
                fix="roles in the order that the template takes, or --data.tokenizer with another template",
                code="D072",
            ) from error


def _rendered(apply: Callable[[list[dict[str, Any]]], object], messages: list[dict[str, Any]]) -> str:
    """The text of messages. Most templates take the arguments of tool calls as objects. Others, such as DeepSeek's,
    take JSON: they fail with objects, or show them as Python does."""
    as_text = [_with_text_arguments(message) for message in messages]
    if as_text == messages:
        return str(apply(messages))
    try:
        text = str(apply(messages))
    except Exception:
        with suppress(Exception):  # the first error says more
            return str(apply(as_text))
        raise
    is_as_python = any(str(one) in text and str(one) != json.dumps(one) for one in _arguments(messages))
    return str(apply(as_text)) if is_as_python else text


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as JSON."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_as_text(call) for call in calls]} if calls else message


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        call = {**call, "function": _as_text(call["function"])}
    if isinstance(call.get("arguments"), dict):
        call = {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return call


def _arguments(messages: list[dict[str, Any]]) -> Iterator[object]:
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        yield call.get("function", call).get("arguments")


def _first(row: Row, count: int) -> Row:
    return replace(row, turns=row.turns[:count])


def _without_one(row: Row) -> Iterator[tuple[str, Row, Row]]:
    """Each key that must be seen in the text, with the row up to it, and the same without the key."""
    if row.tools:
        yield "tools", row, replace(row, tools=())
    for number, turn in enumerate(row.turns):
        given = _first(row, number + 1)
        for shown in SHOWN:
            if turn.rest.get(shown):
                yield shown, given, _with_last(given, {key: one for key, one in turn.rest.items() if key != shown})


def _without_null(row: Row) -> Iterator[tuple[Row, Row]]:
    """The row up to each content that is null, and the same with an empty text."""
    for number, turn in enumerate(row.turns):
        if "content" in turn.rest:
            given = _first(row, number + 1)
            yield given, _with_last(given, {**turn.rest, "content": ""})


def _with_last(row: Row, rest: dict[str, Any]) -> Row:
    """The row with other keys in its last message."""
    return replace(row, turns=(*row.turns[:-1], replace(row.turns[-1], rest=rest)))
