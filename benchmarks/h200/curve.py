"""The losses of a run on the default corpus, as one line of JSON.

python benchmarks/h200/curve.py --precision bf16 [--eager] [--micro-batch 8] [--steps 300] [--lr 1e-4]
python benchmarks/h200/curve.py --transformers

The second: the same weights and batches in Transformers' Llama with torch's AdamW, eager, under autocast to bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments

from shoal.config.load import build_recipe
from shoal.config.recipe import OptimSection, Recipe
from shoal.data.loader import Loader, RankStream
from shoal.data.sources.open import open_datasets
from shoal.numerics.init import initialise
from shoal.numerics.optim.build import build_optimizer, set_lr
from shoal.train.build_model import build_for_layout, build_model
from shoal.train.run import Run

MODEL = {"name": "llama", "hidden": 1024, "num_layers": 8, "num_heads": 16, "num_kv_heads": 16, "ffn": 4096}
DATA = {"seq_len": 1024, "global_batch": 16}
CLIP = 1.0
Step = Callable[[dict[str, Tensor]], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--micro-batch", type=int, default=DATA["global_batch"])
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--transformers", action="store_true")
    args = arguments(parser, precision="fp32", steps=1, eager=True, micro_batch=2)
    model, data = (
        ({"name": "llama", "preset": "tiny"}, {"seq_len": 16, "global_batch": 2}) if args.smoke else (MODEL, DATA)
    )
    recipe = build_recipe({"model": model, "data": data}, title="curve")
    losses = by_transformers(recipe, args) if args.transformers else by_shoal(recipe, args)
    print(json.dumps({"losses": torch.stack(list(losses)).tolist()}))


def by_shoal(recipe: Recipe, arguments: argparse.Namespace) -> Iterator[Tensor]:
    plan = f"mb={arguments.micro_batch} {arguments.precision}"
    with Run(plan, compile=not arguments.eager, clip=CLIP) as run:
        run.prepare(build_for_layout(recipe.model, 0))
        run.prepare(build_optimizer(run.parameters, OptimSection(), lr=arguments.lr))
        for number, batch in enumerate(run.batches(loader_of(recipe)), 1):
            set_lr(run.optimizer, warmed_up(number))
            yield run.step(batch)
            if number == arguments.steps:
                break


def by_transformers(recipe: Recipe, arguments: argparse.Namespace) -> Iterator[Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = build_model(recipe.model)
    initialise(ours, 0)
    shape = ours.config
    config = LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocabulary,
        max_position_embeddings=shape.max_sequence, rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(ours.state_dict())
    model.cuda()
    section = OptimSection()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": section.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=arguments.lr, betas=section.betas, eps=section.eps,
    )  # fmt: skip
    for number, batch in enumerate(loader_of(recipe), 1):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * warmed_up(number)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=batch["tokens"].cuda()).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].cuda().flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
        if number == arguments.steps:
            break


def warmed_up(step: int) -> float:
    """The share of the learning rate: all of it from the fiftieth step on."""
    return min(1.0, step / 50)


def loader_of(recipe: Recipe) -> Loader:
    training, _ = open_datasets(recipe.data, 0)
    return Loader(
        RankStream(training, seed=0, batch=recipe.data.global_batch), workers=0, pin=torch.cuda.is_available()
    )


if __name__ == "__main__":
    main()
