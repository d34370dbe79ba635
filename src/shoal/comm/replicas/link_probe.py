"""What the link between replicas can do, and what codecs cost here; all ranks measure together, and agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from shoal.blueprint.compression import Compression
from shoal.comm.compression.reduce import Seeds, build_average
from shoal.comm.replicas.transport import Transport
from shoal.predict.estimate.replica_sync import Link

SMALL, FIRST, LARGEST = 1024, 256 * 2**10, 64 * 2**20
ENOUGH = 0.3  # seconds of one collective, beside which latency and chance are small
SAMPLE = (1024, 1024)  # a gradient that is encoded on trial


def link_of(wire: Transport) -> Link:
    """Latency and bandwidth of an all-reduce over the wire. Sizes grow until one takes a third of a second."""
    latency = min(_seconds(wire, SMALL) for _ in range(5))
    size = FIRST
    _seconds(wire, size)
    took = _seconds(wire, size)
    while took < ENOUGH and size < LARGEST:
        size *= 4
        took = min(_seconds(wire, size) for _ in range(2 if took < ENOUGH / 4 else 1))
    sent = 2 * (wire.size - 1) * size / wire.size
    return Link(latency, sent / max(took - latency, 1e-9))


def codec_seconds(wire: Transport, methods: Iterable[str]) -> dict[str, float]:
    """Method → seconds to encode and decode a number, without its way over the wire."""
    found: dict[str, float] = {}
    for method in methods:
        compression = Compression.parse(method)
        average = build_average(compression)
        bucket = average.new_bucket([SAMPLE], torch.float32, wire.device, [0])
        x = torch.randn(SAMPLE, device=wire.device).view(-1)
        took = []
        for trial in range(5):
            own, _ = x.clone(), wire.sent.take()
            settle(wire.device)
            began = time.perf_counter()
            average(own, bucket, wire, Seeds(trial, trial))
            settle(wire.device)
            times, _ = wire.sent.take()
            took.append(time.perf_counter() - began - sum(ended - start for start, ended in times))
        found[compression.method] = _slowest(wire, min(took)) / x.numel()
    return found


def _seconds(wire: Transport, num_bytes: int) -> float:
    x = torch.zeros(num_bytes // 4, device=wire.device)
    return _slowest(wire, timed(lambda: wire.all_reduce(x), wire.device))


def timed(do: Callable[[], object], device: torch.device) -> float:
    """Seconds; on a GPU, which works on after it was asked, until it is done."""
    settle(device)
    began = time.perf_counter()
    do()
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    """Wait for what a device was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(wire: Transport, seconds: float) -> float:
    """The same number on all ranks."""
    both = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=wire.group)
    return float(both)
