"""One training system on one GPU, in a process of its own: prints its speed and its memory as one line of JSON.

python benchmarks/h200/systems.py shoal --shape 1.5b --micro-batch 8 [--precision fp8] [--recompute full] ...

The same for all: a Llama of a given shape, random tokens, AdamW with weights and states in float32, products in
bfloat16, compiled, no clipping; a step is forward, backward, update and the forgetting of gradients, timed from one
synchronisation to the next. Peers: torchtitan's own model, compile and loss, in fp8 its own conversion by torchao;
what Accelerate prepares, given to torch.compile, or compiled by its own plugin.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments

PEAK_BF16 = 989e12
"""FLOP/s of the datasheet, dense."""


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 128256

    @property
    def parameters(self) -> int:
        head_dim = self.hidden // self.heads
        attention = self.hidden * head_dim * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden

    def flops_per_token(self, sequence: int) -> int:
        """Of forward and backward; attention as if every token saw all others, as is customary."""
        return 6 * (self.parameters - self.vocabulary * self.hidden) + 12 * self.layers * self.hidden * sequence


SHAPES = {
    "1.5b": Shape(2048, 16, 32, 8, 8192),
    "3.6b": Shape(3072, 28, 24, 8, 8192),
    "8b": Shape(4096, 32, 32, 8, 14336),
    "13b": Shape(5120, 40, 40, 40, 13824, 32000),
    "0.4b": Shape(1024, 24, 16, 16, 4096, 32000),  # heads of 64, none shared
    "1.1b": Shape(2048, 22, 32, 4, 5632, 32000),
    "1.3b-256k": Shape(1536, 16, 12, 4, 6144, 256000),  # heads of 128, a vocabulary larger than the rest
    "2.6b": Shape(2560, 32, 20, 20, 6912, 50304),  # heads of 128, none shared, sizes that are not powers of two
    "tiny": Shape(256, 2, 4, 2, 512, 1024),
}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU is for --smoke."""


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0


def measured(
    name: str,
    shape: Shape,
    arguments: argparse.Namespace,
    step: Callable[[Any], None],
    given: Callable[[Tensor], Any] | None = None,
    **more: Any,
) -> None:
    """Time the steps, and print them. `given` moves tokens to where a system expects them; None: to the GPU."""

    def seconds_of_a_step() -> float:
        tokens = torch.randint(0, shape.vocabulary, (arguments.micro_batch, arguments.sequence + 1))
        batch = tokens.to(DEVICE) if given is None else given(tokens)
        synchronize()
        start = time.perf_counter()
        step(batch)
        synchronize()
        return time.perf_counter() - start

    if arguments.turns:
        seconds_of_a_step()
        for number in map(int, sys.stdin):
            of_turn = [seconds_of_a_step() for _ in range(number)]
            print(json.dumps({"seconds": of_turn, "peak_gib": peak_gib()}), flush=True)
        return
    seconds = [seconds_of_a_step() for _ in range(arguments.steps)]
    settled = seconds[arguments.warmup :]
    median = statistics.median(settled)
    rate = arguments.micro_batch * arguments.sequence / median
    report = {
        "system": name,
        "tokens_per_s": round(rate),
        "mfu": round(rate * shape.flops_per_token(arguments.sequence) / PEAK_BF16, 4),
        "peak_gib": round(peak_gib(), 2),
        "step_ms": round(median * 1e3, 2),
        "spread": round((max(settled) - min(settled)) / median, 4),
        "first_step_s": round(seconds[0], 1),
        **more,
    }
    print(json.dumps(report), flush=True)
    if arguments.profile:
        profile(shape, arguments, lambda tokens: step(tokens.to(DEVICE) if given is None else given(tokens)))


# ---- shoal ----------------------------------------------------------------------------------------------------------


def shoal(shape: Shape, arguments: argparse.Namespace) -> None:
    from shoal.config.recipe import OptimSection
    from shoal.models.llama import Llama, LlamaConfig
    from shoal.numerics.optim.build import build_optimizer
    from shoal.train.run import Run

    config = LlamaConfig(
        hidden=shape.hidden, num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        ffn=shape.ffn, vocabulary=shape.vocabulary, max_sequence=arguments.sequence,
    )  # fmt: skip
    words = f"mb={arguments.micro_batch} {arguments.precision} recompute={arguments.recompute} {arguments.words}"
    options = {"param_dtype": arguments.weights, **arguments.options}
    with Run(words, compile=not arguments.eager, clip=arguments.clip, **options) as run:
        with torch.device(DEVICE):
            model = Llama(config)
        run.prepare(drawn(model))
        section = OptimSection(state_dtype=arguments.states or "fp32", param_dtype=arguments.weights)
        run.prepare(build_optimizer(run.parameters, section, lr=1e-4))
        if arguments.states_first:
            make_states(run.optimizer)

        def given(tokens: Tensor) -> dict[str, Tensor]:
            """As shoal's loader does."""
            both = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
            whole = {name: x.contiguous() for name, x in both.items()}
            return {name: x.pin_memory() for name, x in whole.items()} if DEVICE == "cuda" else whole

        def step(batch: dict[str, Tensor]) -> None:
            run.step(batch)

        measured("shoal", shape, arguments, step, given, parameters=run.composed.num_parameters)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer makes in its first step, so that a single step shows the memory of every later one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()


def drawn(model: nn.Module) -> nn.Module:
    """shoal draws on the host, the same values for every layout; here they only have to be there soon."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter.data, generator)  # type: ignore[operator]
    return model


def profile(shape: Shape, arguments: argparse.Namespace, step: Callable[[Tensor], None]) -> None:
    """Where the time of a step goes, by kernel."""
    batches = [torch.randint(0, shape.vocabulary, (arguments.micro_batch, arguments.sequence + 1)) for _ in range(4)]
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    step(batches[0])
    synchronize()
    with torch.profiler.profile(activities=kinds) as profiler:
        for batch in batches[1:]:
            step(batch)
        synchronize()
    profiler.export_chrome_trace(arguments.profile)


# ---- peers ----------------------------------------------------------------------------------------------------------


class Absent(types.ModuleType):
    """Stands for packages that torchtitan imports and that nothing here calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else Absent(name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return Absent("absent")


def stand_in_for(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name.split(".")[0]) is None or isinstance(
            sys.modules.get(name.split(".")[0]), Absent
        ):
            module = Absent(name)
            module.__path__ = []
            module.__spec__ = importlib.util.spec_from_loader(name, None)
            sys.modules[name] = module


def torchtitan(shape: Shape, arguments: argparse.Namespace) -> None:
    stand_in_for(
        "datasets",
        "datasets.distributed",
        "torchdata",
        "torchdata.stateful_dataloader",
        "tomli",
        "einops",
        "tensorboard",
    )
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_compile

    wide = int(8 * shape.hidden / 3)
    unit = next(unit for unit in (1024, 512, 256, 128) if shape.ffn % unit == 0)
    with torch.device("meta"):
        model = Transformer(
            TransformerModelArgs(
                dim=shape.hidden, n_layers=shape.layers, n_heads=shape.heads, n_kv_heads=shape.kv_heads,
                ffn_dim_multiplier=(shape.ffn - unit / 2) / wide, multiple_of=unit, vocab_size=shape.vocabulary,
                rope_theta=500000, max_seq_len=arguments.sequence,
            )
        )  # fmt: skip
    if arguments.precision == "fp8":
        in_fp8(model)
    apply_compile(model, types.SimpleNamespace(enable=True, backend="inductor", components=["model", "loss"]))
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cuda"))
    if arguments.states == "bf16":  # weights, gradients, states; not the complex numbers by which it turns heads
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    assert model.freqs_cis.is_complex()
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    loss_of = torch.compile(cross_entropy_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scale = 1 / (arguments.micro_batch * arguments.sequence)

    def step(tokens: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:].contiguous())
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()

    measured("torchtitan 0.2.2", shape, arguments, step, parameters=shape.parameters)


def in_fp8(model: nn.Module) -> None:
    """As torchtitan does it, which knows of all layers but the last, with one scale for each tensor."""
    from functools import partial

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchtitan.components.quantization.utils import module_filter_fn

    is_wanted = partial(module_filter_fn, filter_fqns=["output"])
    convert_to_float8_training(model, config=Float8LinearConfig(), module_filter_fn=is_wanted)


def accelerate(shape: Shape, arguments: argparse.Namespace) -> None:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin
    from transformers import LlamaConfig, LlamaForCausalLM

    plugin = TorchDynamoPlugin(backend="inductor") if arguments.plugin else None
    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=plugin)
    config = LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocabulary,
        max_position_embeddings=arguments.sequence, attn_implementation="sdpa", tie_word_embeddings=False,
        use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    compiled = model if arguments.plugin else torch.compile(model)

    def step(tokens: Tensor) -> None:
        accelerator.backward(compiled(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss)
        optimizer.step()
        optimizer.zero_grad()

    measured("Accelerate + Transformers", shape, arguments, step, parameters=sum(p.numel() for p in model.parameters()))


SYSTEMS = {"shoal": shoal, "torchtitan": torchtitan, "accelerate": accelerate}
OWN_OPTIONS = {
    "shoal": {"precision", "recompute", "states", "weights", "words", "options", "clip", "eager", "states_first"},
    "torchtitan": {"precision", "states"},
    "accelerate": {"plugin"},
}
"""What each takes beside what all do."""


def reject_unused(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """What a system would not hear of, it would be measured without."""
    others = set().union(*OWN_OPTIONS.values()) - OWN_OPTIONS[arguments.system]
    unused = [name for name in sorted(others) if getattr(arguments, name) != parser.get_default(name)]
    if unused:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        parser.error(f"{arguments.system} is measured without {words}")


def add_measurement(parser: argparse.ArgumentParser, *, micro_batch: int) -> None:
    """Add the options that all scripts of this folder with peers share; 14 steps, of which 5 warm up."""
    parser.add_argument("--micro-batch", type=int, default=micro_batch)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--precision", default="bf16", help="fp8: of shoal and of torchtitan")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of shoal's Run, as JSON")
    parser.add_argument("--eager", action="store_true", help="of shoal")
    parser.add_argument("--turns", action="store_true", help="make as many steps as each line of the input says")
    parser.add_argument("--profile", default="", help="where to write a trace of three more steps")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    add_measurement(parser, micro_batch=8)
    parser.set_defaults(steps=10, warmup=4)
    parser.add_argument("--recompute", default="none", help="selective or full: of shoal")
    parser.add_argument("--states", default=None, help="bf16: the optimizer's states, and for a peer all it holds")
    parser.add_argument("--weights", default="fp32", help="bf16: shoal's weights and gradients, rounded at random")
    parser.add_argument("--words", default="", help="more words of shoal's plan")
    parser.add_argument("--clip", type=float, default=None, help="of shoal")
    parser.add_argument("--plugin", action="store_true", help="Accelerate compiles by its own plugin")
    parser.add_argument(
        "--states-first", action="store_true", help="make shoal's optimizer states before the first step"
    )
    args = arguments(parser, shape="tiny", micro_batch=1, sequence=16, steps=2, warmup=1, precision="fp32", eager=True)
    reject_unused(parser, args)
    torch.set_float32_matmul_precision("high")
    SYSTEMS[args.system](SHAPES[args.shape], args)


if __name__ == "__main__":
    main()
