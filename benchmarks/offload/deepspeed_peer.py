"""DeepSpeed's ZeRO-Offload on one GPU, in a process of its own: prints its speed and memory as one line of JSON.

python benchmarks/offload/deepspeed_peer.py [--shape 3.6b] [--micro-batch 4]

transformers' Llama of the same shape. DeepSpeed keeps weights and gradients in bfloat16 on the GPU, and float32 copies
of both with AdamW's states in host memory: 16 bytes a parameter there, where shoal has 12.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "h200"))
from systems import SHAPES, Shape


def settings(micro_batch: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }


def measured(shape: Shape, micro_batch: int, sequence: int, steps: int) -> dict[str, object]:
    import deepspeed
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocabulary,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings(micro_batch)
    )
    seconds = []
    for _ in range(steps + 2):
        tokens = torch.randint(0, shape.vocabulary, (micro_batch, sequence), device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds[2:])
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {"step": step, "tokens_per_s": micro_batch * sequence / step, "gib": gib, "version": deepspeed.__version__}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="3.6b", choices=SHAPES)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    os.environ.update(place)
    print(json.dumps(measured(SHAPES[given.shape], given.micro_batch, given.sequence, given.steps)), flush=True)


if __name__ == "__main__":
    main()
