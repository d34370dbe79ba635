"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import shoal

ROOMS = ("blueprint", "config", "predict", "planner", "comm", "numerics", "parallel", "checkpoint")
MODULES = ["shoal.errors", "shoal.hash_rng", "shoal.safe_parsing"] + [
    info.name
    for room in ROOMS
    for info in pkgutil.walk_packages([f"{shoal.__path__[0]}/{room}"], f"shoal.{room}.")
    if not info.ispkg and ".kernels." not in info.name  # which need Triton
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
