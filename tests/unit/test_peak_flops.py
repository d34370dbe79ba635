"""Peak FLOP/s are those of the datasheet, and an unknown device has none."""

from __future__ import annotations

import pytest

from shoal.predict.presets.peak_flops import peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla V100S-PCIE-32GB", "fp16", 130),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("AMD Instinct MI250X / MI250", "bf16", 191.5),  # torch sees half a board
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_known_device(name: str, precision: str, tflops: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(tflops * 1e12)
    assert peak_flops(name.lower(), precision) == peak_flops(name, precision)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("", "bf16"),
        ("cpu", "fp32"),
        ("NVIDIA H100", "bf16"),  # which one?
        ("NVIDIA H20", "bf16"),  # not an H200
        ("NVIDIA RTX A1000", "bf16"),  # not an A100
        ("NVIDIA A10G", "bf16"),  # not an A10
        ("NVIDIA T400", "fp16"),  # not a T4
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),  # a seventh of one
        ("NVIDIA A100-SXM4-80GB", "fp8"),  # has no such units
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("NVIDIA H200", "int8"),
    ],
)
def test_what_is_not_known_has_no_peak(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None
