"""Load a `.pt` file of DeepSpeed without running it.

Such a file is a pickle, and a pickle calls what it names. torch's weights-only reader builds tensors and plain data,
and rejects every other name. DeepSpeed's own names are replaced by records that hold values and do nothing. Tensors
stay on the disk until they are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal.errors import ShoalError
from shoal.files import opened


class Record:
    """The values of an object of DeepSpeed. Whatever a file calls it with is kept, and nothing runs."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.values = (state,)


NAMES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Names of a checkpoint of DeepSpeed that are no tensors and no plain data."""


def safe_load(path: Path) -> Any:
    """The content of a file: tensors, plain data, and records."""
    try:
        with opened(path):  # a regular file, or an error at once
            pass
        with torch.serialization.safe_globals([(Record, name) for name in NAMES]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ShoalError(
            f"{path} cannot be read: {error.strerror or error}", fix="all files of the checkpoint", code="E022"
        ) from None
    except Exception as error:  # torch raises many kinds for foreign bytes
        raise ShoalError(
            f"{path} is no checkpoint of DeepSpeed, or holds more than tensors and plain data, and was not run:"
            f" {_first_line(error)}",
            fix="a checkpoint whose client_state has numbers and texts alone; or another source of these weights",
            code="E021",
        ) from None


def _first_line(error: Exception) -> str:
    """The line of torch's long message that names what was rejected."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), None)
    return (named or (lines or [type(error).__name__])[0])[:200]
