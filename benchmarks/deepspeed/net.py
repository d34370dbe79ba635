"""The model of the checkpoints, its config and its batches, for DeepSpeed and for shoal."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS = 3


class Net(nn.Module):
    """Two groups of parameters, sizes that two ranks do not divide, a buffer, a frozen and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.arange(1.0, 4.0))
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.scale * self.frozen(self.second(F.relu(self.first(x) + self.tied(x))))


def config(stage: int, precision: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]


def loss_of(model: Any, step: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(4, 5, generator=generator).to(dtype)).float().square().mean()


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.1}]
