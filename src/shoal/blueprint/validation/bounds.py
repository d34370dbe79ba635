"""The largest numbers that anything here counts to. Beyond them a mistyped number keeps a process busy for days."""

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
"""What a number is called → the largest that it may be."""
MOST_OF_ANY = 2**40


def absurd(values: Iterable[tuple[str, object]]) -> list[Problem]:
    """A problem for each number that is larger than anything of its name can be.

    >>> absurd([("layers", 10**8)])[0].what
    'layers=100000000 is more than the 4096 that shoal counts to'
    """
    found = []
    for name, value in values:
        most = MOST.get(name, MOST_OF_ANY)
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, int) and number > most:
                what = f"{name}={str(number)[:40]} is more than the {most} that shoal counts to"
                found.append(Problem(what, f"{name}={most} or less"))
    return found
