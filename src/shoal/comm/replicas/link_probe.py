"""Measure the link between replicas and the cost of codecs; all ranks measure together and agree on the numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from shoal.blueprint.replicas.compress_words import Compression
from shoal.comm.compression.gradient_compression import Seeds, build_average
from shoal.comm.replicas.transport import Transport
from shoal.predict.estimate.replica_sync import Link

SMALL, FIRST, LARGEST = 64, 64 * 2**10, 64 * 2**20
ENOUGH = 0.3  # seconds of one collective, compared with which latency and noise are small
SAMPLE = (1024, 1024)  # shape of the gradient that is encoded
LEAST_ROWS = 16


def link_of(transport: Transport) -> Link:
    """Measure latency and bandwidth of an all-reduce. Sizes grow until one takes a third of a second."""
    latency = min(_seconds(transport, SMALL) for _ in range(5))
    size = FIRST
    _seconds(transport, size)
    took = _seconds(transport, size)
    while took < ENOUGH and size < LARGEST:
        size *= 4
        took = min(_seconds(transport, size) for _ in range(2 if took < ENOUGH / 4 else 1))
    sent = 2 * (transport.size - 1) * size / transport.size
    return Link(latency, sent / max(took - latency, 1e-9))


def codec_seconds(transport: Transport, methods: Iterable[str], link: Link) -> dict[str, float]:
    """Measure, per method, the seconds to encode and decode one number, without communication.

    The sample travels, too. Over a slow link it is smaller, so that this takes seconds and not minutes.
    """
    found: dict[str, float] = {}
    width = SAMPLE[1]
    sample = min(SAMPLE[0], max(LEAST_ROWS, int(ENOUGH * link.bandwidth / width))), width
    for method in methods:
        compression = Compression.parse(method)
        average = build_average(compression)
        bucket = average.new_bucket([sample], torch.float32, transport.device, [0])
        x = torch.randn(sample, device=transport.device).view(-1)
        took = []
        for trial in range(5):
            own, _ = x.clone(), transport.sent.take()
            synchronize(transport.device)
            began = time.perf_counter()
            average(own, bucket, transport, Seeds(trial, trial))
            synchronize(transport.device)
            times, _ = transport.sent.take()
            took.append(time.perf_counter() - began - sum(ended - start for start, ended in times))
        found[compression.method] = _slowest(transport, min(took)) / x.numel()
    return found


def _seconds(transport: Transport, num_bytes: int) -> float:
    x = torch.zeros(num_bytes // 4, device=transport.device)
    return _slowest(transport, timed(lambda: transport.all_reduce(x), transport.device))


def timed(do: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes, with the work that it launched on a GPU."""
    synchronize(device)
    began = time.perf_counter()
    do()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(transport: Transport, seconds: float) -> float:
    """Return the maximum over all ranks, the same number on each."""
    both = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=transport.group)
    return float(both)
