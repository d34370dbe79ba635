"""Read the options of a verb, and report all problems at once.

tyro parses a dataclass, and ends the process at the first wrong word, without a code and without JSON. So the words are
checked here first. tyro gets only words that it can parse, and prints the help.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from shoal.errors import Problem, ShoalError, listed, nearest, raise_if

Options = TypeVar("Options")

USUAL = {"resume": "latest"}
"""Values that a fix proposes in place of the default."""


@dataclass
class CheckedWords:
    """Words of a command line that tyro can parse, and the problems of the others."""

    words: list[str] = field(default_factory=list)
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

    def check(self, value: str) -> Iterator[Problem]:
        """The value must be of the option's type."""
        if (rule := self._rule(value)) is not None and value != "None":
            yield Problem("R053", f"{self.flag} must be {rule}, got {value[:80]!r}", f"{self.flag} {self.usual}")

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
    """The options of a verb from its words; raises all problems at once."""
    if not {"--help", "-h"} & set(arguments):
        checked = check_words(kind, arguments, prog=prog)
        raise_if(checked.problems)
    return run_tyro(kind, arguments, prog=prog)


def run_tyro(kind: type[Options], words: Sequence[str], *, prog: str) -> Options:
    """Parse words that `check_words` has accepted, or print the help."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=list(words), prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as ended:
        if not ended.code:  # after --help
            raise
        lines = [line.strip("│╭╮╰╯─ ") for line in said.getvalue().splitlines()]
        what = f"the options of {prog} cannot be read: {' '.join(line for line in lines if line)[:400]}"
        raise ShoalError(what, fix=f"{prog} --help", code="R053") from None


def check_words(kind: type[Any], arguments: Sequence[str], *, prog: str) -> CheckedWords:
    """Sort the words of a verb into those that can be parsed and problems."""
    options = {option.name: option for option in _options(kind)}
    found, words, positionals = CheckedWords(), list(arguments), []
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
        if option is None or option.is_positional:
            found.problems.append(unknown_option(name, options, prog=prog))
            del words[: 1 if words and not equals and not words[0].startswith("--") else 0]  # its value
        elif option.is_switch:
            found.problems += [Problem("R004", f"{option.flag} takes no value", option.flag)] if equals else []
            found.words += [] if equals else [option.flag]
        else:
            _take(option, [value] if equals else None, words, found)
    _place(positionals, [option for option in options.values() if option.is_positional], found, prog=prog)
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
        is_positional = tyro.conf.Positional in getattr(hint, "__metadata__", ())
        plain = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        is_one = get_origin(plain) in (None, tuple, Literal)
        kinds = (plain,) if is_one else tuple(part for part in get_args(plain) if part is not NoneType)
        yield _Option(each.name, kinds, each.default, is_positional)


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
    found.words += [] if wrong else [option.flag, *values]


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
    found.words = [*given, *found.words]
