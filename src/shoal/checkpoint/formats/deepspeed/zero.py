"""Read a checkpoint of ZeRO 0, 1, 2 or 3: weights in float32, states of the optimizer (not of ZeRO 0), buffers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.formats.deepspeed.flat import Shapes, of_stage_2, of_stage_3
from shoal.checkpoint.formats.deepspeed.safe_load import safe_load
from shoal.checkpoint.formats.lazy_tensor import LazyTensor, in_memory
from shoal.checkpoint.storage.shard_file import NAMES
from shoal.errors import ShoalError
from shoal.files import read_regular

LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = re.compile(r"(layer_\d+.*|expp_rank_.*|.*_expert_.*)_states\.pt")

LEFT_OUT = ("lr_scheduler", "random_ltd", "data_sampler")
"""Entries of the file of a model that have no counterpart."""
OWN = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "num_experts", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version", "universal_checkpoint_info", *LEFT_OUT),
)
"""Entries that DeepSpeed itself writes. It puts those of `client_state` beside them."""
MOST_STEPS = 2**40

Tensors = dict[str, LazyTensor]
States = dict[tuple[str, str], LazyTensor]


def step_folder(source: Path) -> Path | None:
    """The folder of the files: the given one, or the one that `latest` names; None: it is no checkpoint."""
    if not source.is_dir():
        return None
    if any(_MODEL.fullmatch(path.name) for path in source.iterdir()) or (source / "zero").is_dir():
        return source
    if not (source / LATEST).is_file():
        return None
    tag = read_regular(source / LATEST, 200).decode(errors="replace").strip()
    is_name = bool(tag) and "/" not in tag and tag not in (".", "..")
    inner = source / tag
    if not is_name or not inner.is_dir() or not any(_MODEL.fullmatch(path.name) for path in inner.iterdir()):
        return None
    return inner


def read_zero(folder: Path) -> tuple[Tensors, States, list[str]]:
    """Tensors by name, states by kind and name, and what is left out."""
    models, optimizers = _files(folder)
    saved = [_mapping(path) for path in models]
    first = saved[0]
    shapes, module = _groups(first, models[0]), _named(first.get("module"))
    tensors: Tensors = {}
    states: States = {}
    if optimizers:
        tensors, states = _partitioned(optimizers, shapes)
    tensors |= _frozen(saved, tensors)
    shared = _mapping_of(first.get("shared_params"))
    for name, tensor in module.items():
        if name in shared:  # a tied weight has one name
            continue
        if name not in tensors and tensor.numel():
            tensors[name] = in_memory(*_kept(tensor))
    return tensors, states, _left_out(first)


def _left_out(first: Mapping[str, Any]) -> list[str]:
    """What the file of a model has, and an import has not."""
    found = [key for key in LEFT_OUT if first.get(key)]
    if first.get("optimizer"):  # the script decided on the order of parameters, which no file has
        found.insert(0, "optimizer (of ZeRO 0: its states have numbers in place of names)")
    return found + [key if key.isprintable() else repr(key) for key in map(str, first) if key not in OWN]


def num_steps(folder: Path) -> int | None:
    """The steps that were made; None: the files do not say it."""
    models, _ = _files(folder)
    found = _mapping(models[0]).get("global_steps") if models else None
    return found if type(found) is int and 0 <= found < MOST_STEPS else None


def described(folder: Path) -> tuple[Shapes, set[str]]:
    """The shapes of the parameters, and the names of tied ones that another name stands for."""
    models, _ = _files(folder)
    if not models:
        return {}, set()
    first = _mapping(models[0])
    shapes = {name: size for group in _groups(first, models[0]) for name, size in group.items()}
    return shapes, set(_mapping_of(first.get("shared_params")))


# ---- files ----------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of the model and of the optimizer, in the order of ranks."""
    names = {path.name: path for path in folder.iterdir() if path.is_file()}
    found: dict[re.Pattern[str], dict[int, Path]] = {_MODEL: {}, _OPTIMIZER: {}}
    for name, path in sorted(names.items()):
        for pattern, files in found.items():
            if match := pattern.fullmatch(name):
                if int(match[2]):
                    raise _model_parallel(name)
                files.setdefault(int(match[1] or 0), path)  # of a model, the one that has all weights
        if _OTHERS.fullmatch(name):
            raise _model_parallel(name)
    for files in found.values():
        if missing := set(range(len(files))) - files.keys():
            what = f"{folder} has the files of {len(files)} ranks, and not of rank {min(missing)}"
            raise ShoalError(what, fix="the files of all ranks, from one save", code="E022")
    return [list(dict(sorted(files.items())).values()) for files in found.values()]  # type: ignore[return-value]


def _model_parallel(name: str) -> ShoalError:
    return ShoalError(
        f"{name} is of a model that DeepSpeed has divided by tensor, pipeline or expert parallelism",
        fix="python -m deepspeed.checkpoint.ds_to_universal merges it; import its output",
        code="E024",
    )


def _mapping(path: Path) -> dict[str, Any]:
    found = safe_load(path)
    if not isinstance(found, Mapping):
        raise ShoalError(f"{path} must hold a mapping, got a {type(found).__name__}", fix="another file", code="E023")
    return dict(found)


# ---- values ---------------------------------------------------------------------------------------------------------


def _groups(model: Mapping[str, Any], path: Path) -> list[Shapes]:
    """The shapes of the parameters of each group, in the order in which they lie in its vector."""
    shapes = model.get("param_shapes")
    if shapes is None:
        return []
    groups = shapes if isinstance(shapes, Sequence) else [shapes]
    if not all(isinstance(group, Mapping) and all(_is_shape(one) for one in group.values()) for group in groups):
        raise ShoalError(f"{path} has no shapes of parameters in param_shapes", fix="another checkpoint", code="E023")
    return [{str(name): tuple(size) for name, size in group.items()} for group in groups]


def _is_shape(found: Any) -> bool:
    return isinstance(found, Sequence) and all(type(size) is int and size >= 0 for size in found)


def _named(module: Any) -> dict[str, Tensor]:
    return {str(name): value for name, value in _mapping_of(module).items() if isinstance(value, Tensor)}


def _mapping_of(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _kept(tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor that is whole in a file: floats of 16 bits become float32, as weights are."""
    tensor = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    if tensor.dtype not in NAMES:
        raise ShoalError(f"shoal has no tensors of {tensor.dtype}", fix="another checkpoint", code="E023")
    return NAMES[tensor.dtype], tensor.contiguous()


def _frozen(saved: Sequence[Mapping[str, Any]], known: Tensors) -> Tensors:
    """Weights without a gradient: whole at stages 1 and 2, in parts at stage 3."""
    shapes = {str(name): tuple(size) for name, size in _mapping_of(saved[0].get("frozen_param_shapes")).items()}
    parts = [_named(one.get("frozen_param_fragments")) for one in saved]
    found: Tensors = {}
    for name, shape in shapes.items():
        if name in known or any(name not in one for one in parts):
            continue
        if tuple(parts[0][name].shape) == shape:
            found[name] = in_memory(*_kept(parts[0][name]))
        else:
            vectors = [_kept(one[name].flatten())[1] for one in parts]
            found |= of_stage_3(vectors, {name: shape})
    return found


# ---- partitions -----------------------------------------------------------------------------------------------------


def _partitioned(files: Sequence[Path], groups: Sequence[Shapes]) -> tuple[Tensors, States]:
    """Weights and states of the optimizer, from the partitions of all ranks."""
    ranks = [_mapping_of(_mapping(path).get("optimizer_state_dict")) for path in files]
    _check_ranks(ranks, files)
    is_stage_3 = "fp32_flat_groups" in ranks[0]
    kinds = ("exp_avg", "exp_avg_sq", "momentum_buffer", "exp_avg_sq_max")
    if is_stage_3:
        merged = {name: size for group in groups for name, size in group.items()}
        tensors = of_stage_3([_end_to_end(one["fp32_flat_groups"]) for one in ranks], merged)
        per_group = [_state(one, "optimizer_state_dict") for one in ranks]
        states: States = {}
        for kind in kinds:
            if all(all(kind in state for state in one) for one in per_group) and per_group[0]:
                vectors = [torch.cat([state[kind].flatten() for state in one]) for one in per_group]
                states |= {(kind, name): value for name, value in of_stage_3(vectors, merged).items()}
        return tensors, states | _steps(per_group[0][:1] * len(groups), groups)
    return _stage_2(ranks, groups, kinds)


def _stage_2(
    ranks: Sequence[Mapping[str, Any]], groups: Sequence[Shapes], kinds: Sequence[str]
) -> tuple[Tensors, States]:
    tensors: Tensors = {}
    states: States = {}
    per_group = [_state(one, "base_optimizer_state") for one in ranks]
    paddings = ranks[0].get("param_alignment_paddings")
    for number, group in enumerate(groups):
        own = paddings[number] if isinstance(paddings, Sequence) and number < len(paddings) else None
        vectors = [_vectors(one["single_partition_of_fp32_groups"])[number] for one in ranks]
        tensors |= of_stage_2(vectors, group, own)
        for kind in kinds:
            if all(number < len(one) and isinstance(one[number].get(kind), Tensor) for one in per_group):
                parts = [one[number][kind].flatten() for one in per_group]
                states |= {(kind, name): value for name, value in of_stage_2(parts, group, own).items()}
    return tensors, states | _steps(per_group[0], groups)


def _check_ranks(ranks: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> None:
    """Every rank must be there, with its partitions."""
    for one, path in zip(ranks, files, strict=True):
        if not ("fp32_flat_groups" in one or "single_partition_of_fp32_groups" in one):
            raise ShoalError(f"{path} has no partitions of float32 weights", fix="another checkpoint", code="E023")
    count = ranks[0].get("partition_count")
    count = max(count) if isinstance(count, Sequence) and count else count
    if isinstance(count, int) and count != len(files):
        what = f"the optimizer was divided over {count} ranks, and the files of {len(files)} are there"
        raise ShoalError(what, fix="the files of all ranks, from one save", code="E022")


def _vectors(found: Any) -> list[Tensor]:
    groups = found if isinstance(found, Sequence) else []
    return [one.flatten() if isinstance(one, Tensor) else torch.cat([part.flatten() for part in one]) for one in groups]


def _end_to_end(found: Any) -> Tensor:
    vectors = _vectors(found)
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def _state(rank: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The optimizer's state of each group, of one rank."""
    found = rank.get(key)
    if isinstance(found, Mapping) and isinstance(found.get("state"), Mapping):
        state = found["state"]
        return [state[place] for place in sorted(state) if isinstance(state[place], Mapping)]
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, Sequence) else []


def _steps(per_group: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> States:
    """The steps that the optimizer has made, for every parameter."""
    found: States = {}
    for state, group in zip(per_group, groups, strict=False):
        step = state.get("step")
        if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1):
            number = torch.tensor(float(step), dtype=torch.float32)
            found |= {("step", name): in_memory("F32", number) for name in group}
    return found
