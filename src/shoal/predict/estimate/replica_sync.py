"""How replicas should meet over a link: at every step, compressed, or every so many steps; and what a step then takes.

    compute   ├─ forward ─┼──────── backward ────────┤├ update
    buckets               .   b0 ready . b1 ready . b2 ready
    link                      ├── b0 ──────┼── b1 ──────┼── b2 ──────┤      seconds of a step: until the last arrived

A bucket travels when it is ready and the one before it has arrived; it takes its messages' latency, its bytes over the
link, and the time to encode and decode it. Islands pay for an exchange once in H steps.

The choice: of the ways that lose less, the first that is near the fastest, or that hides what it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

from shoal.blueprint.plan import Plan
from shoal.blueprint.replicas.compression import Compression
from shoal.predict.exact.traffic import BUCKET_BYTES

BACKWARD = 2 / 3
"""Of the time to compute a step, about: every product of the forward has two in the backward."""
NEAR = 1.25
"""A way that takes so many times longer than the fastest is still preferred, if it changes less."""
HIDDEN = 1.1
"""So much slower than computing alone is as good as hidden."""

LANES = 2
"""Threads that encode (`shoal.parallel.data.bucket_averager`)."""
SMALLEST_BUCKET = 2**20
WAYS = ("", "compress=bf16", "compress=int8", "sync=local:1 compress=powersgd:4", "sync=diloco:50 compress=int8")
"""What is chosen from, by how much it changes what is computed. `topk`, `1bit` and `randomk` are for those who know
that they want them: of ways as fast, they change more."""


@dataclass(frozen=True, slots=True)
class Link:
    """Between replicas, as *measured*."""

    latency: float
    """Seconds of a collective that carries next to nothing."""
    bandwidth: float
    """Bytes a second that a rank sends in a collective that carries much."""


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What one replica is."""

    compute: float
    """Seconds of a step without its peers, *measured*."""
    shapes: Sequence[tuple[int, ...]]
    """Of its parameters."""
    width: int = 4
    """Bytes of a number."""

    @property
    def size(self) -> int:
        """Its parameters."""
        return sum(map(prod, self.shapes))


@dataclass(frozen=True, slots=True)
class Step:
    """What a step takes by one way, *predicted*."""

    words: str
    """Of a plan; empty: gradients at every step."""
    seconds: float
    sent: float
    """Bytes of a rank in a step, on average."""

    @property
    def name(self) -> str:
        """For a table."""
        return self.words or "every step, as it is"


def sync_traffic(plan: Plan, words: str) -> Plan:
    """The plan with another way to meet.

    >>> str(sync_traffic(Plan.parse("tp=2 sync=auto"), "compress=int8"))
    'tp=2 compress=int8'
    """
    parsed = Plan.parse(words)
    return replace(plan, sync=parsed.sync, compress=parsed.compress)


def predict(words: str, island: ReplicaShape, link: Link, replicas: int, codec: Mapping[str, float]) -> Step:
    """What a step takes. `codec`: seconds to encode and decode a number, by method, *measured*; without an entry,
    nothing."""
    plan = Plan.parse(words)
    compression = plan.compression
    per_number = codec.get(compression.method, 0.0) if compression is not None else 0.0
    if compression is None:
        num_bytes = 2 * (replicas - 1) / replicas * island.width * island.size
    else:
        num_bytes = compression.bytes_sent(island.shapes, replicas, island.width)
    num_buckets = max(1, round(island.size * island.width / BUCKET_BYTES))
    sending = num_bytes / link.bandwidth + _messages(compression) * num_buckets * link.latency
    encoding = per_number * island.size
    if plan.sync_spec is not None:
        every = plan.sync_spec.every
        agreeing = 2 * link.latency  # on the loss, and on whether a gradient is finite, in every step
        exchange = sending + encoding / LANES  # nothing is computed meanwhile
        return Step(words, island.compute + agreeing + exchange / every, num_bytes / every)
    return Step(words, _overlapped(island.compute, sending + encoding, num_buckets), num_bytes)


def _messages(compression: Compression | None) -> int:
    """Collectives of a bucket."""
    return 1 if compression is None or compression.method in ("topk", "randomk") else 2


def _overlapped(compute: float, exchange: float, num_buckets: int) -> float:
    """The drawing above.

    >>> _overlapped(3.0, 0.0, 4), _overlapped(3.0, 8.0, 1)
    (3.0, 11.0)
    """
    end = 0.0
    for number in range(num_buckets):
        ready = compute * (1 - BACKWARD + BACKWARD * (number + 1) / num_buckets)
        end = max(end, ready) + exchange / num_buckets
    return end


def best_bucket(num_bytes: int, link: Link, replicas: int) -> float:
    """Bytes of a bucket of gradients: of the last one nothing is hidden, so it should be short; of each the latency is
    paid, so there should be few. Both cost the same, and least together, at √(all bytes x latency x bandwidth).

    >>> best_bucket(100 * 2**20, Link(latency=1e-3, bandwidth=1e9), replicas=2) / 2**20
    9.765625
    """
    sent = 2 * (replicas - 1) / replicas
    best = sqrt(num_bytes * link.latency * link.bandwidth / sent)
    return min(max(best, SMALLEST_BUCKET), num_bytes)


def choose(
    island: ReplicaShape, link: Link, replicas: int, codec: Mapping[str, float], ways: Sequence[str] = WAYS
) -> tuple[Step, list[Step], str]:
    """The way to meet, all that were weighed, and why this one."""
    steps = [predict(words, island, link, replicas, codec) for words in ways]
    fastest = min(step.seconds for step in steps)
    limit = max(NEAR * fastest, HIDDEN * island.compute)
    chosen = next(step for step in steps if step.seconds <= limit)
    exact = steps[0]
    rate = f"{link.bandwidth * 8 / 1e6:,.0f} Mbit/s, {link.latency * 1e3:.1f} ms"
    if chosen is exact:
        why = f"gradients as they are cost {exact.seconds / island.compute:.2f} x computing alone over {rate}"
    else:
        why = (
            f"over {rate} a step would take {exact.seconds:.2f} s with gradients as they are,"
            f" {chosen.seconds:.2f} s so, {island.compute:.2f} s alone"
        )
        compression = Plan.parse(chosen.words).compression
        if compression is not None and compression.warmup_steps:
            why += f"; the first {compression.warmup_steps} steps send gradients as they are (comm.warmup_steps)"
    return chosen, steps, why
