"""Read the options of a verb from its words, and report all problems at once.

The options are a dataclass. tyro prints its help. It could parse the words, too, but it ends the process at the first
wrong one, without a code and without JSON, and takes 0.15 s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import tyro

from shoal.errors import Problem, listed, nearest, raise_if

Options = TypeVar("Options")

USUAL = {"resume": "latest", "deepspeed": "ds_config.json"}
"""Values that a fix proposes in place of the default."""


@dataclass
class CheckedWords:
    """The values of options by their names, and the problems of the words that are none."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class _Option:
    """One option of a verb."""

    name: str
    kinds: tuple[Any, ...]
    """The types of its value, without None."""
    default: Any
    is_positional: bool

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_switch(self) -> bool:
        return self.kinds == (bool,)

    @property
    def takes_several(self) -> bool:
        return any(get_origin(kind) is tuple for kind in self.kinds)

    @property
    def usual(self) -> str:
        """A value to type."""
        if self.name in USUAL:
            return USUAL[self.name]
        choices = [each for kind in self.kinds for each in get_args(kind) if get_origin(kind) is Literal]
        if self.default not in (MISSING, None, ()):
            return " ".join(self.default) if isinstance(self.default, tuple) else str(self.default)
        return str(choices[0]) if choices else "1" if {int, float} & set(self.kinds) else "VALUE"

    def read(self, words: Sequence[str]) -> Any:
        """The value that valid words stand for."""
        if self.takes_several:
            (kind,) = (get_args(kind)[0] for kind in self.kinds if get_origin(kind) is tuple)
            return tuple(map(kind, words))
        (word,) = words
        if word == "None":
            return None
        choices = {str(each): each for kind in self.kinds for each in get_args(kind) if get_origin(kind) is Literal}
        return choices[word] if choices else self.kinds[0](word)

    def check(self, value: str) -> Iterator[Problem]:
        """The value must be of the option's type."""
        if (rule := self._rule(value)) is not None and value != "None":
            yield Problem(
                "R053", f"{self.flag} must be {rule}, got {value[:80]!r}", f"{self.flag} {self._meant(value)}"
            )

    def _meant(self, value: str) -> str:
        """The choice that a value is short for, such as huggingface for hf; else a usual value."""
        choices = [str(each) for kind in self.kinds if get_origin(kind) is Literal for each in get_args(kind)]
        letters = re.compile(".*".join(map(re.escape, value.lower()))) if value else None
        return next((each for each in choices if letters and letters.match(each)), self.usual)

    def _rule(self, value: str) -> str | None:
        """The rule that a value breaks; None: it is valid."""
        choices = [str(each) for kind in self.kinds if get_origin(kind) is Literal for each in get_args(kind)]
        if choices:
            return None if value in choices else listed(choices)
        for kind, rule in ((int, "a whole number"), (float, "a number")):
            if kind in self.kinds:
                try:
                    kind(value)
                except ValueError:
                    return rule
        return None


def parse_options(kind: type[Options], arguments: Sequence[str], *, prog: str) -> Options:
    """The options of a verb from its words; raises all problems at once. --help prints the help and ends the
    process."""
    if {"--help", "-h"} & set(arguments):
        print_help(kind, prog=prog)
    checked = check_words(kind, arguments, prog=prog)
    raise_if(checked.problems)
    return kind(**checked.values)


def print_help(kind: type[Any], *, prog: str) -> NoReturn:
    """Print the help of a verb and end the process."""
    tyro.cli(kind, args=["--help"], prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    raise AssertionError("the help ends the process")


def check_words(kind: type[Any], arguments: Sequence[str], *, prog: str) -> CheckedWords:
    """Sort the words of a verb into values of its options and problems."""
    options = {option.name: option for option in _options(kind)}
    found, words, positionals = CheckedWords(), list(arguments), []
    typed: set[str] = set()
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            positionals.append(word)
            continue
        if not word.startswith("--"):
            found.problems.append(Problem("R002", f"unknown argument {word!r}", f"-{word}"))
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        option = options.get(name.replace("-", "_"))
        typed.add(name.replace("-", "_"))
        if option is None or option.is_positional:
            found.problems.append(unknown_option(name, options, prog=prog))
            del words[: 1 if words and not equals and not words[0].startswith("--") else 0]  # its value
        elif option.is_switch:
            found.problems += [Problem("R004", f"{option.flag} takes no value", option.flag)] if equals else []
            found.values[option.name] = True
        else:
            _take(option, [value] if equals else None, words, found)
    _place(positionals, [option for option in options.values() if option.is_positional], found, prog=prog)
    for option in options.values():
        if option.default is MISSING and not option.is_positional and option.name not in typed:
            fix = f"{prog} ... {option.flag} {option.usual}"
            found.problems.append(Problem("R054", f"{prog} needs {option.flag}", fix))
    return found


def unknown_option(name: str, known: Sequence[str] | dict[str, Any], *, prog: str) -> Problem:
    """The problem of an option that a verb does not have; the fix is the nearest one."""
    near = nearest(name.replace("-", "_"), known)
    fix = f"--{near.replace('_', '-')}" if near else f"{prog} --help"
    return Problem("R002", f"unknown option --{name}", fix)


def _options(kind: type[Any]) -> Iterator[_Option]:
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint = hints[each.name]
        marks = getattr(hint, "__metadata__", ())
        if tyro.conf.Suppress in marks:  # it is no option to type
            continue
        is_positional = tyro.conf.Positional in marks
        plain = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        is_one = get_origin(plain) in (None, tuple, Literal)
        kinds = (plain,) if is_one else tuple(part for part in get_args(plain) if part is not NoneType)
        default = None if each.default_factory is not MISSING else each.default
        yield _Option(each.name, kinds, default, is_positional)


def _take(option: _Option, values: list[str] | None, words: list[str], found: CheckedWords) -> None:
    """Move the value of an option, or its values, from the words to the found ones."""
    if values is None:
        values = []
        while words and not words[0].startswith("--") and (option.takes_several or not values):
            values.append(words.pop(0))  # which may be -1
    wrong = [problem for value in values for problem in option.check(value)]
    if not values:
        wrong.append(Problem("R003", f"{option.flag} has no value", f"{option.flag} {option.usual}"))
    found.problems += wrong
    if not wrong:
        found.values[option.name] = option.read(values)


def _place(words: list[str], options: list[_Option], found: CheckedWords, *, prog: str) -> None:
    """Give the words without a flag to the positional options, and report those that are too many or missing."""
    most = len(words) if any(option.takes_several for option in options) else len(options)
    needed = [option.name.upper() for option in options if option.default is MISSING]
    given = words[:most]
    for word in words[most:]:
        found.problems.append(Problem("R002", f"unknown argument {word!r}", " ".join([prog, *given])))
    if missing := needed[len(given) :]:
        fix = " ".join([prog, *given, *missing])
        found.problems.append(Problem("R054", f"{prog} needs {' and '.join(missing)}", fix))
    for option in options:
        if own := given if option.takes_several else given[:1]:
            found.values[option.name] = option.read(own)
            given = given[len(own) :]
