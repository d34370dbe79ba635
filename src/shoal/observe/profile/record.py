"""What one rank has recorded of its profiled steps, as it is sent to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.comm.profile.timer import Span, Step


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The spans of one rank."""

    rank: int
    host: str
    """Ranks of one host share a clock."""
    place: Mapping[str, int]
    """Its coordinate on the axes of more than one rank."""
    threads: int
    cores: int
    """Cores that it may use, which ranks of its host share."""
    steps: list[Step]
    entered: Mapping[str, int]
    """Collective or message → when it was entered, in ns."""
    device: str = "cpu"
    """The kind of device whose time the spans divide: the main thread of a CPU, or a stream of a GPU."""
    messages: int = 0
    """Buckets of gradients that replicas average in a step; 0: not known."""
    bytes: int = 0
    """That this rank sends for them."""
    peak: int = 0
    """Bytes at its fullest moment, up to the end of the timed steps."""

    def to_mapping(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "rank": self.rank, "host": self.host, "place": dict(self.place), "threads": self.threads,
            "cores": self.cores, "entered": dict(self.entered), "device": self.device,
            "messages": self.messages, "bytes": self.bytes, "peak": self.peak,
            "steps": [{"delay": step.delay, "spans": [_to_list(span) for span in step.spans]} for step in self.steps],
        }  # fmt: skip

    @classmethod
    def from_mapping(cls, found: Mapping[str, Any]) -> RankRecord:
        """Invert `to_mapping`."""
        steps = [Step([_from_list(span) for span in step["spans"]], step["delay"]) for step in found["steps"]]
        return cls(**{**found, "steps": steps})

    @property
    def name(self) -> str:
        """`rank 3 (dp_shard 1, pp 1)`."""
        places = ", ".join(f"{axis} {index}" for axis, index in self.place.items())
        return f"rank {self.rank} ({places})" if places else f"rank {self.rank}"


def _to_list(span: Span) -> list[Any]:
    return [span.name, span.begin, span.key, span.is_wait, span.end, span.inner]


def _from_list(found: Iterable[Any]) -> Span:
    return Span(*found)
