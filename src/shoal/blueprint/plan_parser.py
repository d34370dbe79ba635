"""The vocabulary of a plan, and the parser that reads it.

The parser turns `tp=2 zero=3 bf16` into keys and values, and reports every word that it cannot read at once. It builds
no `Plan`: `plan` imports this file, never the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shoal.blueprint.aliases import OTHER_NAMES, OTHER_SECTIONS
from shoal.blueprint.replicas import compress_words, sync_words
from shoal.errors import Problem, listed, nearest, raise_if

Schedule = Literal["gpipe", "1f1b", "interleaved", "looped", "zb", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
Offload = Literal["none", "optimizer", "parameters"]
"""What is offloaded. `offload=optimizer:FOLDER` names a folder as well."""
Context = Literal["ring", "ulysses"]

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
COUNTS = (*DEGREES, "v", "mb")
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "precision": get_args(Precision),
    "offload": get_args(Offload),
    "context": get_args(Context),
}
_LEGAL = {key: [(type(legal), legal) for legal in choices] for key, choices in CHOICES.items()}
KEYS = (
    *("dp_replicate", "dp_shard", "cp", "context", "tp", "pp", "ep", "zero", "schedule", "v", "sp", "mb"),
    *("recompute", "precision", "offload", "compress", "sync"),
)
"""The fields of `Plan`, in their order."""

BARE_WORDS: Mapping[str, tuple[str, Any]] = {
    **{word: ("schedule", word) for word in get_args(Schedule)},
    **{word: ("precision", word) for word in get_args(Precision)},
    **{"ddp": ("zero", 0), "no_shard": ("zero", 0), "shard_grad_op": ("zero", 2)},
    **{"fsdp": ("zero", 3), "full_shard": ("zero", 3), "hybrid_shard": ("zero", 3)},
    **{word: ("context", word) for word in get_args(Context)},
    "sp": ("sp", True),
}
"""Words without a key → key and value. They include torch's names of sharding strategies."""

EXAMPLES = {"compress": "int8", "sync": "diloco:50"}
SWITCH = {"on": True, "off": False, "true": True, "false": False}


@dataclass
class ReadPlan:
    """A plan as far as it could be read."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    """Keys whose value could not be read. They are not among `values`."""


def parse_words(text: str) -> dict[str, Any]:
    """Read the words of a plan into keys and values; `auto` stands for no word.

    Values that equal a default are included.

    >>> parse_words("recompute=none fp32")
    {'recompute': 'none', 'precision': 'fp32'}
    """
    read = read_words(text)
    raise_if(read.problems, f"plan {text!r}")
    return read.values


def read_words(text: str) -> ReadPlan:
    """Read the words of a plan, and collect the problems of those that cannot be read.

    >>> read = read_words("tp=x mb=4")
    >>> read.values, read.unread
    ({'mb': 4}, {'tp'})
    """
    read, spelled = ReadPlan(), dict[str, str]()
    for word in (word for word in text.split() if word.lower() != "auto"):
        if isinstance(parsed := _parse_word(word), Problem):
            read.problems.append(parsed)
            read.unread |= _meant(word)
            continue
        key, value = parsed
        wrong = list(check_values({key: value}))
        read.problems += wrong
        if key in spelled:
            what = f"{key} is set twice: {spelled[key]} and {word}"
            read.problems.append(Problem("P004", what, f"{spelled[key]} or {word}, not both"))
        read.unread |= {key} if wrong or key in spelled else set()
        read.values[key], spelled[key] = value, word
    if spelled.get("zero", "").lower() == "hybrid_shard" and not {"dp_replicate", "dp_shard"} & spelled.keys():
        what = "HYBRID_SHARD shards inside groups of ranks and replicates over the groups, but no degree is set"
        read.problems.append(Problem("P007", what, "dp_replicate=2, or another number of nodes"))
        read.unread |= {"dp_replicate"}
    read.values = {key: value for key, value in read.values.items() if key not in read.unread}
    return read


def read_mapping(values: Mapping[Any, Any]) -> ReadPlan:
    """Read a plan from keys and values, and collect the problems of those that no plan has."""
    read = ReadPlan()
    for key, value in values.items():
        if key not in KEYS:
            read.problems.append(unknown_key(str(key), value))
            read.unread |= _meant(str(key))
    known = {key: values[key] for key in values if key in KEYS}
    wrong = {key: list(check_values({key: value})) for key, value in known.items()}
    read.problems += [problem for problems in wrong.values() for problem in problems]
    read.unread |= {key for key, problems in wrong.items() if problems}
    read.values = {key: value for key, value in known.items() if key not in read.unread}
    return read


def _meant(word: str) -> set[str]:
    """The key that an unreadable word was meant for, as far as it can be guessed."""
    key = word.partition("=")[0].lower()
    near = key if key in KEYS else nearest(key, [*BARE_WORDS, *KEYS])
    return {BARE_WORDS[near][0] if near in BARE_WORDS else near} if near else set()


def check_values(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of each value by itself."""
    for key, value in values.items():
        if value is None and key not in ("recompute", "precision", "offload"):
            continue
        if key in COUNTS and (type(value) is not int or value < 1):  # True is an int, but not a degree
            yield Problem(
                "P005", f"{key} must be a whole number of at least 1, got {value!r}", f"{key}=1, {key}=2, ..."
            )
        elif key == "offload" and _is_to_folder(value):
            continue
        elif key in CHOICES and (type(value), value) not in _LEGAL[key]:
            legal = listed(CHOICES[key])
            yield Problem("P006", f"{key} must be {legal}, got {value!r}", f"{key}={legal}")
        elif key == "sp" and not isinstance(value, bool):
            yield Problem("P006", f"sp must be on or off, got {value}", "sp=on or sp=off")
        elif key == "compress":
            yield from filter(None, [compress_words.check_word(value)])
        elif key == "sync":
            yield from filter(None, [sync_words.check_word(value)])


def _is_to_folder(value: Any) -> bool:
    """Whether a value of `offload` names a folder. Words of a plan have no spaces."""
    kind, colon, folder = value.partition(":") if isinstance(value, str) else ("", "", "")
    return kind == "optimizer" and bool(colon and folder) and not any(map(str.isspace, folder))


def unknown_key(key: str, value: object) -> Problem:
    """The problem of a key that is no field of a plan."""
    near = nearest(key.lower(), KEYS)
    fix = OTHER_SECTIONS.get(key) or (f"{near}={value}" if near else _nearest_or_all(key, KEYS))
    return Problem("P002", f"a plan has no key {key!r}", fix)


def _parse_word(word: str) -> tuple[str, Any] | Problem:
    """The key and the value of one word."""
    key, equals, value = word.partition("=")
    key = key.lower()
    if not equals:
        return BARE_WORDS[key] if key in BARE_WORDS else _not_a_word(word, key)
    if key not in KEYS:
        return unknown_key(key, value)
    if key == "sp":
        return key, SWITCH.get(value.lower(), value)
    is_number = key in (*COUNTS, "zero") and value.removeprefix("-").isdecimal()
    return key, int(value) if is_number else value


def _not_a_word(word: str, key: str) -> Problem:
    """The problem of a word without a value that is no bare word."""
    if key in KEYS:
        return Problem("P003", f"{word!r} needs a value", f"{key}={listed(CHOICES.get(key, [EXAMPLES.get(key, '2')]))}")
    if (meant := OTHER_SECTIONS.get(key) or OTHER_NAMES.get(key)) is not None:
        return Problem("P001", f"{word!r} is not a word of a plan", meant)
    if (meant := _with_key(key)) is not None:
        return Problem("P003", f"{word!r} needs its key", meant)
    if (number := re.fullmatch(r"([a-z_]+?)_?(\d+)", key)) and number[1] in (*COUNTS, "zero"):
        return Problem("P001", f"{word!r} is not a word of a plan", f"{number[1]}={number[2]}")
    known = dict.fromkeys([*BARE_WORDS, *KEYS])
    values = [*compress_words.METHODS, *sync_words.WAYS]
    near = _with_key(nearest(key, values) or "") if nearest(key, known) is None else None
    return Problem("P001", f"{word!r} is not a word of a plan", near or _nearest_or_all(word, known))


def _with_key(word: str) -> str | None:
    """A value of `compress` or `sync` with its key; None: it is neither."""
    name = word.partition(":")[0]
    if name in compress_words.METHODS:
        return f"compress={word}"
    way = next((way for way in sync_words.WAYS if way == name), None)
    return None if way is None else f"sync={word if word != way else sync_words.EXAMPLES[way]}"


def _nearest_or_all(word: str, known: Iterable[str]) -> str:
    return nearest(word.lower(), known := list(known)) or f"one of {', '.join(known)}"
