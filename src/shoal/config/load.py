"""Load a `Recipe` from a YAML file and command-line overrides, or report all of their problems.

The file and the overrides become one tree before anything is checked. So values are checked in a single place, and all
problems are reported at once.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from shoal.blueprint.aliases import OTHER_SYSTEMS
from shoal.blueprint.plan import Plan
from shoal.config.recipe import Recipe
from shoal.errors import Problem, ShoalError, listed, nearest
from shoal.safe_parsing import OutOfBounds, parse_yaml, read_text, short

Tree = dict[str, Any]

FEW = 5
"""A message lists all legal values of a key up to this number, else the nearest one."""


RECIPE_ENDINGS = ("", ".yaml", ".yml", ".json")
"""A file with another ending and without a section of a recipe counts as data."""


def load_recipe(path: Path | None, overrides: Iterable[tuple[str, str]] = ()) -> Recipe:
    """The recipe in the file (None: all defaults) with overrides such as `("optim.lr", "3e-4")`."""
    tree = {} if path is None else read_yaml(path)
    problems: list[Problem] = []
    overrides = list(overrides)
    _drop_other_model(tree, dict(overrides).get("model.name"))
    for key, text in overrides:
        problems += _open_plan(tree) if key.startswith("plan.") else []
        put(tree, key, parse_value(key, text))
    return build_recipe(tree, title=str(path) if path else "the settings", problems=problems)


def _drop_other_model(tree: Tree, name: str | None) -> None:
    """Drop the keys under `model:` if an override names another model than the file."""
    model = tree.get("model")
    if name is not None and isinstance(model, dict) and model.get("name", "llama") != name:
        tree["model"] = {"name": name}


def read_yaml(path: Path) -> Tree:
    """The mapping in a YAML (or JSON) file."""
    may_be_data = path.suffix not in RECIPE_ENDINGS
    try:
        text = read_text(path, fix="shoal train PATH.yaml")
    except FileNotFoundError:
        names = {file.stem: file for file in path.parent.glob("*.yaml")} if path.parent.is_dir() else {}
        near = names.get(nearest(path.stem, names) or "")
        raise ShoalError(
            f"there is no recipe {str(path)!r}",
            fix=f"did you mean {near}?" if near else "shoal train PATH.yaml, or shoal train for the defaults",
            code="R006",
        ) from None
    except (OSError, ShoalError) as error:
        if path.is_dir() or (may_be_data and isinstance(error, ShoalError)):
            raise _is_data(path) from None
        if isinstance(error, ShoalError):
            raise
        raise ShoalError(
            f"the recipe {str(path)!r} cannot be read: {error}", fix="shoal train PATH.yaml", code="R007"
        ) from None
    if path.suffix == ".py":
        raise ShoalError(
            f"{path} is a Python program, not a recipe", fix=f"python {path}, or torchrun {path}", code="R008"
        )
    try:
        tree = parse_yaml(text, str(path), "correct the line in the message", _UniqueKeys)
    except ShoalError as error:
        if may_be_data and not isinstance(error, OutOfBounds):
            raise _is_data(path) from None
        raise
    if may_be_data and not (isinstance(tree, dict) and Recipe.model_fields.keys() & tree.keys()):
        raise _is_data(path)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ShoalError(
            f"{path} must hold a mapping, got a {type(tree).__name__}",
            fix="start with a section, for example `model:`",
            code="R010",
        )
    return tree


def _is_data(path: Path) -> ShoalError:
    """The error for a text, a file of tokens or a folder where a recipe is expected."""
    kind = "it is a folder" if path.is_dir() else "it has no section such as `model:`"
    return ShoalError(
        f"a recipe must be a YAML file, got {str(path)!r}: {kind}",
        fix=f"shoal train --data.source {shlex.quote(str(path))} to train the default model on it, or shoal train"
        " PATH.yaml",
        code="R009",
    )


class _UniqueKeys(yaml.SafeLoader):
    """YAML that rejects duplicate keys in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in seen:
                raise yaml.constructor.ConstructorError(problem=f"duplicate key {key!r}", problem_mark=node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


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


def _open_plan(tree: Tree) -> list[Problem]:
    """Turn the words of a plan into keys, which are checked with the whole tree.

    Words that cannot be read are reported here and dropped. So each mistake is reported once, and keys beside them are
    checked too.
    """
    plan = tree.get("plan")
    if isinstance(plan, dict):
        return []
    _note_auto(tree)
    tree["plan"] = {}
    try:
        tree["plan"] = Plan.of(plan).to_mapping()
    except ShoalError as error:
        return [each.within("plan") for each in error.problems]
    return []


def build_recipe(tree: Tree, *, title: str, problems: Iterable[Problem] = ()) -> Recipe:
    """Check a whole tree; one `ShoalError` has all of its problems."""
    found = list(problems)
    # An empty section, such as `run:`, is None.
    tree = {key: value for key, value in copy.deepcopy(tree).items() if value is not None}
    if isinstance(tree.get("model"), str):
        tree["model"] = {"name": tree["model"]}
    _note_auto(tree)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        for each in error.errors():
            found += _problems_of(each)
    if found:
        raise ShoalError(*found, title=title)
    return recipe


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
            keys |= {f"{section}.{name}": field.description or "" for name, field in kind.model_fields.items()}
        else:
            keys[section] = info.description or ""
    return keys | {f"plan.{field.name}": "" for field in fields(Plan)}


def unknown_key(key: str) -> Problem:
    """The problem of an unknown key."""
    last = key.rpartition(".")[2]
    known = known_keys()
    by_last = {name.rpartition(".")[2]: name for name in known}
    namesakes = [name for name in known if name.rpartition(".")[2] == last]
    match = OTHER_SYSTEMS.get(last) or (namesakes[0] if len(namesakes) == 1 else nearest(key, known))
    match = match or by_last.get(nearest(last, by_last) or "")
    fix = f"did you mean {match}?" if match else "`shoal train --help` lists all keys"
    return Problem("R011", f"unknown key {key!r}", fix)


def _problems_of(error: Any) -> Iterator[Problem]:
    key = ".".join(str(part) for part in error["loc"] if isinstance(part, str) and part.isidentifier())
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "extra_forbidden":
        yield unknown_key(key)
    elif isinstance(cause, ShoalError):
        yield from (problem.within(key) for problem in cause.problems)
    elif error["type"] == "literal_error":
        words = [word.strip("'") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        near = nearest(str(error["input"])[:200].lower(), words) if len(words) > FEW else None
        known = near or listed(words)
        yield Problem("R012", f"{key} must be {listed(words)}, got {short(error['input'])}", f"--{key} {known}")
    elif error["type"].startswith("bool_"):
        yield Problem("R012", f"{key} must be true or false, got {short(error['input'])}", f"--{key} true or false")
    else:
        rule = error["msg"].replace("Input should ", "must ", 1)
        rule = rule if rule.startswith("must ") else f"is wrong: {rule}"
        about = " ".join(known_keys().get(key, "").split())
        fix = f"{key} is: {about}" if about else f"keys of the section {key}, such as {_first_key(key)}"
        yield Problem("R013", f"{key} {rule}, got {short(error['input'])}", fix)


def _first_key(section: str) -> str:
    return next((key for key in known_keys() if key.startswith(f"{section}.")), section)
