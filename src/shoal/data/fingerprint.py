"""The fingerprint of a run's data: saved in each checkpoint, compared when a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.data.dataset import Dataset
from shoal.data.sources.digest import hashed

METHOD = 1
"""Version of the digest. Digests of different versions cannot be compared."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Sizes and a digest of the data of a run."""

    samples: int
    held_out: int
    digest: str
    """Digest of the training samples and the held-out ones; empty: the content is not hashed."""
    method: int = METHOD

    @classmethod
    def of(cls, training: Dataset, held_out: Dataset) -> Fingerprint:
        """Compute it from both datasets."""
        both = [training.digest(), held_out.digest()]
        digest = hashed(part.encode() for part in both) if any(both) else ""
        return cls(len(training), len(held_out), digest)

    def to_mapping(self) -> dict[str, Any]:
        """The entry in the manifest of a checkpoint."""
        return asdict(self)

    def difference(self, saved: Mapping[str, Any]) -> str:
        """The changes since a saved fingerprint, in words; empty: none found."""
        was = {name: saved.get(name) for name in ("samples", "held_out", "digest")}
        found = [
            f"{what}: {before:,} → {now:,}"
            for what, before, now in (
                ("samples", was["samples"], self.samples),
                ("held-out samples", was["held_out"], self.held_out),
            )
            if isinstance(before, int) and before != now
        ]
        if saved.get("method") == self.method and was["digest"] != self.digest:
            found.append(f"fingerprint: {_short(was['digest'])} → {_short(self.digest)}")
        return "; ".join(found)


def _short(digest: Any) -> str:
    return str(digest)[:12] or "none"
