"""Totals over the ranks of a verification: communication and memory, predicted and counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from shoal.blueprint.layout import GROUP_AXES
from shoal.verification.rank import RankFindings
from shoal.verification.report import Count, ReplicaSync


def collectives_of(ranks: Sequence[RankFindings]) -> dict[str, dict[str, Count]]:
    """Axis → operation → calls of one step, over all ranks. Receives are not counted, only sends."""
    return {
        axis: {
            name: Count(
                predicted=_sum(_predicted(rank, axis, name, "calls") for rank in ranks),
                counted=sum(_counted(rank, axis, name, "calls") for rank in ranks),
            )
            for name in names
        }
        for axis, names in _operations(ranks).items()
    }


def bytes_of(ranks: Sequence[RankFindings]) -> dict[str, Count]:
    """Axis → bytes of one step, over all ranks."""
    return {
        axis: Count(
            predicted=_sum(_predicted(rank, axis, name, "bytes") for rank in ranks for name in names),
            counted=sum(_counted(rank, axis, name, "bytes") for rank in ranks for name in names),
        )
        for axis, names in _operations(ranks).items()
    }


def bytes_to_replicas(ranks: Sequence[RankFindings]) -> Iterator[tuple[str, Count]]:
    """Under compression or local SGD: the axis of replicas, and the bytes that all ranks send."""
    every = [rank.replica_traffic for rank in ranks if rank.replica_traffic is not None]
    if every:
        yield every[0].axis, Count(predicted=sum(m.predicted for m in every), counted=sum(m.counted for m in every))


def replica_sync_of(ranks: Sequence[RankFindings]) -> ReplicaSync | None:
    """Under compression or local SGD: how often replicas synchronize, and whether their weights are equal then."""
    every = [rank.replica_traffic for rank in ranks if rank.replica_traffic is not None]
    if not every:
        return None
    are_equal = all(traffic.has_equal_weights for traffic in every)
    return ReplicaSync(every[0].axis, every[0].every, are_equal, every[0].sends_weights)


def _operations(ranks: Sequence[RankFindings]) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for rank in ranks:
        for traffic in (rank.traffic, rank.predicted_traffic or {}):
            for axis, operations in traffic.items():
                found[axis].update(dict.fromkeys(name for name in operations if name != "recv"))
    return {axis: list(found[axis]) for axis in GROUP_AXES if axis in found}


def _counted(rank: RankFindings, axis: str, name: str, what: str) -> int:
    return rank.traffic.get(axis, {}).get(name, {}).get(what, 0)


def _predicted(rank: RankFindings, axis: str, name: str, what: str) -> int | None:
    """The predicted number; None: not predicted."""
    if rank.predicted_traffic is None:
        return None
    messages = rank.predicted_traffic.get(axis, {}).get(name)
    return 0 if messages is None else getattr(messages, what)


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


def memory_of(ranks: Sequence[RankFindings]) -> dict[str, Count]:
    """Kind → bytes on the rank that holds most."""
    largest = max(ranks, key=lambda rank: rank.memory.total if rank.memory else 0)
    counts = {
        kind: Count(
            predicted=None if largest.predicted_memory is None else getattr(largest.predicted_memory, kind),
            counted=getattr(largest.memory, kind),
        )
        for kind in ("parameters", "gradients", "optimizer")
    }
    return {**counts, "peak": Count(measured=max(rank.peak for rank in ranks))}
