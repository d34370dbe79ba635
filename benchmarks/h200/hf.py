"""One way to train a model of transformers on one GPU, in a process of its own: prints speed and memory as JSON.

python benchmarks/h200/hf.py shoal --family llama      or liger, compiled, plain; families llama, qwen3, gemma3

The same for all: random weights in float32, random tokens with labels, AdamW in float32, products in bfloat16. `liger`
has all kernels of Liger for the family, with its fused loss, and is not compiled, as its authors recommend; `compiled`
is torch.compile of the whole model. `shoal` is the unmodified model under `shoal.Run`, its blocks compiled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments
from systems import DEVICE, Shape, add_measurement, measured

MORE: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 128},
    "gemma3": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 512},
    "tiny": {"tie_word_embeddings": True},
}
SHAPES = {
    "llama": Shape(2048, 16, 32, 8, 8192),
    "qwen3": Shape(2048, 26, 16, 8, 6144, 151936),
    "gemma3": Shape(1536, 26, 6, 2, 8192, 262144),
    "tiny": Shape(64, 2, 4, 2, 128, 1024),
}
"""1.50 B, 1.62 B and 1.55 B parameters. Five of six layers of Gemma 3 see 512 tokens."""
CLASSES = {"llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma3", "tiny": "Llama"}


def built(family: str, sequence: int) -> Any:
    import transformers

    shape, name = SHAPES[family], CLASSES[family]
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocabulary,
        max_position_embeddings=sequence, attn_implementation="sdpa", use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, **MORE[family],
    )  # fmt: skip
    with torch.device(DEVICE):
        return getattr(transformers, f"{name}ForCausalLM")(config)


def shoal(args: argparse.Namespace) -> None:
    from shoal.config.recipe import OptimSection
    from shoal.numerics.optim.build import build_optimizer
    from shoal.train.run import Run

    words = f"mb={args.micro_batch} {args.precision}"
    with Run(words, compile=not args.eager, **args.options) as run:
        run.prepare(built(args.family, args.sequence))
        run.prepare(build_optimizer(run.parameters, OptimSection(), lr=1e-4))

        def given(tokens: Tensor) -> dict[str, Tensor]:
            whole = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, :-1].contiguous()}
            return {name: x.pin_memory() for name, x in whole.items()} if DEVICE == "cuda" else whole

        def step(batch: dict[str, Tensor]) -> None:
            run.step(batch)

        more = {"parameters": run.composed.num_parameters, "layers": run.fused_layers}
        measured("shoal", SHAPES[args.family], args, step, given, **more)


def by_hand(args: argparse.Namespace, wrap: Callable[[Any], Any]) -> None:
    """A loop of plain torch with autocast."""
    model = built(args.family, args.sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    called = wrap(model)

    def step(tokens: Tensor) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = called(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    total = sum(parameter.numel() for parameter in model.parameters())
    measured(args.system, SHAPES[args.family], args, step, parameters=total)


def liger(args: argparse.Namespace) -> None:
    import liger_kernel.transformers as kernels

    names = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text"}
    getattr(kernels, f"apply_liger_kernel_to_{names[args.family]}")(fused_linear_cross_entropy=True)
    by_hand(args, lambda model: model)


SYSTEMS: dict[str, Callable[[argparse.Namespace], None]] = {
    "shoal": shoal,
    "liger": liger,
    "compiled": lambda args: by_hand(args, torch.compile),
    "plain": lambda args: by_hand(args, lambda model: model),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--family", choices=SHAPES, default="llama")
    add_measurement(parser, micro_batch=8)
    args = arguments(parser, family="tiny", micro_batch=2, sequence=16, steps=2, warmup=1, precision="fp32", eager=True)
    torch.set_float32_matmul_precision("high")
    SYSTEMS[args.system](args)


if __name__ == "__main__":
    main()
