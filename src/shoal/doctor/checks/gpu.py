"""Checks of NVIDIA GPUs and their driver, without torch and without a CUDA context."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from shoal.doctor.bounded import Check
from shoal.doctor.checks.nvml import Driver, Gpu, NvmlError, read_driver
from shoal.doctor.finding import Finding, counted, hint, ok, size, warning, will_fail

SECONDS = 3.0
BUSY = 20
"""Percent of utilization from which another program computes on a GPU."""
TAKEN = 0.1
"""Part of a GPU's memory from which another program holds it."""
DEVICES = Path("/dev")
MIG = "MIG-"
"""How CUDA_VISIBLE_DEVICES names a part of a GPU."""
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")


def checks() -> Iterator[Check]:
    """The checks of GPUs."""
    yield Check("GPUs", gpus, SECONDS, _hangs)
    yield Check("GPU errors", gpu_errors)


def device_files() -> list[Path]:
    """Those of NVIDIA GPUs. A container may have /dev/nvidia3 alone."""
    return sorted(DEVICES.glob("nvidia[0-9]*"))


def visible(gpus: Sequence[Gpu]) -> list[int] | None:
    """Indices of the GPUs that CUDA uses here, in its order; None: parts of GPUs (MIG), whose figures are unknown."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return list(range(len(gpus)))
    if MIG in names:
        return None
    found: list[int] = []
    for word in _words(names):
        index = _index(word, gpus)
        if index is None:  # CUDA drops all devices from the first one that does not exist
            break
        found.append(index)
    return found


def _words(names: str) -> list[str]:
    return [word.strip() for word in names.split(",") if word.strip()]


def _index(word: str, gpus: Sequence[Gpu]) -> int | None:
    """The GPU of a word of CUDA_VISIBLE_DEVICES: an index, or the beginning of a UUID; None: there is none."""
    if word.isdecimal():
        return int(word) if int(word) < len(gpus) else None
    found = [index for index, each in enumerate(gpus) if each.uuid.lower().startswith(word.lower())]
    return found[0] if len(found) == 1 else None


def _hangs(seconds: float) -> Finding:
    if not device_files():
        evidence = f"NVML gave no answer for {seconds:g} s, and there is no device file of a GPU"
        return warning("GPUs", evidence, "ls /dev/nvidia*")
    return will_fail("GPUs", f"the driver gave no answer for {seconds:g} s (NVML)", "sudo dmesg | grep -i xid; reboot")


def gpus(read: Callable[[], Driver] = read_driver) -> Iterator[Finding]:
    """The driver answers, fits torch's CUDA, and no GPU is sick or taken."""
    devices = device_files()
    try:
        driver = read()
    except OSError as error:
        if devices:
            evidence = f"{devices[0]} exists, but the driver's library does not load: {str(error)[:100]}"
            yield will_fail("GPUs", evidence, "docker run --gpus all ...   # or install the driver's user libraries")
        else:
            yield ok("GPUs", "no NVIDIA GPU; training uses the CPU")
        return
    except NvmlError as error:
        if devices or "mismatch" in str(error):
            yield will_fail("GPUs", f"the driver fails: {error}", "sudo reboot   # after an update of the driver")
        else:
            yield ok("GPUs", f"no NVIDIA GPU ({error}); training uses the CPU")
        return
    if not driver.gpus:
        yield warning("GPUs", f"driver {driver.version} sees none", "nvidia-smi; sudo dmesg | grep -i nvrm")
        return
    yield from _check_driver(driver)
    yield from _check_visible(driver.gpus)
    seen = visible(driver.gpus)
    used = range(len(driver.gpus)) if seen is None else seen
    yield from _check_pairs(driver, set(used))
    for index in used:
        yield from _check_gpu(index, driver.gpus[index])


def _check_driver(driver: Driver) -> Iterator[Finding]:
    needed = torch_cuda()
    cuda = ".".join(map(str, driver.cuda))
    kinds = sorted({f"{each.name}, {size(each.memory)}" for each in driver.gpus})
    seen = f"{counted(len(driver.gpus), 'GPU')} ({'; '.join(kinds)}), driver {driver.version} for CUDA {cuda}"
    if needed == ():
        evidence = f"{seen}, but the installed torch is built for CPUs alone"
        yield warning("GPUs", evidence, "pip install --force-reinstall torch   # a build with CUDA")
    elif needed and needed[0] > driver.cuda[0]:
        evidence = f"torch is built for CUDA {'.'.join(map(str, needed))}, and driver {driver.version} runs CUDA {cuda}"
        index = f"https://download.pytorch.org/whl/cu{driver.cuda[0]}{driver.cuda[1]}"
        yield will_fail("GPUs", evidence, f"pip install torch --index-url {index}   # or a newer driver")
    else:
        yield ok("GPUs", seen)


def _check_pairs(driver: Driver, used: set[int]) -> Iterator[Finding]:
    """GPUs that cannot read each other's memory send every byte through the host's."""
    count = len(used)
    if count < 2 or driver.apart is None:
        return
    apart = [pair for pair in driver.apart if used.issuperset(pair)]
    if not apart:
        yield ok("GPU pairs", f"all {counted(count, 'GPU')} read each other's memory (P2P)")
        return
    named = ", ".join(f"{one} and {other}" for one, other in apart[:4])
    named += f" and {len(apart) - 4} more pairs" if len(apart) > 4 else ""
    is_all = len(apart) == count * (count - 1) // 2
    which = f"no pair of the {count} GPUs has P2P" if is_all else f"GPUs {named} have no P2P, others have"
    fix = "nvidia-smi topo -p2p r   # virtualization, ACS or an IOMMU may forbid it: sudo dmesg | grep -i iommu"
    kind = hint if is_all else warning
    yield kind("GPU pairs", f"{which}: their bytes go through the host's memory, which is several times slower", fix)


def _check_visible(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """CUDA drops all devices from the first one that does not exist."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None or MIG in names:
        return
    words = _words(names)
    if not words or any(_index(word, gpus) is None for word in words):
        evidence = f"CUDA_VISIBLE_DEVICES={names!r} with {counted(len(gpus), 'GPU')} here"
        kind = will_fail if words and words != ["-1"] else warning
        yield kind("GPUs", evidence, f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(len(gpus))))}")


def _check_gpu(index: int, gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {index} ({gpu.name})"
    if gpu.ecc_errors:
        evidence = f"{name}: {counted(gpu.ecc_errors, 'uncorrected memory error')} since the last reboot"
        yield will_fail("GPU errors", evidence, f"sudo nvidia-smi -r -i {index}   # and replace it if they come again")
    if gpu.remap_pending:
        yield warning(
            "GPU errors", f"{name}: a row of its memory waits to be replaced", f"sudo nvidia-smi -r -i {index}"
        )
    if gpu.slowed_by:
        evidence = f"{name} is slowed down: {', '.join(gpu.slowed_by)}, {gpu.temperature} °C"
        yield warning("GPU clocks", evidence, f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {index}   # check cooling")
    held = gpu.memory - gpu.free
    if held > TAKEN * gpu.memory or gpu.utilization > BUSY:
        evidence = f"{name}: another program holds {size(held)} and uses {gpu.utilization} %"
        yield warning("GPU in use", evidence, f"nvidia-smi -i {index}   # and end it, or CUDA_VISIBLE_DEVICES=OTHERS")


def torch_cuda() -> tuple[int, ...] | None:
    """The CUDA that torch is built for, read from its files; empty: none; None: unknown."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*(?:'([\d.]+)'|\"([\d.]+)\"|None)", text, re.MULTILINE)
    if found is None:
        return None
    words = found[1] or found[2] or ""
    return tuple(int(word) for word in words.split(".") if word)


def gpu_errors(log: str | None = None) -> Iterator[Finding]:
    """The driver writes faults as Xid to the kernel's log, where this user may read it."""
    text = _kernel_log() if log is None else log
    found = _XID.findall(text)
    if found:
        place, number = found[-1]
        evidence = f"{counted(len(found), 'fault')} (Xid) in the kernel's log; the last is Xid {number} of {place}"
        fix = "sudo dmesg | grep -i xid   # what they mean: https://docs.nvidia.com/deploy/xid-errors"
        yield warning("GPU errors", evidence, fix)


def _kernel_log() -> str:
    if not device_files():
        return ""
    try:
        return subprocess.run(["dmesg"], capture_output=True, text=True, check=False, timeout=1.5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
