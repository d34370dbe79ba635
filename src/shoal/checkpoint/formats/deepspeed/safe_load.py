"""Load a `.pt` file of DeepSpeed without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.checkpoint.formats.safe_load import first_line, load_records
from shoal.errors import ShoalError

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
        return load_records(path, NAMES.__contains__)
    except OSError as error:
        raise ShoalError(
            f"{path} cannot be read: {error.strerror or error}", fix="all files of the checkpoint", code="E022"
        ) from None
    except Exception as error:  # torch raises many kinds for foreign bytes
        raise ShoalError(
            f"{path} is no checkpoint of DeepSpeed, or holds more than tensors and plain data, and was not run:"
            f" {first_line(error)}",
            fix="a checkpoint whose client_state has numbers and texts alone; or another source of these weights",
            code="E021",
        ) from None
