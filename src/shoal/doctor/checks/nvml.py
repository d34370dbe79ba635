"""What NVML says of the GPUs, through ctypes: no package is needed, and no CUDA context is made.

NVML can hang on a sick node, and may crash. So it is called in a child process alone (`bounded`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SLOWED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the rack",
}
"""Reasons for low clocks that show a fault. Low clocks of an idle GPU (0x01) and the power cap (0x04) are usual."""
_UNCORRECTED, _SINCE_REBOOT, _READS = 1, 0, 0
_P2P_UNKNOWN = 6


class NvmlError(Exception):
    """NVML answers with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    memory: int
    free: int
    ecc_errors: int
    """Uncorrected errors of its memory since the last reboot."""
    remap_pending: bool
    """A row of its memory is replaced at the next reset."""
    slowed_by: tuple[str, ...]
    temperature: int
    utilization: int
    uuid: str = ""
    """As CUDA_VISIBLE_DEVICES may name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The driver and its GPUs."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it runs."""
    gpus: tuple[Gpu, ...]
    apart: tuple[tuple[int, int], ...] | None = ()
    """Pairs of GPUs that cannot read each other's memory (P2P); None: unknown."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


def read_driver(library: Any = None) -> Driver:
    """All facts; `OSError` if there is no NVML, `NvmlError` if it fails."""
    lib = library if library is not None else ctypes.CDLL(LIBRARY)
    lib.nvmlErrorString.restype = ctypes.c_char_p
    _call(lib, "nvmlInit_v2")
    version = ctypes.create_string_buffer(96)
    _call(lib, "nvmlSystemGetDriverVersion", version, ctypes.c_uint(96))
    cuda, count = ctypes.c_int(), ctypes.c_uint()
    _call(lib, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda))
    _call(lib, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    gpus = tuple(_gpu(lib, index) for index in range(count.value))
    known = Driver(version=version.value.decode(), cuda=(cuda.value // 1000, cuda.value % 1000 // 10), gpus=gpus)
    return replace(known, apart=_apart(lib, count.value))


def _apart(lib: Any, count: int) -> tuple[tuple[int, int], ...] | None:
    """Pairs of GPUs of which one cannot read the other's memory; None: NVML does not know it of every pair."""
    handles = [ctypes.c_void_p() for _ in range(count)]
    for index, handle in enumerate(handles):
        _call(lib, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    found = []
    for one, other in combinations(range(count), 2):
        status = ctypes.c_uint()
        is_known = _try(lib, "nvmlDeviceGetP2PStatus", handles[one], handles[other], _READS, ctypes.byref(status))
        if not is_known or status.value == _P2P_UNKNOWN:
            return None
        if status.value:
            found.append((one, other))
    return tuple(found)


def _gpu(lib: Any, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    _call(lib, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    _call(lib, "nvmlDeviceGetName", handle, name, ctypes.c_uint(96))
    _call(lib, "nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(96))
    memory, used = _Memory(), _Utilization()
    _call(lib, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    _try(lib, "nvmlDeviceGetUtilizationRates", handle, ctypes.byref(used))
    ecc, reasons, degrees = ctypes.c_ulonglong(), ctypes.c_ulonglong(), ctypes.c_uint()
    _try(lib, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_REBOOT, ctypes.byref(ecc))
    _try(lib, "nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
    _try(lib, "nvmlDeviceGetTemperature", handle, 0, ctypes.byref(degrees))
    rows = [ctypes.c_uint() for _ in range(4)]
    _try(lib, "nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
    return Gpu(
        name=name.value.decode(),
        memory=memory.total,
        free=memory.free,
        ecc_errors=ecc.value,
        remap_pending=bool(rows[2].value or rows[3].value),
        slowed_by=tuple(word for bit, word in SLOWED.items() if reasons.value & bit),
        temperature=degrees.value,
        utilization=used.gpu,
        uuid=uuid.value.decode(),
    )


def _call(lib: Any, name: str, *arguments: Any) -> None:
    code = getattr(lib, name)(*arguments)
    if code:
        said = lib.nvmlErrorString(code)
        raise NvmlError(said.decode() if isinstance(said, bytes) else f"{name}: error {code}")


def _try(lib: Any, name: str, *arguments: Any) -> bool:
    """The same for facts that not every GPU has; False: it is unknown, and the result stays 0."""
    function = getattr(lib, name, None)
    return function is not None and function(*arguments) == 0
