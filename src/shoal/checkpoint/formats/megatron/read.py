"""Read a checkpoint of Megatron-LM: weights, Adam's states where they have names, and the section for a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.formats import dcp
from shoal.checkpoint.formats.lazy_tensor import LazyTensor, in_memory
from shoal.checkpoint.formats.megatron.architecture import model_section
from shoal.checkpoint.formats.megatron.common import Common, iteration_folder, read_common
from shoal.checkpoint.formats.megatron.names import Source, Tensors, to_llama
from shoal.errors import Problem, raise_if

OPTIMIZER = "optimizer."
STATE = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTERS = ("param", "fp32_param")
"""Names of the weights in float32, of which those of the model are rounded copies."""
_SHARD = re.compile(r"/shard_[\d.]+_[\d.]+$")


@dataclass(frozen=True)
class Megatron:
    """The content of a checkpoint."""

    weights: Tensors
    states: dict[tuple[str, str], LazyTensor]
    section: dict[str, Any]
    num_steps: int
    left_out: tuple[str, ...]


def read_megatron(source: Path, *, vocabulary: int | None = None) -> Megatron:
    """Read a folder. `vocabulary`: the size without padding; None: rows of padding stay."""
    folder = iteration_folder(source)
    common = read_common(folder)
    section = model_section(common.args, folder, vocabulary)
    tensors, objects = dcp.read(folder)
    padded = common.args["padded_vocab_size"]
    model = Source(tensors)
    weights, used = to_llama(model, section, padded), model.used
    _reject_others(folder, [name for name in tensors if name not in used and not name.startswith(OPTIMIZER)])
    states: dict[tuple[str, str], LazyTensor] = {}
    for kind in (*MASTERS, *MOMENTS):
        if not any(name.startswith(f"{STATE}{kind}.") for name in tensors):
            continue
        one = Source(tensors, f"{STATE}{kind}.")
        found = to_llama(one, section, padded)
        used |= one.used
        if kind in MASTERS:
            weights = found
        else:
            states |= {(kind, name): tensor for name, tensor in found.items()}
    states |= _steps(common, states)
    others = {*(name for name in tensors if name not in used), *(_SHARD.sub("", name) for name in objects)}
    return Megatron(weights, states, section, common.num_steps, (*sorted(others), *common.left_out))


def _steps(common: Common, states: Mapping[tuple[str, str], LazyTensor]) -> dict[tuple[str, str], LazyTensor]:
    """Adam's steps, for every weight that has moments."""
    if common.adam_steps is None:
        return {}
    steps = torch.tensor(common.adam_steps, dtype=torch.float32)
    return {("step", name): in_memory("F32", steps) for _, name in states}


def _reject_others(folder: Path, names: list[str]) -> None:
    """Weights that shoal's llama has no place for change what it computes."""
    raise_if(
        Problem(
            "C045",
            f"{folder} has {name[:200]}, which shoal's llama does not",
            "--format dcp, which imports the tensors under Megatron's names, for a model of your own",
        )
        for name in names[:8]
    )
