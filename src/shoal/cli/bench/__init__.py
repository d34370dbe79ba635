"""`shoal bench`: collectives, gradient compression, and steps of a recipe: their scaling, settings and memory."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from shoal.cli.actions import pick

ABOUT = {
    "scale": "strong and weak scaling of a recipe over the ranks of this machine, for several plans",
    "step": "what each setting buys here: microbatch, buckets, recomputation, precision, compilation",
    "memory": "peak memory of a recipe by cause, measured beside predicted, for several plans",
    "comm": "latency and bandwidth of every collective with every algorithm, from 1 KB to 256 MB",
    "compress": "bytes, step time and loss of a recipe with each gradient compression and local SGD setting",
}


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code."""
    action = pick("bench", arguments, ABOUT, kind="benchmark")
    if action is None:
        return 0
    code: int = import_module(f"shoal.cli.bench.{action}").main(arguments[1:])
    return code
