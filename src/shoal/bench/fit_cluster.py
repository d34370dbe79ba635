"""Fit a `Cluster` to measurements of a machine.

A planner predicts with a few numbers per device and link. Each is fitted to several readings with the formula that the
planner uses, so that one wrong reading has little influence:

    product    seconds = 2MNK / achievable + bytes / bandwidth       `predict.estimate.step_time`
    attention  seconds = 3.5 x FLOPs of the forward / attention      the same
    message    seconds = base + steps x latency + bytes / bandwidth  `predict.cluster.Link`; gathers and scatters use
                                                                     only a part of the bandwidth

Readings are measured; numbers that are fitted to them say so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from shoal.predict.cluster import Cluster, Device, Link, Tier
from shoal.predict.presets.clusters import DEVICES, TIERS, Entry
from shoal.predict.presets.frameworks import SHOAL
from shoal.predict.presets.peak_flops import peak_flops

MESSAGES = ("send", "all_gather", "reduce_scatter", "all_reduce")
LEAST_SHARE = 0.01
"""Of the time of a message that its bytes take, at the size with the largest such share; below it is noise."""
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The time of one operation that all ranks repeat at the same time, on the slowest rank."""

    what: str
    """product, attention, copy, elementwise, launch, block, or one of `MESSAGES`."""
    size: tuple[int, ...]
    """(M, N, K) of a product, (tokens, features) of attention and blocks, (bytes,) of anything else."""
    precision: str
    seconds: float
    """Measured: the fastest of some rounds."""
    flops: float = 0.0
    """Counted."""
    traffic: float = 0.0
    """Bytes read and written, counted."""

    @property
    def rate(self) -> float:
        """FLOP/s, or bytes/s without FLOPs."""
        return (self.flops or self.traffic) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Readings:
    """All readings of a machine, and its description."""

    readings: tuple[Reading, ...]
    device: str
    """torch's name of the device; the model of a CPU."""
    kind: str
    """cpu or cuda."""
    num_ranks: int
    num_threads: int
    """Threads of each rank, on the CPU."""
    memory: float
    """Bytes for each rank."""
    context: float
    """Bytes of a process beside its tensors."""
    host: str
    torch: str
    date: str
    took: float
    """Seconds, measured."""

    def of(self, what: str, precision: str | None = None) -> list[Reading]:
        """The readings of one operation."""
        return [each for each in self.readings if each.what == what and precision in (None, each.precision)]

    def of_messages(self) -> list[Reading]:
        """The readings of all collectives."""
        return [each for each in self.readings if each.what in MESSAGES]

    @property
    def precisions(self) -> list[str]:
        """The precisions of the measured products."""
        return list(dict.fromkeys(each.precision for each in self.of("product")))

    def to_mapping(self) -> dict[str, Any]:
        """The readings as JSON."""
        return asdict(self)

    def sentence(self) -> str:
        """One line about machine, ranks and version."""
        threads = f" with {self.num_threads} threads each" if self.kind == "cpu" else ""
        return f"shoal calibrate on {self.host}: {self.num_ranks} x {self.device}{threads}, torch {self.torch}"


# ---- from readings to a cluster -------------------------------------------------------------------------------------


def cluster_of(found: Readings) -> Cluster:
    """The cluster of a machine. Links that one machine cannot measure come from the preset of its device, and their
    source says so."""
    known = _preset(found)
    inside = fit_tier(found.of_messages(), found.num_ranks) if found.num_ranks > 1 else _unmeasured(known.inside)
    return Cluster(
        device=device_of(found),
        per_node=found.num_ranks,
        inside=inside,
        between=_unmeasured(known.between),
        is_measured=True,
        source=found.sentence(),
        date=found.date,
    )


def device_of(found: Readings) -> Device:
    """The device of a machine."""
    copied = max(each.rate for each in found.of("copy"))
    streamed = min(copied, statistics.median(each.rate for each in found.of("elementwise")))
    rates = {word: fit_rate(found.of("product", word), streamed) for word in found.precisions}
    best = {word: max(each.rate for each in found.of("product", word)) for word in found.precisions}
    attention = {each.precision: each.rate for each in found.of("attention")}  # the longest comes last
    return Device(
        name=found.device,
        peak={word: peak_flops(found.device, word) or best[word] for word in rates},
        achievable=rates,
        memory=found.memory,
        bandwidth=copied,
        streaming=streamed / copied,
        attention=attention,
        is_modern=_preset(found).is_modern,
        host_factor=found.of("launch")[0].seconds / (SHOAL.host_forward + SHOAL.host_backward),
        context=found.context,
        source="measured; peak by the datasheet, or where there is none, the fastest product",
    )


def fit_rate(products: Sequence[Reading], bandwidth: float) -> float:
    """Fit FLOP/s such that products take FLOPs / rate + bytes / bandwidth, with least squared relative errors.

    >>> made_up = [
    ...     Reading(what="product", size=(), precision="", seconds=f + 1, flops=10 * f, traffic=2) for f in (1, 9)
    ... ]
    >>> round(fit_rate(made_up, bandwidth=2), 6)
    10.0
    """
    slopes = [each.flops / each.seconds for each in products]
    left = [max(0.1, 1 - each.traffic / bandwidth / each.seconds) for each in products]  # a cache can be faster
    return sum(s * s for s in slopes) / sum(s * part for s, part in zip(slopes, left, strict=True))


def fit_tier(messages: Sequence[Reading], num_ranks: int, *, num_nodes: int = 1, inside_latency: float = 0.0) -> Tier:
    """Fit a link such that messages take the time of `Link`, with least squared relative errors. With several
    `num_nodes`, it is the link between nodes, and `inside_latency` is that within a node."""
    shape = _Shape(num_ranks, num_nodes, inside_latency)
    known = [_predicted(each, shape, 0, 0, 0, 0) / each.seconds for each in messages]
    columns = [
        [_predicted(each, shape, *unit) / each.seconds - part for each, part in zip(messages, known, strict=True)]
        for unit in np.eye(4).tolist()
    ]
    base, latency, *per_bytes = _nonnegative(np.array(columns).T, 1 - np.array(known))
    per_byte, per_gathered_byte = map(_at_least_seen, per_bytes, columns[2:])
    over = f"on {num_nodes} hosts" if num_nodes > 1 else ""
    return Tier(
        name="measured",
        bandwidth=1 / per_byte,
        latency=latency,
        base=base,
        gathering=per_byte / per_gathered_byte,
        source=f"measured between {num_ranks} ranks {over}".rstrip(),
    )


def _at_least_seen(per_byte: float, shares: Sequence[float]) -> float:
    """Seconds per byte. Where the fit gives bytes no part of the time of any message, because noise hid it, they are
    those of the fastest message: a link is never infinitely fast. `shares[i] * per_byte` is the part of message i.

    >>> _at_least_seen(0.5, [0.2, 1.6]), _at_least_seen(0.0, [0.2, 1.6])
    (0.5, 0.625)
    """
    largest = max(shares, default=0.0)
    return max(per_byte, 1e-15) if per_byte * largest >= LEAST_SHARE or not largest else 1 / largest


class _Shape(NamedTuple):
    """Number of ranks and nodes."""

    num_ranks: int
    num_nodes: int = 1
    inside_latency: float = 0.0


def _predicted(
    message: Reading, shape: _Shape, base: float, latency: float, per_byte: float, per_gathered_byte: float
) -> float:
    """Seconds of a message over a link with these numbers. With one of them 1 and the others 0, it is a coefficient."""
    is_direct = message.what in ("send", "all_reduce")
    per_byte = per_byte if is_direct else per_gathered_byte
    alone = 1 / per_byte if per_byte else math.inf
    members = shape.num_ranks // shape.num_nodes
    together = alone * (members if shape.num_nodes > 1 else 1)
    link = Link(
        shape.num_ranks, shape.num_nodes, together, latency, base, shape.inside_latency, alone=alone, members=members
    )
    seconds = {"send": link.send, "all_reduce": link.reduce}.get(message.what, link.gather)
    return seconds(message.size[0])


def _nonnegative(columns: Any, target: Any) -> tuple[float, ...]:
    """The non-negative least-squares solution of columns · x = target: the best over all subsets of columns."""
    width = columns.shape[1]
    best, solution = math.inf, np.zeros(width)
    for number in range(1, width + 1):
        for chosen in map(list, combinations(range(width), number)):
            found = np.zeros(width)
            found[chosen] = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            error = float(np.square(columns @ found - target).sum())
            if (found >= 0).all() and error < best:
                best, solution = error, found
    return tuple(solution.tolist())


def _preset(found: Readings) -> Entry:
    """The preset of the device with this name and the nearest memory size; the CPU's if there is none."""
    rows = [row for row in DEVICES.values() if row.torch_name in found.device]
    return min(rows, key=lambda row: abs(row.memory * 2**30 - found.memory), default=DEVICES["cpu"])


def _unmeasured(name: str) -> Tier:
    tier = TIERS[name]
    return Tier(
        name=tier.name,
        bandwidth=tier.bandwidth,
        latency=tier.latency,
        base=tier.base,
        source=f"not measured: {tier.source}",
    )


# ---- how well it fits -----------------------------------------------------------------------------------------------


def error_of_products(found: Readings, device: Device, precision: str) -> float:
    """The mean absolute relative error of the fitted rate, over the readings of products."""
    stream = device.bandwidth * device.streaming
    pairs = [
        (each.flops / device.achievable[precision] + each.traffic / stream, each.seconds)
        for each in found.of("product", precision)
    ]
    return _mean_error(pairs)


def error_of_messages(found: Readings, tier: Tier) -> float:
    """The mean absolute relative error of the fitted link, over the readings of messages."""
    numbers = tier.base, tier.latency, 1 / tier.bandwidth, 1 / (tier.bandwidth * tier.gathering)
    return _mean_error(
        [(_predicted(each, _Shape(found.num_ranks), *numbers), each.seconds) for each in found.of_messages()]
    )


def _mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    return statistics.fmean(abs(predicted / measured - 1) for predicted, measured in pairs)
