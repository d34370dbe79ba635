"""The machines on paper: devices, the links between them, how many there are, and what they cost.

A `Cluster` is a preset (`h100:8x16`: 16 nodes of 8), a YAML file, or `here`, what `shoal calibrate` has measured. All
rates are what one device sees: bandwidth of a link in one direction, as bytes that arrive per second. Two rates of
compute stand side by side: the vendor's peak, of which an MFU is a fraction, and what the largest matrix products
really reach, which is what time is predicted from.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.blueprint.validation.bounds import check_bounds
from shoal.errors import ShoalError, listed, nearest, raise_if

GIB = 2.0**30
HERE = "here"
"""The name of the machine at hand."""


def here_file() -> Path:
    """Where a machine's own measurement is kept: written by `shoal calibrate`, read by `--cluster here`."""
    try:
        return Path.home() / ".config" / "shoal" / "here.yaml"
    except RuntimeError:  # a user without an entry in the password database, as in some containers
        what = "the measurement of this machine is kept in the home directory, and this user has none"
        raise ShoalError(what, fix="export HOME=/a/folder; or a preset: --cluster h100:8") from None


def is_measured_here() -> bool:
    """Whether there is a measurement of this machine that this user may look for."""
    try:
        return os.path.exists(here_file())  # False, where Path.exists raises, for what may not be looked at
    except ShoalError:
        return False


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as torch counts them."""

    name: str
    peak: Mapping[str, float]
    """Precision → dense FLOP/s of the datasheet."""
    achievable: Mapping[str, float]
    """Precision → FLOP/s that large matrix products reach."""
    memory: float
    """Bytes that a process can allocate when nobody else does."""
    bandwidth: float
    """Bytes/s of its memory, by the datasheet."""
    streaming: float = 0.85
    """The part of that bandwidth that reading and writing long tensors reaches."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Precision → FLOP/s of a fused attention kernel with heads of 128. Empty: a fixed part of `achievable`."""
    is_modern: bool = False
    """Whether its matrix units are fed asynchronously, as Hopper's and later ones: older attention kernels do not."""
    host_factor: float = 1.0
    """How long the host takes to launch a kernel, beside the usual server. A calibrated machine says its own."""
    context: float = 1.5 * GIB
    """Bytes outside of torch's allocator: the context, libraries, buffers of communicators."""
    source: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth))

    @cached_property
    def is_host(self) -> bool:
        """Whether it is the processor itself, with no libraries of a GPU's beside it."""
        return self.name.lower().startswith("cpu")

    def rate(self, precision: str) -> float:
        """FLOP/s of large products at a precision; the next better one where there are no units for it."""
        for word in _fallbacks(precision):
            if word in self.achievable:
                return self.achievable[word]
        raise ShoalError(f"{self.name} has no rate for {precision}", fix=f"{listed(self.achievable)}")

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
    """Seconds that any collective takes, however few steps it has."""
    gathering: float = 1.0
    """The part of that bandwidth that gathers and scatters reach. NCCL's are as fast as its sums, gloo's are not."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices.

    >>> cluster = Cluster.parse("h100:8x16")
    >>> cluster.num_devices, cluster.device.name
    (128, 'h100')
    """

    device: Device
    per_node: int
    nodes: int = 1
    inside: Tier
    between: Tier
    price: float | None = None
    """Money for one device and one hour. None: nobody said."""
    is_measured: bool = False
    """Whether the rates were measured on these very machines."""
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        for key in ("per_node", "nodes"):
            if getattr(self, key) < 1:
                raise ShoalError(f"{key}={getattr(self, key)} is not a number of machines", fix=f"{key}=1 or more")
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
        """The same machines, as many as are needed for so many devices."""
        if num_devices <= self.per_node:
            return replace(self, per_node=num_devices, nodes=1)
        if num_devices % self.per_node:
            fix = f"a multiple of {self.per_node}"
            raise ShoalError(f"{num_devices} devices do not fill nodes of {self.per_node}", fix=fix)
        return replace(self, nodes=num_devices // self.per_node)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A preset with a size (`h200:8`, `h100:8x16`), the path of a YAML file, or the machine at hand as `shoal
        calibrate` has measured it: `here`. A file and `here` take another size as well: `here:4`, `lab.yaml:8x2`."""
        if _is_path(text):
            path, size = _path_and_size(text)
            return _sized(cls.from_yaml(Path(path)), path, size)
        from shoal.predict.presets.clusters import DEVICES, preset

        name, _, size = text.partition(":")
        name = name.strip().lower()
        if name == HERE:
            return cls._here(size)
        if name not in DEVICES:
            longer = [f"{known}:{size or 8}" for known in DEVICES if known.startswith(name)]
            near = nearest(name, DEVICES)
            others = f"{f'{near}:{size or 8}? ' * bool(near)}There are {', '.join(DEVICES)}; or the path of a YAML file"
            raise ShoalError(f"there is no preset of a device {name!r}", fix=listed(longer) if longer else others)
        per_node, nodes = _size(name, size or str(DEVICES[name].per_node))
        return preset(name, per_node=per_node, nodes=nodes)

    @classmethod
    def _here(cls, size: str) -> Cluster:
        """The machine at hand, with as many devices as were measured or as are asked for."""
        path = here_file()
        if not os.path.exists(path):
            what = f"this machine was not measured: there is no {path}"
            raise ShoalError(what, fix="shoal calibrate, which takes a minute; or a preset such as h100:8")
        return _sized(cls.from_yaml(path), HERE, size)

    def to_mapping(self) -> dict[str, Any]:
        """As keys and values; `from_mapping` reads it back."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, said: Mapping[str, Any]) -> Cluster:
        """From keys and values, such as those of a YAML file. `like` names a preset that they change: `{"like":
        "h100:8x4", "between": "ethernet-100", "price": 2}`."""
        said = {key: _named_tier(value) if key in ("inside", "between") else value for key, value in said.items()}
        if "like" in said:
            said = _changed(_preset(said.pop("like")).to_mapping(), said)
        for key, kind in (("device", Device), ("inside", Tier), ("between", Tier)):
            if key not in said:
                fix = f"{key}: with {listed(_keys(kind))}; or like: h100:8, and what is different"
                raise ShoalError(f"the cluster does not say its {key}", fix=fix)
            said[key] = _build(kind, said[key], key)
        built: Cluster = _build(cls, said, "the cluster")
        return built

    def to_yaml(self) -> str:
        """The text of a file that `from_yaml` reads."""
        import yaml

        text: str = yaml.safe_dump(self.to_mapping(), sort_keys=False)
        return text

    @classmethod
    def from_yaml(cls, path: Path) -> Cluster:
        """From a file, such as one that `shoal calibrate` has written."""
        from shoal.safe_parsing import parse_yaml, read_text

        try:
            text = read_text(path, fix="shoal calibrate writes one")
        except OSError as error:
            fix = "shoal calibrate writes one, or say a preset such as h100:8x2"
            raise ShoalError(f"the cluster file {path} cannot be read: {error.strerror}", fix=fix) from error
        said = parse_yaml(text, str(path), "shoal calibrate writes one")
        if not isinstance(said, Mapping):
            raise ShoalError(f"{path} holds no keys and values", fix="shoal calibrate writes one")
        return cls.from_mapping(said)

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


def _size(name: str, size: str) -> tuple[int, int]:
    """Devices of a node, and nodes, as they are written behind the name of a cluster.

    >>> _size("h100", "8x16"), _size("h100", "4")
    ((8, 16), (4, 1))
    """
    match = re.fullmatch(r"(\d{1,15})(?:x(\d{1,15}))?", size.strip())
    if not match or int(match[1]) < 1 or (match[2] and int(match[2]) < 1):
        what = f"{size[:80]!r} is not a number of devices"
        raise ShoalError(what, fix=f"{name}:8 for one node of 8, {name}:8x16 for 16 of them")
    return int(match[1]), int(match[2] or 1)


def _sized(cluster: Cluster, name: str, size: str) -> Cluster:
    """The same machines, in the numbers that were asked for, if any were."""
    if not size:
        return cluster
    per_node, nodes = _size(name, size)
    return replace(cluster, per_node=per_node, nodes=nodes)


def larger(text: str) -> Iterator[str]:
    """Clusters in the form of this one, each with twice the devices of the one before: a node is filled up as far as
    such nodes usually are, then there are more nodes.

    >>> from itertools import islice
    >>> list(islice(larger("rtx4090:2"), 3)), list(islice(larger("h100:1x4"), 2)), next(larger("a/lab.yaml:4"))
    (['rtx4090:4', 'rtx4090:8', 'rtx4090:8x2'], ['h100:1x8', 'h100:1x16'], 'a/lab.yaml:4x2')
    """
    from shoal.predict.presets.clusters import DEVICES

    name, size = _path_and_size(text) if _is_path(text) else (text.partition(":")[0], text.partition(":")[2])
    says_nodes, preset = "x" in size, DEVICES.get(name.strip().lower())
    per_node, nodes = _size(name, size) if size else (0, 1)
    if not size:
        cluster = Cluster.parse(text)
        per_node, nodes = cluster.per_node, cluster.nodes
    usual = preset.per_node if preset and not says_nodes else 0
    while True:
        if nodes == 1 and per_node * 2 <= usual:
            per_node *= 2
        else:
            nodes *= 2
        yield f"{name}:{per_node}x{nodes}" if nodes > 1 else f"{name}:{per_node}"


def _keys(kind: type[Any]) -> list[str]:
    return [entry.name for entry in fields(kind)]


def _build(kind: type[Any], said: Any, where: str) -> Any:
    """An object from its keys, each known and none missing."""
    if not isinstance(said, Mapping):
        raise ShoalError(f"{where} is {said!r}, not keys and values", fix=f"{where}: with {listed(_keys(kind))}")
    types = {field.name: str(field.type) for field in fields(kind)}
    for key in said:
        if key not in types:
            fix = nearest(str(key), _keys(kind)) or listed(_keys(kind))
            raise ShoalError(f"{where} has no key {key!r}", fix=fix)
    try:
        return kind(**{key: _number(value, types[key], f"{where}: {key}") for key, value in said.items()})
    except TypeError as error:
        raise ShoalError(
            f"{where} is not complete: {error}", fix=f"shoal calibrate writes all of {_keys(kind)}"
        ) from None


def _number(value: Any, type_name: str, where: str) -> Any:
    """What a key holds, as a number if it is one; YAML takes 25e9 for a word."""
    if isinstance(value, Mapping):  # of rates by precision
        return {key: _number(rate, "float", f"{where}: {key}") for key, rate in value.items()}
    if not type_name.startswith(("float", "int")) or (value is None and "None" in type_name):
        return value
    is_whole = type_name == "int"
    try:
        number = float(value)
        is_fit = not isinstance(value, bool) and math.isfinite(number) and number >= 0
    except (TypeError, ValueError):
        is_fit = False
    if not is_fit or (is_whole and not number.is_integer()):
        kind = "a whole number" if is_whole else "a number"
        raise ShoalError(f"{where} is {value!r}, not {kind}", fix=f"{kind}, 0 or more")
    return int(number) if is_whole else number


def _is_path(text: str) -> bool:
    return _path_and_size(text)[0].endswith((".yaml", ".yml")) or "/" in text


def _path_and_size(text: str) -> tuple[str, str]:
    """A file, and the size behind it, if there is one.

    >>> _path_and_size("lab.yaml:8x2"), _path_and_size("a/lab.yaml")
    (('lab.yaml', '8x2'), ('a/lab.yaml', ''))
    """
    match = re.fullmatch(r"(.*\.ya?ml):(\d+(?:x\d+)?)", text)
    return (match[1], match[2]) if match else (text, "")


def _preset(name: Any) -> Cluster:
    """That a file is like; another file could be like this one, and so on."""
    if not isinstance(name, str) or _is_path(name):
        raise ShoalError(f"like: {name!r} is no preset", fix="like: h100:8x4, or like: here")
    return Cluster.parse(name)


def _named_tier(value: Any) -> Any:
    """The keys of a kind of link that is said by its name."""
    from shoal.predict.presets.clusters import TIERS

    if not isinstance(value, str):
        return value
    if value not in TIERS:
        raise ShoalError(f"there is no kind of link {value!r}", fix=nearest(value, TIERS) or listed(TIERS))
    return asdict(TIERS[value])


def _changed(all_of: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The first with what is said in its place, key by key, however deep."""
    changed = {
        key: _changed(all_of[key], value)
        if isinstance(value, Mapping) and isinstance(all_of.get(key), Mapping)
        else value
        for key, value in said.items()
    }
    return {**all_of, **changed}
