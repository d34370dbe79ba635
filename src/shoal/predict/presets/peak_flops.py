"""How fast an accelerator could be at best: the vendor's dense peak per precision, found by the name torch gives it.

An MFU is a fraction of this number, so a wrong one is worse than none: a device or a precision that the table does not
hold has no peak here, and no MFU is shown.
"""

from __future__ import annotations

TERA = 1e12

# Name as torch prints it, or a part of it made of whole words → TFLOP/s. All are dense (datasheets like to print the
# double, with 2:4 sparsity), with fp32 accumulation, of one device as torch counts devices. fp32 is plain IEEE fp32 and
# not tf32; fp64 is that of matrix units where there are any. What the hardware or its datasheet lacks is not in the
# row; a row without any precision says that a name only looks like a known one.
_PEAKS: dict[str, dict[str, float]] = {
    # NVIDIA DGX B200 and HGX B200 datasheet, an eighth of the board; GB200 NVL72 datasheet, one of 72
    "GB200": {"fp64": 40, "fp32": 80, "bf16": 2500, "fp16": 2500, "fp8": 5000},
    "B200": {"fp64": 37, "fp32": 75, "bf16": 2250, "fp16": 2250, "fp8": 4500},
    # NVIDIA H200 and GH200 datasheets
    "GH200": {"fp64": 67, "fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979},
    "H200 NVL": {"fp64": 60, "fp32": 60, "bf16": 835, "fp16": 835, "fp8": 1671},
    "H200": {"fp64": 67, "fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979},
    # NVIDIA H100 datasheet: SXM5 (which torch calls by its memory), PCIe and NVL differ in clock and in number of units
    "H100 80GB HBM3": {"fp64": 67, "fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979},
    "H100 PCIe": {"fp64": 51, "fp32": 51, "bf16": 756, "fp16": 756, "fp8": 1513},
    "H100 NVL": {"fp64": 60, "fp32": 60, "bf16": 835, "fp16": 835, "fp8": 1671},
    # NVIDIA A100 datasheet: the same for SXM4 and PCIe, 40 and 80 GB
    "A100": {"fp64": 19.5, "fp32": 19.5, "bf16": 312, "fp16": 312},
    # NVIDIA L40S, L40, L4, A40 and A10 datasheets; RTX A6000: GA102 whitepaper
    "L40S": {"fp32": 91.6, "bf16": 362, "fp16": 362, "fp8": 733},
    "L40": {"fp32": 90.5, "bf16": 181, "fp16": 181, "fp8": 362},
    "L4": {"fp32": 30.3, "bf16": 121, "fp16": 121, "fp8": 242.5},
    "A40": {"fp32": 37.4, "bf16": 149.7, "fp16": 149.7},
    "A10": {"fp32": 31.2, "bf16": 125, "fp16": 125},
    "RTX A6000": {"fp32": 38.7, "bf16": 154.8, "fp16": 154.8},
    # NVIDIA Ada and GA102 whitepapers; GeForce cards halve the rate when they accumulate in fp32, as torch does
    "RTX 4090": {"fp32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
    "RTX 4090 D": {},
    "RTX 4090 Laptop": {},
    "RTX 3090": {"fp32": 35.6, "bf16": 71, "fp16": 71},
    "RTX 3090 Ti": {},
    # NVIDIA V100 and V100S datasheet, T4 datasheet: no bf16 before Ampere
    "V100-SXM2": {"fp64": 7.8, "fp32": 15.7, "fp16": 125},
    "V100-PCIE": {"fp64": 7, "fp32": 14, "fp16": 112},
    "V100S-PCIE": {"fp64": 8.2, "fp32": 16.4, "fp16": 130},
    "T4": {"fp32": 8.1, "fp16": 65},
    # AMD Instinct datasheets; torch sees the two dies of an MI250X as two devices, so the row is half a board
    "MI250X": {"fp64": 47.9, "fp32": 47.9, "bf16": 191.5, "fp16": 191.5},
    "MI300X": {"fp64": 163.4, "fp32": 163.4, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of a device at a precision (`fp64 fp32 bf16 fp16 fp8`); None for an unknown device.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989000000000000.0
    >>> peak_flops("NVIDIA H100 of the future", "bf16") is None
    True
    """
    row = _row(device_name)
    return row[precision] * TERA if precision in row else None


def _row(device_name: str) -> dict[str, float]:
    """The row with the longest name that the device's name holds in whole words: an A1000 is no A100."""
    if _holds(device_name, "MIG"):  # a slice of a device carries the name of the whole
        return {}
    names = [name for name in _PEAKS if _holds(device_name, name)]
    return _PEAKS[max(names, key=len)] if names else {}


def _holds(text: str, words: str) -> bool:
    """Whether a text has these words, and not as a part of longer ones. A regular expression for each row of the table
    would have to be compiled in every process."""
    text, words = f" {text.lower()} ", words.lower()
    place = text.find(words)
    while place >= 0 and (text[place - 1].isalnum() or text[place + len(words)].isalnum()):
        place = text.find(words, place + 1)
    return place >= 0
