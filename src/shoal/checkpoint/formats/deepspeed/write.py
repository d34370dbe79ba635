"""The file of a model that `load_checkpoint` of DeepSpeed reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def as_model_file(weights: dict[str, Tensor], *, num_steps: int) -> dict[str, Any]:
    """The content of `mp_rank_00_model_states.pt`: whole weights, and no state of an optimizer."""
    return {
        "module": weights,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "lr_scheduler": None,
        "global_steps": num_steps,
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }
