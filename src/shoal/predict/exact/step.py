"""One rank in one step: what every formula of the messages reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap

from shoal.blueprint import placement as rules
from shoal.blueprint.model_shapes import ModelShapes, Shapes, Sizes
from shoal.blueprint.placement import ShardGroup, StageShapes
from shoal.blueprint.plan import Plan

Message = tuple[str, str, int | None, int | None]
"""Axis, operation, how many such calls, bytes of each; of all together where it is not known how many they are."""


@dataclass(frozen=True)
class Step:
    """A rank, its plan and its model."""

    plan: Plan
    shapes: ModelShapes
    batch: int
    rank: int
    sizes: Sizes

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Axis → coordinate."""
        return self.plan.layout.coordinate(self.rank)

    @cached_property
    def parts(self) -> list[StageShapes]:
        """Its stages of the pipeline; one without a pipeline."""
        return rules.parts(self.plan, self.shapes, self.rank)

    @cached_property
    def num_microbatches(self) -> int:
        """Of a step."""
        return self.plan.num_microbatches(self.batch)

    @cached_property
    def samples(self) -> int:
        """Of a microbatch."""
        return self.plan.microbatch_size(self.batch)

    @property
    def is_pipeline(self) -> bool:
        """Whether the plan has several stages on several ranks."""
        return self.plan.layout.pp > 1

    @cached_property
    def splits_tokens(self) -> bool:
        """Whether tp ranks divide the tokens outside of split regions."""
        return rules.splits_tokens(self.plan, self.shapes.description)

    def is_here(self, module: str) -> bool:
        """Whether a submodule lives on this rank."""
        return any(rules.is_inside(module, part.modules) for part in self.parts)

    def num_forwards(self, module: str, *, is_repeated: bool) -> int:
        """How often a submodule computes in a step; twice for each backward where its block is recomputed."""
        is_in_block = any(module.startswith(f"{block}.") for block in self.shapes.description.blocks)
        return self.num_microbatches * (1 + (self.plan.recompute != "none" and is_in_block and is_repeated))

    @cached_property
    def shard_group(self) -> ShardGroup:
        """The ranks that share each parameter."""
        return ShardGroup(self.plan, self.shapes.description, self.rank)

    def padded(self, pieces: Shapes) -> int:
        """Elements of this rank's shard of a unit, as FSDP2 sends it."""
        return sum(starmap(self.shard_group.padded, pieces.items()))
