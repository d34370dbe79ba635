"""Packages that only some sources need: imported when used, and named with what to install when missing."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.errors import ShoalError


def needs(module: str, *, setting: str, extra: str, package: str = "") -> Any:
    """Import `module`, or say which setting wants it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ShoalError(
            f"{setting} needs the package {package or module}, which is not installed ({error})",
            fix=f"pip install 'shoal[{extra}]'",
        ) from error
