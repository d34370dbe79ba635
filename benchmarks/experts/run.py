"""What do experts cost on a GPU compared with a dense model of equal active parameters, and does a bias balance them?

python benchmarks/experts/run.py --gpu [--microbatches 2,4] [--compile off,on] [--rounds 3] [--models dense,moe]
python benchmarks/experts/run.py --profile [--microbatches 4] [--compile on]     # where a step of the mixture goes
python benchmarks/experts/run.py --balance [--steps 200]                         # on the CPU

--gpu: the preset `1b-active` against a llama of the same depth, width and attention whose feed-forward is as large as
the experts of one token. Both run in one process and alternate, so that both have the same conditions. MFU
counts what `training_flops` counts: active parameters, and attention as far as it is not masked.

--balance: a small mixture on the default corpus whose router is balanced by nothing but the bias of its experts, and
the same one without. Reported is the load of the busiest expert over the mean, layer by layer, over the last steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.config.load import build_recipe
from shoal.data.loader import Loader, RankStream
from shoal.data.sources.open import open_datasets
from shoal.models import llama, moe
from shoal.models.llama import Llama
from shoal.models.moe_config import PRESETS
from shoal.numerics.optim.adamw import AdamW
from shoal.predict.presets.peak_flops import peak_flops
from shoal.train.build_model import build_model
from shoal.train.run import Run

PRESET, SEED, BAR = "1b-active", 0, 0.6
GIB = 2**30
SPARSE = PRESETS[PRESET]
BODY = {name: getattr(SPARSE, name) for name in ("vocabulary", "hidden", "num_layers", "num_heads", "num_kv_heads")}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "dense": {"preset": "tiny", **BODY, "ffn": SPARSE.top_k * SPARSE.expert_ffn + SPARSE.shared_ffn},
    "moe": {"preset": PRESET},
}


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def model_of(name: str, max_sequence: int) -> Llama:
    """Drawn on the device: five billion numbers take a minute on a host."""
    build = moe.build if name == "moe" else llama.build
    with torch.device("meta"):
        model = build(**ARGUMENTS[name], max_sequence=max_sequence)
    model.to_empty(device="cuda")
    generator = torch.Generator("cuda").manual_seed(SEED)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            model.init_parameter(parameter_name, parameter, generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model


@dataclass
class Contender:
    """One model in training, and what its steps took."""

    name: str
    microbatch: int
    compiles: bool
    batch: dict[str, Tensor]
    words: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """The most that was allocated in a step, without what the other model holds all the time."""
    problem: str = ""
    run: Run | None = None
    others_bytes: int = 0

    def prepare(self) -> None:
        run = Run(f"bf16 mb={self.microbatch} {self.words}", seed=SEED, clip=1.0, device="cuda", compile=self.compiles)
        model = model_of(self.name, self.batch["tokens"].shape[1])
        self.config = model.config
        run.prepare(model)
        run.prepare(AdamW(run.module.parameters(), lr=1e-4))
        self.run = run

    def step(self) -> float:
        assert self.run is not None
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.run.step(self.batch)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def take(self, num_steps: int, *, counts: bool) -> None:
        """Some steps in a row; the first of them follows the other model's and is left out."""
        if self.problem:
            return
        torch.cuda.reset_peak_memory_stats()
        try:
            taken = [self.step() for _ in range(num_steps + 1)][1:]
        except torch.OutOfMemoryError:
            self.problem = "out of memory"
        if self.problem:  # outside of the handler, whose traceback holds every tensor of the step
            self.forget()
            return
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - self.others_bytes)
        self.seconds += taken if counts else []

    def forget(self) -> None:
        """Give the memory back."""
        self.run = None
        gc.collect()
        torch.cuda.empty_cache()

    @property
    def mfu(self) -> float:
        peak = peak_flops(torch.cuda.get_device_name(), "bf16")
        if not self.seconds or not peak:
            return 0.0
        flops = self.config.training_flops(tuple(self.batch["tokens"].shape))
        return flops / statistics.median(self.seconds) / peak

    def hottest(self) -> str:
        """How much more than the mean the busiest expert of any layer had in the last step."""
        if self.run is None or self.run.report is None or self.run.report.experts is None:
            return "-"
        return f"{max(hottest(self.run.report.experts)):.2f}"

    def row(self) -> dict[str, str]:
        median = statistics.median(self.seconds) if self.seconds else float("nan")
        spread = (max(self.seconds) - min(self.seconds)) / median if self.seconds else float("nan")
        return {
            "model": self.name,
            "parameters": f"{self.config.num_parameters / 1e9:.2f} B",
            "microbatch": str(self.microbatch),
            "compiled": "yes" if self.compiles else "no",
            "step, median": f"{median * 1e3:.0f} ms" if self.seconds else self.problem,
            "spread": f"{spread:.1%}",
            "tokens/s, measured": f"{self.batch['tokens'].numel() / median:,.0f}",
            "MFU": f"{self.mfu:.1%}",
            "peak memory, measured": f"{self.peak_bytes / GIB:.1f} GiB",
            "busiest expert / mean": self.hottest(),
        }


def in_turns(contenders: list[Contender], rounds: int, steps: int) -> None:
    """Both prepared, both warm, then so many rounds of so many steps each."""
    static: dict[str, int] = {}
    for contender in contenders:
        before = torch.cuda.memory_allocated()
        contender.prepare()
        contender.take(1, counts=False)  # with the state of the optimizer, which comes into being at the first update
        static[contender.name] = torch.cuda.memory_allocated() - before
    for contender in contenders:
        contender.peak_bytes = 0
        contender.others_bytes = sum(size for name, size in static.items() if name != contender.name)
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            contender.take(steps, counts=True)


def random_batch(batch: int, sequence: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(SEED)
    tokens = torch.randint(SPARSE.vocabulary, (batch, sequence + 1), device="cuda", generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def contenders_of(arguments: argparse.Namespace, names: Iterable[str]) -> Iterable[list[Contender]]:
    """The models that take turns, one setting after the other."""
    batch = random_batch(arguments.batch, arguments.sequence)
    for microbatch in map(int, arguments.microbatches.split(",")):
        for compiles in (word == "on" for word in arguments.compile.split(",")):
            torch.compiler.reset()  # a new shape is compiled as it is, and not as one of many
            yield [Contender(name, microbatch, compiles, batch, arguments.words) for name in names]


def on_gpu(arguments: argparse.Namespace) -> None:
    rows, best = [], dict.fromkeys(("dense", "moe"), 0.0)
    for contenders in contenders_of(arguments, arguments.models.split(",")):
        in_turns(contenders, arguments.rounds, arguments.steps_per_round)
        for contender in contenders:
            rows.append(contender.row())
            best[contender.name] = max(best[contender.name], contender.mfu)
            print(rows[-1], flush=True)
        for contender in contenders:
            contender.forget()
    question = (
        f"MoE `{PRESET}` ({SPARSE.num_active_parameters / 1e9:.2f} B of {SPARSE.num_parameters / 1e9:.2f} B parameters"
        f" active: {SPARSE.top_k} of {SPARSE.num_experts} experts) and a dense llama of as many active ones, bf16,"
        f" shoal's AdamW, clipping, {arguments.batch} sequences of {arguments.sequence} random tokens a step, in turns:"
        f" {arguments.rounds} rounds of {arguments.steps_per_round} steps."
    )
    text = "\n".join([heading("Experts on one GPU", question, packages=("flash-attn-4",)), table(rows)])
    if best["dense"] and best["moe"]:
        ratio = best["moe"] / best["dense"]
        verdict = (
            f"Best MFU: {best['moe']:.1%} of the mixture, {best['dense']:.1%} of the dense model: {ratio:.2f} of it"
        )
        text += f"\n\n{verdict} (bar: {BAR})."
    print(text)
    print("written to", write("experts", text))


# ---- where a step goes ----------------------------------------------------------------------------------------------

KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "optimizer": ("adam", "multi_tensor", "lpnorm"),
    "grouped matmul": ("grouped", "group_gemm", "groupproblem"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "wgmma", "splitk"),
    "sort, search, scan": ("sort", "radix", "scan", "searchsorted", "topk", "bitonic"),
    "gather, scatter, rows": ("index", "gather", "scatter", "embedding", "cat"),
    "softmax, loss, norms": ("softmax", "nll", "rms", "layer_norm", "reduce"),
    "copies, fills": ("memcpy", "memset", "copy", "fill"),
    "compiled": ("triton",),
}


def kind_of(kernel: str) -> str:
    low = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in low for part in parts)), "elementwise and others")


def profile(arguments: argparse.Namespace) -> None:
    """The time on the device of a few steps: by kind, by kernel, by operator; and how much of a step it is idle."""
    for contenders in contenders_of(arguments, arguments.models.split(",")):
        for contender in contenders:
            contender.prepare()
            contender.take(2, counts=True)
            if contender.problem:
                print(contender.row())
                continue
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
                profiled = contender.step()
            print(f"\n==== {contender.row()}")
            print_profile(profiler, statistics.median(contender.seconds), profiled)
            if arguments.trace:
                profiler.export_chrome_trace(f"{arguments.trace}/{contender.name}-mb{contender.microbatch}.json.gz")
            contender.forget()


def print_profile(profiler: Any, seconds: float, profiled: float) -> None:
    events = profiler.key_averages()
    kernels = [(e.self_device_time_total / 1e3, e.count, e.key) for e in events if "CUDA" in str(e.device_type)]
    kernels.sort(reverse=True)
    busy = sum(time_ms for time_ms, _, _ in kernels)
    print(f"step {seconds * 1e3:.0f} ms ({profiled * 1e3:.0f} ms under the profiler), kernels {busy:.0f} ms")
    kinds: dict[str, list[float]] = {}
    for time_ms, count, key in kernels:
        total = kinds.setdefault(kind_of(key), [0.0, 0])
        total[0] += time_ms
        total[1] += count
    for kind, (time_ms, count) in sorted(kinds.items(), key=lambda item: -item[1][0]):
        print(f"{time_ms:9.1f} ms {time_ms / busy:6.1%} {count:7.0f} x  {kind}")
    print("---- kernels")
    for time_ms, count, key in kernels[:30]:
        print(f"{time_ms:9.2f} ms {time_ms / busy:6.1%} {count:6d} x  {key[:130]}")
    print("---- operators, with the shapes that they were called with")
    shaped = [e for e in profiler.key_averages(group_by_input_shape=True) if "CUDA" not in str(e.device_type)]
    shaped.sort(key=lambda e: -e.self_device_time_total)
    for e in shaped[:30]:
        print(f"{e.self_device_time_total / 1e3:9.2f} ms {e.count:6d} x  {e.key[:60]} {str(e.input_shapes)[:120]}")


# ---- how busy each expert is ----------------------------------------------------------------------------------------

LAST = 20
"""Steps over which loads are summed: in a single one, chance keeps some expert busier than the mean."""
SPARSITY = {"num_experts": 8, "top_k": 2, "score": "sigmoid", "auxiliary_coefficient": 0.0}


def hottest(experts: Tensor) -> list[float]:
    """The load of the busiest expert over the mean, of each router."""
    loads = experts[:, :-2].double().cpu()
    return (loads.amax(1) / loads.mean(1)).tolist()


def loads_of(bias_rate: float, arguments: argparse.Namespace) -> tuple[list[Tensor], list[float]]:
    """The loads of all routers, and the loss, step by step."""
    data = {"source": "python", "seq_len": arguments.sequence, "global_batch": arguments.batch}
    model = {"name": "moe", "preset": "tiny", **SPARSITY, "bias_rate": bias_rate}
    recipe = build_recipe({"model": model, "data": data}, title="balance")
    training, _ = open_datasets(recipe.data, SEED)
    loads, losses = [], []
    with Run("fp32", seed=SEED, clip=1.0, device="cpu") as run:
        with torch.device("meta"):
            built = build_model(recipe.model)
        run.prepare(built)
        run.prepare(torch.optim.AdamW(run.module.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True))
        loader = Loader(RankStream(training, seed=SEED, batch=arguments.batch), workers=0)
        for batch in run.batches(loader):
            losses.append(float(run.step(batch)))
            assert run.report is not None
            assert run.report.experts is not None
            loads.append(run.report.experts.clone())
            if run.steps_done == arguments.steps:
                break
        loader.close()
    return loads, losses


def balance(arguments: argparse.Namespace) -> None:
    rows = []
    for bias_rate in map(float, arguments.bias_rates.split(",")):
        loads, losses = loads_of(bias_rate, arguments)
        report = {"bias_rate": f"{bias_rate:g}"}
        for until in (LAST, arguments.steps // 2, arguments.steps):
            recent = hottest(torch.stack(loads[until - LAST : until]).sum(0))
            report[f"steps {until - LAST + 1} to {until}, by layer"] = "  ".join(f"{load:.2f}" for load in recent)
        alone = [max(hottest(step)) for step in loads[-LAST:]]
        report["single steps, the busiest of all layers"] = f"{statistics.median(alone):.2f}, up to {max(alone):.2f}"
        report["loss, last steps"] = f"{statistics.fmean(losses[-LAST:]):.3f}"
        rows.append(report)
        print(report, flush=True)
    tokens = arguments.batch * arguments.sequence
    question = (
        f"Load of the busiest expert over the mean, *counted*: a mixture of {SPARSITY['num_experts']} experts, of which"
        f" a token visits {SPARSITY['top_k']}, sigmoid scores, no auxiliary loss, on the default corpus in steps of"
        f" {arguments.batch} x {arguments.sequence} = {tokens:,} tokens on the CPU. 1 is even; the bar is 1.5 within"
        " 200 steps. bias_rate 0 is the same without a bias."
    )
    text = "\n".join([heading("Balance of experts", question), table(rows)])
    print(text)
    print("written to", write("balance", text))


def main() -> None:
    parser = argparse.ArgumentParser()
    what = parser.add_mutually_exclusive_group(required="--smoke" not in sys.argv)
    what.add_argument("--gpu", action="store_true")
    what.add_argument("--profile", action="store_true")
    what.add_argument("--balance", action="store_true")
    parser.add_argument("--models", default=None, help="of --gpu (dense,moe) and --profile (moe)")
    parser.add_argument("--microbatches", default="2,4")
    parser.add_argument("--compile", default="off,on")
    parser.add_argument("--words", default="", help="more words of the plan, such as recompute=selective")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--trace", default="", help="a folder for traces of --profile")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bias-rates", default="0,0.001,0.01")
    args = arguments(parser, steps=2, bias_rates="0.01", sequence=16, batch=2)
    args.sequence = args.sequence or (128 if args.balance else 4096)
    args.models = args.models or ("moe" if args.profile else "dense,moe")
    (balance if args.balance or args.smoke else profile if args.profile else on_gpu)(args)


if __name__ == "__main__":
    main()
