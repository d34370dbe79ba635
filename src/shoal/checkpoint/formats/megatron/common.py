"""The folder of a checkpoint, and its `common.pt`: the arguments of the training, its iteration, and Adam's steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.formats import dcp
from shoal.checkpoint.formats.safe_load import Record, first_line, load_records
from shoal.errors import ShoalError
from shoal.files import read_regular

LATEST, COMMON, FORMAT = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
MOST_STEPS = 2**40
PLAIN = (
    "argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "pathlib.PosixPath", "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
)  # fmt: skip
"""Names of Python that arguments are made of. Those of Megatron are its enums. None of them is looked up."""


@dataclass(frozen=True)
class Common:
    """What a checkpoint says of its training."""

    args: Mapping[str, Any]
    num_steps: int
    adam_steps: float | None
    """The steps that Adam has counted; None: it says none."""
    left_out: tuple[str, ...]
    """Entries that have no counterpart."""


def is_megatron(source: Path) -> bool:
    """Whether a folder has a checkpoint of Megatron-LM, or iterations of one."""
    return (source / LATEST).is_file() or ((source / COMMON).is_file() and (source / FORMAT).is_file())


def iteration_folder(source: Path) -> Path:
    """The folder of an iteration: the given one, or the one that the newest is said to be."""
    folder = source if (source / COMMON).is_file() else source / _newest(source)
    if (folder / COMMON).is_file() and (folder / dcp.METADATA).is_file():
        return folder
    kind = _format(folder / FORMAT)
    if (folder / dcp.METADATA).is_file() and not (folder / COMMON).exists():
        raise ShoalError(
            f"{folder} must have {COMMON}, the format torch_dist of Megatron-LM, got fsdp_dtensor or torch_dcp",
            fix=f"shoal checkpoint import {folder} imported --format dcp --prefix model.",
            code="E064",
        )
    raise ShoalError(
        f"{folder} must have {COMMON} and {dcp.METADATA}, the format torch_dist of Megatron-LM, got {kind}",
        fix="Megatron-LM itself converts it: --load OLD --ckpt-convert-format torch_dist --ckpt-convert-save NEW",
        code="E064",
    )


def _newest(source: Path) -> str:
    text = read_regular(source / LATEST, 100).decode(errors="replace").strip() if (source / LATEST).is_file() else ""
    if text == "release":
        return text
    if not text.isdecimal() or int(text) >= MOST_STEPS:
        raise ShoalError(
            f"{source} must have {LATEST} with a number or release, got {text[:80]!r}",
            fix="a folder iter_... of it",
            code="E064",
        )
    return f"iter_{int(text):07d}"


def _format(path: Path) -> str:
    try:
        found = json.loads(read_regular(path, 2**16))
    except (OSError, ValueError, RecursionError):
        return "another one"
    return str(found.get("sharded_backend"))[:40] if isinstance(found, Mapping) else "another one"


def read_common(folder: Path) -> Common:
    """Read `common.pt`. Whatever it names of Megatron becomes a record; any other name is rejected."""
    found = _load(folder / COMMON)
    args = found.get("args") if isinstance(found, Mapping) else None
    said = args.values[0] if isinstance(args, Record) and args.values else None
    if not isinstance(found, Mapping) or not isinstance(said, Mapping):
        raise ShoalError(
            f"{folder / COMMON} must hold the arguments of a training, got none",
            fix="--format dcp, which imports the tensors under Megatron's names",
            code="E066",
        )
    step = found.get("iteration")
    return Common(
        {str(name): _plain(value) for name, value in said.items()},
        step if type(step) is int and 0 <= step < MOST_STEPS else 0,
        _adam_steps(found.get("optimizer")),
        tuple(name for name in ("opt_param_scheduler", "rng_state", "rerun_state_machine") if found.get(name)),
    )


def _load(path: Path) -> Any:
    try:
        return load_records(path, lambda name: name in PLAIN or name.startswith("megatron."))
    except OSError as error:
        raise ShoalError(
            f"{path} cannot be read: {error.strerror or error}", fix="all files of the checkpoint", code="E064"
        ) from None
    except Exception as error:  # torch raises many kinds for foreign bytes
        raise ShoalError(
            f"{path} holds more than tensors, plain data and names of Megatron, and was not run: {first_line(error)}",
            fix="--format dcp, which reads the tensors alone",
            code="E065",
        ) from None


def _plain(value: Any) -> Any:
    """Numbers, texts and None; of anything else its kind."""
    return value if value is None or type(value) in (bool, int, float, str) else f"a {type(value).__name__}"


def _adam_steps(optimizer: Any) -> float | None:
    """The steps, from the state or from a group; mixed precision has them one level deeper."""
    while isinstance(optimizer, Mapping) and isinstance(optimizer.get("optimizer"), Mapping):
        optimizer = optimizer["optimizer"]
    if not isinstance(optimizer, Mapping):
        return None
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    found = state.get("common_step") if isinstance(state, Mapping) else None
    if found is None and isinstance(groups, list) and groups and isinstance(groups[0], Mapping):
        found = groups[0].get("step")
    found = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    return float(found) if isinstance(found, int | float) and 0 <= found < MOST_STEPS else None
