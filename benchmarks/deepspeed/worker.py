"""One rank of the comparison: the same script, with the engine of DeepSpeed or of shoal.

torchrun --nproc-per-node 2 benchmarks/deepspeed/worker.py ENGINE CASES.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def build(case: dict[str, Any]) -> nn.Module:
    """A classifier. The one for bf16 has no norm, which autocast computes in float32, and weights that bfloat16 can
    hold: DeepSpeed's float32 weights start from those in bfloat16."""
    torch.manual_seed(7)
    is_low = case["precision"] == "bf16"
    norm = [] if is_low else [nn.LayerNorm(32)]
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *norm, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    return model.bfloat16().float() if is_low else model


def microbatch(case: dict[str, Any], number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Samples of one microbatch of one rank. A part of the labels, of another size in each, does not count."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(4, 16, generator=generator)
    y = torch.randint(0, 8, (4,), generator=generator)
    y[: int(torch.randint(0, 3, (), generator=generator))] = -100
    return x.to(torch.bfloat16 if case["precision"] == "bf16" else torch.float32), y


def losses_of(initialize: Any, case: dict[str, Any]) -> list[float]:
    """The mean loss of each step, over microbatches and ranks."""
    engine, _, _, _ = initialize(
        model=(model := build(case)), model_parameters=model.parameters(), config=case["config"]
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    accumulated = case["config"]["gradient_accumulation_steps"]
    found = []
    for step in range(case["steps"]):
        total = 0.0
        for part in range(accumulated):
            x, y = microbatch(case, step * accumulated + part, rank)
            loss = F.cross_entropy(engine(x).float(), y, ignore_index=-100)
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulated
        mean = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(mean)
        found.append(float(mean) / ranks)
    return found


def main() -> None:
    name, cases, result = sys.argv[1:]
    if name == "deepspeed":
        from deepspeed import initialize
    else:
        from shoal.deepspeed import initialize
    found = {}
    for case in json.loads(Path(cases).read_text()):
        found[case["name"]] = losses_of(initialize, case)
        if dist.get_rank() == 0:
            print(case["name"], found[case["name"]][-1], flush=True)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
