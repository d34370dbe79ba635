"""Write result files with hardware, versions, date and command."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_writes_results = True


def arguments(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """The arguments of a benchmark. `--smoke` replaces defaults by those of a case of seconds, which shows that the
    benchmark still runs; its numbers mean nothing, and no result is written."""
    global _writes_results
    parser.add_argument("--smoke", action="store_true", help="run a case of seconds; write no result")
    _writes_results = "--smoke" not in sys.argv
    if not _writes_results:
        parser.set_defaults(**smoke)
    return parser.parse_args()


def hardware() -> str:
    """`NVIDIA H200`, or the CPU with its number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_name()}, {cores} cores"


def heading(title: str, question: str, *, packages: Sequence[str] = ()) -> str:
    """The top of a result file; `packages`: those others that it has measured."""
    software = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    software += [f"{name} {version}" for name in packages if (version := _version(name))]
    return "\n".join(
        [
            f"# {title}",
            "",
            question,
            "",
            f"- hardware: {hardware()}",
            f"- software: {', '.join(software)}, commit {_commit()}",
            f"- date: {time.strftime('%Y-%m-%d')}",
            f"- command: `python {shlex.join(sys.argv)}`",
            "",
        ]
    )


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table of rows with the same keys."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(theme: str, text: str) -> Path:
    """Keep a result; a new date is a new file, and an old one is never changed by another day."""
    if not _writes_results:
        return Path("no file, since this is --smoke")
    kind = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(r\)|processor|@.*", "", hardware().lower().split(",")[0])).strip("-")
    path = RESULTS / f"{theme}_{kind}_{time.strftime('%Y-%m-%d')}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")
    return path


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _cpu_name() -> str:
    found = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    names = [line.partition(":")[2].strip() for line in found if line.startswith("Model name")]
    return names[0] if names else platform.machine()
