"""What was measured of a machine, and the `Cluster` that follows from it.

A planner predicts with a handful of numbers per device and link. Each is fitted to readings by the very formula that
will use it, so that what one reading says wrong, the others outvote:

    product    seconds = 2MNK / achievable + bytes / bandwidth       `blueprint.step_time`
    attention  seconds = 3.5 x FLOPs of the forward / attention      the same
    message    seconds = base + steps x latency + bytes / bandwidth  `blueprint.cluster.Link`; of gathers and scatters
                                                                     only a part of the bandwidth

Readings are measured; what is fitted to them says so.
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
from shoal.predict.framework_profile import SHOAL
from shoal.predict.presets.clusters import DEVICES, TIERS, Entry
from shoal.predict.presets.peak_flops import peak_flops

MESSAGES = ("send", "all_gather", "reduce_scatter", "all_reduce")
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One thing that was done again and again, on all ranks at once, and how long it took on the slowest."""

    what: str
    """product, attention, copy, elementwise, launch, block, or one of `MESSAGES`."""
    size: tuple[int, ...]
    """Of a product (M, N, K), of attention and of blocks (tokens, features), of anything else (bytes,)."""
    precision: str
    seconds: float
    """Measured: the fastest of some rounds."""
    flops: float = 0.0
    """Counted."""
    traffic: float = 0.0
    """Bytes read and written, counted."""

    @property
    def rate(self) -> float:
        """FLOP/s, or bytes/s of what has no FLOPs."""
        return (self.flops or self.traffic) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Readings:
    """All that was measured of a machine, and what it was measured on."""

    readings: tuple[Reading, ...]
    device: str
    """As torch calls it; of a CPU, its model."""
    kind: str
    """cpu or cuda."""
    num_ranks: int
    num_threads: int
    """Of each rank, on the CPU."""
    memory: float
    """Bytes that each rank has to itself."""
    context: float
    """Bytes of a process that are not tensors."""
    host: str
    torch: str
    date: str
    took: float
    """Seconds, measured."""

    def of(self, what: str, precision: str | None = None) -> list[Reading]:
        """Those of one kind."""
        return [each for each in self.readings if each.what == what and precision in (None, each.precision)]

    def of_messages(self) -> list[Reading]:
        """Those of all collectives."""
        return [each for each in self.readings if each.what in MESSAGES]

    @property
    def precisions(self) -> list[str]:
        """In which products were measured."""
        return list(dict.fromkeys(each.precision for each in self.of("product")))

    def to_mapping(self) -> dict[str, Any]:
        """As keys and values, for JSON."""
        return asdict(self)

    def sentence(self) -> str:
        """Where and when, in a line."""
        threads = f" with {self.num_threads} threads each" if self.kind == "cpu" else ""
        return f"shoal calibrate on {self.host}: {self.num_ranks} x {self.device}{threads}, torch {self.torch}"


# ---- from readings to a cluster -------------------------------------------------------------------------------------


def cluster_of(found: Readings) -> Cluster:
    """The machine as the planner sees it. What one machine cannot tell (links to others; links at all, of one device)
    is taken from the preset of its device, and says so."""
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
    """One of its devices."""
    copied = max(each.rate for each in found.of("copy"))
    streamed = min(copied, statistics.median(each.rate for each in found.of("elementwise")))
    rates = {word: fit_rate(found.of("product", word), streamed) for word in found.precisions}
    best = {word: max(each.rate for each in found.of("product", word)) for word in found.precisions}
    attention = {each.precision: each.rate for each in found.of("attention")}  # the longer one comes last
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
    """FLOP/s such that products take FLOPs / rate + bytes / bandwidth, with the least sum of squared relative errors.

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
    """A link such that messages take what `Link` says, with the least sum of squared relative errors. `num_nodes` that
    the ranks lie on; if several, it is the link between them, and `inside_latency` that of the ones inside."""
    shape = _Shape(num_ranks, num_nodes, inside_latency)
    known = [_predicted(each, shape, 0, 0, 0, 0) / each.seconds for each in messages]
    columns = [
        [_predicted(each, shape, *unit) / each.seconds - part for each, part in zip(messages, known, strict=True)]
        for unit in np.eye(4).tolist()
    ]
    base, latency, *per_bytes = _nonnegative(np.array(columns).T, 1 - np.array(known))
    per_byte, per_gathered_byte = (max(each, 1e-15) for each in per_bytes)
    over = f"on {num_nodes} hosts" if num_nodes > 1 else ""
    return Tier(
        name="measured",
        bandwidth=1 / per_byte,
        latency=latency,
        base=base,
        gathering=per_byte / per_gathered_byte,
        source=f"measured between {num_ranks} ranks {over}".rstrip(),
    )


class _Shape(NamedTuple):
    """Ranks, and how they lie."""

    num_ranks: int
    num_nodes: int = 1
    inside_latency: float = 0.0


def _predicted(
    message: Reading, shape: _Shape, base: float, latency: float, per_byte: float, per_gathered_byte: float
) -> float:
    """Seconds of a message over a link of such numbers. A unit of one and none of the others: its coefficient."""
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


def _nonnegative(columns: Any, wanted: Any) -> tuple[float, ...]:
    """The least-squares solution of columns · x = wanted in which no x is negative: the best that some columns give."""
    width = columns.shape[1]
    best, solution = math.inf, np.zeros(width)
    for number in range(1, width + 1):
        for chosen in map(list, combinations(range(width), number)):
            found = np.zeros(width)
            found[chosen] = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)[0]
            error = float(np.square(columns @ found - wanted).sum())
            if (found >= 0).all() and error < best:
                best, solution = error, found
    return tuple(solution.tolist())


def _preset(found: Readings) -> Entry:
    """The row of a device of this name, of the nearest size of memory; the CPU's where there is none."""
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
    """The mean relative error, without sign, of what was fitted to products, against the readings."""
    stream = device.bandwidth * device.streaming
    pairs = [
        (each.flops / device.achievable[precision] + each.traffic / stream, each.seconds)
        for each in found.of("product", precision)
    ]
    return _mean_error(pairs)


def error_of_messages(found: Readings, tier: Tier) -> float:
    """The same of messages."""
    numbers = tier.base, tier.latency, 1 / tier.bandwidth, 1 / (tier.bandwidth * tier.gathering)
    return _mean_error(
        [(_predicted(each, _Shape(found.num_ranks), *numbers), each.seconds) for each in found.of_messages()]
    )


def _mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    return statistics.fmean(abs(predicted / measured - 1) for predicted, measured in pairs)
