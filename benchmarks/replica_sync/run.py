"""How much faster are compression and local SGD over a slow link, what do they cost in loss, and is it predicted?

python benchmarks/replica_sync/run.py [--parts link loss race]

link    two hosts with 100 Mbit/s between them, a llama of 25 M parameters, two sequences of 16 tokens a step: step time
        of each method, predicted and then measured
loss    4 ranks, a tiny llama on the default corpus, three seeds: validation loss of each method after as many samples
race    two hosts with 10 Mbit/s between them, the tiny llama: seconds until the loss is 2.6

Hosts are network namespaces (`../comm/hosts.py`), which need root. Each part is one run of `shoal bench compress
--json`, or three.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))
import hosts
from report import arguments, heading, table, write

SHOAL = [sys.executable, "-m", "shoal", "bench", "compress", "--json"]
MODEL_25M = {
    "hidden": 512, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "ffn": 1536, "vocabulary": 6144,
    "max_sequence": 64,
}  # fmt: skip
LINK_METHODS = (
    "plain",
    "compress=bf16",
    "compress=fp16",
    "compress=int8",
    "compress=1bit",
    "compress=randomk:0.1",
    "compress=topk:0.01",
    "compress=powersgd:4",
    "sync=local:1 compress=topk:0.01",
    "sync=local:1 compress=powersgd:4",
    "sync=diloco:50",
    "sync=diloco:50 compress=int8",
)
BARS = {
    "compress=bf16": 1.8,
    "compress=int8": 3.2,
    "compress=powersgd:4": 10.0,
    "compress=topk:0.01": 8.0,
    "sync=local:1 compress=topk:0.01": 8.0,
    "sync=local:1 compress=powersgd:4": 10.0,
    "sync=diloco:50": 15.0,
}
OF_STEPS = tuple(f"sync=local:1 compress={method}" for method in ("powersgd:4", "1bit", "randomk:0.1", "topk:0.01"))
"""Methods that compress the updates of AdamW and not its gradients."""
LOSS_METHODS = (
    *("plain", "compress=bf16", "compress=fp16", "compress=int8", *OF_STEPS, "compress=powersgd:4"),
    *("sync=local:8", "sync=diloco:50", "sync=diloco:50 compress=int8"),
)
CLOSE = ("compress=bf16", "compress=fp16", "compress=int8", "compress=powersgd:4", OF_STEPS[0])
"""Methods whose loss must be within 2 % of plain; the others within 5 %."""
RACE_LOSS = 2.6
RACE_METHODS = (
    *("plain", "compress=bf16", "compress=int8", "compress=powersgd:4", "compress=1bit", "compress=topk:0.01"),
    *("sync=local:8 compress=int8", "sync=diloco:50 compress=int8"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=["link", "loss", "race"], default=["link", "loss", "race"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of the part loss")
    options = arguments(parser, parts=["loss"], seeds=1, steps=2)
    methods = ("plain", "compress=int8") if options.smoke else LOSS_METHODS
    for part in options.parts:
        made = {"link": link, "loss": lambda: loss(options.seeds, options.steps, methods), "race": race}[part]()
        title, question, rows, rest = made
        text = f"{heading(title, question)}\n{table(rows)}\n{rest}"
        write(f"replica-sync-{part}", text)
        print(text, flush=True)


def over_a_link(rate: str, words: list[str], timeout: float) -> dict[str, Any]:
    """The JSON of rank 0, from two hosts."""
    with hosts.made(2, rate=rate, prefix="shoal-sync", network="10.79.0") as both:
        ended = hosts.checked(hosts.run(both, [*SHOAL, *words], timeout=timeout))
    result: dict[str, Any] = json.loads(ended[0].stdout)
    return result


def settings(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('__', '.')}", str(value))]


def link() -> tuple[str, str, list[dict[str, str]], str]:
    words = [f"--model.{name}={value}" for name, value in MODEL_25M.items()]
    words += settings(data__source="synthetic", data__vocabulary=6144, data__seq_len=16, data__global_batch=2)
    words += settings(comm__warmup_steps=0)
    result = over_a_link("100mbit", [*words, "--steps", "4", "--methods", *LINK_METHODS], timeout=1500)
    plain = result["methods"][0]["seconds"]
    alone = result["compute_seconds"]
    rows = []
    for method in result["methods"]:
        rows.append(
            {
                "method": method["method"],
                "MB sent a step": f"{method['bytes'] / 1e6:.3f}",
                "step, predicted": f"{method['predicted']:.3f} s",
                "step, measured": f"{method['seconds']:.3f} s",
                "predicted / measured": f"{method['predicted'] / method['seconds']:.2f}",
                "speedup": f"{plain / method['seconds']:.2f}",
                "bar": f"{BARS[method['method']]:g}" if method["method"] in BARS else "",
            }
        )
    question = (
        f"Two hosts with 100 Mbit/s between them, one rank each; a llama of {result['parameters']:,} parameters in"
        f" float32, 2 x 16 tokens a step. A step without communication takes {alone:.3f} s; plain gradients spend"
        f" {1 - alone / plain:.1%} of their step on communication, *measured*. The link, measured before:"
        f" {result['link']['bytes_per_second'] * 8 / 1e6:.1f} Mbit/s. For local SGD, the mean over 50 steps and a sync."
    )
    return (
        "Compression and local SGD over 100 Mbit/s",
        question,
        rows,
        f"Chosen by `sync=auto`: {result['chosen'] or 'none'}; {result['why']}.\n",
    )


def loss(seeds: int, steps: int, methods: Sequence[str]) -> tuple[str, str, list[dict[str, str]], str]:
    every: dict[str, list[float]] = {method: [] for method in methods}
    for seed in range(seeds):
        words = settings(run__seed=seed, data__seq_len=64, data__global_batch=16, launch__nproc=4, steps=steps)
        ended = subprocess.run(
            [*SHOAL, *words, "--methods", *methods], capture_output=True, text=True, check=False, timeout=3000
        )
        if ended.returncode:
            raise RuntimeError(ended.stderr[-3000:])
        for method in json.loads(ended.stdout)["methods"]:
            every[method["method"]].append(method["eval_loss"])
        print(f"seed {seed}: {every}", file=sys.stderr, flush=True)
    rows = []
    for method, losses in every.items():
        ratios = [own / plain for own, plain in zip(losses, every["plain"], strict=True)]
        bar = 0.02 if method in CLOSE else 0.05
        rows.append(
            {
                "method": method,
                "validation loss": ", ".join(f"{one:.4f}" for one in losses),
                "ratio to plain": f"{statistics.fmean(ratios):.4f}",
                "worst seed": f"{max(ratios):.4f}",
                "bar": f"{1 + bar:.2f}" if method != "plain" else "",
                "holds": "" if method == "plain" else ("yes" if max(ratios) <= 1 + bar else "NO"),
            }
        )
    question = (
        f"The tiny llama on the default corpus, 4 ranks, {steps} steps of 16 sequences of 64 tokens, AdamW, {seeds}"
        " seeds: the loss over 64 validation sequences, of the synchronised weights."
    )
    return "Loss after as many samples", question, rows, ""


def race() -> tuple[str, str, list[dict[str, str]], str]:
    words = settings(data__seq_len=64, data__global_batch=16, steps=600, **{"until-loss": RACE_LOSS})
    words += settings(optim__schedule="constant", optim__lr=1e-3)
    result = over_a_link("10mbit", [*words, "--methods", *RACE_METHODS], timeout=2400)
    plain = result["methods"][0]["seconds_to_loss"]
    rows = []
    for method in result["methods"]:
        reached = method["seconds_to_loss"]
        rows.append(
            {
                "method": method["method"],
                f"seconds to a loss of {RACE_LOSS}": "not reached" if reached is None else f"{reached:.1f}",
                "steps": str(method["steps"]),
                "a step": f"{method['seconds']:.3f} s",
                "speedup": "" if reached is None else f"{plain / reached:.2f}",
            }
        )
    question = (
        f"Two hosts with 10 Mbit/s between them, one rank each; the tiny llama ({result['parameters']:,} parameters) on"
        f" the default corpus, 16 sequences of 64 tokens a step, constant rate, until the mean loss of five steps is"
        f" {RACE_LOSS}; 600 steps at most. A step without communication takes {result['compute_seconds']:.3f} s."
    )
    return "A race to a loss over 10 Mbit/s", question, rows, _curves(result)


def _curves(result: dict[str, Any]) -> str:
    """Loss over time, a few points of each method."""
    lines = ["\nLoss after so many seconds:\n"]
    marks = [1, 2, 5, 10, 20, 50, 100, 200, 500]
    rows = []
    for method in result["methods"]:
        row = {"method": method["method"]}
        for mark in marks:
            before = [loss for at, loss in method["curve"] if at <= mark]
            ended = method["curve"][-1][0] < mark and row.get(f"{marks[marks.index(mark) - 1]} s") in ("", None)
            row[f"{mark} s"] = "" if not before or ended else f"{statistics.fmean(before[-5:]):.2f}"
        rows.append(row)
    return "\n".join([*lines, table(rows)])


if __name__ == "__main__":
    main()
