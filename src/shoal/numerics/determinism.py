"""Settings that make two runs of the same layout give the same bits."""

from __future__ import annotations

import os

import torch


def make_deterministic() -> None:
    """Choose deterministic algorithms everywhere; an operation that has none raises. Call it before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, on first use
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
