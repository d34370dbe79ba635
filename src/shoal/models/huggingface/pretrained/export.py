"""A trained model of a folder, back to a folder that `from_pretrained` loads: the old names, and the files beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.checkpoint.formats.huggingface import COPIED, Extra, dtype_word
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.config.pretrained_folder import folder_of
from shoal.config.recipe import ModelSection
from shoal.errors import ShoalError
from shoal.models.huggingface.pretrained.conversion import to_files
from shoal.models.huggingface.pretrained.folder import config_of
from shoal.train.build_model import build_model, without_memory

OWN = ("init", "trust_remote_code")
"""Keys of a model section that are no keys of a config.json."""


def for_export(section: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], Extra]:
    """The tensors of a checkpoint under the names of files, and what else is in such a folder."""
    model_section = ModelSection.model_validate({key: value for key, value in section.items() if value is not None})
    folder = folder_of(model_section.name, with_code=bool(section.get("trust_remote_code")))
    model: Any = without_memory(lambda: build_model(model_section))
    expected = {name: tuple(one.shape) for name, one in model.state_dict().items() if name not in model.first_names}
    for name, shape in expected.items():
        there = f"the shape {list(tensors[name].shape)}" if name in tensors else "no tensor"
        if there != f"the shape {list(shape)}":
            raise ShoalError(
                f"the recipe must describe the checkpoint's model: {name} has {there} there and the shape {list(shape)}"
                f" in {str(folder)!r}",
                fix="--recipe RECIPE, with the recipe that the checkpoint was trained with",
                code="C044",
            )
    named = {name: tensor for name, tensor in tensors.items() if name in expected}
    config = config_of(folder)
    config |= {key: value for key, value in model_section.arguments.items() if key not in OWN}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_word(named)
    files = to_files(model, named)
    return files, Extra(config, tuple(folder / name for name in COPIED if (folder / name).is_file()))
