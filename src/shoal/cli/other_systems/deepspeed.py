"""`--deepspeed ds_config.json`: the settings of a config, below those of the command line and above the recipe's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.comm.rendezvous.environment import read_environment
from shoal.config.checks.memory import has_no_accelerator
from shoal.config.deepspeed.translate import translate
from shoal.config.deepspeed.translation import Line, Target, Translation
from shoal.config.recipe_file import read_yaml
from shoal.errors import ShoalError
from shoal.safe_parsing import short

Overrides = list[tuple[str, str]]

LOSS = (
    "loss: the mean over all labels of the global batch; DeepSpeed averages the means of microbatches and ranks"
    " (--optim.loss_mean microbatch)"
)


def translated_for_recipe(path: Path, recipe: Path | None, overrides: Overrides, *, several_hosts: bool) -> Translation:
    """Translate the config for a recipe and the settings of a command."""
    ranks = None if several_hosts else _num_ranks(recipe, dict(overrides))
    return translate(path, target="train", num_ranks=ranks)


def _num_ranks(recipe: Path | None, overrides: Mapping[str, str]) -> int | None:
    """The number of ranks, as far as it is known without torch."""
    if (typed := overrides.get("launch.nproc", "")).isdecimal():
        return int(typed)
    if (placement := read_environment(os.environ)) is not None:
        return placement.world_size
    try:
        launch = (read_yaml(recipe) if recipe is not None else {}).get("launch") or {}
        nproc = launch.get("nproc") if isinstance(launch, dict) else None
    except ShoalError:  # which the recipe's own reading reports
        nproc = None
    if isinstance(nproc, int):
        return nproc
    is_cpu = overrides.get("launch.device") == "cpu" or has_no_accelerator()
    return 1 if is_cpu else None


def table(path: Path, lines: Sequence[Line], typed: Sequence[str]) -> str:
    """The translation as lines of text. `typed` are settings of the command line, which replace those of the config."""
    rows = [(_of_config(line), line.flag or "-", _remark(line, typed)) for line in lines]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    shown = [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]
    return "\n".join([f"{path} in settings of shoal:", *shown])


def _of_config(line: Line) -> str:
    return f"{line.key} {'(default)' if line.value is None else short(line.value, 40)}"


def _remark(line: Line, typed: Sequence[str]) -> str:
    setting = line.flag.partition(" ")[0].removeprefix("--")
    by = next(
        (name for name in typed if setting and (name == setting or (name == "plan" and setting[:5] == "plan."))), ""
    )
    return f"overridden by --{by}" if by else line.remark


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The translation as JSON."""
    return [line.to_mapping() for line in lines]


def translated_for_plan(path: Path, num_ranks: int | None) -> Translation:
    """Translate the config for the planner."""
    target: Target = "plan"
    return translate(path, target=target, num_ranks=num_ranks)
