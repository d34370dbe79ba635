"""Blocks that torch.compile has captured compute what one process computes, under every parallelism."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.world import World
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.compositions import COMPILED, is_in_short
from tests.dist.pool import Pool
from tests.dist.test_compositions import BATCH, CLIP, STEPS, Trace, batches, build, check, train_plainly

# The compiler's front end decides what can be captured; its code generator takes half a minute a model on two cores.
BACKEND = "aot_eager"


def num_layers(plan: str) -> int:
    """Each is compiled for itself: as many as there are kinds of them, or stages."""
    return 4 if "interleaved" in plan or "looped" in plan else 2


def train_compiled(world: World, plan: str, kind: str) -> Trace | None:
    torch.compiler.reset()
    run = Run(f"fp64 {plan}", seed=7, clip=CLIP, world=world, compile=BACKEND)
    with torch.device("meta"):
        model = build(kind, num_layers(plan))
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    trace: Trace = {"loss": [], "norm": [], "grad": [], "weight": []}
    run.on_gradients = lambda: trace["grad"].append(dict(run.composed.full_tensors("gradient")))
    share = BATCH // run.degree
    for batch in batches(kind)[:STEPS]:
        mine = {name: value[run.coordinate * share :][:share] for name, value in batch.items()}
        trace["loss"].append(run.step(mine).item())
        assert run.report is not None
        trace["norm"].append(run.report.grad_norm.item())
    trace["weight"].append(dict(run.composed.full_tensors("weight")))
    trace["eval"] = run.evaluate([mine])  # compiled once more, without gradients
    return trace if world.is_main else None


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.parametrize(
    ("size", "plan", "kind"),
    [case if is_in_short("test_compiled", *case) and "cp=2" in case[1] else wide(*case) for case in COMPILED],
)
def test_compiled_blocks_compute_the_same(pool: Pool, size: int, plan: str, kind: str) -> None:
    ours = pool.run(train_compiled, size, plan, kind)[0]
    check(ours, train_plainly(kind, num_layers(plan)))
