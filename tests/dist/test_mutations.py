"""`verify` can fail: each deliberate defect of a layout is caught, and the report names the axis or the tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.blueprint.plan import Plan
from shoal.comm import differentiable_collectives
from shoal.comm.world import World
from shoal.models import llama
from shoal.numerics.gradients import global_norm, norms_of
from shoal.numerics.local_tensor import to_local
from shoal.parallel import parallel_model
from shoal.parallel.data import ddp, fsdp
from shoal.parallel.pipeline import pipeline
from shoal.train.loss.global_loss import GlobalLoss
from shoal.train.step.engine import StepEngine
from shoal.verification.case import Case
from shoal.verification.rank import verify_in
from tests.cover import covered
from tests.dist.pool import Pool

VOCABULARY, TOKENS = 31, 8


def case(plan: str, size: int) -> Case:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (8, TOKENS + 1), generator=generator)
        batches.append({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
    build = functools.partial(
        llama.build, hidden=16, ffn=24, num_layers=2, num_heads=4, num_kv_heads=2, vocabulary=VOCABULARY, tied=True
    )
    return Case(build=build, batches=batches, plan=Plan.parse(f"fp64 {plan}").resolve(size), clip=0.5)


# ---- the defects: what a careless change could do -------------------------------------------------------------------


def no_sum_on_entering() -> Any:
    """tp: the gradients that q, k and v send back are not summed over the ranks."""
    return patch.object(
        differentiable_collectives._Enter, "backward", staticmethod(lambda ctx, *grads: (grads[0], None))
    )


def sum_twice_on_leaving() -> Any:
    """tp: partial results are summed twice."""
    twice = staticmethod(
        lambda ctx, x, group: differentiable_collectives.all_reduce(
            differentiable_collectives.all_reduce(x, group), group
        )
    )
    return patch.object(differentiable_collectives._Leave, "forward", twice)


def partial_gradients_stay_partial() -> Any:
    """tp: norms under sequence parallelism keep the gradient of their own tokens."""
    return patch.object(parallel_model, "all_reduce_together", lambda tensors, group: None)


def replicas_do_not_talk() -> Any:
    """dp_replicate: DDP never synchronises."""
    original = DistributedDataParallel.forward

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.no_sync():
            return original(self, *arguments, **options)

    return patch.object(DistributedDataParallel, "forward", forward)


def averages_summed() -> Any:
    """dp: the loss is scaled for an average, but the gradients were summed already."""
    original = GlobalLoss.total_weight
    return patch.object(GlobalLoss, "total_weight", lambda self, *step: original(self, *step) / self.state.degree)


def microbatches_averaged() -> Any:
    """Each microbatch's gradient is divided by the number of microbatches."""
    original = GlobalLoss.total_weight
    return patch.object(
        GlobalLoss, "total_weight", lambda self, step, *n: original(self, step, *n) * len(step.microbatches)
    )


def wrong_microbatch() -> Any:
    """pp: a later stage computes with the input of the next microbatch."""
    original = pipeline.Stage.forward

    def forward(self: Any, x: Tensor | None = None, *, microbatch: Tensor) -> Tensor:
        if self.index:
            microbatch = (microbatch + 1) % len(self.feed.calls)
        return original(self, x, microbatch=microbatch)

    return patch.object(pipeline.Stage, "forward", forward)


def tied_copies_drift() -> Any:
    """pp: embedding and head, one parameter on two stages, each keep their own gradient."""
    return patch.object(parallel_model, "sum_tied", lambda *_: None)


def replicas_of_stages_do_not_talk() -> Any:
    """pp x dp_replicate: the average over replicas is forgotten."""
    return patch.object(ddp, "average_gradients", lambda gradients, group: None)


def norm_of_own_shard() -> Any:
    """dp_shard: every rank clips by the norm of its own shard."""

    def norm(self: Any, parameters: list[nn.Parameter], **_: Any) -> Tensor:
        return global_norm(norms_of([to_local(p.grad) for p in parameters if p.grad is not None]))

    return patch.object(parallel_model.ParallelModel, "norm", norm)


def shards_are_not_summed() -> Any:
    """dp_shard: FSDP2 is never told that a microbatch is the last, and reduces nothing."""
    return patch.object(fsdp, "_set", lambda module, **_: module.set_requires_gradient_sync(False))


def replicas_of_shards_do_not_talk() -> Any:
    """HSDP: shards are summed inside a replica, and never over replicas."""
    original = fsdp._set

    def told(module: Any, **options: Any) -> None:
        original(module, **options)
        module.set_requires_all_reduce(False)

    return patch.object(fsdp, "_set", told)


def accumulation_drops_microbatches() -> Any:
    """Gradients come from the last microbatch alone; the earlier ones are lost."""
    original = StepEngine._backward

    def backward(self: Any, loss_sum: Tensor) -> None:
        for unit in self.state.composed.named.values():
            unit.grad = None
        original(self, loss_sum)

    return patch.object(StepEngine, "_backward", backward)


DEFECTS: list[tuple[Callable[[], Any], int, str, tuple[str, ...]]] = [
    # defect, ranks, plan, words of which the report must have one
    (no_sum_on_entering, 2, "tp=2 sp=off mb=4", ("tp",)),
    (sum_twice_on_leaving, 2, "tp=2 sp=off mb=4", ("tp",)),
    (partial_gradients_stay_partial, 2, "tp=2 sp=on mb=4", ("tp",)),
    (replicas_do_not_talk, 2, "dp_replicate=2 mb=2", ("dp_replicate",)),
    (averages_summed, 2, "zero=3 mb=2", ("dp_shard",)),
    (shards_are_not_summed, 2, "zero=1 mb=2", ("embed_tokens",)),
    (replicas_of_shards_do_not_talk, 4, "dp_replicate=2 zero=3 mb=1", ("dp_replicate", "embed_tokens")),
    (microbatches_averaged, 2, "dp_replicate=2 mb=1", ("microbatch",)),
    (wrong_microbatch, 2, "pp=2 1f1b mb=1", ("stage", "microbatch")),
    (tied_copies_drift, 2, "pp=2 1f1b mb=1", ("embed_tokens",)),
    (replicas_of_stages_do_not_talk, 4, "pp=2 dp_replicate=2 1f1b mb=1", ("dp_replicate",)),
    (norm_of_own_shard, 2, "zero=3 mb=2", ("norm",)),
    (accumulation_drops_microbatches, 1, "mb=2", ("microbatch",)),
]


@contextmanager
def broken(defect: str) -> Iterator[None]:
    with globals()[defect]():
        yield


def verify_with(world: World, defect: str | None, plan: str) -> tuple[Any, str | None]:
    if defect is None:
        found = verify_in(world, case(plan, world.size))
    else:
        with broken(defect):
            found = verify_in(world, case(plan, world.size))
    return found.verdict, found.cause


@pytest.mark.parametrize(
    ("defect", "size", "plan", "words"),
    covered(DEFECTS, lambda _, __, plan, words: [plan.partition("=")[0]], lambda _, size, *__: size),
    ids=[d[0].__name__ for d in DEFECTS],
)
def test_a_defect_is_caught_and_named(
    pool: Pool, defect: Callable[[], Any], size: int, plan: str, words: tuple[str, ...]
) -> None:
    verdict, cause = pool.run(verify_with, size, defect.__name__, plan)[0]
    assert not verdict.equal
    said = f"{verdict.first} {cause}"
    print(said)
    assert any(word in said for word in words), said


@pytest.mark.parametrize(
    ("size", "plan"),
    covered(
        sorted({(size, plan) for _, size, plan, _ in DEFECTS}),
        lambda _, plan: [len(plan.split()) > 1],
        lambda size, _: size,
    ),
)
def test_the_same_without_a_defect_is_equal(pool: Pool, size: int, plan: str) -> None:
    verdict, cause = pool.run(verify_with, size, None, plan)[0]
    assert verdict.equal, cause
