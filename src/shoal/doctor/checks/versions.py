"""Versions of what a run depends on, read without importing it; the same facts are compared between hosts."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from shoal.doctor.bounded import Check
from shoal.doctor.finding import Finding, hint, ok, warning, will_fail
from shoal.errors import to_install
from shoal.version import __version__

EXTRAS = {
    "transformers": ("hf", "models of Hugging Face (hf:NAME)"),
    "pyarrow": ("parquet", "Parquet files"),
    "torchao": ("fp8", "fp8"),
}
"""Module → its extra, and what needs it."""
PACKAGES = ("transformers", "tokenizers", "safetensors", "pyarrow", "torchao", "triton")
"""Packages that may read data or compute, and so have to be the same on all hosts; some need them, others do not."""
MUST_AGREE = ("python", "torch", "shoal", "NCCL")
"""On all hosts of a run; others may differ."""


def checks() -> Iterator[Check]:
    """The checks of versions."""
    yield Check("versions", versions, 3.0)
    yield Check("optional packages", optional)


def facts() -> dict[str, str]:
    """Name → version; what is not installed is left out."""
    found = {"python": platform.python_version(), "torch": _installed("torch"), "shoal": __version__}
    found |= {"numpy": _installed("numpy"), "NCCL": loaded_nccl(), "driver": _driver(), "kernel": platform.release()}
    found |= {name: _installed(name) for name in PACKAGES}
    found |= {"code": code_of(Path.cwd()), "encoding": sys.getfilesystemencoding()}
    return {name: version for name, version in found.items() if version}


def code_of(folder: Path) -> str:
    """The commit of the code in a folder, with a hash of what was changed since; empty: it is in no repository, or git
    is missing."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD").strip().decode()
    if not commit:
        return ""
    changed = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    return f"{commit}+{hashlib.sha256(changed).hexdigest()[:6]}" if changed else commit


def _git(folder: Path, *words: str) -> bytes:
    """The output of git; nothing, if it fails or takes long."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=1.5).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def versions() -> Iterator[Finding]:
    """The packages that shoal requires are there and new enough; NCCL is the one that torch was installed with."""
    found = facts()
    wrong = [each for each in _required() if (have := _installed(each[0])) == "" or _number(have) < _number(each[1])]
    for name, least in wrong:
        evidence = f"{name} {_installed(name) or 'is not installed'}; shoal needs {least} or newer"
        yield will_fail("versions", evidence, f"{sys.executable} -m pip install '{name}>={least}'")
    packaged = _installed("nvidia-nccl-cu13") or _installed("nvidia-nccl-cu12")
    loaded = found.get("NCCL", "")
    if packaged and loaded and _number(packaged)[:3] != _number(loaded)[:3]:
        evidence = f"NCCL {loaded} would be loaded, but {packaged} is installed: a library path comes first"
        yield warning("versions", evidence, "unset LD_LIBRARY_PATH LD_PRELOAD")
    if not wrong:
        yield ok("versions", ", ".join(f"{name} {version}" for name, version in found.items()))


def optional() -> Iterator[Finding]:
    """Packages that only some recipes need."""
    for module, (extra, purpose) in EXTRAS.items():
        if find_spec(module) is None:
            yield hint("optional packages", f"{module} is missing, for {purpose}", to_install(extra))


def _required() -> list[tuple[str, str]]:
    """Packages and their least versions, from the metadata of shoal; empty in a tree that is not installed."""
    try:
        texts = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:
        return [("torch", "2.11")]
    found = (re.fullmatch(r"([A-Za-z0-9_-]+)\s*>=\s*([\d.]+)", text) for text in texts)
    return [(each[1], each[2]) for each in found if each is not None]


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _number(version: str) -> tuple[int, ...]:
    """The numbers of a version.

    >>> _number("2.13.0+cu130") > _number("2.11")
    True
    """
    return tuple(int(word) for word in re.match(r"[\d.]*", version)[0].split(".") if word)  # type: ignore[index]


def loaded_nccl() -> str:
    """The version of the NCCL that torch would load: that of the library path first, then its own; empty: none."""
    for path in ("libnccl.so.2", *map(str, _own_nccl())):
        try:
            library = ctypes.CDLL(path)
            number = ctypes.c_int()
            library.ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return ""


def _own_nccl() -> list[Path]:
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [path for folder in folders for path in Path(folder).glob("nccl/lib/libnccl.so.2")]


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""
