"""Folders of PEFT: `adapter_model.safetensors` with the matrices of LoRA, and `adapter_config.json`.

    base_model.model.NAME.lora_A.weight    shoal's NAME.lora_A
    base_model.model.NAME.lora_B.weight    shoal's NAME.lora_B
    base_model.model.NAME                  a parameter of a module that trains whole (`modules_to_save`)

`peft.PeftModel.from_pretrained(model, folder)` reads a folder that is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.blueprint.placement import is_inside
from shoal.checkpoint.formats import safetensors
from shoal.checkpoint.formats.lazy_tensor import LazyTensor, full
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.errors import Problem, ShoalError, raise_if
from shoal.files import read_regular
from shoal.numerics.local_tensor import to_local
from shoal.parallel.lora.apply import lora
from shoal.parallel.lora.layers import is_adapter
from shoal.parallel.lora.whole_modules import heads_of

if TYPE_CHECKING:
    from shoal.parallel.parallel_model import ParallelModel  # it loads torch's sharding, which a start need not

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX, SUFFIX = "base_model.model.", ".weight"
MOST_JSON = 2**20
CHANGES = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "lora_bias": False,
    "use_qalora": False,
    "alora_invocation_tokens": None,
    "layer_replication": None,
}
"""Settings of PEFT that change the formula → the value that they have to have here. Missing ones have it, and others
that are not known here have to be off."""
WITHOUT_EFFECT = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "ensure_weight_tying", "init_lora_weights"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("megatron_config", "megatron_core"),
}
"""Settings that are read here, that say what the names in the file say, too, or that matter before training alone."""
KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` under which PEFT leaves the base weights as they are. By pissa, olora, corda and loftq
it subtracts the adapter that it begins with."""


def config_of(settings: Mapping[str, Any], base: str | None = None) -> dict[str, Any]:
    """`adapter_config.json` for the `lora` of a checkpoint's state."""
    return {
        "peft_type": "LORA",
        "task_type": settings.get("task_type", "CAUSAL_LM"),  # which older checkpoints do not say
        "base_model_name_or_path": base,
        "r": settings["rank"],
        "lora_alpha": int(settings["alpha"]) if settings["alpha"] == int(settings["alpha"]) else settings["alpha"],
        "lora_dropout": settings["dropout"],
        "target_modules": list(settings["targets"]),
        "modules_to_save": list(settings.get("modules_to_save", ())) or None,
        "fan_in_fan_out": bool(settings.get("fan_in_fan_out", False)),
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
    """Write a folder. `tensors` may hold others than those that are trained, which are left out."""
    own = {f"{PREFIX}{name}{SUFFIX}": tensor for name, tensor in tensors.items() if is_adapter(name)}
    whole = config["modules_to_save"] or ()
    own |= {f"{PREFIX}{name}": tensor for name, tensor in tensors.items() if is_inside(name, whole)}
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
    others = {name: value for name, value in found.items() if name not in WITHOUT_EFFECT}
    return problems + [
        Problem("L012", f"{path} must have {name} {CHANGES.get(name)!r}, got {value!r}", "merge it with PEFT first")
        for name, value in others.items()
        if value not in (CHANGES.get(name), None, [], {}, False)
    ]


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Add the LoRA of a folder to a model, in place. Where it has no memory yet, `Run.prepare` reads the values."""
    config, path = read_config(folder), Path(folder) / WEIGHTS
    tensors = _read(path, config)
    targets = sorted({name.rpartition(".")[0] for name in tensors if is_adapter(name)})
    saved = {name for name in tensors if not is_adapter(name)}
    whole = [name for name, one in model.named_modules() if name and _is_saved(name, one, config, saved)]
    _reject_without_head(model, whole, path)
    lora(
        model,
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        targets=targets,
        dropout=float(config.get("lora_dropout", 0.0)),
        modules_to_save=whole,
    )
    copy_into(model, tensors, path)
    if any(parameter.is_meta for parameter in model.parameters()):
        made: Any = model
        made.adapter_to_load = str(folder)
    return model


def _reject_without_head(model: nn.Module, whole: list[str], path: Path) -> None:
    """Reject an adapter without the head of a classifier, which begins with random weights."""
    if missing := [head for head in heads_of(model) if not is_inside(head, whole)]:
        raise ShoalError(
            f"{path} must hold the head {missing[0]!r} of {type(model).__name__}, which it would leave untrained",
            fix=f"an adapter that was saved with modules_to_save=[{missing[0]!r}], as PEFT does by task_type",
            code="L018",
        )


@torch.no_grad()
def fill_adapter(composed: ParallelModel, folder: str | Path) -> None:
    """Fill this rank's pieces of LoRA from a folder."""
    path, whole = Path(folder) / WEIGHTS, composed.peft_settings.get("modules_to_save", ())
    tensors = _read(path, read_config(folder))
    trained = {name: shape for name, shape in composed.shapes.items() if is_adapter(name) or is_inside(name, whole)}
    _reject_others(trained, tensors, path)
    for name in composed.named.keys() & trained.keys():
        value = full(tensors[name])
        for begin, piece in composed.boxes_of(name, to_local(composed.named[name])):  # views
            piece.copy_(
                value[tuple(slice(first, first + size) for first, size in zip(begin, piece.shape, strict=True))]
            )


def _read(path: Path, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """The tensors of a file under shoal's names."""
    found = {}
    for name, tensor in safetensors.read(path).items():
        own = name.removeprefix(PREFIX)
        plain = own.removesuffix(SUFFIX)
        is_matrix = is_adapter(plain) and own != plain
        if not name.startswith(PREFIX) or not (is_matrix or _ends_with(own.rpartition(".")[0], config)):
            raise ShoalError(
                f"{path} must hold names such as {PREFIX}NAME.lora_A{SUFFIX}, got {name!r}",
                fix="an adapter of linear layers alone",
                code="L013",
            )
        found[plain if is_matrix else own] = tensor
    return found


def _ends_with(module: str, config: Mapping[str, Any]) -> bool:
    """Whether PEFT takes a module, or one around it, for one that trains whole: it compares the ends of names."""
    around = [".".join(module.split(".")[:depth]) for depth in range(1, module.count(".") + 2)]
    return any(name.endswith(str(one)) for name in around for one in config.get("modules_to_save") or ())


def _is_saved(name: str, module: nn.Module, config: Mapping[str, Any], saved: set[str]) -> bool:
    """Whether a module trains whole, and its parameters are in the file. The head of a classifier may be named in the
    config of a model that has none."""
    ends = any(name.endswith(str(one)) for one in config.get("modules_to_save") or ())
    return ends and any(f"{name}.{own}" in saved for own, _ in module.named_parameters())


@torch.no_grad()
def copy_into(model: nn.Module, tensors: Mapping[str, LazyTensor], path: Path) -> None:
    """Copy the tensors of a file to the trained parameters of a model; both have to have the same ones."""
    every = model.named_parameters()
    own = {name: parameter for name, parameter in every if parameter.requires_grad or is_adapter(name)}
    _reject_others({name: tuple(parameter.shape) for name, parameter in own.items()}, tensors, path)
    for name, parameter in own.items():
        if not parameter.is_meta:
            parameter.copy_(full(tensors[name]))


def _reject_others(own: Mapping[str, tuple[int, ...]], tensors: Mapping[str, LazyTensor], path: Path) -> None:
    strange = sorted(own.keys() ^ tensors.keys()) or [name for name in own if own[name] != tensors[name].shape]
    if strange:
        raise ShoalError(
            f"{path} must fit the layers of this model, got another {strange[0]}",
            fix="the adapter of this model",
            code="L013",
        )
