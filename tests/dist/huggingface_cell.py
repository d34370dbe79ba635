"""One cell of the table of docs/huggingface.md, on a rank: an architecture under a layout."""

from __future__ import annotations

import functools
import re
import warnings

from shoal import ShoalError
from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.verification.case import Case
from shoal.verification.rank import verify_in
from tests import huggingface


def cell(world: World, kind: str, words: str) -> str:
    """`1e-15`, or why it is rejected."""
    warnings.simplefilter("ignore")  # of transformers
    build = functools.partial(huggingface.build, kind)
    plan = Plan.parse(f"fp64 {words}").resolve(world.size)
    try:
        verdict = verify_in(world, Case(build=build, batches=[huggingface.batch(kind)] * 2, plan=plan)).verdict
    except ShoalError as error:
        said = error.problems[0].what if error.problems else str(error)
        why = said.partition("cannot divide this model: ")[2] or said
        return re.sub(r"^[A-Z]\w+:? ", "", why)
    if verdict is None:  # rank 0 compares
        return ""
    largest = max(verdict.worst.loss, verdict.worst.grad, verdict.worst.weight, verdict.worst.grad_norm)
    return f"{largest:.0e}" if verdict.equal else f"**{largest:.0e}**"
