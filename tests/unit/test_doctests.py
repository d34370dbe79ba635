"""The examples in the docstrings of pure code are true."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import shoal.blueprint

PURE = ["shoal.errors", *(f"shoal.blueprint.{info.name}" for info in pkgutil.iter_modules(shoal.blueprint.__path__))]


@pytest.mark.parametrize("name", PURE)
def test_examples(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
