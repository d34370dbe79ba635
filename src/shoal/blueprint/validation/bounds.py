"""Upper bounds of the numbers in a setting. Without them a mistyped number would keep a process busy for days."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.errors import Problem

MOST_LAYERS = 4096
MOST_DEVICES = 2**20
MOST_RANKS = 2**12
"""Processes on one machine, and threads of one."""
MOST_SEQUENCE = 2**27
MOST_BATCH = 2**22
MOST = {
    "layers": MOST_LAYERS, "num_layers": MOST_LAYERS, "dense_layers": MOST_LAYERS, "num_dense_layers": MOST_LAYERS,
    "blocks": MOST_LAYERS, "depths": MOST_LAYERS, "heads": 2**16, "num_heads": 2**16, "kv_heads": 2**16,
    "num_kv_heads": 2**16, "head_dim": 2**16, "experts": 2**16, "num_experts": 2**16, "num_shared_experts": 2**16,
    "top_k": 2**16, "hidden": 2**22, "ffn": 2**26, "expert_ffn": 2**26, "shared_ffn": 2**26, "vocabulary": 2**28,
    "devices": MOST_DEVICES, "nodes": MOST_DEVICES, "per_node": MOST_DEVICES, "sequence": MOST_SEQUENCE,
    "--seq-len": MOST_SEQUENCE, "batch": MOST_BATCH, "--global-batch": MOST_BATCH,
}  # fmt: skip
"""Name of a number → its largest value."""
MOST_OF_ANY = 2**40


def check_bounds(values: Iterable[tuple[str, object]]) -> list[Problem]:
    """A problem for each number above the bound of its name.

    >>> check_bounds([("layers", 10**8)])[0].what
    'layers must be at most 4096, got 100000000'
    """
    found = []
    for name, value in values:
        most = MOST.get(name, MOST_OF_ANY)
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, int) and number > most:
                found.append(
                    Problem("R018", f"{name} must be at most {most}, got {str(number)[:40]}", f"{name}={most}")
                )
    return found
