"""What `bench scale`, `step` and `memory` have in common: the recipe, the device, and the outputs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from shoal.cli.bench.common import check_file, check_ranks
from shoal.cli.process import ended_by_interrupt, without_garbage_collection
from shoal.cli.reports.console import WIDTH, show
from shoal.config.checks.memory import has_no_accelerator
from shoal.config.checks.settings import check_incomplete
from shoal.config.load import RecipeReading
from shoal.config.recipe import Recipe
from shoal.errors import Problem, raise_if
from shoal.observe.jsonable import jsonable

if TYPE_CHECKING:
    from rich.console import Console

Found = Mapping[str, Any]
PLANS = ("ddp", "zero=1", "zero=2", "zero=3", "pp=2", "tp=2")
"""Plans that are compared unless others are named."""


def complete(reading: RecipeReading, problems: Sequence[Problem], most_ranks: int) -> Recipe:
    """The recipe of a command without problems; else raise all of them. Then load torch."""
    for text in reading.notes:
        note(text)
    num_gpus = 0 if has_no_accelerator() else None
    if num_gpus is None and not problems:
        import torch

        num_gpus = torch.cuda.device_count()
    found = [*problems, *check_ranks([most_ranks], reading.recipe, num_gpus or 0)]
    recipe = reading.with_problems(found).complete(lambda each: check_incomplete(each, None))
    _import_torch(recipe)
    return recipe


def _import_torch(recipe: Recipe) -> None:
    """Import torch and all that ranks need, once, in the process that they are forked from."""
    with ended_by_interrupt(), without_garbage_collection():
        if not recipe.run.compile:
            from shoal.numerics import lazy_dynamo

            lazy_dynamo.install()
        import_module("shoal.bench.training.time_steps")


def device_of(recipe: Recipe, nproc: Sequence[int]) -> str:
    """cpu or cuda; raises if there are fewer GPUs than ranks."""
    import torch

    num_gpus = 0 if recipe.launch.device == "cpu" else torch.cuda.device_count()
    raise_if(check_ranks(nproc, recipe, num_gpus))
    return "cuda" if num_gpus else "cpu"


def recipe_mapping(recipe: Recipe, path: Path | None) -> dict[str, Any]:
    """The recipe in a few words, as JSON."""
    return {
        "recipe": None if path is None else str(path),
        "model": " ".join(filter(None, (recipe.model.name, recipe.model.preset))),
        "global_batch": recipe.data.global_batch,
        "seq_len": recipe.data.seq_len,
        "precision": recipe.plan.precision,
    }


@dataclass(frozen=True, kw_only=True)
class TrainingBench:
    """Options of every benchmark that trains a recipe."""

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: the tiny llama."""

    cluster: str | None = None
    """The cluster of the predictions: a preset, a file, or here. None: here, if it was calibrated with as many threads;
    else this machine is measured first, for 20 s."""

    out: Path | None = None
    """A JSON file to write the results to."""

    html: Path | None = None
    """An HTML file to write: one page with a drawing and the table."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""

    @property
    def outputs(self) -> Outputs:
        """Where the results go."""
        return Outputs(self.json, self.out, self.html)


def note(text: str) -> None:
    """Print a line about the preparation."""
    print(f"shoal: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Outputs:
    """Where the results go."""

    as_json: bool
    out: Path | None
    html: Path | None
    stdout: TextIO = field(default_factory=lambda: sys.stdout)

    def problems(self) -> Iterator[Problem]:
        """Find files that cannot be written."""
        yield from check_file(self.out, ".json")
        yield from check_file(self.html, ".html")

    def to_stderr(self) -> AbstractContextManager[Any]:
        """Send what a user's model prints to stderr."""
        return redirect_stdout(sys.stderr)

    def show(self, found: Found, render: Callable[[Console, Found], None]) -> None:
        """Write the files, and print the tables or the JSON."""
        if self.out is not None:
            self.out.write_text(json.dumps(jsonable(found), indent=2) + "\n")
        if self.html is not None:
            from shoal.pages.report import write_page

            page = import_module(f"shoal.pages.bench.{found['benchmark']}")
            write_page(self.html, page.make_page(found))
        if self.as_json:
            print(json.dumps(jsonable(found)), file=self.stdout)
            return
        show(lambda console: render(console, found), self.stdout, width=WIDTH)
        for path, what in ((self.out, "the results"), (self.html, "a page")):
            if path is not None:
                print(f"wrote {path}: {what}", file=self.stdout)
