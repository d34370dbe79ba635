"""Plans that can be planned and not yet run."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.plan import Plan
from shoal.errors import Problem


def check_unsupported(plan: Plan) -> Iterator[Problem]:
    """Words of a plan, open or resolved, that no run supports together."""
    if plan.sync and (plan.cp or 1) > 1 and plan.zero == 0:
        yield Problem(
            "P049",
            f"sync={plan.sync} needs cp=1, or shards inside a replica, got cp={plan.cp} with zero=0",
            "zero=1, 2 or 3",
        )
    if plan.compression is not None and plan.compression.feeds_back and plan.precision == "fp16" and not plan.sync:
        what = f"compress={plan.compress} keeps a residual, which the changing loss scale of fp16 would make wrong"
        yield Problem("P050", what, "bf16 in place of fp16, or compress=int8")
    if plan.sync and plan.offloaded == "optimizer":
        what = f"sync={plan.sync} exchanges weights on the device, and offload=optimizer updates them on the host"
        yield Problem("P051", what, "offload=none or parameters")
