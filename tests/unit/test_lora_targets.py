"""Targets of LoRA that name no layer: the fix is a whole list to type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.models.llama import build
from tests.rejects import rejects


def llama() -> nn.Module:
    with torch.device("meta"):
        return build(vocabulary=8, hidden=16, num_layers=1, num_heads=2)


@pytest.mark.parametrize(
    ("targets", "kept"),
    [
        (["q_proj", "v_prj"], ["q_proj", "v_proj"]),
        (["v_prj", "q_porj"], ["v_proj", "q_proj"]),
        (["q_proj", "zzzzzz"], ["q_proj"]),
        (["zzzzzz"], ["q_proj"]),
    ],
)
def test_the_fix_keeps_the_other_targets(targets: list[str], kept: list[str]) -> None:
    quoted, plain = ", ".join(f'"{name}"' for name in kept), ", ".join(kept)
    with rejects("L003", f"targets=[{quoted}] (--model.lora.targets '[{plain}]')"):
        shoal.lora(llama(), targets=targets)
