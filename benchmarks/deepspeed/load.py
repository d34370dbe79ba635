"""Load weights that shoal has exported, with DeepSpeed at the stages 0, 1 and 2, and compare every element.

torchrun --nproc-per-node 2 benchmarks/deepspeed/load.py FOLDER WHOLE.pt
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from net import Net, config, groups_of


def main() -> None:
    folder, whole = sys.argv[1:]
    expected = torch.load(whole, weights_only=True)
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in (0, 1, 2):
        model = Net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config(stage, "fp32"))
        path, _ = engine.load_checkpoint(folder, load_module_only=True, load_module_strict=False)
        assert path is not None
        for name, parameter in engine.module.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[f"model/{name}"], rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    main()
