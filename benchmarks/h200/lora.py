"""One way to train LoRA on a Llama of 8.0 B parameters on one GPU, in a process of its own: prints speed and memory.

python benchmarks/h200/lora.py shoal      or peft, peft-liger

The same for all: random weights, frozen and in bfloat16; LoRA of rank 16 in float32 on the seven linear layers of each
block; AdamW in float32, products in bfloat16; 2 x 4096 random tokens. No activation is recomputed by request. `peft`
and `peft-liger` are transformers with PEFT in a loop of plain torch, the latter with all kernels of Liger for Llama and
its fused loss. `shoal` is the unmodified model of transformers with `shoal.lora` under `shoal.Run`.
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

SHAPES = {"8b": Shape(4096, 32, 32, 8, 14336), "tiny": Shape(64, 2, 4, 2, 128, 1024)}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 16, 32


def built(size: str, sequence: int) -> Any:
    """The base, in bfloat16 from the start: 8 B parameters in float32 would be half of an H200."""
    import transformers

    shape = SHAPES[size]
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocabulary,
        max_position_embeddings=sequence, attn_implementation="sdpa", tie_word_embeddings=False, use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def sizes_of(model: Any) -> dict[str, int]:
    named = list(model.parameters())
    trained = sum(parameter.numel() for parameter in named if parameter.requires_grad)
    return {"parameters": sum(parameter.numel() for parameter in named), "trained": trained}


def with_shoal(args: argparse.Namespace) -> None:
    import shoal
    from shoal.config.recipe import OptimSection
    from shoal.numerics.optim.build import build_optimizer

    model = shoal.lora(built(args.size, args.sequence), rank=RANK, alpha=ALPHA, targets=TARGETS)
    sizes = sizes_of(model)
    with shoal.Run(f"mb={args.micro_batch} {args.precision}", compile=not args.eager, **args.options) as run:
        run.prepare(model)
        run.prepare(build_optimizer(run.parameters, OptimSection(weight_decay=0.01), lr=1e-4))

        def given(tokens: Tensor) -> dict[str, Tensor]:
            whole = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, :-1].contiguous()}
            return {name: x.pin_memory() for name, x in whole.items()} if DEVICE == "cuda" else whole

        def step(batch: dict[str, Tensor]) -> None:
            run.step(batch)

        measured("shoal", SHAPES[args.size], args, step, given, **sizes)


def with_peft(args: argparse.Namespace) -> None:
    """A loop of plain torch with autocast, as in PEFT's examples."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
    model: Any = get_peft_model(built(args.size, args.sequence), settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=DEVICE == "cuda")

    def step(tokens: Tensor) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    measured(args.system, SHAPES[args.size], args, step, **sizes_of(model))


def with_peft_and_liger(args: argparse.Namespace) -> None:
    import liger_kernel.transformers as kernels

    kernels.apply_liger_kernel_to_llama(fused_linear_cross_entropy=True)
    with_peft(args)


SYSTEMS: dict[str, Callable[[argparse.Namespace], None]] = {
    "shoal": with_shoal,
    "peft": with_peft,
    "peft-liger": with_peft_and_liger,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--size", choices=SHAPES, default="8b")
    add_measurement(parser, micro_batch=2)
    args = arguments(parser, size="tiny", micro_batch=2, sequence=16, steps=2, warmup=1, precision="fp32", eager=True)
    torch.set_float32_matmul_precision("high")
    SYSTEMS[args.system](args)


if __name__ == "__main__":
    main()
