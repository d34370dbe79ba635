"""The weights that a run starts with: those of a checkpoint, of files of other systems, or drawn from the seed.

`run.start_from` names them. Without it, a model of a folder (`hf:PATH`) starts with the weights in that folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from torch import nn

from shoal.checkpoint.formats.adapter import fill_adapter
from shoal.checkpoint.formats.huggingface import CONFIG, INDEX, model_of, read_json
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.load import load_step
from shoal.checkpoint.load_tensors import load_tensors
from shoal.checkpoint.state.base_fingerprint import reject_other_base
from shoal.checkpoint.storage.store import find
from shoal.comm.all_or_none import all_or_none, on_main
from shoal.config.recipe import ModelSection, Recipe
from shoal.errors import Problem, ShoalError, raise_if
from shoal.train.build_model import adapter_of, build_model, without_memory
from shoal.train.model_prefix import value_for
from shoal.train.recipe.saving.same_model import other_model
from shoal.train.run import Run
from shoal.train.run_checkpoint import holder_of

_FREE = ("max_sequence", "init_std")
"""Settings of a llama that its weights do not depend on."""


def source_of(recipe: Recipe) -> str | None:
    """The place of the weights; None: they are drawn from the seed."""
    if recipe.run.start_from is not None:
        return recipe.run.start_from
    return value_for("START_FOLDERS", recipe.model)


def with_dimensions(recipe: Recipe) -> Recipe:
    """The recipe with the sizes of the folder that its weights are from. Raises where it says others: weights of the
    same shapes mean something else with another `rope_theta`, for example."""
    where = recipe.run.start_from
    if where is None or recipe.model.name != "llama" or "://" in where or not (Path(where) / CONFIG).is_file():
        return recipe
    path = Path(where) / CONFIG
    config = read_json(path)
    there = model_of(config, path)
    if there is None:  # names and shapes of its tensors may be the same, as those of a Mistral
        what = (
            f"{path} must be of a llama, for shoal's llama, got the model_type {str(config.get('model_type'))[:80]!r}"
        )
        raise ShoalError(what, fix=f"--model.name hf:{where}, without --run.start_from", code="C045")
    known = import_module("shoal.models.llama_config")
    here = asdict(known.build_config("llama", known.PRESETS, known.LlamaConfig(), recipe.model.arguments))
    is_set = here if recipe.model.preset else (recipe.model.model_extra or {})
    raise_if(
        Problem("C051", f"model.{key} must be {there[key]}, as in {path}, got {here[key]}", f"leave out --model.{key}")
        for key in is_set
        if key in there and key not in _FREE and key in here and here[key] != there[key] and here[key] is not None
    )
    lora = {} if recipe.model.lora is None else {"lora": recipe.model.lora}
    changed = {key: here[key] for key in is_set if key in _FREE}
    return recipe.model_copy(update={"model": ModelSection(**{**there, **changed, **lora})})


def is_foreign(where: str) -> bool:
    """Whether a place has weights in a format of other systems, such as a folder of Hugging Face."""
    path = Path(where)
    if "://" in where or not path.exists():
        return False
    from shoal.checkpoint.formats.import_ import detect  # it loads torch's own checkpoints: a second

    with suppress(ShoalError):
        return (path / INDEX).is_file() or bool(detect(path))
    return False


def expect_weights(recipe: Recipe, model: nn.Module) -> None:
    """Let a model be laid out without drawing weights that will be replaced."""
    if hasattr(model, "is_loaded_later"):
        setattr(model, "is_loaded_later", source_of(recipe) is not None)  # noqa: B010  # a flag, no module


def check_weights(recipe: Recipe, model: nn.Module) -> list[Problem]:
    """Problems of the files that a model would start with, in formats of other systems. Headers are read, and
    the values of tensors that a config ties and the files have twice."""
    try:
        where = source_of(recipe)
        if where is not None and is_foreign(where):
            foreign_tensors(model if recipe.model.lora is None else _without_lora(recipe), where)
        elif where is not None and "://" not in where:  # the ranks read the others
            raise_if(_other_model(recipe, model, where))
    except ShoalError as error:
        return list(error.problems)
    return []


def start_with_weights(run: Run, recipe: Recipe) -> str | None:
    """Load the weights that the run starts with. Every rank calls it. Returns where they are from."""
    where = source_of(recipe)
    adapter = None if recipe.model.lora is None else recipe.model.lora.adapter
    if where is None:
        found = None
    elif is_foreign(where):
        load_tensors(run.world, holder_of(run), foreign_tensors(_without_lora(recipe), where), where)
        found = where
    else:
        if "://" in where:  # others were compared before a process was started
            model, failed = _without_lora(recipe), f"{where!r} cannot be read"
            on_main(run.world, lambda: raise_if(_other_model(recipe, model, where)), failed=failed)
        found = f"step {load_start_weights(run, where)} of {where}"
    if adapter is not None:  # `prepare` has read it, and a checkpoint that the run starts from may have had another
        failed, fix = f"{adapter} was not loaded", "--model.lora.adapter FOLDER, which every rank can read"
        all_or_none(run.world, lambda: fill_adapter(run.composed, adapter), failed=failed, fix=fix)
    return " and ".join(filter(None, (found, adapter))) or None


def _other_model(recipe: Recipe, model: nn.Module, where: str) -> Iterator[Problem]:
    """Problems of a checkpoint of another model. A place without checkpoints is reported by others."""
    store, step = find(where)
    steps = store.steps() if step is None else [step]
    if steps:
        yield from other_model(recipe, model, store.manifest(steps[-1]), where)


def _without_lora(recipe: Recipe) -> nn.Module:
    """The model without memory, as files of other systems have it."""
    model = without_memory(lambda: build_model(recipe.model.model_copy(update={"lora": None})))
    assert model is not None
    return model


def load_start_weights(run: Run, where: str) -> int:
    """Load the weights of a step of another run, or imported ones; returns that step. Every rank calls it."""
    store, step = find(where)
    newest = on_main(run.world, lambda: store.steps()[-1], failed=f"{where!r} cannot be read")
    manifest = load_step(store, run.world, holder_of(run), newest if step is None else step, only_weights=True)
    reject_other_base(run.composed, run.world, manifest, store.where)
    return manifest.step


def foreign_tensors(model: nn.Module, where: str) -> Mapping[str, LazyTensor]:
    """The tensors of foreign files under the names of a model without memory."""
    from shoal.checkpoint.formats import import_ as formats

    adapter, path = adapter_of(model), Path(where)
    if adapter is not None and path.is_dir() and ((path / INDEX).is_file() or formats.detect(path) != "dcp"):
        of_adapter: Mapping[str, LazyTensor] = adapter.weights_of(model, path)
        return of_adapter
    found = formats.read(path, formats.ImportSettings()).model
    for name, parameter in model.named_parameters():
        there = found[name].shape if name in found else None
        if there != tuple(parameter.shape):
            raise ShoalError(
                f"{where!r} is of another model: {name} has the shape {list(there or ()) if there else 'none'} there"
                f" and {list(parameter.shape)} here",
                fix="the model section of these weights, or --run.start_from OTHER_WEIGHTS",
                code="C011",
            )
    return found


def check_start_from(run: Run, recipe: Recipe, *, is_fresh: bool) -> None:
    """Raise if `run.start_from` has no weights, or if starting over would remove them. Every rank calls it."""
    failed = f"{recipe.run.start_from!r} cannot be read"
    on_main(
        run.world,
        lambda: reject_bad_start_from(recipe, is_fresh=is_fresh),
        failed=failed,
        fix="--run.start_from RUN_DIRECTORY",
    )


def reject_bad_start_from(recipe: Recipe, *, is_fresh: bool) -> None:
    """Raise as `check_start_from` does, in one process."""
    where, directory = str(recipe.run.start_from), recipe.run.dir
    if is_fresh and directory and Path(where).resolve().is_relative_to(Path(directory).resolve()):
        raise ShoalError(
            f"starting over in {directory!r} would remove {where!r}, which run.start_from names",
            fix="--run.dir OTHER_DIRECTORY",
            code="C029",
        )
    if not is_foreign(where) and not find(where)[0].steps():
        raise ShoalError(
            f"there is no checkpoint in {where!r} to start from",
            fix="--run.start_from RUN_DIRECTORY, or one of its steps, or a folder of safetensors",
            code="C001",
        )
