"""`shoal bench`: collectives, gradient compression, and steps of a recipe: their scaling, settings and memory."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from shoal.errors import ShoalError, nearest

ABOUT = {
    "scale": "strong and weak scaling of a recipe over the ranks of this machine, for several plans",
    "step": "what each setting buys here: microbatch, buckets, recomputation, precision, compilation",
    "memory": "peak memory of a recipe by cause, measured beside predicted, for several plans",
    "comm": "latency and bandwidth of every collective with every algorithm, from 1 KB to 256 MB",
    "compress": "bytes, step time and loss of a recipe with each gradient compression and local SGD setting",
}


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code."""
    action = arguments[0] if arguments else "--help"
    if action in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if action not in ABOUT:
        near = nearest(action, ABOUT)
        raise ShoalError(f"unknown benchmark {action!r}", fix=f"shoal bench {near or ' | '.join(ABOUT)}", code="R001")
    code: int = import_module(f"shoal.cli.bench.{action}").main(arguments[1:])
    return code


def _help() -> str:
    lines = [f"  {name:<8}  {about}" for name, about in ABOUT.items()]
    usage = "usage: shoal bench BENCHMARK [options]"
    return "\n".join([usage, "", *lines, "", "`shoal bench BENCHMARK --help` lists the options; all take --json.", ""])
