"""Resume with DeepSpeed what shoal has trained and exported: the same weights, moments and next step as plain torch.

torchrun --nproc-per-node 2 benchmarks/deepspeed/load_universal.py FOLDER {groups,one} STAGE...
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from net import STEPS, Net, config, groups_of, loss_of, one_group
from save import by_hand


def compare(engine: Any, expected: dict[str, Any], what: str) -> None:
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        found = {f"model/{name}": safe_get_full_fp32_param(parameter)}
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer/{kind}/{name}"] = safe_get_full_optimizer_state(parameter, kind)
        for key, tensor in found.items():
            torch.testing.assert_close(
                tensor.detach().cpu(),
                expected[key].detach(),
                rtol=1e-5,
                atol=1e-7,
                msg=lambda text, key=key: f"{what} {key}: {text}",
            )


def main() -> None:
    folder, name, *stages = sys.argv[1:]
    groups = {"groups": groups_of, "one": one_group}[name]
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in map(int, stages):
        model = Net()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(9.0)
        words = {**config(stage, "fp32"), "checkpoint": {"load_universal": True}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=words)
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        assert engine.global_steps == STEPS
        compare(engine, by_hand(STEPS, groups), f"stage {stage}, loaded")
        engine.backward(loss_of(engine, STEPS, torch.float32))
        engine.step()
        compare(engine, by_hand(STEPS + 1, groups), f"stage {stage}, a step later")
    deepspeed.comm.destroy_process_group()  # else a thread of gloo may abort the process while Python ends


if __name__ == "__main__":
    main()
