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
from deepspeed.utils import safe_get_full_fp32_param
from net import STEPS, Net, config, groups_of, loss_of
from torch import nn

CASES = [(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")]


def by_hand(steps: int = STEPS, groups: Any = groups_of) -> dict[str, Any]:
    """The same training in plain torch: gradients averaged over ranks, clipped at 1, AdamW."""
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.0)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=4)
    for step in range(steps):
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
