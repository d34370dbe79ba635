"""Parameters that were frozen when replicas were built, which no reducer of gradients knows.

DDP and our own reducers put the parameters into buckets once. A parameter that begins to need a gradient later would
get that of this rank's samples alone, and replicas would drift apart. FSDP2 reduces whatever has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from shoal.errors import ShoalError


@dataclass(frozen=True)
class FrozenParameters:
    """Names and parameters without a gradient; none where every gradient is reduced anyway."""

    named: tuple[tuple[str, nn.Parameter], ...] = ()

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> FrozenParameters:
        """All that need no gradient now."""
        named = (item for model in models for item in model.named_parameters())
        return cls(tuple((name, parameter) for name, parameter in named if not parameter.requires_grad))

    def reject_unfrozen(self) -> None:
        """Raise if one of them needs a gradient now."""
        for name, parameter in self.named:
            if parameter.requires_grad:
                raise ShoalError(
                    f"{name} needs a gradient since it was prepared without, and replicas would not average it",
                    fix="zero=1 in the plan; or a group of the optimizer with lr=0 in place of requires_grad_(False)",
                    code="T104",
                )
