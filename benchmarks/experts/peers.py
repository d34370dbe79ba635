"""Is a mixture of experts on one GPU trained as fast as by torchtitan?

pip install torchtitan==0.2.2 -e '.[fa4]'
python benchmarks/experts/peers.py                                     # the table
python benchmarks/experts/peers.py --system shoal --shape fine         # one row

Each row is a process of its own, one after the other on an otherwise idle GPU. Both train the same shape on random
tokens: AdamW with weights and states in float32, products in bfloat16, compiled, no clipping, 4 sequences of 4,096
tokens. torchtitan's side is its own model (qwen3 without norms of queries and keys), compile and loss, with autocast;
its experts are grouped products and its balance a bias, shoal's balance is an auxiliary loss.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "h200"))
from report import arguments, heading, table, write
from systems import DEVICE, drawn, measured, stand_in_for

SYSTEMS = ("shoal", "torchtitan")
PACKAGES = ("torchtitan", "flash-attn-4", "nvidia-cudnn-cu13")


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in every layer, without shared ones."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    expert_ffn: int
    vocabulary: int

    def parameters(self, experts: int) -> int:
        """All, or with top_k experts those of a token."""
        attention = 2 * self.hidden * self.hidden * (self.heads + self.kv_heads) // self.heads
        sparse = 3 * experts * self.hidden * self.expert_ffn + self.experts * self.hidden
        return self.layers * (attention + sparse + 2 * self.hidden) + (2 * self.vocabulary + 1) * self.hidden

    def flops_per_token(self, sequence: int) -> int:
        """Of forward and backward, of active parameters; attention as if every token saw all others."""
        looked_up = self.vocabulary * self.hidden
        return 6 * (self.parameters(self.top_k) - looked_up) + 12 * self.layers * self.hidden * sequence


SHAPES = {
    "wide": Mixture(2048, 24, 16, 4, 16, 2, 2048, 32768),
    "fine": Mixture(1536, 16, 12, 4, 64, 8, 512, 65536),
    "tiny": Mixture(64, 2, 4, 2, 4, 2, 32, 128),
}


def shoal(shape: Mixture, args: argparse.Namespace) -> None:
    from shoal.models.moe import Moe, MoeConfig
    from shoal.numerics.optim.adamw import AdamW
    from shoal.train.run import Run

    config = MoeConfig(
        hidden=shape.hidden, num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        num_experts=shape.experts, top_k=shape.top_k, expert_ffn=shape.expert_ffn, vocabulary=shape.vocabulary,
        max_sequence=args.sequence,
    )  # fmt: skip
    is_cuda = DEVICE == "cuda"
    words = f"mb={args.micro_batch} {'bf16' if is_cuda else 'fp32'} {args.words}"
    with Run(words, compile=is_cuda, device=DEVICE) as run:
        with torch.device(DEVICE):
            model = Moe(config)
        run.prepare(drawn(model))
        run.prepare(AdamW(run.module.parameters(), lr=1e-4))

        def given(tokens: Tensor) -> dict[str, Tensor]:
            whole = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
            return {name: x.pin_memory() for name, x in whole.items()} if is_cuda else whole

        def step(batch: dict[str, Tensor]) -> None:
            run.step(batch)

        measured("shoal", shape, args, step, given)  # type: ignore[arg-type]  # it has what is used of a Shape


def torchtitan(shape: Mixture, args: argparse.Namespace) -> None:
    stand_in_for(
        *("datasets", "datasets.distributed", "torchdata", "torchdata.stateful_dataloader"),
        *("tomli", "einops", "tensorboard"),
    )
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama4.infra.parallelize import apply_compile
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model

    experts = MoEArgs(
        num_experts=shape.experts, num_shared_experts=0, score_func="softmax", route_norm=True, top_k=shape.top_k,
        score_before_experts=False, load_balance_coeff=1e-3,
    )  # fmt: skip
    config = Qwen3ModelArgs(
        dim=shape.hidden, n_layers=shape.layers, n_heads=shape.heads, n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocabulary, head_dim=shape.hidden // shape.heads, hidden_dim=shape.expert_ffn, qk_norm=False,
        max_seq_len=args.sequence, moe_enabled=True, moe_inter_dim=shape.expert_ffn, moe_args=experts,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3Model(config)
    compiler = types.SimpleNamespace(enable=True, backend="inductor", components=["model", "loss"])
    apply_compile(model, compiler, False)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cuda"))
    loss_of = torch.compile(cross_entropy_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scale = 1.0 / (args.micro_batch * args.sequence)

    def step(tokens: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:].contiguous())
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()

    measured("torchtitan 0.2.2", shape, args, step)  # type: ignore[arg-type]


def result_of(system: str, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own measured; it ends the table if that process fails."""
    size = ["--micro-batch", str(args.micro_batch), "--sequence", str(args.sequence)]
    count = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    command = [sys.executable, __file__, "--system", system, "--shape", shape, *size, *count]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"`{' '.join(command)}` failed:\n{ended.stderr[-2000:]}")
    print(lines[-1], flush=True)
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def compared(args: argparse.Namespace) -> None:
    rows = []
    for name in ("wide", "fine"):
        shape = SHAPES[name]
        found = {system: result_of(system, name, args) for system in SYSTEMS}
        base = found["torchtitan"]
        what = f"{name}: {shape.top_k} of {shape.experts} experts of {shape.expert_ffn}, hidden {shape.hidden}"
        size = f"{shape.parameters(shape.top_k) / 1e9:.2f} of {shape.parameters(shape.experts) / 1e9:.2f} B active"
        rows += [
            {
                "mixture": f"{what}, {shape.layers} layers, {size}",
                "system": report["system"],
                "step": f"{report['step_ms']:.1f} ms",
                "spread": f"{report['spread']:.1%}",
                "tokens/s": f"{report['tokens_per_s']:,}",
                "MFU": f"{report['mfu']:.1%}",
                "GiB": f"{report['peak_gib']:.1f}",
                "speed": f"{report['tokens_per_s'] / base['tokens_per_s']:.2f}",
                "memory": f"{report['peak_gib'] / base['peak_gib']:.2f}",
            }
            for report in found.values()
        ]
    question = (
        f"{args.micro_batch} x {args.sequence} random tokens a step, AdamW with weights and states in float32,"
        " products in bfloat16, compiled, no clipping, one process after the other; the median of the steps after"
        " warm-up, *measured*. MFU counts active parameters, and attention as if every token saw all, over"
        " 989 TFLOP/s. Memory is the most that torch has allocated. Ratios are to torchtitan."
    )
    text = (
        f"{heading('Mixtures of experts on one GPU, against torchtitan', question, packages=PACKAGES)}\n{table(rows)}"
    )
    print(text)
    print("written to", write("experts-peers", text))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, default=None, help="measure it alone; default: the table")
    parser.add_argument("--shape", choices=SHAPES, default="wide", help="of --system")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--words", default="", help="more words of shoal's plan, with --system shoal")
    parser.add_argument("--profile", default="", help="with --system: where to write a trace of three more steps")
    parser.set_defaults(turns=False)
    args = arguments(parser, system="shoal", shape="tiny", micro_batch=1, sequence=16, steps=2, warmup=1)
    torch.set_float32_matmul_precision("high")
    if args.system is None:
        compared(args)
    else:
        {"shoal": shoal, "torchtitan": torchtitan}[args.system](SHAPES[args.shape], args)


if __name__ == "__main__":
    main()
