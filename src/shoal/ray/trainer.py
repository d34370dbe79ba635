"""`shoal.ray.Trainer`: a recipe or a function on the workers of a Ray cluster."""

from __future__ import annotations

import copy
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.config.load import build_recipe, load_recipe
from shoal.config.recipe import Recipe
from shoal.errors import Findings, Problem, ShoalError, needs
from shoal.ray.scaling import check_sizes

Work = str | Path | Mapping[str, Any] | Recipe | Callable[..., Any]


class Trainer:
    """Trains on Ray: `fit()` starts the workers, and returns Ray's result when the run has ended.

    work            a recipe (a path, a mapping or a `Recipe`), or a function that each worker calls
    scaling_config  Ray's; or a number of workers; or (min, max)
    run_config      Ray's: the name of the run, its storage path, the number of failures
    settings        of a recipe's file: settings that replace its own, such as {"optim.lr": 1e-3}
    config          of a function: its argument, if it takes one
    resume          of a recipe: auto resumes an unfinished run of this name; latest also a finished one
    quiet           of a recipe: print no progress

    A run is below `storage_path/name/shoal`. After a failure, and when Ray changes the number of workers, it resumes
    from its newest checkpoint there. A `failure_config` that is left at its default takes `launch.max_restarts`.
    """

    def __init__(
        self,
        work: Work,
        scaling_config: Any = None,
        run_config: Any = None,
        *,
        settings: Mapping[str, Any] | None = None,
        config: Any = None,
        resume: str = "auto",
        quiet: bool = False,
    ) -> None:
        train = _ray_train()
        self.scaling_config = _scaling(train, scaling_config)
        self.recipe: Recipe | None = None
        self.function: Callable[..., Any] | None = None
        self.config, self.resume, self.quiet = config, resume, quiet
        _check_arguments(work, settings, config)
        if callable(work):
            self.function = work
        else:
            self.recipe = _recipe(work, settings or {})
        self.run_config = _run_config(train, run_config, self.recipe)
        self._check()

    def fit(self) -> Any:
        """Train to the end. Returns a `ray.train.Result`; its `return_value` is the summary of the run."""
        torch_part = needs("ray.train.torch", what="shoal.ray", extra="ray", package="ray[train]")
        from shoal.ray.worker import call_function, train_recipe  # torch

        result = torch_part.TorchTrainer(
            train_recipe if self.recipe is not None else call_function,
            train_loop_config=self._order(),
            torch_config=torch_part.TorchConfig(**self._group()),
            scaling_config=self.scaling_config,
            run_config=self.run_config,
        ).fit()
        if isinstance(result.return_value, ShoalError):
            raise result.return_value
        return result

    @property
    def directory(self) -> str:
        """The folder of the run, or its URL."""
        path = str(self.run_config.storage_path).removeprefix("file://")
        path = path if "://" in path else os.path.abspath(os.path.expanduser(path))
        return f"{path}/{self.run_config.name}/shoal"

    def _order(self) -> dict[str, Any]:
        """The argument of the function on the workers."""
        if self.recipe is None:
            return {"function": self.function, "config": self.config, "directory": self.directory}
        recipe = self._stored(self.recipe)
        if os.path.isdir(self.directory):
            from shoal.observe.run_directory import RunDirectory  # torch
            from shoal.train.recipe.preflight import as_trained

            # A run that cannot resume is rejected here: Ray would start the workers again and again.
            RunDirectory.preview(as_trained(recipe), self.resume)
        return {
            "recipe": recipe.model_dump(mode="json"),
            "directory": self.directory,
            "cwd": os.getcwd(),
            "command": f"ray-{secrets.token_hex(8)}",
            "resume": self.resume,
            "quiet": self.quiet,
        }

    def _stored(self, recipe: Recipe) -> Recipe:
        """The recipe, saved below the storage path. A URL has the checkpoints alone."""
        if "://" in self.directory:
            section = recipe.checkpoint.model_copy(update={"dir": f"{self.directory}/checkpoints"})
            return recipe.model_copy(update={"checkpoint": section})
        return recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": self.directory})})

    def _group(self) -> dict[str, Any]:
        """The settings of torch's process group, which Ray makes."""
        if self.recipe is None:
            return {}
        both = bool(self.scaling_config.use_gpu) and self.recipe.launch.device != "cpu"
        return {"backend": "cpu:gloo,cuda:nccl" if both else "gloo", "timeout_s": math.ceil(self.recipe.launch.timeout)}

    def _check(self) -> None:
        found = Findings()
        found += self._check_resume()
        if self.run_config.storage_filesystem is not None:
            what = "RunConfig(storage_filesystem=...) is an object of pyarrow, which shoal does not save to"
            found += [Problem("Y005", what, "RunConfig(storage_path='s3://bucket/folder')")]
        if self.recipe is not None:
            found += _check_recipe(self.recipe, self.scaling_config)
            found += _check_kept(self.run_config)
        found.raise_all("shoal.ray.Trainer")

    def _check_resume(self) -> Iterator[Problem]:
        if self.resume not in ("auto", "latest"):
            what = f"resume must be auto or latest, got {str(self.resume)[:80]!r}"
            yield Problem("Y006", what, "resume='auto'; to start over, RunConfig(name='ANOTHER_NAME')")


def _ray_train() -> Any:
    return needs("ray.train", what="shoal.ray", extra="ray", package="ray[train]")


def _check_arguments(work: Any, settings: Any, config: Any) -> None:
    """Reject arguments that would have no effect."""
    if not isinstance(work, str | Path | Recipe | Mapping) and not callable(work):
        what = f"Trainer takes a recipe or a function, got {type(work).__name__}"
        raise ShoalError(what, fix="Trainer('recipe.yaml', ScalingConfig(num_workers=2))", code="Y002")
    if settings and not isinstance(work, str | Path):
        what = f"settings replace those of a recipe's file, got a {type(work).__name__} in place of a path"
        raise ShoalError(what, fix="set them there; a function takes config={...}", code="Y003")
    if config is not None and not callable(work):
        what = "config is the argument of a function, and a recipe was given"
        raise ShoalError(what, fix="settings={...}, or a function in place of the recipe", code="Y003")


def _recipe(work: Any, settings: Mapping[str, Any]) -> Recipe:
    if isinstance(work, str | Path):
        return load_recipe(Path(work), [(key, str(value)) for key, value in settings.items()])
    tree = work.model_dump(mode="json") if isinstance(work, Recipe) else dict(work)
    return build_recipe(tree, title="the recipe")


def _scaling(train: Any, given: Any) -> Any:
    """Ray's ScalingConfig."""
    config = train.ScalingConfig(num_workers=given) if isinstance(given, int | tuple) else given
    config = config if config is not None else train.ScalingConfig()
    if not isinstance(config, train.ScalingConfig):
        what = f"scaling_config must be Ray's ScalingConfig, a number of workers or (min, max), got {given!r:.80}"
        raise ShoalError(what, fix="ray.train.ScalingConfig(num_workers=2)", code="Y011")
    if config.min_workers < 1:
        what = f"num_workers must be at least 1, got {config.num_workers}"
        raise ShoalError(what, fix="ScalingConfig(num_workers=2)", code="Y007")
    return config


def _run_config(train: Any, given: Any, recipe: Recipe | None) -> Any:
    """Ray's RunConfig; defaults come from the recipe."""
    if given is not None and not isinstance(given, train.RunConfig):
        what = f"run_config must be Ray's RunConfig, got {given!r:.80}"
        raise ShoalError(what, fix="ray.train.RunConfig(name='mine', storage_path='/shared/ray')", code="Y011")
    if recipe is None:
        return given if given is not None else train.RunConfig()
    config = given if given is not None else train.RunConfig(name=recipe.run.name)
    if config.failure_config == train.FailureConfig():
        config = copy.copy(config)  # the user's stays as it is
        config.failure_config = train.FailureConfig(max_failures=recipe.launch.max_restarts)
    return config


def _check_kept(run_config: Any) -> Iterator[Problem]:
    """Find settings of Ray for checkpoints, which a recipe saves itself."""
    config = getattr(run_config, "checkpoint_config", None)
    for name in ("num_to_keep", "checkpoint_score_attribute"):
        if (value := getattr(config, name, None)) is not None:
            what = f"CheckpointConfig({name}={value!r:.80}) has no effect on a recipe, which saves by checkpoint.every"
            fix = f"settings={{'checkpoint.keep': {value}}}" if name == "num_to_keep" else "leave it out"
            yield Problem("Y012", what, fix)


def _check_recipe(recipe: Recipe, scaling: Any) -> Iterator[Problem]:
    yield from check_sizes(recipe, range(scaling.min_workers, scaling.max_workers + 1))
    for key, value in (("run.dir", recipe.run.dir), ("checkpoint.dir", recipe.checkpoint.dir)):
        if value is not None:
            what = f"{key} is {value!r}, but a run on Ray is saved below its storage path"
            yield Problem("Y008", what, f"leave {key} out, and RunConfig(storage_path={value!r})")
    if recipe.run.overwrite:
        what = "run.overwrite would remove the run after each failure, before it can resume"
        yield Problem("Y009", what, "--run.overwrite false, and RunConfig(name='ANOTHER_NAME')")
    if recipe.launch.device == "cuda" and not scaling.use_gpu:
        what = "launch.device is cuda, but ScalingConfig gives the workers no GPU"
        yield Problem("Y010", what, "ScalingConfig(use_gpu=True), or --launch.device cpu")
