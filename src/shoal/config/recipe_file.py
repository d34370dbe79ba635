"""Read the tree of settings in the file of a recipe."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from shoal.config.recipe import Recipe
from shoal.errors import ShoalError, nearest
from shoal.safe_parsing import OutOfBounds, parse_yaml, read_text

Tree = dict[str, Any]

RECIPE_ENDINGS = ("", ".yaml", ".yml", ".json")
"""A file with another ending and without a section of a recipe counts as data."""


def read_yaml(path: Path) -> Tree:
    """The mapping in a YAML (or JSON) file."""
    may_be_data = path.suffix not in RECIPE_ENDINGS
    try:
        text = read_text(path, fix="shoal train PATH.yaml")
    except FileNotFoundError:
        names = {file.stem: file for file in path.parent.glob("*.yaml")} if path.parent.is_dir() else {}
        near = names.get(nearest(path.stem, names) or "")
        model = f"--model.name {path}" if str(path).startswith("hf:") else None
        raise ShoalError(
            f"there is no recipe {str(path)!r}",
            fix=model or (f"shoal train {near}" if near else "shoal train PATH.yaml, or shoal train for the defaults"),
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
