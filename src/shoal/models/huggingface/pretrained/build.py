"""From `hf:PATH` to a model that a recipe can train: its config alone decides its shapes.

    forward           takes the batch of a recipe (pretrained/data/batches.py)
    init_parameter    weights from the seed and the name (pretrained/deferred.py)
    init_buffer       buffers, which no file has

A model that is built on the meta device needs the last two. They come from a twin (pretrained/twin.py): the same model
with real buffers and without parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.config.pretrained_folder import folder_of
from shoal.errors import ShoalError, listed, nearest, needs
from shoal.models.huggingface.pretrained.data.batches import for_recipes, task_of
from shoal.models.huggingface.pretrained.data.pixels import pixel_rule
from shoal.models.huggingface.pretrained.deferred import with_values_later
from shoal.models.huggingface.pretrained.folder import config_of, with_floats
from shoal.models.huggingface.pretrained.same_config import Origin
from shoal.models.huggingface.pretrained.twin import Twin
from shoal.numerics.fp8.convert import silence

INITS = ("weights", "random")
OF_PLAN = "--optim.param_dtype bf16, which keeps weights in bfloat16, or bf16 in the plan, which computes in it"
WITHOUT_EFFECT = {"dtype": OF_PLAN, "torch_dtype": OF_PLAN, "use_cache": ""}
"""Key of a config.json that changes nothing in training → what does; empty: nothing."""


def builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds the model of `hf:PATH`."""
    return partial(build, name)


def build(name: str, *, init: str = "weights", trust_remote_code: Any = False, **changes: Any) -> nn.Module:
    """Build the model of a folder for recipes, with random weights or without memory. Its weights are loaded when it is
    laid out.

    `changes` replace values of its config.json.
    """
    model = build_unchanged(name, init=init, trust_remote_code=trust_remote_code, **changes)
    task = task_of(model)
    model.pixel_rule = pixel_rule(model.origin.folder) if task == "image class" else None
    model.__class__ = for_recipes(type(model).__base__, task)
    return model  # type: ignore[no-any-return]


def build_unchanged(name: str, *, init: str = "weights", trust_remote_code: Any = False, **changes: Any) -> Any:
    """The same for a loop of your own: with transformers' own forward."""
    if init not in INITS:
        raise ShoalError(f"model.init must be {listed(INITS)}, got {init!r}", fix="--model.init weights", code="M077")
    if not isinstance(trust_remote_code, bool):
        what = f"model.trust_remote_code must be true or false, got {trust_remote_code!r}"
        raise ShoalError(what, fix="--model.trust_remote_code true", code="M077")
    transformers = needs("transformers", what=f"model.name {name}", extra="hf")
    with silence("torchao", "torch.utils._pytree"):  # messages of an import that users cannot act on
        assert transformers.PreTrainedModel
    folder = folder_of(name, with_code=trust_remote_code)
    config = _config(folder, changes, trusts=trust_remote_code)
    construct = partial(_construct, folder, config, trusts=trust_remote_code)
    model = construct()
    twin = Twin(construct)
    kind: Any = type(model)
    model.__class__ = with_values_later(kind)
    model.twin = twin
    model.origin = Origin(folder, config, changes)
    return model


def _config(folder: Path, changes: dict[str, Any], *, trusts: bool) -> Any:
    transformers = needs("transformers", what="a model of transformers", extra="hf")
    said = config_of(folder)
    kind = said.get("model_type")
    known = kind in transformers.CONFIG_MAPPING and not (trusts and _has_own_class(said, transformers))
    if not known and not trusts:
        raise _needs_code(folder, said, f"has the model_type {str(kind)[:80]!r}, which transformers does not know")
    try:
        with torch.device("cpu"):
            if known:
                made = transformers.CONFIG_MAPPING[kind].from_dict
                config = made(with_floats(said))
                _check_keys(folder, changes, {**config.to_dict(), **said})
                # Made anew, and not changed: a class computes some values from others, as head_dim from hidden_size.
                return made(with_floats({**said, **changes})) if changes else config
            config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
    except ShoalError:
        raise
    except Exception as error:
        raise _wrong(folder, error) from error
    _check_keys(folder, changes, config.to_dict())
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def _has_own_class(said: Mapping[str, Any], transformers: Any) -> bool:
    """Whether the class of the model is in the folder's code, and not in transformers."""
    own, names = said.get("auto_map"), said.get("architectures")
    is_known = isinstance(names, list) and any(isinstance(name, str) and hasattr(transformers, name) for name in names)
    return isinstance(own, dict) and "AutoModelForCausalLM" in own and not is_known


def _check_keys(folder: Path, changes: dict[str, Any], known: dict[str, Any]) -> None:
    for key, value in changes.items():
        if key in WITHOUT_EFFECT:
            raise ShoalError(
                f"model.{key} must be left out, since it changes nothing in training, got {str(value)[:40]!r}",
                fix=WITHOUT_EFFECT[key] or f"leave out --model.{key}",
                code="M088",
            )
        if key not in known:
            near = nearest(key, known)
            raise ShoalError(
                f"the config of {str(folder)!r} has no {key!r}, which is set under `model:`",
                fix=f"--model.{near} {value}" if near else f"leave out --model.{key}",
                code="M077",
            )


def _construct(folder: Path, config: Any, *, trusts: bool) -> Any:
    """The model, in float32 whatever the config says: precision is a matter of the plan."""
    transformers = needs("transformers", what="a model of transformers", extra="hf")
    names = [name for name in config.architectures or () if isinstance(name, str)]
    kinds: list[Any] = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    try:
        for kind in kinds:
            is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
            if is_model and kind.config_class is type(config):
                return kind(copy.deepcopy(config))
        if not trusts and _has_own_class(said := config.to_dict(), transformers):
            # transformers would build its own class of this model_type, without what the folder's code adds
            raise _needs_code(folder, said, f"names the class {listed(names or ['?'])}, which transformers has not")
        return transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=trusts, dtype=torch.float32
        )
    except ShoalError:
        raise
    except Exception as error:
        if not trusts and "trust_remote_code" in str(error):
            raise _needs_code(folder, config.to_dict(), f"needs the class {listed(names or ['?'])}") from None
        raise _wrong(folder, error) from error


def _needs_code(folder: Path, said: dict[str, Any], what: str) -> ShoalError:
    has_own = isinstance(said.get("auto_map"), dict)
    fix = "read its .py files, and if you trust them: --model.trust_remote_code true"
    return ShoalError(
        f"{str(folder / 'config.json')!r} {what}" + ("; it brings code of its own, which was not run" * has_own),
        fix=fix if has_own else "a newer transformers, or another model",
        code="M072",
    )


def _wrong(folder: Path, error: Exception) -> ShoalError:
    reason = " ".join(str(error).split())[:300]  # the first line of a strict config names no value
    return ShoalError(
        f"no model can be built from {str(folder / 'config.json')!r}: {type(error).__name__}: {reason}",
        fix="the config.json as save_pretrained writes it",
        code="M073",
    )
