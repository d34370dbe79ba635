"""A rank that computes a wrong gradient is named by a replay on other ranks; a right one raises no alarm.

Before `check_compute` the wrong gradient was averaged into the weights of all ranks, which stayed equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.errors import RunFailed, ShoalError
from shoal.models.llama import build as build_llama
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import on_ranks

SMALL = {"hidden": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "vocabulary": 32, "max_sequence": 16}


def own_run(world: World, plan: str, *, every: int, model: nn.Module | None = None) -> Run:
    torch.manual_seed(0)
    run = Run(plan, world=world, check_compute=every, clip=0.5)
    model = build_llama(**SMALL, ffn=32) if model is None else model
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return run


def one_step(run: Run, number: int) -> float:
    generator = torch.Generator().manual_seed(10 * number + run.coordinate)
    tokens = torch.randint(0, 32, (4, 9), generator=generator)
    return float(run.step({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}))


class Stateful(nn.Module):
    """Dropout, and a buffer that changes with the samples of a rank and enters its next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.drop = nn.Embedding(32, 8), nn.Linear(8, 32), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens)) * self.scale.clone()  # type: ignore[operator]
        self.scale.mul_(1 + 0.01 * tokens.float().mean())  # type: ignore[operator]
        result: Tensor = self.head(self.norm(x.flatten(0, 1)).view_as(x))
        return result


@pytest.mark.parametrize("plan", ["dp_replicate=4 zero=0 mb=2", wide("dp_replicate=4 zero=0 bf16")])
@on_ranks(4)
def test_a_replay_changes_nothing_and_raises_no_alarm(world: World, plan: str) -> None:
    """Losses and weights with and without it are the same bits."""
    models: list[Any] = [None, None] if "bf16" in plan else [Stateful(), Stateful()]
    if models[0] is not None:
        models[1].load_state_dict(models[0].state_dict())
    runs = [own_run(world, plan, every=every, model=model) for every, model in zip((2, 0), models, strict=True)]
    for number in range(4):
        compared, plain = (one_step(run, number) for run in runs)
        assert compared == plain
    assert [run.compute_check.agreed_at for run in runs] == [4, None]
    for (name, one), (_, other) in zip(*(run.module.state_dict().items() for run in runs), strict=True):
        assert torch.equal(one, other), name


def flip_on(run: Run, name: str, *, times: int) -> None:
    """Flip a bit of a gradient the next times that it is computed."""
    left = [times]

    def flip(gradient: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            return gradient
        gradient = gradient.contiguous().clone()
        gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return gradient

    run.composed.named[name].register_hook(flip)


@pytest.mark.parametrize(
    ("times", "code", "text", "may_pass"),
    [
        (1, "T076", "rank 2 computed wrong once: in step 2, its gradient of {} differs from its replay", True),
        (99, "T075", "rank 2 computes wrong: in step 2, its gradient of {} differs from the replay of ranks", False),
    ],
)
@on_ranks(4)
def test_the_rank_that_computes_wrong_is_named(world: World, times: int, code: str, text: str, may_pass: bool) -> None:
    run = own_run(world, "dp_replicate=4 zero=0", every=2)
    one_step(run, 0)
    before = [parameter.detach().clone() for parameter in run.parameters]
    name = list(run.composed.named)[3]
    if world.rank == 2:
        flip_on(run, name, times=times)
    with pytest.raises(RunFailed) as caught:
        one_step(run, 1)
    assert caught.value.codes == (code,)
    assert text.format(name) in str(caught.value)
    assert "no step was compared since the start" in str(caught.value) or code != "T076"
    assert caught.value.may_pass is may_pass
    assert all(torch.equal(one, other) for one, other in zip(before, run.parameters, strict=True)), "no update was made"


@pytest.mark.parametrize(
    ("times", "code", "text"),
    [
        (1, "T076", "rank 1 computed wrong once: in step 1"),
        (99, "T077", "ranks 0 and 1 compute different gradients of {} from the same samples, in step 1, and each"),
    ],
)
@on_ranks(2)
def test_of_two_ranks_only_one_that_does_not_reproduce_its_own_is_named(
    world: World, times: int, code: str, text: str
) -> None:
    run = own_run(world, "dp_replicate=2 zero=0", every=1)
    name = list(run.composed.named)[3]
    if world.rank == 1:
        flip_on(run, name, times=times)
    with pytest.raises(RunFailed) as caught:
        one_step(run, 0)
    assert caught.value.codes == (code,)
    assert text.format(name) in str(caught.value)


class Random(nn.Module):
    """Its gradients cannot be reproduced."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.head(self.embedding(tokens)) * (1 + 0.001 * self.calls)
        return result


@on_ranks(2)
def test_a_model_that_is_not_reproducible_accuses_no_rank(world: World) -> None:
    run = own_run(world, "dp_replicate=2 zero=0", every=1, model=Random())
    with pytest.raises(RunFailed, match="ranks 0 and 1 did not reproduce their own gradients of"):
        one_step(run, 0)


@on_ranks(2)
def test_other_layouts_are_rejected(world: World) -> None:
    run = own_run(world, "zero=3", every=1)
    with pytest.raises(ShoalError, match="check_compute needs ranks that compute alone") as caught:
        one_step(run, 0)
    assert caught.value.codes == ("T079",)
