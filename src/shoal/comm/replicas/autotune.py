"""Choose the all-reduce algorithm and the bucket size from measurements on the link between replicas."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from shoal.blueprint.collectives.algorithms import Algorithm
from shoal.comm.replicas.link_probe import link_of, timed
from shoal.comm.replicas.transport import Chosen, Sent, Transport
from shoal.predict.estimate.replica_sync import Link, best_bucket

TRIED: tuple[Algorithm, ...] = ("ring", "halving", "double_tree")
ROUNDS = 3


def fastest(transport: Transport, num_bytes: int) -> tuple[Chosen, str]:
    """Return the fastest all-reduce for this size, by its slowest rank, and the time of each as text.

    Every rank calls it, and all choose the same. An algorithm must be 10 % faster than torch's own to be chosen.
    """
    several_nodes = transport.node is not None and 1 < transport.node < transport.size
    ways: list[Chosen] = ["builtin", *TRIED]
    if several_nodes:
        ways.append("hierarchical")
    x = torch.zeros(max(1, num_bytes // 4), device=transport.device)
    took = torch.tensor([_seconds(replace(transport, algorithm=way, sent=Sent()), x) for way in ways])
    _agree(took, transport)
    best = int(took.argmin())
    each = ", ".join(f"{way} {seconds * 1e3:.2f} ms" for way, seconds in zip(ways, took.tolist(), strict=True))
    why = f"{num_bytes / 2**20:.3g} MB take {each}, measured"
    return ways[best] if took[best] < 0.9 * took[0] else "builtin", why


def bucket_mb(transport: Transport, num_bytes: int) -> tuple[float, str]:
    """Return the bucket size that hides most communication, from the measured link, and the reason. All ranks agree."""
    measured = link_of(transport)
    worst = torch.tensor([measured.latency, 1 / measured.bandwidth], dtype=torch.float64)
    _agree(worst, transport)
    link = Link(float(worst[0]), 1 / float(worst[1]))
    size = best_bucket(num_bytes, link, transport.size)
    rate = f"{link.bandwidth * 8 / 1e6:,.0f} Mbit/s, {link.latency * 1e3:.2f} ms"
    return size / 2**20, f"gradients of {num_bytes / 2**20:.3g} MB over {rate}, measured"


def _agree(seconds: torch.Tensor, transport: Transport) -> None:
    """Take the slowest over all ranks: ranks with the same weights, along tp, must choose the same."""
    there = seconds.to(transport.device)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    seconds.copy_(there)


def _seconds(transport: Transport, x: torch.Tensor) -> float:
    transport.all_reduce(x)  # open connections, allocate memory
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(timed(lambda: transport.all_reduce(x), transport.device))
    return median(rounds)
