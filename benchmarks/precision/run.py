"""Do fp32, bf16 and fp16 train on this GPU, how fast, and in how much memory?

python benchmarks/precision/run.py [--steps 20] [-- settings of the recipe ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

RECIPE = "recipes/llama3-1b-gpu.yaml"
TINY = [
    *("--model.preset", "tiny", "--data.global_batch", "4", "--data.seq_len", "16", "--data.validation", "0"),
    *("--launch.device", "cpu", "--launch.nproc", "1", "--run.compile", "false", "--checkpoint.every", "0step"),
]
"""What makes it a matter of seconds on a CPU."""


def train(precision: str, steps: int, settings: list[str]) -> dict[str, Any]:
    """One run in a process of its own; the summary that it prints."""
    words = [sys.executable, "-m", "shoal", "train", RECIPE, "--plan.precision", precision, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--run.duration", f"{steps}step", "--run.dir", f"{folder}/run", *settings]
        found = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{precision} ended with exit code {found.returncode}")
    summary: dict[str, Any] = json.loads(found.stdout)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precisions", default="fp32,bf16,fp16")
    parser.add_argument("settings", nargs=argparse.REMAINDER, help="of the recipe, behind --")
    asked = arguments(parser, steps=1, precisions="fp32")
    settings = TINY if asked.smoke else [word for word in asked.settings if word != "--"]
    rows = []
    for precision in asked.precisions.split(","):
        summary = train(precision, asked.steps, settings)
        rows.append(
            {
                "precision": precision,
                "tokens/s, measured": f"{summary['tokens_per_s']:,.0f}",
                "MFU": f"{summary['mfu']:.1%}" if summary["mfu"] else "peak not known",
                "peak memory, measured": f"{summary['memory_gib_max']:.1f} GiB",
                "loss, first step": f"{summary['loss_first']:.3f}",
                "loss, last ten": f"{summary['loss_last']:.3f}",
                "dropped steps": str(summary["skipped_steps"]),
            }
        )
        print(json.dumps(summary), flush=True)
    about = heading(
        "Precision on one GPU",
        f"`{RECIPE}` ({summary['parameters']:,} parameters), {asked.steps} steps each; median step after warm-up."
        " MFU counts 6 FLOPs per parameter and token plus attention, over the dense peak of that precision.",
    )
    text = about + "\n" + table(rows)
    print(text)
    print("written to", write("precision", text))


if __name__ == "__main__":
    main()
