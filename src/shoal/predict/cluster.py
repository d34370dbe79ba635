"""The machines on paper: devices, the links between them, how many there are, and what they cost.

A `Cluster` is a preset (`h100:8x16`: 16 nodes of 8), a YAML file, or `here`, what `shoal calibrate` has measured. All
rates are what one device sees: bandwidth of a link in one direction, as bytes that arrive per second. Two rates of
compute stand side by side: the vendor's peak, of which an MFU is a fraction, and what the largest matrix products
really reach, which is what time is predicted from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from shoal.blueprint.validation.bounds import check_bounds
from shoal.errors import ShoalError, listed, raise_if

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as torch counts them."""

    name: str
    peak: Mapping[str, float]
    """Precision → dense FLOP/s of the datasheet."""
    achievable: Mapping[str, float]
    """Precision → FLOP/s that large matrix products reach."""
    memory: float
    """Bytes that a process can allocate when no other process does."""
    bandwidth: float
    """Bytes/s of its memory, by the datasheet."""
    streaming: float = 0.85
    """The part of that bandwidth that reading and writing long tensors reaches. An assumption, between the 0.7 and 0.9
    of other cost models; `shoal calibrate` measures it, and found 0.89 on an H200."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Precision → FLOP/s of a fused attention kernel with heads of 128. Empty: a fixed part of `achievable`."""
    is_modern: bool = False
    """Whether its matrix units are fed asynchronously, as Hopper's and later ones: older attention kernels do not."""
    host_factor: float = 1.0
    """How long the host takes to launch a kernel, beside the usual server. A calibrated machine says its own."""
    context: float = 1.5 * GIB
    """Bytes outside of torch's allocator: the context, libraries, buffers of communicators. An assumption, since 1 to 3
    GiB are usual; `shoal calibrate` measures it."""
    source: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth))

    @cached_property
    def is_host(self) -> bool:
        """Whether it is a CPU, without a GPU's context in its memory."""
        return self.name.lower().startswith("cpu")

    def rate(self, precision: str) -> float:
        """FLOP/s of large products at a precision; the next better one where there are no units for it."""
        for word in _fallbacks(precision):
            if word in self.achievable:
                return self.achievable[word]
        raise ShoalError(f"{self.name} has no rate for {precision}", fix=f"{listed(self.achievable)}", code="Q015")

    def peak_rate(self, precision: str) -> float:
        """The datasheet's FLOP/s at a precision."""
        for word in _fallbacks(precision):
            if word in self.peak:
                return self.peak[word]
        return self.rate(precision)


def _fallbacks(precision: str) -> tuple[str, ...]:
    """What is computed in instead where a device lacks a precision."""
    return {
        "fp8": ("fp8", "bf16", "fp16", "fp32"),
        "bf16": ("bf16", "fp16", "fp32"),
        "fp16": ("fp16", "bf16", "fp32"),
        "fp64": ("fp64", "fp32"),
    }.get(precision, (precision,))


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One kind of link."""

    name: str
    bandwidth: float
    """Bytes/s that one device receives in long messages, while all do."""
    latency: float
    """Seconds that one step of a collective takes, however small."""
    base: float = 10e-6
    """Seconds that any collective takes, however few steps it has. An assumption, where a tier does not say."""
    gathering: float = 1.0
    """The part of that bandwidth that gathers and scatters reach. NCCL's are as fast as its sums, gloo's are not."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices.

    >>> from shoal.predict.cluster_parser import parse_cluster
    >>> cluster = parse_cluster("h100:8x16")
    >>> cluster.num_devices, cluster.device.name
    (128, 'h100')
    """

    device: Device
    per_node: int
    nodes: int = 1
    inside: Tier
    between: Tier
    price: float | None = None
    """Money for one device and one hour. None: unknown."""
    is_measured: bool = False
    """Whether the rates were measured on these very machines."""
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        for key in ("per_node", "nodes"):
            if getattr(self, key) < 1:
                raise ShoalError(
                    f"{key}={getattr(self, key)} is not a number of machines", fix=f"{key}=1 or more", code="Q016"
                )
        raise_if(
            check_bounds([("per_node", self.per_node), ("nodes", self.nodes), ("devices", self.per_node * self.nodes)])
        )

    def __hash__(self) -> int:
        return hash((self.device, self.per_node, self.nodes))

    @cached_property
    def num_devices(self) -> int:
        """All of them."""
        return self.per_node * self.nodes

    def resized(self, num_devices: int) -> Cluster:
        """The same machines, with `num_devices` devices."""
        if num_devices <= self.per_node:
            return replace(self, per_node=num_devices, nodes=1)
        if num_devices % self.per_node:
            fix = f"a multiple of {self.per_node}"
            raise ShoalError(f"{num_devices} devices do not fill nodes of {self.per_node}", fix=fix, code="Q017")
        return replace(self, nodes=num_devices // self.per_node)

    def to_mapping(self) -> dict[str, Any]:
        """As keys and values; `cluster_from_mapping` reads it back."""
        return asdict(self)

    def to_yaml(self) -> str:
        """The text of a file that `cluster_from_yaml` reads."""
        import yaml

        text: str = yaml.safe_dump(self.to_mapping(), sort_keys=False)
        return text

    def __str__(self) -> str:
        return f"{self.device.name}:{self.per_node}x{self.nodes}"

    # ---- collectives ------------------------------------------------------------------------------------------------

    def link(self, degree: int, stride: int) -> Link:
        """What a group of ranks sees that are `stride` apart, when ranks fill one node after the other."""
        nodes = min(self.nodes, _nodes_spanned(degree, stride, self.per_node))
        if nodes == 1:
            one = self.inside
            return Link(degree, 1, one.bandwidth, one.latency, one.base, gathering=one.gathering)
        members = max(1, self.per_node // stride)  # that share a node
        members = 1 if members >= degree else members  # it would fit into a node, and its last member is in the next
        bandwidth = min(self.inside.bandwidth, members * self.between.bandwidth)
        between = self.between
        return Link(
            degree,
            nodes,
            bandwidth,
            between.latency,
            between.base,
            self.inside.latency,
            gathering=between.gathering,
            alone=min(self.inside.bandwidth, between.bandwidth),
            members=members,
        )


@dataclass(frozen=True, slots=True)
class Link:
    """A group of ranks, and the slowest link in it."""

    degree: int
    nodes: int
    bandwidth: float
    latency: float
    base: float
    inside_latency: float = 0.0
    gathering: float = 1.0
    alone: float = 0.0
    """Bytes/s between two devices of different nodes: one share of the network, where `bandwidth` is that of all
    members of a node together."""
    members: int = 1
    """Of a node."""

    def gather(self, size: float) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes in all."""
        if self.degree == 1:
            return 0.0
        share = (self.degree - 1) / self.degree
        return self.base + self._steps() + share * size / (self.bandwidth * self.gathering)

    def latency_of_gather(self) -> float:
        """Seconds of a gather of next to nothing."""
        return self.base + self._steps() if self.degree > 1 else 0.0

    def reduce(self, size: float) -> float:
        """Seconds of an all-reduce: by a ring for long messages, by a tree for short ones."""
        if self.degree == 1:
            return 0.0
        share = 2 * (self.degree - 1) / self.degree
        ring = 2 * self._steps() + share * size / self.bandwidth
        # The textbook's tree sends 2 x size; NCCL's reach a part of the bandwidth, 0.4 to 1.0 by size. 0.8 is assumed.
        tree = 2 * math.log2(self.degree) * self.latency + 2.5 * size / self.bandwidth
        return self.base + min(ring, tree)

    def exchange(self, size: float) -> float:
        """Seconds of an all-to-all in which each rank sends `size` bytes in all: what leaves a node goes by the rank's
        own share of the network."""
        if self.degree == 1:
            return 0.0
        if self.nodes == 1:
            return self.base + self.latency + (self.degree - 1) / self.degree * size / self.bandwidth
        return self.base + self.latency + (self.degree - self.members) / self.degree * size / self.alone

    def send(self, size: float) -> float:
        """Seconds of one message to a neighbour, who is on another node for some if there are several."""
        return self.base + self.latency + size / (self.bandwidth if self.nodes == 1 else self.alone)

    def _steps(self) -> float:
        """Latency of going round once: most hops stay inside a node."""
        if self.nodes == 1:
            return (self.degree - 1) * self.latency
        return (self.nodes - 1) * self.latency + (self.degree - self.nodes) * self.inside_latency


def _nodes_spanned(degree: int, stride: int, per_node: int) -> int:
    """The most nodes that one group of `degree` ranks has members in, when they are `stride` apart.

    Groups start at every rank below `stride`, and again after each `degree * stride` ranks. The worst one starts at the
    last place of a node at which any of them starts.

    >>> _nodes_spanned(6, 4, 6), _nodes_spanned(16, 1, 8), _nodes_spanned(4, 8, 8)
    (4, 2, 4)
    """
    if stride >= per_node:
        return degree
    cycle = math.gcd(degree * stride, per_node)
    start = per_node - cycle + min(stride, cycle) - 1
    return (start + (degree - 1) * stride) // per_node + 1
