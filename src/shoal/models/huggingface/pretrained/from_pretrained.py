"""A model of a folder for a loop of your own (`shoal.from_pretrained`), whose weights `Run.prepare` reads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.formats.start_weights import StartWeights
from shoal.errors import needs
from shoal.models.huggingface.pretrained.build import build_unchanged
from shoal.models.huggingface.pretrained.folder import GENERATION
from shoal.models.huggingface.pretrained.weights import folder_to_start_from, weights_of
from shoal.train.build_model import without_memory


def build(name: str, *, init: str, trust_remote_code: bool, **config: Any) -> Any:
    """Build the model of `hf:FOLDER` without memory, with the files that it starts with."""
    settings = {"init": init, "trust_remote_code": trust_remote_code, **config}
    model = _on_meta(name, settings)
    folder = model.origin.folder
    model.model_section = {"name": name, **settings}
    if folder_to_start_from(name, init=init, trust_remote_code=trust_remote_code) is not None:
        model.start_weights = StartWeights(str(folder), partial(_weights, name, settings))
        model.is_loaded_later = bool(model.start_weights.tensors)  # checked now: no rank has started anything
    _set_generation(model, folder)
    return model


def _on_meta(name: str, settings: dict[str, Any]) -> Any:
    return without_memory(lambda: build_unchanged(name, **settings))


def _weights(name: str, settings: dict[str, Any]) -> Mapping[str, LazyTensor]:
    """The tensors of a folder under the names of its model, to which nothing was added yet."""
    model = _on_meta(name, settings)
    return weights_of(model, model.origin.folder)


def _set_generation(model: Any, folder: Path) -> None:
    """Let `model.generate` use the folder's settings, as from_pretrained does. A file that cannot be read has none."""
    transformers = needs("transformers", what="a model of transformers", extra="hf")
    if (folder / GENERATION).is_file() and model.can_generate():
        with suppress(OSError, ValueError, TypeError):
            model.generation_config = transformers.GenerationConfig.from_pretrained(str(folder))
