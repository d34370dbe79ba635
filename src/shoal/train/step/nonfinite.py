"""Where a loss or a gradient stopped being a number."""

from __future__ import annotations

from shoal.comm.world import World
from shoal.train.step.report import PendingStep


def nonfinite_places(world: World, pending: PendingStep) -> str:
    """One sentence that names the rank and the microbatch, or else the parameter. Every rank has to call it."""
    sums = enumerate(pending.sums)
    mine = [(world.rank, index) for index, part in sums if not bool(part.isfinite())]
    places = [place for rank in world.all_gather_object(mine) for place in rank]
    if places:
        where = "; ".join(f"rank {rank}, microbatch {index}" for rank, index in places)
        return f"step {pending.number}: the loss is not finite on {where}"
    bad = [name for name, norm in pending.norms.items() if not bool(norm.isfinite())]
    names = list(dict.fromkeys(name for rank in world.all_gather_object(bad) for name in rank))
    whose = (
        f"the norm of the gradient of {', '.join(names[:3])}"
        if names
        else "the norm of the gradients, each of which is,"
    )
    return f"step {pending.number}: every loss is finite, but {whose} is not"
