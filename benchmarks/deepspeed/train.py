"""Train with shoal's engine, and save in shoal's own format: what an export begins with.

torchrun --nproc-per-node 2 benchmarks/deepspeed/train.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from net import STEPS, Net, config, groups_of, loss_of, one_group

import shoal.deepspeed as deepspeed


def main() -> None:
    root = Path(sys.argv[1])
    for name, groups in (("groups", groups_of), ("one", one_group)):
        model = Net()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config(2, "fp32"))
        for step in range(STEPS):
            engine.backward(loss_of(engine, step, torch.float32))
            engine.step()
        engine.save_checkpoint(root, tag=name)


if __name__ == "__main__":
    main()
