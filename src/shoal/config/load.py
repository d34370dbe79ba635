"""From a YAML file and the words of a command line to a `Recipe`, or to the list of everything that is wrong with them.

The file and the overrides become one tree before anything is checked, so there is a single place where a value is
judged, and a person sees all problems at once, wherever they typed them.
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
"""So many values of a key are all named where another one was said; of more, the nearest."""


RECIPE_ENDINGS = ("", ".yaml", ".yml", ".json")
"""A file with another ending, and without a section of a recipe, is taken for data."""


def load_recipe(path: Path | None, overrides: Iterable[tuple[str, str]] = ()) -> Recipe:
    """The recipe in the file (None: all defaults) with `("optim.lr", "3e-4")` and the like laid over it."""
    tree = {} if path is None else read_yaml(path)
    problems: list[Problem] = []
    overrides = list(overrides)
    _forget_other_model(tree, dict(overrides).get("model.name"))
    for key, text in overrides:
        problems += _open_plan(tree) if key.startswith("plan.") else []
        put(tree, key, parse_value(key, text))
    return build_recipe(tree, title=str(path) if path else "the settings", problems=problems)


def _forget_other_model(tree: Tree, name: str | None) -> None:
    """Keys under `model:` belong to the model that the file names; another one's are said beside its name."""
    model = tree.get("model")
    if name is not None and isinstance(model, dict) and model.get("name", "llama") != name:
        tree["model"] = {"name": name}


def read_yaml(path: Path) -> Tree:
    """The mapping in a YAML (or JSON) file."""
    may_be_data = path.suffix not in RECIPE_ENDINGS
    try:
        text = read_text(path, fix="give the path of a YAML file")
    except FileNotFoundError:
        names = {file.stem: file for file in path.parent.glob("*.yaml")} if path.parent.is_dir() else {}
        near = names.get(nearest(path.stem, names) or "")
        raise ShoalError(
            f"there is no recipe {str(path)!r}",
            fix=f"did you mean {near}?" if near else "give the path of a YAML file, or none to use the defaults",
        ) from None
    except (OSError, ShoalError) as error:
        if path.is_dir() or (may_be_data and isinstance(error, ShoalError)):
            raise _is_data(path) from None
        if isinstance(error, ShoalError):
            raise
        raise ShoalError(
            f"the recipe {str(path)!r} cannot be read: {error}", fix="give the path of a YAML file"
        ) from None
    if path.suffix == ".py":
        raise ShoalError(f"{path} is a Python program, not a recipe", fix=f"python {path}, or torchrun {path}")
    try:
        tree = parse_yaml(text, str(path), "mend the line that it names", _NoTwins)
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
            f"{path} holds a {type(tree).__name__}, not a mapping", fix="start with a section, for example `model:`"
        )
    return tree


def _is_data(path: Path) -> ShoalError:
    """The message for a text, a file of tokens or a folder where a recipe is expected."""
    kind = "is a folder" if path.is_dir() else "holds no section of a recipe, such as `model:`"
    return ShoalError(
        f"{str(path)!r} {kind}: a recipe is a YAML file, and data is named by data.source",
        fix=f"shoal train --data.source {shlex.quote(str(path))}, to train the default model on it; or the path of a"
        " YAML file",
    )


class _NoTwins(yaml.SafeLoader):
    """YAML in which a key that stands twice in one mapping is a mistake, not a choice of the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in seen:
                raise yaml.constructor.ConstructorError(problem=f"{key!r} stands twice", problem_mark=node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_value(key: str, text: str) -> Any:
    """A value as typed on the command line: YAML, and `None` as Python's users write it."""
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
    """Turn a plan that was given as words into keys, which are judged with the whole tree. Words that cannot be read
    are told here and then gone: each mistake is told once, and keys beside them are judged too."""
    plan = tree.get("plan")
    if isinstance(plan, dict):
        return []
    _note_auto(tree)
    tree["plan"] = {}
    try:
        tree["plan"] = Plan.of(plan).to_mapping()
    except ShoalError as error:
        return [Problem(f"plan: {each.what}", each.fix) for each in error.problems]
    return []


def build_recipe(tree: Tree, *, title: str, problems: Iterable[Problem] = ()) -> Recipe:
    """Check a whole tree; everything that is wrong with it comes in one `ShoalError`."""
    found = list(problems)
    # `run:` with nothing below it says nothing.
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
    """A plan that says `auto` asks for the planner, unless the recipe says that it does not."""
    words = tree.get("plan")
    if isinstance(words, str) and "auto" in words.lower().split():
        if not isinstance(tree.setdefault("run", {}), dict):
            return  # which is told as a mistake
        tree["run"].setdefault("planned", True)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with every value spelled out, as YAML that loads again to an equal one."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def difference(old: Tree, new: Tree) -> list[str]:
    """One line for each key whose value differs: `optim.lr: 0.001 → 0.002`."""
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
    """The message for a key that no recipe has."""
    last = key.rpartition(".")[2]
    known = known_keys()
    by_last = {name.rpartition(".")[2]: name for name in known}
    namesakes = [name for name in known if name.rpartition(".")[2] == last]
    match = OTHER_SYSTEMS.get(last) or (namesakes[0] if len(namesakes) == 1 else nearest(key, known))
    match = match or by_last.get(nearest(last, by_last) or "")
    fix = f"did you mean {match}?" if match else "`shoal train --help` lists all keys"
    return Problem(f"unknown key {key!r}", fix)


def _problems_of(error: Any) -> Iterator[Problem]:
    key = ".".join(str(part) for part in error["loc"] if isinstance(part, str) and part.isidentifier())
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "extra_forbidden":
        yield unknown_key(key)
    elif isinstance(cause, ShoalError):
        yield from (Problem(f"{key}: {problem.what}", problem.fix) for problem in cause.problems)
    elif error["type"] == "literal_error":
        words = [word.strip("'") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        near = nearest(str(error["input"])[:200].lower(), words) if len(words) > FEW else None
        yield Problem(f"{key}: there is no {short(error['input'])}", f"--{key} {near or listed(words)}")
    elif error["type"].startswith("bool_"):
        yield Problem(f"{key}: {short(error['input'])} is neither true nor false", f"--{key} true or false")
    else:
        message = error["msg"][0].lower() + error["msg"][1:]
        about = " ".join(known_keys().get(key, "").split())
        fix = f"{key} is: {about}" if about else f"keys of the section {key}, such as {_first_key(key)}"
        yield Problem(f"{key}: {message}, but it is {short(error['input'])}", fix)


def _first_key(section: str) -> str:
    return next((key for key in known_keys() if key.startswith(f"{section}.")), section)
