"""Fit the links of a cluster to messages measured between its ranks. No torch here.

A planner's `Link` takes base + steps x latency + bytes / bandwidth for any collective (`shoal.predict.cluster`).
Training uses torch's own collectives. So a tier is fitted to those, and to messages that all ranks send at once, with
the same formula. Links that were not measured, such as those to other hosts, stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.bench.fit_cluster import MESSAGES, Reading, fit_tier
from shoal.bench.timings import BUILTIN, TOGETHER, Tier, Timing
from shoal.predict import cluster as paper
from shoal.predict.cluster import Cluster


def readings_of(timings: Iterable[Timing], tier: Tier) -> list[Reading]:
    """The timings that the planner has a formula for."""
    return [
        Reading(what=each.kind, size=(each.size,), precision="fp32", seconds=each.seconds, traffic=float(each.size))
        for each in timings
        if each.tier == tier and each.kind in MESSAGES and each.algorithm in (BUILTIN, TOGETHER)
    ]


def with_links(
    known: Cluster, timings: Sequence[Timing], *, per_host: int, num_hosts: int, source: str, date: str
) -> Cluster:
    """The same devices with measured links, `per_host` on each of `num_hosts` hosts."""
    inside = _tier(known.inside, readings_of(timings, "within"), per_host, nodes=1, inside_latency=0.0)
    across, ranks = readings_of(timings, "across"), per_host * num_hosts
    between = _tier(known.between, across, ranks, nodes=num_hosts, inside_latency=inside.latency)
    return replace(
        known,
        per_node=per_host,
        nodes=num_hosts,
        inside=inside,
        between=between,
        source=f"{known.source or known.device.source}; links: {source}",
        date=date,
    )


def _tier(
    known: paper.Tier, messages: Sequence[Reading], degree: int, *, nodes: int, inside_latency: float
) -> paper.Tier:
    if len({message.size for message in messages}) < 2:  # a link has a latency and a bandwidth
        return known
    return fit_tier(messages, degree, num_nodes=nodes, inside_latency=inside_latency)
