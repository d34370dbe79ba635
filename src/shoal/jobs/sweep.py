"""Sweeps: every combination of some values of some settings, each a job of one array."""

from __future__ import annotations

import itertools
import re

from shoal.errors import ShoalError

MOST_JOBS = 1000
_SETTING = re.compile(r"[a-z]+(\.[a-z0-9_]+)*")


def read_sweep(lines: str) -> list[dict[str, str]]:
    """The settings of each job of `--array optim.lr=1e-4,3e-4`, one setting a line.

    >>> read_sweep("optim.lr=1e-4,3e-4")
    [{'optim.lr': '1e-4'}, {'optim.lr': '3e-4'}]
    """
    axes: dict[str, list[str]] = {}
    for line in lines.split("\n") if lines else ():
        name, equals, text = line.partition("=")
        values = text.split(",")
        if not equals or not _SETTING.fullmatch(name) or not all(values) or not text.isprintable():
            what = f"--array must be a setting with its values, got {line[:80]!r}"
            raise ShoalError(what, fix="--array optim.lr=1e-4,3e-4", code="J006")
        if name == "run.dir":
            what = "--array gives each job a directory of its own, runs/NAME-array/NUMBER, and would ignore run.dir"
            raise ShoalError(what, fix="--run.dir FOLDER, in which each job has its own", code="J006")
        if name in axes:
            raise ShoalError(f"--array has {name} twice", fix=f"--array {name}=ALL,ITS,VALUES once", code="J006")
        axes[name] = values
    jobs = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())] if axes else []
    if len(jobs) > MOST_JOBS:
        what = f"--array must give at most {MOST_JOBS} jobs, got {len(jobs)}"
        raise ShoalError(what, fix="fewer values, or several arrays", code="J006")
    return jobs
