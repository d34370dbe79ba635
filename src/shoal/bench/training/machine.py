"""This machine as a benchmark sees it: its cores, its load, and the cluster that predictions are made for."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

import torch

from shoal.bench import calibrate
from shoal.bench.fit_cluster import cluster_of
from shoal.launch.local import launch
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import is_measured_here, parse_cluster

CALIBRATION_SECONDS = 20.0
"""The time of a calibration before a benchmark, where there is none of this machine with as many threads."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine, and how busy it was."""

    host: str = field(default_factory=socket.gethostname)
    torch: str = torch.__version__
    date: str = field(default_factory=lambda: date.today().isoformat())
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    """Processes that ran or waited for a core in the minute before the benchmark."""
    began: float = field(default_factory=time.monotonic)

    def to_mapping(self) -> dict[str, Any]:
        """As JSON, at the end of the benchmark."""
        known = {name: value for name, value in asdict(self).items() if name != "began"}
        return {**known, "load_after": os.getloadavg()[0], "seconds": time.monotonic() - self.began}


def cluster_for_bench(
    named: str | None, *, ranks: int, threads: int, device: str, say: Callable[[str], None]
) -> Cluster:
    """The cluster to predict for: a named one; `here`, if it was calibrated with as many threads; else measured now."""
    if named is not None:
        return parse_cluster(named)
    if is_measured_here():
        here = parse_cluster("here")
        is_same = here.device.is_host == (device == "cpu")
        if is_same and (device != "cpu" or f"with {threads} threads each" in here.source):
            return here
    say(f"calibrating for {CALIBRATION_SECONDS:.0f} s; `shoal calibrate` does it once, --cluster names another")
    arguments = (device, CALIBRATION_SECONDS, True, time.monotonic(), threads)
    return cluster_of(launch(calibrate.measure, arguments, nproc=max(2, ranks) if device == "cpu" else ranks)[0])


@dataclass
class CalibrationTurns:
    """This machine, measured in every round of a benchmark: with the speed that it has beside the rows."""

    ranks: int
    threads: int
    device: str
    precision: str
    rounds: int
    clusters: list[Cluster] = field(default_factory=list)
    """One for each round."""

    @classmethod
    def named(cls, cluster: Cluster, rounds: int) -> CalibrationTurns:
        """A given cluster in every round."""
        return cls(1, 1, "cpu", "fp32", rounds, [cluster] * rounds)

    @property
    def is_needed(self) -> bool:
        """Whether the next round has no cluster yet."""
        return len(self.clusters) < self.rounds

    def take(self) -> None:
        """Measure for a share of the time of a calibration, on new ranks."""
        seconds = CALIBRATION_SECONDS / self.rounds
        arguments = (self.device, seconds, True, time.monotonic(), self.threads, self.precision)
        nproc = max(2, self.ranks) if self.device == "cpu" else self.ranks
        self.clusters.append(cluster_of(launch(calibrate.measure, arguments, nproc=nproc)[0]))


def cluster_mapping(cluster: Cluster) -> dict[str, Any]:
    """Where predictions come from, as JSON."""
    return {"source": cluster.source, "date": cluster.date, "is_measured": cluster.is_measured}
