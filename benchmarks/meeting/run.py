"""What do ways of meeting gain over a slow link, what do they cost in loss, and was it foretold?

python benchmarks/meeting/run.py [--parts link loss race] [--ways ...]

link    two hosts with 100 Mbit/s between them, a llama of 25 M parameters, two sequences of 16 tokens a step: seconds
        of a step by each way, predicted before and measured
loss    4 ranks, a tiny llama on the default corpus, three seeds: held-out loss after as many samples by each way
race    two hosts with 10 Mbit/s between them, the tiny llama: seconds until the loss has come down to 2.6

Hosts are network namespaces (`../comm/hosts.py`), for which it takes root. Each part is one run of
`shoal bench compress --json`, or three.
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
LINK_WAYS = (
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
"""What is left out or late is that of Adam's steps, not of gradients that Adam divides by."""
LOSS_WAYS = (
    *("plain", "compress=bf16", "compress=fp16", "compress=int8", *OF_STEPS, "compress=powersgd:4"),
    *("sync=local:8", "sync=diloco:50", "sync=diloco:50 compress=int8"),
)
CLOSE = ("compress=bf16", "compress=fp16", "compress=int8", "compress=powersgd:4", OF_STEPS[0])
"""Ways whose loss is to stay within 2 % of plain; the others within 5 %."""
RACE_LOSS = 2.6
RACE_WAYS = (
    *("plain", "compress=bf16", "compress=int8", "compress=powersgd:4", "compress=1bit", "compress=topk:0.01"),
    *("sync=local:8 compress=int8", "sync=diloco:50 compress=int8"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=["link", "loss", "race"], default=["link", "loss", "race"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of the part loss")
    asked = arguments(parser, parts=["loss"], seeds=1, steps=2)
    ways = ("plain", "compress=int8") if asked.smoke else LOSS_WAYS
    for part in asked.parts:
        made = {"link": link, "loss": lambda: loss(asked.seeds, asked.steps, ways), "race": race}[part]()
        title, question, rows, rest = made
        text = f"{heading(title, question)}\n{table(rows)}\n{rest}"
        write(f"meeting-{part}", text)
        print(text, flush=True)


def over_a_link(rate: str, words: list[str], timeout: float) -> dict[str, Any]:
    """What rank 0 says, of two hosts."""
    with hosts.made(2, rate=rate, prefix="shoal-meeting", network="10.79.0") as both:
        ended = hosts.checked(hosts.run(both, [*SHOAL, *words], timeout=timeout))
    said: dict[str, Any] = json.loads(ended[0].stdout)
    return said


def settings(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('__', '.')}", str(value))]


def link() -> tuple[str, str, list[dict[str, str]], str]:
    words = [f"--model.{name}={value}" for name, value in MODEL_25M.items()]
    words += settings(data__source="synthetic", data__vocabulary=6144, data__seq_len=16, data__global_batch=2)
    words += settings(comm__exact_steps=0)
    said = over_a_link("100mbit", [*words, "--steps", "4", "--methods", *LINK_WAYS], timeout=1500)
    plain = said["ways"][0]["seconds"]
    alone = said["compute_seconds"]
    rows = []
    for way in said["ways"]:
        rows.append(
            {
                "way": way["words"],
                "MB sent a step": f"{way['bytes'] / 1e6:.3f}",
                "step, predicted": f"{way['predicted']:.3f} s",
                "step, measured": f"{way['seconds']:.3f} s",
                "predicted / measured": f"{way['predicted'] / way['seconds']:.2f}",
                "x faster": f"{plain / way['seconds']:.2f}",
                "bar": f"{BARS[way['words']]:g}" if way["words"] in BARS else "",
            }
        )
    question = (
        f"Two hosts with 100 Mbit/s between them, one rank each; a llama of {said['parameters']:,} parameters in"
        f" float32, 2 x 16 tokens a step. A step without meeting takes {alone:.3f} s, so that plain gradients spend"
        f" {1 - alone / plain:.1%} of their step on the wire, *measured*. The link as it was measured before:"
        f" {said['link']['bytes_per_second'] * 8 / 1e6:.1f} Mbit/s. Of islands, the mean over 50 steps and a meeting."
    )
    return (
        "Ways to meet over 100 Mbit/s",
        question,
        rows,
        f"Chosen by `sync=auto`: {said['chosen'] or 'none'}; {said['why']}.\n",
    )


def loss(seeds: int, steps: int, ways: Sequence[str]) -> tuple[str, str, list[dict[str, str]], str]:
    every: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(seeds):
        words = settings(run__seed=seed, data__seq_len=64, data__global_batch=16, launch__nproc=4, steps=steps)
        ended = subprocess.run(
            [*SHOAL, *words, "--methods", *ways], capture_output=True, text=True, check=False, timeout=3000
        )
        if ended.returncode:
            raise RuntimeError(ended.stderr[-3000:])
        for way in json.loads(ended.stdout)["ways"]:
            every[way["words"]].append(way["eval_loss"])
        print(f"seed {seed}: {every}", file=sys.stderr, flush=True)
    rows = []
    for way, losses in every.items():
        ratios = [own / plain for own, plain in zip(losses, every["plain"], strict=True)]
        bar = 0.02 if way in CLOSE else 0.05
        rows.append(
            {
                "way": way,
                "held-out loss": ", ".join(f"{one:.4f}" for one in losses),
                "of plain": f"{statistics.fmean(ratios):.4f}",
                "worst seed": f"{max(ratios):.4f}",
                "bar": f"{1 + bar:.2f}" if way != "plain" else "",
                "holds": "" if way == "plain" else ("yes" if max(ratios) <= 1 + bar else "NO"),
            }
        )
    question = (
        f"The tiny llama on the default corpus, 4 ranks, {steps} steps of 16 sequences of 64 tokens, AdamW, {seeds}"
        " seeds: the loss over 64 held-out sequences, of the weights that all share."
    )
    return "Loss after as many samples", question, rows, ""


def race() -> tuple[str, str, list[dict[str, str]], str]:
    words = settings(data__seq_len=64, data__global_batch=16, steps=600, **{"until-loss": RACE_LOSS})
    words += settings(optim__schedule="constant", optim__lr=1e-3)
    said = over_a_link("10mbit", [*words, "--methods", *RACE_WAYS], timeout=2400)
    plain = said["ways"][0]["seconds_to_loss"]
    rows = []
    for way in said["ways"]:
        reached = way["seconds_to_loss"]
        rows.append(
            {
                "way": way["words"],
                f"seconds to a loss of {RACE_LOSS}": "not reached" if reached is None else f"{reached:.1f}",
                "steps": str(way["steps"]),
                "a step": f"{way['seconds']:.3f} s",
                "x faster": "" if reached is None else f"{plain / reached:.2f}",
            }
        )
    question = (
        f"Two hosts with 10 Mbit/s between them, one rank each; the tiny llama ({said['parameters']:,} parameters) on"
        f" the default corpus, 16 sequences of 64 tokens a step, constant rate, until the mean loss of five steps is"
        f" {RACE_LOSS}; 600 steps at most. A step without meeting takes {said['compute_seconds']:.3f} s."
    )
    return "A race to a loss over 10 Mbit/s", question, rows, _curves(said)


def _curves(said: dict[str, Any]) -> str:
    """Loss over time, a few points of each way."""
    lines = ["\nLoss after so many seconds:\n"]
    marks = [1, 2, 5, 10, 20, 50, 100, 200, 500]
    rows = []
    for way in said["ways"]:
        row = {"way": way["words"]}
        for mark in marks:
            before = [loss for at, loss in way["curve"] if at <= mark]
            ended = way["curve"][-1][0] < mark and row.get(f"{marks[marks.index(mark) - 1]} s") in ("", None)
            row[f"{mark} s"] = "" if not before or ended else f"{statistics.fmean(before[-5:]):.2f}"
        rows.append(row)
    return "\n".join([*lines, table(rows)])


if __name__ == "__main__":
    main()
