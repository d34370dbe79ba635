"""Presets of devices and links, each with where its numbers are from.

Peaks are those of `shoal.predict.presets.peak_flops`; here is what time and memory need beside them. `matmul` is the
largest measured rate of a matrix product ("maximum achievable matmul FLOPS", MAMF, in
stas00/ml-engineering, compute/accelerator/benchmarks); without one, the part of the peak that the nearest relative
reaches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from shoal.predict.cluster import GIB, Cluster, Device, Tier
from shoal.predict.presets.peak_flops import TERA, peak_flops

GB = 1e9
MICRO = 1e-6
PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8")
FP8_PART = 0.92
"""Of the part of the peak that bf16 products reach, what fp8 products do, scaling included. An assumption, since no
table of ceilings exists. `shoal calibrate` found 0.83 on one H200 (bf16 764 of 989, fp8 1264 of 1979 TFLOP/s:
benchmarks/results/planner_nvidia-h200_2026-11-15.md), and its figures replace the preset's. With 0.82 or 1.0, the
median error of Megatron-Bridge's times in `shoal backtest RUNS.csv` is 18.8 or 17.9 % in place of 16.8 %."""


def _tier(name: str, gb_per_s: float, latency: float, base: float, source: str) -> Tier:
    """`latency` and `base` in microseconds."""
    return Tier(name=name, bandwidth=gb_per_s * GB, latency=latency * MICRO, base=base * MICRO, source=source)


_NCCL = "AutoParallel's port of nccl tuning.cc"
_TESTS = "bus bandwidth of large messages in nccl-tests"

_TIERS = (
    # Inside a node. Bandwidth is what a device receives while all of its group send: of NVLink, what large collectives
    # reach rather than the sum of all lanes. Latency is one step of NCCL's Simple protocol: 3.4 µs over NVLink, 14 over
    # InfiniBand in its tuning tables; others are assumptions around it. `base` is an assumption everywhere: those
    # tables have 6.6 to 14 µs for a ring, and a launch comes on top. Both matter for short messages alone.
    _tier("nvlink5", 640, 3.0, 15, f"B200: {_NCCL}, 640 GB/s used"),
    _tier("nvlink4", 320, 3.4, 15, f"H100: {_NCCL}, 320 GB/s used"),
    _tier("nvlink3", 230, 3.4, 20, f"DGX A100: {_TESTS}"),
    _tier("nvlink3-a800", 155, 3.4, 20, "A800: 400 of the A100's 600 GB/s"),
    _tier("nvlink2", 120, 4.0, 20, f"DGX-1V: {_TESTS}"),
    _tier("nvlink-bridge", 100, 4.0, 20, "600 GB/s between two cards, PCIe beyond"),
    _tier("infinity4", 300, 4.0, 20, "MI300X: bus bandwidth of large messages in rccl-tests"),
    _tier("infinity3", 120, 5.0, 20, "MI250X: bus bandwidth of large messages in rccl-tests"),
    _tier("pcie5", 40, 6.0, 25, "64 GB/s a direction, less headers and sharing"),
    _tier("pcie4", 20, 6.0, 25, "32 GB/s a direction, less headers and sharing"),
    _tier(
        "memory", 2, 50, 100, "gloo between processes of one host, an order of magnitude; shoal calibrate measures it"
    ),
    # Between nodes: 90 % of the share of one device, an assumption for headers and flow control.
    _tier("infiniband-xdr", 90, 14, 25, "800 Gb/s a device"),
    _tier("infiniband-ndr", 45, 14, 25, "400 Gb/s a device"),
    _tier("infiniband-hdr", 22.5, 14, 25, "200 Gb/s a device"),
    _tier("infiniband-edr", 11, 14, 25, "100 Gb/s a device"),
    _tier("efa", 40, 30, 60, "AWS p5: 3200 Gb/s a node of 8"),
    _tier("roce-200", 20, 20, 40, "1600 Gb/s a node of 8"),
    _tier("roce-50", 5.6, 20, 40, "4 x 100 Gb/s a node of 8"),
    _tier("omnipath-50", 5.6, 20, 40, "4 x 100 Gb/s a node of 8"),
    _tier("ethernet-400", 40, 20, 40, "400 Gb/s a device, RoCE"),
    _tier("ethernet-100", 1.4, 40, 80, "100 Gb/s a node of 8, TCP"),
    _tier("ethernet-10", 1.1, 60, 120, "10 Gb/s a node of 1, TCP"),
)
TIERS = {tier.name: tier for tier in _TIERS}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A device of the table below."""

    torch_name: str
    """Its name in `peak_flops`."""
    memory: float
    """GiB that torch reports."""
    bandwidth: float
    """GB/s of memory, by the datasheet."""
    matmul: float
    """bf16 or fp16 TFLOP/s that large products reach."""
    inside: str
    between: str
    per_node: int = 8
    price: float | None = None
    """Dollars an hour, on demand at large clouds, rounded, mid 2026; `--price` sets another."""
    is_modern: bool = False
    """See `Device`."""
    peaks: tuple[float, float, float] | None = None
    """TFLOP/s in fp32, bf16 and fp8 where `peak_flops` does not have them."""
    context: float = 1.5
    """GiB, see `Device`."""
    source: str = ""


def _nvidia(torch_name: str, memory: float, bandwidth: float, matmul: float, inside: str, between: str) -> Entry:
    source = f"NVIDIA {torch_name} datasheet; matmul: MAMF"
    is_modern = "V100" not in torch_name and "A100" not in torch_name
    return Entry(
        torch_name=torch_name,
        memory=memory,
        bandwidth=bandwidth,
        matmul=matmul,
        inside=inside,
        between=between,
        is_modern=is_modern,
        source=source,
    )


def _with(entry: Entry, **changes: object) -> Entry:
    return replace(entry, **changes)  # type: ignore[arg-type]


_RELATIVE = "matmul: none is published; the part of the peak that its nearest relative reaches"
_H100 = _with(_nvidia("H100 80GB HBM3", 79.1, 3350, 794, "nvlink4", "infiniband-ndr"), price=6.88)
_A100 = _nvidia("A100", 79.2, 2039, 271, "nvlink3", "infiniband-hdr")
_B200 = _with(_nvidia("B200", 178, 8000, 1745, "nvlink5", "infiniband-ndr"), price=14.24)
_GB200 = _with(_nvidia("GB200", 184, 8000, 1822, "nvlink5", "infiniband-ndr"), per_node=72)
_MI300X = Entry(
    torch_name="MI300X",
    memory=191.5,
    bandwidth=5300,
    matmul=668,
    inside="infinity4",
    between="infiniband-ndr",
    is_modern=True,
    source="AMD MI300X datasheet; matmul: MAMF",
)

DEVICES = {
    "v100": _with(
        _nvidia("V100-SXM2", 31.7, 900, 105, "nvlink2", "infiniband-edr"),
        price=3.06,
        source=f"NVIDIA V100 datasheet; {_RELATIVE}",
    ),
    "a100-40": _with(_A100, memory=39.4, bandwidth=1555, price=4.10),
    "a100-80": _with(_A100, price=5.12),
    "a800": _with(_A100, inside="nvlink3-a800", source="NVIDIA A800 datasheet; matmul: MAMF of the A100"),
    "h100": _H100,
    "h100-pcie": _with(
        _nvidia("H100 PCIe", 79.1, 2000, 520, "pcie5", "infiniband-ndr"),
        source=f"NVIDIA H100 PCIe datasheet, 350 W; {_RELATIVE}",
    ),
    "h100-nvl": _with(
        _nvidia("H100 NVL", 93.1, 3900, 610, "nvlink-bridge", "infiniband-ndr"),
        source=f"NVIDIA H100 NVL datasheet, 400 W; {_RELATIVE}",
    ),
    "h100-96": _with(
        _H100,
        memory=94.5,
        bandwidth=2400,
        matmul=640,
        between="ethernet-400",
        price=None,
        source="torchtitan benchmarks: 96 GB of HBM2e, 2.4 TB/s, 500 W; matmul: 794 at 700 W, less by the power",
    ),
    "h200": _with(_nvidia("H200", 139.8, 4800, 794, "nvlink4", "infiniband-ndr"), price=7.91),
    "b200": _B200,
    "gb200": _GB200,
    "b300": _with(
        _B200,
        torch_name="B300",
        memory=268,
        matmul=1920,
        between="infiniband-xdr",
        price=None,
        peaks=(75, 2250, 4500),
        source="NVIDIA HGX B300 datasheet; matmul: of the B200, more by its power, 1100 for 1000 W",
    ),
    "gb300": _with(
        _GB200,
        torch_name="GB300",
        memory=277,
        matmul=2120,
        between="infiniband-xdr",
        peaks=(80, 2500, 5000),
        source="NVIDIA GB300 NVL72 datasheet; matmul: of the GB200, more by its power, 1400 for 1200 W",
    ),
    "mi250x": _with(
        _MI300X,
        torch_name="MI250X",
        memory=63.9,
        bandwidth=1638,
        matmul=147,
        inside="infinity3",
        between="infiniband-hdr",
        is_modern=False,
        source="AMD MI250X datasheet, half a board, which torch counts as a device; matmul: MAMF",
    ),
    "mi300x": _MI300X,
    "mi325x": _with(_MI300X, memory=255.5, bandwidth=6000, matmul=785, source="AMD MI325X datasheet; matmul: MAMF"),
    "mi355x": _with(
        _MI300X,
        torch_name="MI355X",
        memory=287.5,
        bandwidth=8000,
        matmul=1580,
        peaks=(157.3, 2516.6, 5033.2),
        source=f"AMD MI355X datasheet; {_RELATIVE}",
    ),
    "l40s": _with(
        _nvidia("L40S", 44.4, 864, 250, "pcie4", "ethernet-100"),
        price=1.86,
        is_modern=False,
        source=f"NVIDIA L40S datasheet; {_RELATIVE}",
    ),
    "rtx4090": _with(
        _nvidia("RTX 4090", 23.5, 1008, 150, "pcie4", "ethernet-10"),
        is_modern=False,
        source=f"NVIDIA Ada whitepaper; {_RELATIVE}",
    ),
    "cpu": Entry(
        torch_name="CPU",
        memory=16,
        bandwidth=40,
        matmul=0.05,
        inside="memory",
        between="ethernet-10",
        per_node=2,
        peaks=(0.1, 0.05, 0.05),
        context=0.3,  # of Python and torch after a small step: 0.27 to 0.32 measured (torch 2.13, Intel Xeon)
        source="some cores of a server, an order of magnitude; shoal calibrate measures this one",
    ),
}
"""Name → what is known of it."""


@lru_cache(maxsize=64)
def preset_device(name: str) -> Device:
    """A device of the table."""
    row = DEVICES[name]
    rates = {word: peak_flops(row.torch_name, word) for word in PRECISIONS}
    peak = {word: rate for word, rate in rates.items() if rate is not None}
    if row.peaks:
        fp32, half, eighth = row.peaks
        peak = {word: rate * TERA for word, rate in zip(PRECISIONS, (fp32 / 2, fp32, half, half, eighth), strict=True)}
    reached = row.matmul * TERA / peak["bf16" if "bf16" in peak else "fp16"]
    return Device(
        name=name,
        peak=peak,
        achievable={word: rate * reached * (FP8_PART if word == "fp8" else 1.0) for word, rate in peak.items()},
        memory=row.memory * GIB,
        bandwidth=row.bandwidth * GB,
        is_modern=row.is_modern,
        context=row.context * GIB,
        source=row.source,
    )


@lru_cache(maxsize=256)
def preset(name: str, *, per_node: int, nodes: int, between: str | None = None) -> Cluster:
    """Nodes of a device of the table, with the links that such nodes usually have."""
    row = DEVICES[name]
    return Cluster(
        device=preset_device(name),
        per_node=per_node,
        nodes=nodes,
        inside=TIERS[row.inside],
        between=TIERS[between or row.between],
        price=row.price,
        source=row.source,
        date="2026-11-15",
    )
