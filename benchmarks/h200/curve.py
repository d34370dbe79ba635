"""The losses of a run on the default corpus, as one line of JSON.

python benchmarks/h200/curve.py --precision bf16 [--eager] [--steps 300] [--lr 1e-4]
"""

from __future__ import annotations

import argparse
import json

import torch

from shoal.blueprint.recipe import OptimSection
from shoal.blueprint.settings import build_recipe
from shoal.data.loading import Loader
from shoal.data.open import open_datasets
from shoal.numerics.optim import build_optimizer, set_lr
from shoal.train.build import build_to_lay_out
from shoal.train.run import Run

MODEL = {"name": "llama", "hidden": 1024, "num_layers": 8, "num_heads": 16, "num_kv_heads": 16, "ffn": 4096}
DATA = {"sequence": 1024, "batch": 16}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    recipe = build_recipe({"model": MODEL, "data": DATA}, title="curve")
    training, _ = open_datasets(recipe.data, 0)
    losses: list[torch.Tensor] = []
    with Run(f"mb=16 {arguments.precision}", compile=not arguments.eager, clip=1.0) as run:
        run.prepare(build_to_lay_out(recipe.model, 0))
        run.prepare(build_optimizer(run.parameters, OptimSection(), lr=arguments.lr))
        loader = Loader(training, seed=0, batch=16, workers=0, pin=run.device.type == "cuda")
        for batch in run.batches(loader):
            set_lr(run.optimizer, min(1.0, (run.steps_done + 1) / 50))
            losses.append(run.step(batch))
            if run.steps_done == arguments.steps:
                break
        loader.close()
    print(json.dumps({"losses": torch.stack(losses).tolist()}))


if __name__ == "__main__":
    main()
