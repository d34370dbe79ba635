"""Which way of sending is the fastest here: tried, not guessed."""

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
    """What carries an all-reduce of this size in the least time, the slowest rank counting; and what each took. Every
    rank calls it, and all choose the same. One that is not a tenth faster than torch's own is not worth it."""
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
    """The size of buckets that hides most of what travels, from what the link can do; and that. All choose the same."""
    measured = link_of(transport)
    worst = torch.tensor([measured.latency, 1 / measured.bandwidth], dtype=torch.float64)
    _agree(worst, transport)
    link = Link(float(worst[0]), 1 / float(worst[1]))
    size = best_bucket(num_bytes, link, transport.size)
    rate = f"{link.bandwidth * 8 / 1e6:,.0f} Mbit/s, {link.latency * 1e3:.2f} ms"
    return size / 2**20, f"gradients of {num_bytes / 2**20:.3g} MB over {rate}, measured"


def _agree(seconds: torch.Tensor, transport: Transport) -> None:
    """On the slowest, over all ranks: others that hold the same weights, along tp, must not come to something else."""
    there = seconds.to(transport.device)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    seconds.copy_(there)


def _seconds(transport: Transport, x: torch.Tensor) -> float:
    transport.all_reduce(x)  # connections, and memory
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(timed(lambda: transport.all_reduce(x), transport.device))
    return median(rounds)
