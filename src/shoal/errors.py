"""Errors that a user can fix: all problems at once, each with its code, the rule, both values and the fix to type.

A code such as `P011` is a letter for the area and a number. It stands for one rule and stays, while words may change:
`shoal explain P011` prints its page, which is in `error_pages/`.

A `ShoalError` never shows a traceback; the command line prints it and exits with `exit_code`. Impossible states are an
`assert`. A failure inside a worker is a `RunFailed` with the traceback of the first rank that failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

from shoal.script_fixes import in_python

T = TypeVar("T")

BAD_INPUT = 2
RUN_FAILED = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: the code of its rule, what is wrong, and its fix."""

    code: str
    what: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert len(self.code) == len("P001"), f"{self.code!r} is not a code"

    def __str__(self) -> str:
        first, *more = self.what.split("\n", 1)  # a traceback, for example, follows the first line
        lines = [f"{first} [{self.code}]", *more]
        return "\n".join([*lines, f"    fix: {self.fix}"] if self.fix else lines)

    def within(self, where: str) -> Problem:
        """The same problem, with the place in front.

        >>> print(Problem("P005", "tp must be a whole number of at least 1, got 0").within("plan"))
        plan: tp must be a whole number of at least 1, got 0 [P005]
        """
        return replace(self, what=f"{where}: {self.what}")


class ShoalError(ValueError):
    """One or more problems that the user can fix. Its text has the fixes to type in a script.

    >>> error = ShoalError("batch 10 is not divisible by 4 ranks", fix="--data.global_batch 12", code="P011")
    >>> print(error)
    batch 10 is not divisible by 4 ranks [P011]
        fix: batch_size=12
    >>> print(error.on_command_line())
    batch 10 is not divisible by 4 ranks [P011]
        fix: --data.global_batch 12
    """

    exit_code = BAD_INPUT

    @overload
    def __init__(self, *problems: Problem, title: str = "") -> None: ...

    @overload
    def __init__(self, what: str, /, *, code: str, fix: str = "", title: str = "") -> None: ...

    def __init__(self, *problems: Problem | str, code: str = "", fix: str = "", title: str = "") -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(code, p, fix) for p in problems)
        self.title = title
        super().__init__(self._text(tuple(map(self._in_script, self.problems))))

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of its problems, each once."""
        return tuple(dict.fromkeys(problem.code for problem in self.problems))

    def _in_script(self, problem: Problem) -> Problem:
        return replace(problem, fix=in_python(problem.fix))

    def on_command_line(self) -> str:
        """The text with the fixes to type on the command line."""
        return self._text(self.problems)

    def _text(self, problems: tuple[Problem, ...]) -> str:
        if len(problems) == 1 and not self.title:
            return str(problems[0])
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        head = f"{count} in {self.title}" if self.title else count
        return "\n".join([head, *("  " + str(p).replace("\n", "\n  ") for p in problems)])

    def __reduce__(self) -> tuple[object, ...]:  # keyword arguments do not survive pickling by default
        return _rebuild, (type(self), self.problems, self.title), self.__dict__.copy()


def _rebuild(kind: type[ShoalError], problems: tuple[Problem, ...], title: str) -> ShoalError:
    return kind(*problems, title=title)


class RecipeError(ShoalError):
    """Problems of a recipe. Its fixes are settings (`--optim.lr 1`) wherever it is loaded."""

    def _in_script(self, problem: Problem) -> Problem:
        return problem


class RunFailed(ShoalError):
    """A worker died or raised; the text is that of the first one to fail."""

    exit_code = RUN_FAILED
    may_pass = False
    """Whether a restart may succeed."""
    saved_step: int | None = None
    """The newest step that the workers had saved; None: none, or not known."""
    cause: str = ""
    """The exception of the worker, with the step in which it was raised, or the phase in which it had no memory left;
    empty: there is none."""
    memory: Mapping[str, int] = MappingProxyType({})
    """Of a worker that had no memory left: its rank, and bytes by cause, measured."""
    plan: str = ""
    """That of the ranks on several hosts, which only they know; empty: they are on one."""
    is_of_replacement: bool = False
    """Whether it happened while a lost worker was being replaced."""


class LostPeer(RunFailed):
    """A rank timed out on another one that has stopped, has died, or is slower than `launch.timeout`."""

    may_pass = True


class StoreTaken(RunFailed):
    """Another run saves in the same object store now. This one must not: a step would have files of both."""


def raise_if(problems: Iterable[Problem], title: str = "") -> None:
    """Raise one `ShoalError` with all problems, if there are any."""
    if found := tuple(problems):
        raise ShoalError(*found, title=title)


@dataclass
class Findings:
    """Collect the problems of several checks, each once, and raise them together."""

    problems: list[Problem] = field(default_factory=list)

    def __iadd__(self, problems: Iterable[Problem]) -> Findings:
        """Add problems that are not known yet."""
        for problem in problems:
            if all(problem.what != known.what for known in self.problems):
                self.problems.append(problem)
        return self

    def of(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """Call the function; if it raises a `ShoalError`, collect its problems and return None."""
        try:
            return function(*arguments, **options)
        except ShoalError as error:
            self += error.problems
            return None

    def raise_all(self, title: str = "") -> None:
        """Raise all problems, if there are any. One problem stands without the title."""
        raise_if(self.problems, title if len(self.problems) > 1 else "")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to a mistyped one.

    >>> nearest("weigth_decay", ["lr", "weight_decay"])
    'weight_decay'
    """
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return match[0] if match else None


def needs(module: str, *, what: str, extra: str, package: str = "") -> Any:
    """Import an optional package, or raise with the feature that needs it and the command to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ShoalError(
            f"{what} needs the package {package or module}, which is not installed ({error})",
            fix=to_install(extra),
            code="R027",
        ) from error


def to_install(extra: str) -> str:
    """The command that installs the packages of an extra of shoal.

    No registry has shoal itself. In a clone the command installs the clone's extra, elsewhere the packages by name.
    """
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e '{clone}[{extra}]'"
    from importlib import metadata  # slow to load, and seldom needed

    try:
        needed = [text for text in metadata.requires("shoal") or () if _is_of(text, extra)]
    except metadata.PackageNotFoundError:
        needed = []
    packages = " ".join(f"'{text.partition(';')[0].strip()}'" for text in needed)
    return f"pip install {packages}" if packages else f"pip install -e '.[{extra}]', in a clone of shoal"


def _is_of(requirement: str, extra: str) -> bool:
    """Whether a requirement from the metadata of a distribution belongs to an extra.

    >>> _is_of("wandb>=0.17; extra == 'wandb'", "wandb"), _is_of("torch>=2.11", "wandb")
    (True, False)
    """
    marker = requirement.partition(";")[2].replace('"', "'")
    return f"extra == '{extra}'" in marker


def listed(words: Iterable[object]) -> str:
    """Join words as `a, b or c`.

    >>> listed([1, 2, 4])
    '1, 2 or 4'
    """
    *front, last = [str(word) for word in words]
    return f"{', '.join(front)} or {last}" if front else last
