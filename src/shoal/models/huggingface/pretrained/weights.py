"""The weights of a folder, under the names of a model, checked against it. Only headers of files are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.formats.huggingface import CONFIG, read
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.config.pretrained_folder import folder_of
from shoal.errors import Problem, ShoalError, raise_if
from shoal.models.huggingface.pretrained.conversion import ignored, to_model
from shoal.models.huggingface.pretrained.folder import config_of, has_weights, no_weights
from shoal.models.huggingface.pretrained.same_config import other_config

FLOATS = ("F64", "F32", "BF16", "F16")
MOST_SHOWN = 4


def folder_to_start_from(name: str, *, init: str = "weights", trust_remote_code: bool = False, **_: Any) -> str | None:
    """The folder whose weights a model of a recipe starts with; None: it starts with random ones."""
    if init == "random":
        return None
    folder = folder_of(name, with_code=trust_remote_code)
    if not has_weights(folder):
        raise no_weights(folder)
    return str(folder)


def weights_of(model: Any, folder: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder under the names of the model's parameters and buffers. Raises if some are missing, have
    other shapes, or belong to no module."""
    if not has_weights(folder):
        raise no_weights(folder)
    if (folder / CONFIG).is_file():
        config_of(folder)  # rejects quantized weights
        if (origin := getattr(model, "origin", None)) is not None:  # a model of a script has a config of its own
            raise_if(other_config(origin, folder))
    in_files = read(folder)
    try:
        found, unexpected = to_model(model, in_files)
    except ShoalError:
        raise
    except Exception as error:  # transformers' operations, on tensors of other shapes
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
        raise ShoalError(
            f"the tensors in {str(folder)!r} cannot be converted to those of {type(model).__name__}: {reason}",
            fix=_FIX,
            code="M075",
        ) from None
    raise_if(_untied(model, folder, found))
    found = _with_tied(model, found)
    strange = sorted(set(unexpected) - set(ignored(model, unexpected)))
    raise_if(_misfits(model, folder, found, strange))
    return found


_FIX = "the weights of this config.json; or --model.init random"


def _tied(model: Any) -> Iterator[list[str]]:
    """All names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return iter(names.values())


def _untied(model: Any, folder: Path, found: Mapping[str, LazyTensor]) -> Iterator[Problem]:
    """Parameters that are one in the model and several, with different values, in the files."""
    for alike in _tied(model):
        first, *others = [name for name in alike if name in found] or [""]
        for other in others:
            if not _is_same(found[first], found[other]):
                what = f"{first} and {other} in {str(folder)!r} differ, and the config says that they are one tensor"
                yield Problem("M075", what, "--model.tie_word_embeddings false")


def _is_same(first: LazyTensor, second: LazyTensor) -> bool:
    """Whether two tensors that are read in the same parts are equal."""
    pairs = zip(first.boxes, second.boxes, strict=False)
    is_alike = (first.shape, first.dtype, len(first.boxes)) == (second.shape, second.dtype, len(second.boxes))
    return is_alike and all(one.begin == other.begin and torch.equal(one.read(), other.read()) for one, other in pairs)


def _with_tied(model: Any, found: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Give a tied parameter, which files have once, all of its names."""
    out = dict(found)
    for alike in _tied(model):
        known = next((found[name] for name in alike if name in found), None)
        if known is not None:
            out.update(dict.fromkeys(alike, known))
    return out


def _misfits(model: Any, folder: Path, found: Mapping[str, LazyTensor], strange: list[str]) -> Iterator[Problem]:
    """One problem with all differences between the files and the model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    said: list[str] = []
    for name, tensor in model.state_dict().items():
        if name not in found:
            said += [f"{name} is missing"] if name in parameters else []
        elif found[name].shape != tuple(tensor.shape):
            said.append(f"{name} has the shape {list(found[name].shape)} there and {list(tensor.shape)} in the model")
        elif name in parameters and found[name].dtype not in FLOATS:
            said.append(f"{name} has the dtype {found[name].dtype}, which is not one of {', '.join(FLOATS)}")
    said += [f"{name} belongs to no module" for name in strange]
    if said:
        more = f"; and {len(said) - MOST_SHOWN} more" if len(said) > MOST_SHOWN else ""
        kind = type(model).__name__
        what = f"the weights in {str(folder)!r} are not those of this {kind}: {'; '.join(said[:MOST_SHOWN])}{more}"
        yield Problem("M075", what, _unchanged(model, folder) or _FIX)


def _unchanged(model: Any, folder: Path) -> str:
    """The flags that give settings under `model:` the values of config.json again."""
    if not (folder / CONFIG).is_file():
        return ""
    made = model.config.to_dict()
    saved = {key: value for key, value in config_of(folder).items() if type(value) in (int, bool) and key in made}
    flags = [f"--model.{key} {json.dumps(value)}" for key, value in saved.items() if made[key] != value]
    return f"{' '.join(flags)}, as in config.json; or --model.init random" if flags else ""
