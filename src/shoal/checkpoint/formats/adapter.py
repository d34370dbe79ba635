"""Folders of PEFT: `adapter_model.safetensors` with the matrices of LoRA, and `adapter_config.json`.

    base_model.model.NAME.lora_A.weight    shoal's NAME.lora_A
    base_model.model.NAME.lora_B.weight    shoal's NAME.lora_B

`peft.PeftModel.from_pretrained(model, folder)` reads a folder that is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.checkpoint.formats import safetensors
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.errors import Problem, ShoalError, raise_if
from shoal.files import read_regular
from shoal.numerics.local_tensor import to_local
from shoal.parallel.lora.apply import lora
from shoal.parallel.lora.layers import adapted_layers, is_adapter

if TYPE_CHECKING:
    from shoal.parallel.parallel_model import ParallelModel  # it loads torch's sharding, which a start need not

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX, SUFFIX = "base_model.model.", ".weight"
MOST_JSON = 2**20
CHANGES = {
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "lora_bias": False,
    "use_qalora": False,
    "alora_invocation_tokens": None,
    "layer_replication": None,
}
"""Settings of PEFT that change the formula → the value that they have to have here. Missing ones have it."""
KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` under which PEFT leaves the base weights as they are. By pissa, olora, corda and loftq
it subtracts the adapter that it begins with."""


def config_of(settings: Mapping[str, Any], base: str | None = None) -> dict[str, Any]:
    """`adapter_config.json` for the `lora` of a checkpoint's state."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings["rank"],
        "lora_alpha": int(settings["alpha"]) if settings["alpha"] == int(settings["alpha"]) else settings["alpha"],
        "lora_dropout": settings["dropout"],
        "target_modules": list(settings["targets"]),
        "inference_mode": True,
        "init_lora_weights": True,
        **CHANGES,
    }


def write(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    disk: Filesystem,
    progress: Callable[[int], None],
    *,
    config: Mapping[str, Any],
) -> None:
    """Write a folder. `tensors` may hold others than those of LoRA, which are left out."""
    own = {f"{PREFIX}{name}{SUFFIX}": tensor for name, tensor in tensors.items() if is_adapter(name)}
    safetensors.write(folder / WEIGHTS, own, disk, progress, format="pt")
    with safetensors.new_file(folder / CONFIG, disk) as file:
        disk.write(file, json.dumps(config, indent=2).encode() + b"\n")


def read_config(folder: str | Path) -> dict[str, Any]:
    """The settings of a folder; those that change the formula are rejected."""
    path = Path(folder) / CONFIG
    try:
        found = json.loads(read_regular(path, MOST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ShoalError(
            f"{path} must be the JSON that PEFT writes beside an adapter: {reason}",
            fix="the folder that model.save_pretrained of PEFT, or shoal checkpoint export, has written",
            code="L011",
        ) from error
    raise_if(_problems(path, found))
    return dict(found)


def _problems(path: Path, found: Any) -> list[Problem]:
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = found.get("peft_type") if isinstance(found, dict) else type(found).__name__
        return [Problem("L012", f"{path} must be of LoRA, got peft_type {kind!r}", "an adapter of type LORA")]
    problems = []
    if (start := found.get("init_lora_weights")) not in KEEPS_BASE:
        what = f"{path} must have an init_lora_weights that leaves the base as it is, got {str(start)[:40]!r}"
        problems.append(Problem("L012", what, "save it with PEFT's path_initial_model_for_weight_conversion"))
    others = [name for name, value in CHANGES.items() if found.get(name, value) not in (value, None, [], {}, False)]
    return problems + [
        Problem("L012", f"{path} must have {name} {CHANGES[name]!r}, got {found[name]!r}", "merge it with PEFT first")
        for name in others
    ]


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Add the LoRA of a folder to a model, in place. Where it has no memory yet, `Run.prepare` reads the values."""
    config, path = read_config(folder), Path(folder) / WEIGHTS
    tensors = {_own_name(path, name): tensor for name, tensor in safetensors.read(path).items()}
    targets = sorted({name.rpartition(".")[0] for name in tensors})
    lora(
        model,
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        targets=targets,
        dropout=float(config.get("lora_dropout", 0.0)),
    )
    copy_into(model, tensors, path)
    if any(parameter.is_meta for parameter in model.parameters()):
        made: Any = model
        made.adapter_to_load = str(folder)
    return model


@torch.no_grad()
def fill_adapter(composed: ParallelModel, folder: str | Path) -> None:
    """Fill this rank's pieces of LoRA from a folder."""
    path = Path(folder) / WEIGHTS
    tensors = {_own_name(path, name): tensor for name, tensor in safetensors.read(path).items()}
    own = {name: composed.shapes[name] for name in composed.named if is_adapter(name)}
    _reject_others({name: shape for name, shape in composed.shapes.items() if is_adapter(name)}, tensors, path)
    for name in own:
        whole = torch.cat([box.read() for box in tensors[name].boxes])
        for begin, piece in composed.boxes_of(name, to_local(composed.named[name])):  # views
            piece.copy_(
                whole[tuple(slice(first, first + size) for first, size in zip(begin, piece.shape, strict=True))]
            )


def _own_name(path: Path, name: str) -> str:
    own = name.removeprefix(PREFIX).removesuffix(SUFFIX)
    if not name.startswith(PREFIX) or not name.endswith(SUFFIX) or not is_adapter(own):
        raise ShoalError(
            f"{path} must hold names such as {PREFIX}NAME.lora_A{SUFFIX}, got {name!r}",
            fix="an adapter of linear layers alone",
            code="L013",
        )
    return own


@torch.no_grad()
def copy_into(model: nn.Module, tensors: Mapping[str, LazyTensor], path: Path) -> None:
    """Copy the matrices of a file to the layers of a model; both have to have the same ones."""
    own = {
        f"{name}.{part}": getattr(layer, part)
        for name, layer in adapted_layers(model).items()
        for part in layer.adapter_names
    }
    _reject_others({name: tuple(parameter.shape) for name, parameter in own.items()}, tensors, path)
    for name, parameter in own.items():
        if not parameter.is_meta:
            for box in tensors[name].boxes:
                parameter[box.begin[0] : box.begin[0] + box.shape[0]].copy_(box.read())


def _reject_others(own: Mapping[str, tuple[int, ...]], tensors: Mapping[str, LazyTensor], path: Path) -> None:
    strange = sorted(own.keys() ^ tensors.keys()) or [name for name in own if own[name] != tensors[name].shape]
    if strange:
        raise ShoalError(
            f"{path} must fit the layers of this model, got another {strange[0]}",
            fix="the adapter of this model",
            code="L013",
        )
