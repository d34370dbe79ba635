"""Read a checkpoint of DeepSpeed, whichever of its forms it has."""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint.formats.deepspeed.universal import is_universal, read_universal
from shoal.checkpoint.formats.deepspeed.zero import States, Tensors, described, read_zero


def read_deepspeed(folder: Path) -> tuple[Tensors, States, list[str]]:
    """Tensors by name, states by kind and name, and what is left out.

    A universal checkpoint has the parameters that were trained; the rest is in the file of the model beside them.
    """
    if not is_universal(folder):
        return read_zero(folder)
    shapes, shared = described(folder)
    tensors, states = read_universal(folder, shapes, shared)
    beside, _, others = read_zero(folder) if any(folder.glob("*mp_rank_*_model_states.pt")) else ({}, {}, [])
    return {**beside, **tensors}, states, others
