"""Load a `Recipe` from a YAML file and command-line overrides, or report all of their problems.

The file and the overrides become one tree before anything is checked. So values are checked in a single place, and all
problems are reported at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from shoal.blueprint.aliases import OTHER_SYSTEMS
from shoal.blueprint.plan import Plan
from shoal.blueprint.plan_parser import read_mapping, read_words
from shoal.blueprint.validation.check import OTHER_PLAN_VALUES
from shoal.config.flag_aliases import instead_of
from shoal.config.recipe import Recipe
from shoal.config.recipe_file import Tree, read_yaml
from shoal.errors import Findings, Problem, RecipeError, ShoalError, listed, nearest
from shoal.safe_parsing import OutOfBounds, parse_yaml, short

FEW = 5
"""A message lists all legal values of a key up to this number, else the nearest one."""


OTHER_VALUES: Mapping[str, Any] = {
    **{f"plan.{name}": value for name, value in OTHER_PLAN_VALUES.items()},
    **{"data.global_batch": 720, "launch.nproc": 60},
    **{"optim.name": "sgd", "optim.implementation": "fused", "run.duration": "10min"},
}
"""Key → a valid value that leads to other problems than the default does."""


@dataclass(frozen=True)
class RecipeReading:
    """A recipe as far as it could be read, and the problems of the rest."""

    recipe: Recipe
    """Values that could not be read are the defaults."""
    other: Recipe
    """The same with other values in place of the defaults. Problems that both have do not depend on these values."""
    problems: tuple[Problem, ...] = ()
    title: str = ""
    has_file: bool = True
    """False: the file could not be read. Then nothing is known of the recipe but the settings of the command line."""
    notes: tuple[str, ...] = ()
    """Sentences about keys of the file that the command line overrides as a whole. The verb prints them."""
    translated: tuple[Mapping[str, Any], ...] = ()
    """The keys of another system's config, each with its setting."""
    of_config: tuple[tuple[str, str], ...] = ()
    """The settings of that config, in words of the command line."""

    def with_problems(self, problems: Iterable[Problem]) -> RecipeReading:
        """Add problems of the command that have nothing to do with the recipe."""
        return replace(self, problems=(*self.problems, *problems))

    def complete(self, check: Callable[[Recipe], Iterable[Problem]] = lambda recipe: ()) -> Recipe:
        """Return the recipe if all of it could be read; else raise, also with the problems that `check` finds in it.

        `check` must need neither the model nor the data: loading torch takes seconds, and a mistyped key is a matter of
        a fraction of one. Their problems are reported once all settings can be read.
        """
        if not self.problems:
            return self.recipe
        more = list(check(self.recipe)) if self.has_file else []
        if more and self.other is not self.recipe:
            certain = {problem.what for problem in check(self.other)}
            more = [problem for problem in more if problem.what in certain]
        raise RecipeError(*self.problems, *more, title=self.title)


def load_recipe(path: Path | None, overrides: Iterable[tuple[str, str]] = ()) -> Recipe:
    """The recipe in the file (None: all defaults) with overrides such as `("optim.lr", "3e-4")`."""
    return read_recipe(path, overrides).complete()


def read_recipe(
    path: Path | None, overrides: Iterable[tuple[str, str]] = (), problems: Iterable[Problem] = ()
) -> RecipeReading:
    """Read the same as far as possible. `problems` are those of the command line that were found before."""
    collected = Findings()
    collected += problems
    tree = {} if path is None else collected.of(read_yaml, path)
    has_file, tree = tree is not None, tree or {}
    title = str(path) if path and has_file else "the settings"
    found, unread, overrides = collected.problems, set[str](), list(overrides)
    notes = _drop_other_model(tree, dict(overrides).get("model.name"))
    for key, text in overrides:
        if key.startswith("plan."):
            _open_plan(tree, found, unread)
        try:
            put(tree, key, parse_value(key, text))
        except ShoalError as error:
            collected += error.problems
            unread.add(key)
    reading = _read_tree(tree, title=title, problems=found, unread=unread)
    title = title if has_file or len(reading.problems) > 1 else ""
    return replace(reading, has_file=has_file, title=title, notes=tuple(notes))


def _drop_other_model(tree: Tree, name: str | None) -> list[str]:
    """Drop the keys under `model:` if an override names another model than the file; returns a note that says so. LoRA
    is for any model."""
    model = tree.get("model")
    model = {"name": model} if isinstance(model, str) else model
    if name is None or not isinstance(model, dict) or model.get("name", "llama") == name:
        return []
    tree["model"] = {"name": name} | ({"lora": model.pop("lora")} if "lora" in model else {})
    before = model.pop("name", "llama")
    dropped = ", ".join(f"{key} {spell(value)}" for key, value in model.items())
    return [f"--model.name {name} drops the recipe's settings of {before}: {dropped}"] if dropped else []


def parse_value(key: str, text: str) -> Any:
    """Parse a value from the command line: YAML, or `None`."""
    if text == "None":
        return None
    if key == "plan":
        return text
    try:
        return parse_yaml(text, f"--{key}", f"--{key} VALUE")
    except OutOfBounds:
        raise
    except ShoalError:  # words with a colon or a bracket in them
        return text


def put(tree: Tree, key: str, value: Any) -> None:
    """Set `a.b.c` in a nested mapping."""
    *sections, last = key.replace("-", "_").split(".")
    for section in sections:
        below = tree.get(section)
        below = below if isinstance(below, dict) else {}
        tree[section] = below
        tree = below
    tree[last] = value


def _open_plan(tree: Tree, problems: list[Problem], unread: set[str]) -> None:
    """Turn the words of a plan into keys. Words that cannot be read are reported and dropped, each once."""
    plan = tree.get("plan")
    if isinstance(plan, dict):
        return
    _note_auto(tree)
    _read_plan(tree, problems, unread)


def _read_plan(tree: Tree, problems: list[Problem], unread: set[str]) -> None:
    """Reduce the plan to the keys and values that could be read."""
    plan = tree.get("plan")
    if isinstance(plan, Plan):
        return
    if not isinstance(plan, Mapping | str | None):
        problems += (problem.within("plan") for problem in _problems_of_plan(plan))
        plan = None
    read = read_mapping(plan) if isinstance(plan, Mapping) else read_words(plan or "")
    problems += (problem.within("plan") for problem in read.problems)
    unread |= {f"plan.{key}" for key in read.unread}
    tree["plan"] = read.values


def _problems_of_plan(plan: object) -> tuple[Problem, ...]:
    """The problem of a plan that is neither words nor a mapping."""
    try:
        Plan.of(plan)  # type: ignore[arg-type]
    except ShoalError as error:
        return error.problems
    return ()


def build_recipe(tree: Tree, *, title: str, problems: Iterable[Problem] = ()) -> Recipe:
    """Check a whole tree; one `ShoalError` has all of its problems."""
    return _read_tree(tree, title=title, problems=problems).complete()


def _read_tree(
    tree: Tree, *, title: str, problems: Iterable[Problem] = (), unread: Iterable[str] = ()
) -> RecipeReading:
    """Read a tree; values that are not valid are reported and replaced by defaults."""
    found, lost = list(problems), set(unread)
    # An empty section, such as `run:`, is None.
    tree = {key: value for key, value in copy.deepcopy(tree).items() if value is not None}
    if isinstance(tree.get("model"), str):
        tree["model"] = {"name": tree["model"]}
    _note_auto(tree)
    found += _drop_odd_keys(tree)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        _read_plan(tree, found, lost)
        for each in error.errors():
            if each["loc"][:1] != ("plan",):
                found += (problem for problem in _problems_of(each) if problem not in found)
                lost.add(_drop(tree, each))
        recipe = Recipe.model_validate(tree)
    return RecipeReading(recipe, _with_other_values(tree, lost) if lost else recipe, tuple(found), title)


def _drop_odd_keys(tree: Tree) -> list[Problem]:
    """Remove keys that are no words, which YAML allows, from a tree and its sections; returns their problems."""
    found = []
    for prefix, section in [
        ("", tree),
        *((f"{key}.", value) for key, value in tree.items() if isinstance(value, dict)),
    ]:
        for key in [key for key in section if not isinstance(key, str)]:
            found.append(unknown_key(f"{prefix}{key}", section.pop(key)))
    return found


def _drop(tree: Tree, error: Any) -> str:
    """Remove the value that an error of pydantic is about; returns its key."""
    section, *keys = error["loc"]
    if keys and isinstance(tree.get(section), dict):
        tree[section].pop(keys[0], None)
        return f"{section}.{keys[0]}"
    tree.pop(section, None)
    return str(section)


def _with_other_values(tree: Tree, unread: Iterable[str]) -> Recipe:
    other = copy.deepcopy(tree)
    _read_plan(other, [], set())
    for key in unread:
        if key in OTHER_VALUES:
            put(other, key, OTHER_VALUES[key])
    return Recipe.model_validate(other)


def _note_auto(tree: Tree) -> None:
    """Set `run.planned` for a plan with the word `auto`, unless the recipe sets it."""
    words = tree.get("plan")
    if isinstance(words, str) and "auto" in words.lower().split():
        if not isinstance(tree.setdefault("run", {}), dict):
            return  # the validation reports it
        tree["run"].setdefault("planned", True)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with every value spelled out, as YAML that loads again to an equal one."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def difference(old: Tree, new: Tree) -> list[str]:
    """One line for each key with a different value: `optim.lr: 0.001 → 0.002`."""
    flat_old, flat_new = dict(flatten(old)), dict(flatten(new))
    keys = [*flat_old, *(key for key in flat_new if key not in flat_old)]
    pairs = [(key, flat_old.get(key), flat_new.get(key)) for key in keys]
    return [f"{key}: {before} → {after}" for key, before, after in pairs if before != after]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"a": {"b": 1}}` → `("a.b", 1)`."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def known_keys() -> dict[str, str]:
    """Every dotted key of a recipe, with its documentation."""
    keys: dict[str, str] = {}
    for section, info in Recipe.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys |= _keys_of(section, kind)
        else:
            keys[section] = info.description or ""
    return keys | {f"plan.{field.name}": "" for field in fields(Plan)}


def _keys_of(section: str, kind: type[BaseModel]) -> dict[str, str]:
    """The keys of a section, with those of a section inside it, such as `model.lora.rank`."""
    keys: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        inner = [one for one in get_args(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        own = _keys_of(f"{section}.{name}", inner[0]) if inner else {f"{section}.{name}": field.description or ""}
        keys |= own
    return keys


def unknown_key(key: str, value: object = "VALUE") -> Problem:
    """The problem of an unknown key."""
    last = key.rpartition(".")[2]
    known = known_keys()
    by_last = {name.rpartition(".")[2]: name for name in known}
    namesakes = [name for name in known if name.rpartition(".")[2] == last]
    is_named = last in OTHER_SYSTEMS or len(namesakes) == 1
    if not is_named and (instead := instead_of(last, str(value))) is not None:
        return Problem("R011", f"unknown key {key!r}", instead)
    match = OTHER_SYSTEMS.get(last) or (namesakes[0] if len(namesakes) == 1 else nearest(key, known))
    match = match or by_last.get(nearest(last, by_last) or "")
    fix = _setting(match, value) if match else "shoal train --help, which lists all keys"
    return Problem("R011", f"unknown key {key!r}", fix)


def _setting(meant: str, value: object) -> str:
    """The setting to type in place of an unknown one: a key, a key with a value, or a key with an example or a note."""
    key, _, rest = meant.partition(" ")
    if meant.startswith("--"):
        return meant
    if rest.startswith("("):
        example = rest.strip("()")
        return f"--{key} VALUE {rest}" if " " in example else f"--{key} {example}"
    return f"--{meant}" if rest else f"--{key} {spell(value) if _takes(key, value) else 'VALUE'}"


def _takes(key: str, value: object) -> bool:
    """Whether the value is valid for the key."""
    tree: Tree = {}
    put(tree, key, value)
    try:
        Recipe.model_validate(tree)
    except ValidationError:
        return False
    return True


def spell(value: object) -> str:
    """Spell a value for the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{list(value)}'" if isinstance(value, list | tuple) else str(value)


def _problems_of(error: Any) -> Iterator[Problem]:
    key = ".".join(str(part) for part in error["loc"] if isinstance(part, str) and part.isidentifier())
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "extra_forbidden":
        yield unknown_key(key, error["input"])
    elif isinstance(cause, ShoalError):
        yield from (replace(problem.within(key), fix=_flag(key, problem.fix)) for problem in cause.problems)
    elif error["type"] == "literal_error":
        words = [word.strip("'") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        near = nearest(str(error["input"])[:200].lower(), words) if len(words) > FEW else None
        known = near or listed(words)
        yield Problem("R012", f"{key} must be {listed(words)}, got {short(error['input'])}", f"--{key} {known}")
    elif error["type"].startswith("bool_"):
        yield Problem("R012", f"{key} must be true or false, got {short(error['input'])}", f"--{key} true or false")
    else:
        name = key if key in known_keys() else _first_key(key)
        rule = _rule(error, name)
        about = " ".join(known_keys().get(name, "").split())
        fix = f"--{name} {_usual(name)}  # {about}" if about else "shoal train --help, which lists all keys"
        yield Problem("R013", f"{key} {rule}, got {short(error['input'])}", fix)


RULES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "string_type": "must be text",
    "tuple_type": "must be a list",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a section with keys"),
}
"""Kind of an error of pydantic → the rule in plain words. Bounds have plain words already."""


def _rule(error: Any, key: str) -> str:
    """The rule that a value breaks."""
    if error["type"] in ("missing", "too_long", "too_short"):
        section, _, name = key.partition(".")
        return f"must be a list of {len(getattr(getattr(Recipe(), section), name))} values"
    rule = RULES.get(error["type"]) or error["msg"].replace("Input should ", "must ", 1)
    return rule if rule.startswith("must ") else f"is wrong: {rule}"


def _flag(key: str, fix: str) -> str:
    """A fix of one value of a key, as a flag. A fix that is a flag stays."""
    return fix if fix.startswith("--") or key not in known_keys() else f"--{key} {fix}"


def _usual(key: str) -> str:
    """The default of a key, as it is typed; 1 for a number that is open by default."""
    section, _, name = key.partition(".")
    default = getattr(getattr(Recipe(), section), name, None)
    field = type(getattr(Recipe(), section)).model_fields.get(name)
    is_number = default is None and field is not None and "int" in str(field.annotation)
    return "1" if is_number else spell(default)


def _first_key(section: str) -> str:
    return next((key for key in known_keys() if key.startswith(f"{section}.")), section)
