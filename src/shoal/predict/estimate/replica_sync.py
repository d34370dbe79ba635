"""Choose how replicas synchronize over a link: every step, compressed, or every H steps; and predict the step time.

    compute   ├─ forward ─┼──────── backward ────────┤├ update
    buckets               .   b0 ready . b1 ready . b2 ready
    link                      ├── b0 ──────┼── b1 ──────┼── b2 ──────┤      seconds of a step: until the last arrived

A bucket travels when it is ready and the one before it has arrived; it takes its messages' latency, its bytes over the
link, and the time to encode and decode it. Local SGD pays for an exchange once in H steps.

The choice: `WAYS` is ordered by how little each changes the result. The first that is near the fastest, or that hides
its traffic, is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

from shoal.blueprint.plan import Plan
from shoal.blueprint.replicas.compress_words import Compression
from shoal.predict.exact.data_traffic import BUCKET_BYTES

BACKWARD = 2 / 3
"""Fraction of the compute time, about: each product of the forward has two in the backward."""
NEAR = 1.25
"""A way up to this many times slower than the fastest is preferred if it changes the result less. An assumption; it
decides what `sync=auto` chooses, and no prediction."""
HIDDEN = 1.1
"""A step up to this many times as long as computing alone counts as hidden. An assumption, as above."""

LANES = 2
"""Threads that encode (`shoal.parallel.data.bucket_averager`)."""
SMALLEST_BUCKET = 2**20
"""Bytes. An assumption: the bucket that is reduced first in torch's DDP is as large."""
WAYS = ("", "compress=bf16", "compress=int8", "sync=local:1 compress=powersgd:4", "sync=diloco:50 compress=int8")
"""The choices, ordered by how much they change the result. `topk`, `1bit` and `randomk` are not among them: they
change more than others that are as fast."""


@dataclass(frozen=True, slots=True)
class Link:
    """Between replicas, as *measured*."""

    latency: float
    """Seconds of a collective that carries next to nothing."""
    bandwidth: float
    """Bytes a second that a rank sends in a collective that carries much."""


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """One replica: its parameters and its compute time."""

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
    """The *predicted* step of one way to synchronize."""

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
    """Return the plan with another way to synchronize.

    >>> str(sync_traffic(Plan.parse("tp=2 sync=auto"), "compress=int8"))
    'tp=2 compress=int8'
    """
    parsed = Plan.parse(words)
    return replace(plan, sync=parsed.sync, compress=parsed.compress)


def predict(words: str, replica: ReplicaShape, link: Link, replicas: int, codec: Mapping[str, float]) -> Step:
    """Predict a step. `codec`: seconds to encode and decode a number, by method, *measured*; without an entry,
    nothing."""
    plan = Plan.parse(words)
    compression = plan.compression
    per_number = codec.get(compression.method, 0.0) if compression is not None else 0.0
    if compression is None:
        num_bytes = 2 * (replicas - 1) / replicas * replica.width * replica.size
    else:
        num_bytes = compression.bytes_sent(replica.shapes, replicas, replica.width)
    num_buckets = max(1, round(replica.size * replica.width / BUCKET_BYTES))
    sending = num_bytes / link.bandwidth + _messages(compression) * num_buckets * link.latency
    encoding = per_number * replica.size
    if plan.sync_spec is not None:
        every = plan.sync_spec.every
        agreeing = 2 * link.latency  # on the loss, and on whether a gradient is finite, in every step
        exchange = sending + encoding / LANES  # nothing is computed meanwhile
        return Step(words, replica.compute + agreeing + exchange / every, num_bytes / every)
    return Step(words, _overlapped(replica.compute, sending + encoding, num_buckets), num_bytes)


def _messages(compression: Compression | None) -> int:
    """Collectives of a bucket."""
    return 1 if compression is None or compression.method in ("topk", "randomk") else 2


def _overlapped(compute: float, exchange: float, num_buckets: int) -> float:
    """Return the end of the last bucket, as drawn at the top of this file.

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
    replica: ReplicaShape, link: Link, replicas: int, codec: Mapping[str, float], ways: Sequence[str] = WAYS
) -> tuple[Step, list[Step], str]:
    """Return the chosen way to synchronize, the predictions of all ways, and the reason."""
    steps = [predict(words, replica, link, replicas, codec) for words in ways]
    fastest = min(step.seconds for step in steps)
    limit = max(NEAR * fastest, HIDDEN * replica.compute)
    chosen = next(step for step in steps if step.seconds <= limit)
    exact = steps[0]
    rate = f"{link.bandwidth * 8 / 1e6:,.0f} Mbit/s, {link.latency * 1e3:.1f} ms"
    if chosen is exact:
        why = f"gradients as they are cost {exact.seconds / replica.compute:.2f} x computing alone over {rate}"
    else:
        why = (
            f"over {rate} a step would take {exact.seconds:.2f} s with gradients as they are,"
            f" {chosen.seconds:.2f} s so, {replica.compute:.2f} s alone"
        )
        compression = Plan.parse(chosen.words).compression
        if compression is not None and compression.warmup_steps:
            why += f"; the first {compression.warmup_steps} steps send gradients as they are (comm.warmup_steps)"
    return chosen, steps, why
