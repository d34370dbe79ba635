"""The device of a rank: which precisions it multiplies in, its memory and its name."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from shoal.comm.world import World


def supports(device: torch.device, precision: str) -> bool:
    """Whether a device multiplies in a precision, without emulating it."""
    if device.type == "cpu":
        return precision != "fp8"
    if precision == "bf16":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return precision != "fp8" or torch.cuda.get_device_capability(device) >= (8, 9)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_of_rank(world: World) -> float:
    """Bytes that a rank has to itself: its GPU's, or its share of the host's."""
    if world.device.type == "cuda":
        return float(torch.cuda.mem_get_info(world.device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.local_size


def outside_of_allocator(device: torch.device) -> float:
    """Bytes of a GPU in use that torch's allocator does not count: context, libraries, communicators."""
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free - torch.cuda.memory_reserved(device))


def cpu_name() -> str:
    """The CPU's model name in /proc/cpuinfo, or its architecture where that has none, as on ARM."""
    lines = _cpu_lines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {names[0] if names else platform.machine()}"


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
