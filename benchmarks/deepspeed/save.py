"""Save checkpoints with DeepSpeed itself, with the whole tensors beside them: what an import is held against.

torchrun --nproc-per-node 2 benchmarks/deepspeed/save.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

STEPS = 3
CASES = [(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")]


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


def by_hand() -> dict[str, Any]:
    """The same training in plain torch: gradients averaged over ranks, clipped at 1, AdamW."""
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.0)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=4)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, torch.float32).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    whole = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq", "step") if p.requires_grad else ():
            whole[f"optimizer/{state}/{name}"] = optimizer.state[p][state]
    return whole


def save(folder: Path, stage: int, precision: str) -> None:
    """Save, and beside it the whole tensors: of fp32 those of plain torch, of bf16 DeepSpeed's own float32 weights."""
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config(stage, precision))
    for step in range(STEPS):
        engine.backward(loss_of(engine, step, torch.bfloat16 if precision == "bf16" else torch.float32))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"epoch": 2})
    whole = by_hand()
    if precision == "bf16":
        named = engine.module.named_parameters()
        whole = {f"model/{name}": safe_get_full_fp32_param(p) for name, p in named if p.requires_grad}
    if dist.get_rank() == 0:
        torch.save({name: tensor.detach().clone() for name, tensor in whole.items()}, folder / "whole.pt")


def main() -> None:
    root = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo")
    for stage, precision in CASES:
        save(root / f"zero{stage}-{precision}", stage, precision)


if __name__ == "__main__":
    main()
