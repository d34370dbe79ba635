"""Split a command line into a verb's own options and settings of the recipe (`--optim.lr 3e-4`).

A verb's options are a dataclass. Settings are merged into the YAML file and validated with it
(`shoal.config.load`), so that all problems are reported at once. tyro prints the help of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tyro

from shoal.blueprint.aliases import OTHER_SYSTEMS
from shoal.cli.options import check_words, unknown_option
from shoal.config.data_source import SourceField
from shoal.config.duration import Duration
from shoal.config.flag_aliases import instead_of
from shoal.config.load import RecipeReading, read_recipe
from shoal.config.recipe import LoraSection, ModelSection, Recipe
from shoal.errors import Problem, nearest

Options = TypeVar("Options")

# Short names of settings that are typed often.
SHORT = {"nproc": "launch.nproc", "device": "launch.device", "plan": "plan"}


def parse(kind: type[Options], arguments: Sequence[str], *, prog: str) -> tuple[Options, RecipeReading]:
    """A verb's options and the recipe, from `[RECIPE] [--option ...] [--section.key value ...]`.

    Problems of the command line are in the reading. `RecipeReading.complete` raises them with those of the recipe.
    """
    if "--help-all" in arguments:
        _print_help(kind, prog)
    if "--help" in arguments or "-h" in arguments:
        from shoal.cli.reports.short_help import short_help

        print(short_help(kind, prog), end="")
        raise SystemExit(0)
    own, overrides, problems = _sort(list(arguments), own={each.name: each.type for each in fields(kind)})  # type: ignore[arg-type]
    checked = check_words(kind, own, prog=prog)
    problems += checked.problems
    options = kind(**checked.values)
    path: Path | None = getattr(options, "recipe", None)
    config: Path | None = getattr(options, "deepspeed", None)
    if config is None:
        return options, _of_verb(read_recipe(path, overrides, problems), prog)
    return options, _of_verb(_read_below(options, path, overrides, problems), prog)


def _of_verb(reading: RecipeReading, prog: str) -> RecipeReading:
    """The reading, with fixes that name this verb: the file is read without knowing it."""
    fixed = (replace(each, fix=each.fix.replace("shoal train", prog)) for each in reading.problems)
    return replace(reading, problems=tuple(fixed))


def _read_below(
    options: Any, recipe: Path | None, overrides: list[tuple[str, str]], problems: list[Problem]
) -> RecipeReading:
    """The recipe, with a config of DeepSpeed above it and the settings of the command line above both."""
    from shoal.cli.other_systems.deepspeed import LOSS, translated_for_recipe
    from shoal.cli.other_systems.table import table

    config: Path = options.deepspeed
    hosts, ranks = bool(getattr(options, "hosts", None)), getattr(options, "num_ranks", None)
    found = translated_for_recipe(config, recipe, overrides, several_hosts=hosts, ranks=ranks)
    reading = read_recipe(recipe, [*found.overrides(), *overrides], [*problems, *found.problems])
    note = f"{table(str(config), found.lines, [key for key, _ in overrides])}\n  {LOSS}"
    lines = tuple(line.to_mapping() for line in found.lines)
    return replace(reading, notes=(*reading.notes, note), translated=lines, of_config=tuple(found.overrides()))


def settings_as_words(kind: type[Any], arguments: Sequence[str]) -> list[str]:
    """The settings of the recipe among the words of a verb, to pass on to `shoal train`."""
    _, overrides, _ = _sort(list(arguments), own={each.name: each.type for each in fields(kind)})
    return [word for name, value in overrides for word in (f"--{name}", value) if word]


def _sort(words: list[str], own: dict[str, Any]) -> tuple[list[str], list[tuple[str, str]], list[Problem]]:
    """Arguments of the verb, settings with one YAML value each (`--optim.betas '[0.9, 0.99]'`), and the problems of
    the arguments that are neither."""
    others: list[str] = []
    overrides: list[tuple[str, str]] = []
    problems: list[Problem] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("-") and not word.startswith("--"):
            problems.append(_not_an_option(word))
        elif not word.startswith("--"):
            others.append(word)
        elif (option := name.replace("-", "_")) in own:
            has_value = own[option] != "bool" and not equals and words and not words[0].startswith("--")
            others += [word, words.pop(0)] if has_value else [word]  # a value may be -1
        else:
            name = SHORT.get(name, name)
            if not equals and _is_list(name):
                equals, value = "=", _list_of(words)
            elif not equals and words and not words[0].startswith("--"):
                equals, value = "=", words.pop(0)
            if instead := _of_another_system(name, value):
                if instead.partition(" ")[0] == f"--{name}":  # of `shoal train`, and not of this verb
                    instead = f"{instead} for the verb train, which lists the settings to type here"
                problems.append(Problem("R005", f"there is no option --{name}", instead))
                continue
            if not equals and not _may_stand_alone(name):
                problems.append(_without_value(name))
                continue
            is_of_recipe = "." in name or name in SHORT.values() or OTHER_SYSTEMS.get(option) is not None
            if not is_of_recipe and nearest(option, own) is not None:
                problems.append(unknown_option(name, own, prog="shoal"))
            else:
                overrides.append((name, value if equals else "true"))
    return others, overrides, problems


def _of_another_system(name: str, value: str) -> str | None:
    """The setting to type in place of an option of another system."""
    section, dot, _ = name.replace("-", "_").partition(".")
    if name in SHORT.values() or (dot and section in Recipe.model_fields):
        return None
    return instead_of(name, value)


def _may_stand_alone(name: str) -> bool:
    """Whether `--run.deterministic` alone means true: it does for booleans, and for unknown names."""
    section, _, key = name.replace("-", "_").partition(".")
    if section not in Recipe.model_fields:
        return True  # validation of the recipe reports the unknown name
    known = _keys_of(section)
    return section != "plan" and bool(key) and (key not in known or known[key].annotation is bool)


def _is_list(name: str) -> bool:
    section, _, key = name.replace("-", "_").partition(".")
    known = _keys_of(section)
    return key in known and get_origin(known[key].annotation) is tuple


def _keys_of(section: str) -> dict[str, Any]:
    info = Recipe.model_fields.get(section)
    return getattr(info.annotation, "model_fields", {}) if info else {}


def _list_of(words: list[str]) -> str:
    """`0.9 0.95` or `'[0.9, 0.95]'`, up to the next option."""
    taken = []
    while words and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken[0] if len(taken) == 1 and taken[0].startswith("[") else f"[{', '.join(taken)}]"


def _without_value(name: str) -> Problem:
    return Problem("R003", f"--{name} has no value", f"--{name} VALUE")


def _not_an_option(word: str) -> Problem:
    return Problem("R002", f"unknown argument {word!r}", f"-{word}")


def _print_help(kind: type[Any], prog: str) -> None:
    """Print the verb's options and every key of a recipe, with defaults; ends the process."""
    settings = Annotated[Recipe, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]  # a boolean takes a value there
    shown_keys = Recipe(model=ModelSection(lora=LoraSection()))  # else the keys of LoRA would not be listed
    both = make_dataclass(
        kind.__name__,
        [("settings", settings, field(default_factory=lambda: shown_keys))],
        bases=(kind,),
        frozen=True,
        kw_only=True,
    )
    both.__doc__ = kind.__doc__
    shown = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
    tyro.cli(both, args=["--help"], prog=prog, config=shown, registry=_shown_as_words())


def _shown_as_words() -> tyro.constructors.ConstructorRegistry:
    """Show a duration and a data source as one word; tyro would split them into their fields."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def duration(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        return _word("DURATION", Duration) if info.type is Duration else None

    @registry.primitive_rule
    def source(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        return _word("SOURCE", str) if info.type == get_args(SourceField)[0] else None

    return registry


def _word(metavar: str, kind: type) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """A value that help shows as one word. Help alone uses it, so that no value is parsed."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )
