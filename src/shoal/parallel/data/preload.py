"""Import before the fork what every worker of a plan would import: once, and not again after a restart."""

from __future__ import annotations

from importlib import import_module

from shoal.blueprint.plan import Plan
from shoal.numerics import lazy_dynamo


def preload(plan: Plan) -> None:
    """Import what FSDP2 needs, if the plan uses it: `fully_shard` loads torch's compiler, which takes 1 to 2 s."""
    if plan.is_sharded:
        lazy_dynamo.load()
        import_module("torch.distributed.fsdp")
