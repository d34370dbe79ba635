"""Import the modules of torch that a plan uses, which each rank would otherwise import by itself."""

from __future__ import annotations

from importlib import import_module

from shoal.blueprint.plan import Plan
from shoal.numerics import lazy_dynamo


def preload(plan: Plan) -> None:
    """Import what FSDP2 needs, if the plan uses it: `fully_shard` loads torch's compiler, which takes 1 to 2 s."""
    if plan.is_sharded:
        lazy_dynamo.load()
        import_module("torch.distributed.fsdp")
