"""A row for fine-tuning as turns. A key that changes the meaning of a row is honoured or rejected; others, such as `id`
or `source`, are ignored.

    row        system                 the first message, unless there is one
               history                [[question, answer], ...] before an instruction
               tools                  passed to the chat template
    message    weight                 0: the message is not trained; 1: as without it
               all other keys         passed to the chat template, which must show those of SHOWN
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.errors import ShoalError

KINDS = ({"messages"}, {"instruction", "output"}, {"prompt", "completion"})
"""Keys by which a row is recognised."""
UNREAD_OF_ROW = (
    *("functions", "documents", "chat_template", "chat_template_kwargs", "weight", "label"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
"""Keys of a row that would change what is trained, and are not read."""
EMPTY: tuple[object, ...] = (None, "", [], {})
KEYS = {"input", "system", "history", "tools", *UNREAD_OF_ROW}.union(*KINDS)
"""All keys that are looked at."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles that chat templates know. Messages of the assistant are trained; a template may have others."""
SHOWN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that are a part of what it says, beside its content."""
UNREAD_OF_MESSAGE = ("loss", "loss_mask", "train", "training", "train_on_turn", "train_detail", "images", "audio")
"""Keys of a message that would change what is trained, and are not read."""
FIX = 'lines such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, or a piece of plain text, which has no role."""

    role: str
    content: str
    is_trained: bool
    rest: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the message, for a chat template; `content` if it is null."""

    @property
    def message(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        return {"role": self.role, "content": self.content, **self.rest}


@dataclass(frozen=True, slots=True)
class Row:
    """The turns of a row, the tools that its messages may call, and its place in the data."""

    turns: tuple[Turn, ...]
    tools: tuple[Any, ...] = ()
    where: str = "a conversation"


def row_of(found: Any, where: str) -> Row:
    """The turns of a row that was read; raises if it is of no kind, or has nothing to train."""
    if not isinstance(found, dict) or not any(kind <= found.keys() for kind in KINDS):
        keys = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ShoalError(
            f"{where} must have messages, instruction and output, or prompt and completion, got {keys or 'no key'}",
            fix=FIX,
            code="D070",
        )
    _reject_unread(found, where)
    turns = tuple(_with_system(found, tuple(_turns(found, where)), where))
    if not any(turn.is_trained for turn in turns):
        raise _without_answer(turns, where)
    return Row(turns, _tools(found, where), where)


def _without_answer(turns: tuple[Turn, ...], where: str) -> ShoalError:
    """The error of a row with nothing to train: without an answer, or with answers of a role of another name."""
    unknown = list(dict.fromkeys(turn.role for turn in turns if turn.role and turn.role not in ROLES))
    others = f"; it has the roles {', '.join(unknown)}, and known are {', '.join(ROLES)}" if unknown else ""
    fix = '"role": "user" for questions and "role": "assistant" for answers' if unknown else FIX
    return ShoalError(f"{where} must have an answer to train on, got none{others}", fix=fix, code="D071")


def _reject_unread(row: Mapping[str, Any], where: str) -> None:
    """Raise for a key of the row that cannot be honoured. A weight of 1 changes nothing, nor does a label, unless it
    says that the answer is a bad one."""
    harmless = {"weight": row.get("weight") == 1, "label": row.get("label") is not False}
    found = next((key for key in UNREAD_OF_ROW if row.get(key) not in EMPTY and not harmless.get(key)), None)
    is_text = isinstance(row.get("prompt"), str) and not any(kind <= row.keys() for kind in KINDS[:2])
    of_messages = ("system", "tools") if is_text else ()
    of_instructions = ("history",) if "messages" in row or "instruction" not in row else ()
    unfit = next((key for key in (*of_messages, *of_instructions) if row.get(key)), None)
    if found or unfit:
        raise unhonoured(where, str(found or unfit), "a row without it; system and tools are for messages")


def unhonoured(where: str, key: str, fix: str) -> ShoalError:
    """The error of a key that changes the meaning of a row and is not read."""
    return ShoalError(f"{where}: {key!r} changes what is trained, and cannot be honoured", fix=fix, code="D100")


def _turns(row: Mapping[str, Any], where: str) -> Iterator[Turn]:
    if "messages" in row:
        yield from _messages(row["messages"], where)
    elif "instruction" in row:
        for pair in row.get("history") or ():
            if not isinstance(pair, list) or len(pair) != 2:
                what = f"{where}: history must have pairs of a question and an answer, got {pair!r:.80}"
                raise ShoalError(what, fix='"history": [["question", "answer"]]', code="D070")
            yield Turn("user", _text(pair[0], where), is_trained=False)
            yield Turn("assistant", _text(pair[1], where), is_trained=True)
        given = _text(row.get("input") or "", where)
        question = _text(row["instruction"], where) + (f"\n\n{given}" if given else "")
        yield Turn("user", question, is_trained=False)
        yield Turn("assistant", _text(row["output"], where), is_trained=True)
    elif isinstance(row["prompt"], str):
        yield Turn("", row["prompt"], is_trained=False)
        yield Turn("", _text(row["completion"], where), is_trained=True)
    else:
        yield from (replace(turn, is_trained=False) for turn in _messages(row["prompt"], where))
        yield from _messages(row["completion"], where)


def _with_system(row: Mapping[str, Any], turns: tuple[Turn, ...], where: str) -> Iterator[Turn]:
    """The turns, after the system message of the row."""
    if system := _text(row.get("system") or "", where):
        if turns[0].role == "system":
            raise unhonoured(where, "system", "one system message: that of the row, or that of its messages")
        yield Turn("system", system, is_trained=False)
    yield from turns


def _tools(row: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """The tools of a row: a list, or the JSON of one."""
    found = row.get("tools") or ()
    with suppress(ValueError, RecursionError):  # text that is no JSON is no list
        found = json.loads(found) if isinstance(found, str) else found
    if not isinstance(found, list | tuple) or not all(isinstance(tool, dict) for tool in found):
        what = f"{where}: tools must be a list of JSON objects, got {found!r:.80}"
        raise ShoalError(what, fix='"tools": [{"type": "function", "function": {...}}]', code="D070")
    return tuple(found)


def _messages(found: Any, where: str) -> Iterator[Turn]:
    if not isinstance(found, list) or not found:
        raise ShoalError(f"{where} must have a list of messages, got {type(found).__name__}", fix=FIX, code="D070")
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ShoalError(
                f"{where}: a message must have a role and a content, got {message!r:.80}", fix=FIX, code="D070"
            )
        yield _turn(message, where)


def _turn(message: Mapping[str, Any], where: str) -> Turn:
    """A message with all its keys. One that calls tools may have no content."""
    if unread := next((key for key in UNREAD_OF_MESSAGE if message.get(key) not in EMPTY), None):
        raise unhonoured(where, unread, 'messages without it; "weight": 0 for a message that is not trained')
    known = ("role", "content", "weight")
    rest = {key: value for key, value in message.items() if key not in known and value is not None}
    content = message.get("content")
    if rest.get("tool_calls"):
        rest["tool_calls"] = _with_arguments(rest["tool_calls"], where)
    if content is None and any(rest.get(key) for key in SHOWN):
        content, rest["content"] = "", None
    is_trained = _weight(message, where) == 1 and message["role"] == "assistant"
    return Turn(message["role"], _text(content, where), is_trained, rest)


def _weight(message: Mapping[str, Any], where: str) -> int:
    weight = message.get("weight")
    if weight is None:
        return 1
    if weight not in (0, 1) or (weight == 1 and message["role"] != "assistant"):
        raise ShoalError(
            f"{where}: weight must be 0, or 1 for the assistant, got {weight!r:.40} for {message['role']!r:.40}",
            fix='"weight": 0 for an answer that is not trained; or no weight',
            code="D101",
        )
    return int(weight)


def _with_arguments(calls: Any, where: str) -> list[Any]:
    """Tool calls whose arguments are objects, as templates take them. Files for other systems have them as JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        what = f"{where}: tool_calls must be a list of JSON objects, got {calls!r:.80}"
        raise ShoalError(what, fix='"tool_calls": [{"type": "function", "function": {...}}]', code="D070")
    return [_with_objects(call) for call in calls]


def _with_objects(call: Mapping[str, Any]) -> dict[str, Any]:
    inner = {"function": _with_objects(call["function"])} if isinstance(call.get("function"), dict) else {}
    with suppress(ValueError, RecursionError):
        read = json.loads(call["arguments"]) if isinstance(call.get("arguments"), str) else None
        inner |= {"arguments": read} if isinstance(read, dict) else {}
    return {**call, **inner}


def _text(found: Any, where: str) -> str:
    if not isinstance(found, str):
        raise ShoalError(f"{where}: content must be text, got {type(found).__name__}", fix=FIX, code="D070")
    return found
