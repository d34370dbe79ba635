"""Write a folder that `load_checkpoint` of DeepSpeed reads.

    latest, latest_universal                       the name of the folder beside them
    global_step100/
        mp_rank_00_model_states.pt                 whole weights, for load_module_only=True at the stages 0, 1 and 2
        zero_pp_rank_0_mp_rank_00_model_states.pt  the counters alone, which stage 3 looks for under this name
        zero/optimizer_state.pt                    steps and learning rates
        zero/NAME/fp32.pt, exp_avg.pt, ...         a universal checkpoint, for {"checkpoint": {"load_universal": true}}

DeepSpeed's optimizer takes as many groups of parameters as file and script both have, without a word about the others.
So the file has more of them than any script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.formats import torch_file
from shoal.checkpoint.formats.deepspeed.universal import FOLDER, WEIGHT
from shoal.checkpoint.formats.lazy_tensor import LazyTensor, full
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import SIZES
from shoal.errors import ShoalError
from shoal.files import write_text

VERSION = "0.19.8"
MODEL, COUNTERS = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
FLOATS = ("F64", "F32", "F16", "BF16")
MOST_GROUPS = 1024
"""Groups of parameters in the file."""

States = Mapping[tuple[str, str], LazyTensor]
Rates = Sequence[Mapping[str, float]]


def num_bytes(weights: Mapping[str, LazyTensor], states: States) -> int:
    """Bytes of the universal checkpoint, which is in float32."""
    numbers = [*weights.values(), *states.values()]
    return sum(4 * tensor.num_bytes // SIZES[tensor.dtype] for tensor in numbers if tensor.dtype in FLOATS)


def as_model_file(weights: dict[str, Tensor], *, num_steps: int) -> dict[str, Any]:
    """The content of `mp_rank_00_model_states.pt`: whole weights, and no state of an optimizer."""
    # The schedules of DeepSpeed take the first entry, those of torch the other ones. After N steps DeepSpeed's are at
    # N - 1.
    schedule = {"last_batch_iteration": num_steps - 1, "last_epoch": num_steps, "_step_count": num_steps + 1}
    return {
        "module": weights,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "lr_scheduler": {**schedule, "lr_lambdas": []},
        "global_steps": num_steps,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
    }


def write_beside(folder: Path, num_steps: int, disk: Filesystem) -> None:
    """Write what a folder has beside the file of the model, but for the universal checkpoint."""
    torch_file.save(folder / COUNTERS, as_model_file({}, num_steps=num_steps), disk)
    for name in ("latest", "latest_universal"):
        write_text(folder.parent / name, folder.name)


def write_universal(
    folder: Path,
    weights: Mapping[str, LazyTensor],
    states: States,
    rates: Rates,
    *,
    progress: Callable[[int], None],
    disk: Filesystem,
) -> None:
    """Write `zero/`; one tensor is in memory at a time.

    rates   the learning rates of the groups of parameters, if they are known
    """
    by_name = _states_by_name(states)
    step = next((full(one) for (kind, _), one in states.items() if kind == "step"), torch.tensor(0.0))
    others = {kind: None for kind, _ in states} | ({"step": step} if states else {})
    zero = folder / FOLDER
    disk.make(zero)
    for name, weight in weights.items():
        if weight.dtype not in FLOATS:
            continue
        own = zero / _checked(name)
        disk.make(own)
        for kind, tensor in _tensors_of(weight, by_name.get(name, others)):
            torch_file.save(own / f"{kind}.pt", tensor if kind == "step" else {"param": tensor}, disk)
            progress(tensor.numel() * tensor.element_size())
        disk.sync(own)
    torch_file.save(zero / "optimizer_state.pt", _common(step, rates), disk)
    disk.sync(zero)


def _tensors_of(weight: LazyTensor, states: Mapping[str, LazyTensor | Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """The weight and the states of a parameter. None: it has had no gradient, and has zeros, as in DeepSpeed."""
    yield WEIGHT, full(weight).float()
    for kind, state in states.items():
        found = full(state) if isinstance(state, LazyTensor) else state
        yield kind, torch.zeros(weight.shape) if found is None else found.float()


def _states_by_name(states: States) -> dict[str, dict[str, LazyTensor | Tensor | None]]:
    found: dict[str, dict[str, LazyTensor | Tensor | None]] = {}
    for (kind, name), tensor in states.items():
        found.setdefault(name, {})[kind] = tensor
    return found


def _common(step: Tensor, rates: Rates) -> dict[str, Any]:
    """The content of `optimizer_state.pt`: `param_groups` for the stages 1 and 2, `optimizer_state_dict` for 3."""
    known = [{"lr": float(group["lr"])} for group in rates if "lr" in group] or [{}]
    groups = [{**known[min(number, len(known) - 1)], "params": []} for number in range(MOST_GROUPS)]
    return {
        "ds_version": VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups[:1]},
    }


def _checked(name: str) -> str:
    """The name of a parameter is that of a folder here."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or not name.isprintable():
        raise ShoalError(
            f"{name[:80]!r} cannot be the name of a folder, in which DeepSpeed looks for a parameter",
            fix="--format safetensors",
            code="E025",
        )
    return name
