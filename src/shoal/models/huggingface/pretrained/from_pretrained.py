"""`shoal.from_pretrained`: a model of a folder for a loop of your own, whose weights `Run.prepare` reads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.formats.start_weights import StartWeights
from shoal.config.pretrained_folder import PREFIX
from shoal.errors import needs
from shoal.models.huggingface.pretrained.build import build_unchanged
from shoal.models.huggingface.pretrained.folder import GENERATION
from shoal.models.huggingface.pretrained.weights import folder_to_start_from, weights_of
from shoal.train.build_model import without_memory


def from_pretrained(name: str, *, init: str = "weights", trust_remote_code: bool = False, **config: Any) -> Any:
    """Build a model of transformers without memory; `run.prepare` reads, on each rank, its part of the files.

        model = shoal.from_pretrained("Qwen/Qwen3-0.6B")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        model, optimizer = run.prepare(model, optimizer)

    It is of the class that config.json names, in training mode, and in float32 until a plan or `param_dtype` says
    otherwise. Files are compared with the model now; values are read by `prepare`.

    name               a folder as save_pretrained writes it, or a name on the hub; `hf:` may be in front
    init               weights, or random: drawn from the seed of the run by transformers' own rules
    trust_remote_code  run Python files of the folder
    config             values in place of those of config.json, such as num_hidden_layers=4
    """
    settings = {"init": init, "trust_remote_code": trust_remote_code, **config}
    model = _on_meta(name, settings)
    folder = model.origin.folder
    model.model_section = {"name": name if name.startswith(PREFIX) else f"{PREFIX}{name}", **settings}
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
