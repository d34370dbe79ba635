"""Replicas that meet by a way of ours: by lists of messages, compressed, or every so many steps."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.numerics.init import initialise
from shoal.parallel.data.diloco import OuterOptimizer
from shoal.parallel.data.local_step_scale import LocalStepScale, picked
from shoal.train.run import Run
from tests.cover import covered, wide
from tests.dist import test_reshard
from tests.dist.pool import Pool, on_ranks
from tests.dist.test_reshard import BATCH, TOKENS, VOCABULARY, assert_same, share, whole

LR = 1e-2


def build(kind: str) -> nn.Module:
    """A layer for each of two stages."""
    return test_reshard.build(kind, num_layers=2)


def started(world: World, plan: str, *, kind: str = "llama", **options: Any) -> Run:
    model = build(kind)
    initialise(model, 0)
    run = Run(f"fp64 {plan}", world=world, seed=0, clip=0.5, **{"warmup_steps": 0, **options})
    run.prepare(model)
    run.prepare(torch.optim.AdamW(run.parameters, lr=LR))
    return run


def trained(world: World, plan: str, steps: int = 3, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    run = started(world, plan, **options)
    losses = [float(run.step(share(run, step))) for step in range(steps)]
    return losses, run.weights()


@pytest.fixture(scope="module")
def alone(pool: Pool) -> tuple[list[float], dict[str, Tensor]]:
    """One rank, three steps."""
    found: tuple[list[float], dict[str, Tensor]] = pool.run(trained, 1, "")[0]
    return found


@pytest.fixture(scope="module")
def plain(pool: Pool) -> list[float]:
    """Two ranks that tell each other everything, six steps."""
    losses: list[float] = pool.run(trained, 2, "", 6)[0][0]
    return losses


# ---- lists of messages ----------------------------------------------------------------------------------------------

COMPOSED = [
    wide(2, "mb=4", "ring"),
    (3, "mb=8", "halving"),
    wide(4, "", "double_tree"),
    wide(4, "", "hierarchical"),
    wide(4, "tp=2 mb=6", "ring"),
    wide(4, "dp_replicate=2 zero=3 mb=3", "tree"),
    wide(4, "dp_replicate=2 zero=1 mb=3", "ring"),
    wide(4, "dp_replicate=2 pp=2 1f1b mb=3", "ring"),
    wide(2, "cp=2 mb=6", "ring"),
    (2, "", "auto"),
]


@pytest.mark.parametrize(("ranks", "plan", "algorithm"), COMPOSED)
def test_lists_of_messages_train_as_one_rank_does(
    pool: Pool, alone: tuple[list[float], dict[str, Tensor]], ranks: int, plan: str, algorithm: str
) -> None:
    (losses, weights), *_ = pool.run(_trained_by, ranks, plan, algorithm)
    assert losses == pytest.approx(alone[0], rel=1e-11)
    for name, weight in alone[1].items():
        assert torch.allclose(weights[name], weight, rtol=1e-8, atol=1e-10), name


def _trained_by(world: World, plan: str, algorithm: Any) -> tuple[list[float], dict[str, Tensor]]:
    return trained(world, plan, algorithm=algorithm)


@on_ranks(2)
def test_buckets_are_as_large_as_the_link_wants(world: World) -> None:
    """And change nothing but when things travel."""
    losses = {}
    for size in (None, "auto"):
        for words in ("", "compress=bf16", "zero=3"):
            run = started(world, words, bucket_mb=size)
            losses[words, size] = [float(run.step(share(run, step))) for step in range(2)]
            said = run.composed.bucket_chosen
            assert said == "" if size is None else ("if at all" if words == "zero=3" else "ms, measured") in said
    for words in ("", "compress=bf16", "zero=3"):
        assert losses[words, "auto"] == pytest.approx(losses[words, None], rel=1e-12)


class Forked(nn.Module):
    """Uses one of its first two layers, another one on every rank and in every step, and never the third."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.turn = rank

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        return self.layers[self.turn % 2](x)


@on_ranks(2)
def test_parameters_without_a_gradient(world: World) -> None:
    """Of one that some ranks have used, the others have zero; one that nobody has used is left alone."""
    torch.manual_seed(0)
    batch = {"x": torch.ones(2, 3, dtype=torch.float64)}
    options: dict[str, Any] = {"loss": lambda model, batch: (model(batch["x"]).sum(), 1), "algorithm": "ring"}
    run = Run("fp64", world=world, find_unused_parameters=True, **options)
    model = run.prepare(Forked(world.rank))
    run.prepare(torch.optim.SGD(run.parameters, lr=0.5, weight_decay=0.0))
    run.optimizer.param_groups[0]["weight_decay"] = 0.1
    before = [layer.bias.detach().clone() for layer in model.layers]
    run.step(batch)
    first, second, third = model.layers
    for layer, bias in ((first, before[0]), (second, before[1])):  # each was used by one of two ranks
        assert torch.allclose(bias - layer.bias, 0.5 + 0.5 * 0.1 * bias)
    assert torch.equal(third.bias, before[2])
    strict = Run("fp64", world=world, **options)
    strict.prepare(Forked(world.rank))
    strict.prepare(torch.optim.SGD(strict.parameters, lr=0.5))
    with pytest.raises(ShoalError, match="some without a gradient on this replica"):
        strict.step(batch)


@on_ranks(2)
def test_every_replica_begins_with_the_weights_of_the_first(world: World) -> None:
    torch.manual_seed(world.rank)
    run = Run("fp64 compress=int8", world=world, loss=lambda model, batch: (model(batch["x"]).sum(), 1))
    model = run.prepare(nn.Linear(3, 3))
    first, second = world.all_gather_object(model.weight.detach().clone())
    assert torch.equal(first, second)


# ---- compressed -----------------------------------------------------------------------------------------------------

METHODS = ["fp16", "bf16", "int8", "1bit", "topk:0.1", "randomk:0.5", "powersgd:2"]
DIVIDED = [(4, "dp_replicate=2 zero=3"), (4, "dp_replicate=2 tp=2 mb=6")]
COMPRESSED = [(2, "mb=6", method) for method in METHODS]
COMPRESSED += [(*DIVIDED[number % 2], method) for number, method in enumerate(METHODS)]


@pytest.mark.parametrize(
    ("ranks", "plan", "method"),
    covered(COMPRESSED, lambda _, plan, method: [method, *plan.split()], lambda ranks, *_: ranks),
)
def test_compressed_training_stays_near(pool: Pool, plain: list[float], ranks: int, plan: str, method: str) -> None:
    """And the layouts that divide a replica make no difference to what travels between two."""
    every = pool.run(trained, ranks, f"{plan} compress={method}", 6)
    losses = every[0][0]
    assert all(other == losses for other, _ in every), "ranks disagree"
    assert losses[0] == pytest.approx(plain[0], rel=1e-12)
    assert losses != pytest.approx(plain, rel=1e-9), "nothing was compressed"
    assert losses == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize(
    "plan",
    [
        wide("sp=off compress=int8"),
        wide("sp=off compress=topk:0.1"),
        "sp=on sync=diloco:3 compress=int8",
        wide("compress=1bit"),
    ],
)
@on_ranks(4)
def test_weights_that_tp_ranks_share_stay_the_same(world: World, plan: str) -> None:
    """Although the weights beside them differ from rank to rank."""
    run = started(world, f"dp_replicate=2 tp=2 {plan}")
    for step in range(5):
        run.step(share(run, step))
    composed = run.composed
    own = {n: p.detach().clone() for n, p in composed.named.items() if composed.is_replicated(n, "tp")}
    every = world.all_gather_object((run.mesh.coordinate["dp_replicate"], own))
    for place, others in every:
        for name, weight in others.items():
            if place == run.mesh.coordinate["dp_replicate"] or composed.local_sgd is None:
                assert torch.equal(weight, own[name]), name


@on_ranks(2)
def test_what_cannot_go_together_is_refused(world: World) -> None:
    with pytest.raises(ShoalError, match="the changing loss scale of fp16"):
        Run("fp16 compress=topk", world=world)
    with pytest.raises(ShoalError, match=r"got cp=2 with zero=0|but dp_replicate=1"):
        Run("cp=2 sync=diloco:4", world=world)
    for words in ("zero=3 compress=1bit", "tp=2 sync=diloco:4"):
        with pytest.raises(ShoalError, match="but dp_replicate=1"):
            Run(words, world=world)


@on_ranks(2)
def test_how_much_was_hidden_is_told(world: World) -> None:
    run = started(world, "compress=int8", bucket_mb=0.001)
    run.step(share(run, 0))
    assert run.composed.reducer is not None
    overlap = run.composed.reducer.overlap
    assert overlap is not None
    assert len(run.composed.reducer.averager.buckets) > 3
    assert 0 <= overlap.exposed <= overlap.seconds
    assert 0 <= overlap.part <= 1
    assert overlap.bytes > 0


# ---- local SGD ------------------------------------------------------------------------------------------------------


def batch_of(step: int, place: int, degree: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    size = BATCH // degree
    own = tokens[place * size : (place + 1) * size]
    return own[:, :-1], own[:, 1:]


def diloco(replicas: int, steps: int, every: int, *, lr: float, momentum: float) -> tuple[list[float], nn.Module]:
    """In plain torch, one replica after the other."""
    outer = build("llama").double()
    initialise(outer, 0)
    sgd = torch.optim.SGD(outer.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    models = [copy.deepcopy(outer) for _ in range(replicas)]
    inner = [torch.optim.AdamW(model.parameters(), lr=LR) for model in models]
    losses = []
    for step in range(steps):
        total = 0.0
        for place, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            tokens, labels = batch_of(step, place, replicas)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total += float(loss.detach()) / replicas
        losses.append(total)
        if (step + 1) % every == 0:
            sgd.zero_grad()
            for shared, *own in zip(outer.parameters(), *(model.parameters() for model in models), strict=True):
                shared.grad = shared.detach() - torch.stack([one.detach() for one in own]).mean(0)
            sgd.step()
            for model in models:
                model.load_state_dict(outer.state_dict())
    return losses, outer


def _trained_by_the_mean(world: World, plan: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    return trained(world, plan, steps, outer=OuterOptimizer(rescale=False))


@pytest.mark.parametrize(
    ("ranks", "plan", "replicas"),
    [wide(2, "mb=4", 2), wide(3, "", 3), (4, "dp_replicate=2 zero=3 mb=3", 2),
     wide(4, "dp_replicate=2 tp=2", 2), wide(4, "dp_replicate=2 pp=2 1f1b mb=3", 2)],
)  # fmt: skip
def test_local_sgd_matches_plain_torch(pool: Pool, ranks: int, plan: str, replicas: int) -> None:
    way, lr, momentum = ("local", 1.0, 0.0) if ranks == 3 else ("diloco", 0.7, 0.9)
    (losses, weights), *_ = pool.run(_trained_by_the_mean, ranks, f"{plan} sync={way}:3", 7)
    expected, outer = diloco(replicas, 7, 3, lr=lr, momentum=momentum)
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, weight in outer.named_parameters():
        assert torch.allclose(weights[name], weight, rtol=1e-7, atol=1e-9), name


@on_ranks(2)
def test_fragments_take_turns_and_late_ones_keep_what_was_done_meanwhile(world: World) -> None:
    """Held against the same written out in plain torch for this one case: 2 fragments, every 4 steps, 1 step late."""
    run = started(world, "sync=diloco:4", outer=OuterOptimizer(lr=0.5, momentum=0.0, fragments=2, delay=1))
    local_sgd = run.composed.local_sgd
    assert local_sgd is not None
    shared = {name: p.detach().clone() for name, p in run.composed.named.items()}
    at_send: dict[str, Tensor] = {}
    for step in range(1, 10):
        run.step(share(run, step))
        own = {name: p.detach().clone() for name, p in run.composed.named.items()}
        for number, fragment in enumerate(local_sgd.fragments):
            if step in ((3, 7), (5, 9))[number]:  # sent after 2, 6 and 4, 8; applied one step later
                for name in fragment.named:
                    away = torch.stack([shared[name] - sent[name] for sent in world.all_gather_object(at_send)]).mean(0)
                    shared[name] = shared[name] - 0.5 * away
                    assert torch.allclose(local_sgd.shared[name], shared[name], rtol=1e-9, atol=1e-12), (step, name)
            if step in ((2, 6), (4, 8))[number]:
                at_send.update({name: own[name] for name in fragment.named})
    assert len(local_sgd.fragments) == 2
    assert all(local_sgd.fragments[n].named for n in range(2))


@on_ranks(2)
def test_local_sgd_averages_the_gradients_of_its_first_steps(world: World) -> None:
    """By the mean of their gradients, so that nothing is to be exchanged; then each goes its own way."""
    plain = started(world, "mb=6")
    run = started(world, "sync=local:3 compress=topk:0.1 mb=6", warmup_steps=2)
    for step in range(2):
        assert float(run.step(share(run, step))) == pytest.approx(float(plain.step(share(plain, step))), rel=1e-12)
        sent = run.report.overlap if run.report is not None else None
        assert sent is not None
        assert sent.bytes >= 8 * sum(parameter.numel() for parameter in run.parameters)
        assert_same(*world.all_gather_object({name: p.detach().clone() for name, p in run.composed.named.items()}))
    for name, weight in plain.weights().items():
        assert torch.allclose(run.weights()[name], weight, rtol=1e-8, atol=1e-10), name
    run.step(share(run, 2))  # of the third, all replicas synchronize, in few bytes
    sent = run.report.overlap if run.report is not None else None
    assert sent is not None
    assert 0 < sent.bytes < 8 * sum(parameter.numel() for parameter in run.parameters)


@on_ranks(4)
def test_how_far_gradients_lie_apart_is_measured(world: World) -> None:
    """A signal that all replicas see, and noise of their own."""
    everybody, alone = dist.group.WORLD, dist.new_group([world.rank], use_local_synchronization=True)
    assert everybody is not None
    finite, shapes = torch.zeros(()), [(100, 300), (7,), (5000,)]
    drawn = torch.Generator().manual_seed(1 + world.rank)
    for noise in (0.0, 1.0, 100.0):
        spread = LocalStepScale(0.9, torch.zeros(2))
        for step in range(30):
            gradients = [torch.ones(shape) + noise * torch.randn(shape, generator=drawn) for shape in shapes]
            assert not spread.update(finite, gradients, step, times=torch.ones(()), replicas=everybody, own=alone)
        expected = ((1 + noise**2) / (1 + noise**2 / 4)) ** 0.5
        assert float(spread.factor(4)) == pytest.approx(expected, rel=0.03)
        before = spread.squares
        gradients[0].fill_(torch.nan)
        assert spread.update(torch.ones(()), gradients, 30, times=torch.ones(()), replicas=everybody, own=alone)
        assert torch.equal(spread.squares, before)
        assert float(spread.factor(4, most=1.5)) == pytest.approx(min(expected, 1.5), rel=0.03)
    assert float(LocalStepScale(0.9, torch.zeros(2)).factor(4)) == 1.0
    late = LocalStepScale(
        0.9, torch.zeros(2), begins_equal=True
    )  # squares of one model are known, and forgotten slowly
    late.update(finite, gradients[1:], 0, times=torch.ones(()), replicas=everybody, own=alone)
    assert float(late.factor(4)) < 1.2
    assert picked([torch.empty(0, 3), torch.empty(0)], 5).numel() == 0


@pytest.mark.wide
def test_a_mean_of_replicas_is_as_long_as_the_step_of_one_model(pool: Pool) -> None:
    """With tokens drawn at random there is little but noise: Adam's steps of four replicas are half as long as they
    should be, on average, unless somebody looks."""
    started_from = build("llama")
    initialise(started_from, 0)
    lengths = {}
    for words, options in (("", {}), ("sync=local:1", {}), ("sync=local:1 ", {"outer": OuterOptimizer(rescale=False)})):
        _, weights = pool.run(_trained_so, 4, words, options)[0]
        moved = [(weights[name] - weight.detach()).norm() for name, weight in started_from.double().named_parameters()]
        lengths[words] = float(torch.stack(moved).norm())
    plain, rescaled, as_they_are = lengths.values()
    assert rescaled == pytest.approx(plain, rel=0.15)
    assert as_they_are < 0.85 * plain


def _trained_so(world: World, words: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    return trained(world, words, 12, **options)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(4, "dp_replicate=2 tp=2 sp=off"), wide(4, "dp_replicate=2 zero=3"), wide(4, "dp_replicate=2 pp=2 mb=3")],
)
def test_ranks_of_a_replica_rescale_alike(pool: Pool, ranks: int, plan: str) -> None:
    """By one number, near that of replicas that are one rank each: it is measured at other places."""
    every = pool.run(_stretched, ranks, f"{plan} sync=local:1")
    losses, factor = pool.run(_stretched, 2, "sync=local:1")[0]
    assert every == [every[0]] * ranks
    assert every[0][0] == pytest.approx(losses, rel=0.01)
    assert every[0][1] == pytest.approx(factor, rel=0.1)
    assert factor > 1.1


def _stretched(world: World, plan: str) -> tuple[list[float], float]:
    run = started(world, plan)
    losses = [float(run.step(share(run, step))) for step in range(6)]
    local_sgd = run.composed.local_sgd
    assert local_sgd is not None
    assert local_sgd.step_scale is not None
    return losses, float(local_sgd.step_scale.factor(2))


@on_ranks(2)
def test_replicas_that_were_apart_stay_so(world: World) -> None:
    """Another way to meet after a resume, whose first steps are not over: each has an optimizer of its own by now."""
    with TemporaryDirectory() as folder:
        shared_folder = world.all_gather_object(folder)[0]
        run = started(world, "sync=diloco:3 compress=int8 mb=6")
        for step in range(4):
            run.step(share(run, step))
        run.save(shared_folder)
        again = started(world, "sync=local:1 compress=powersgd:2 mb=6", warmup_steps=6)
        assert again.load(shared_folder) == 4
        local_sgd = again.composed.local_sgd
        assert local_sgd is not None
        for step in range(4, 9):
            again.step(share(again, step))
            assert_same(*world.all_gather_object({name: one.clone() for name, one in local_sgd.shared.items()}))
        world.barrier()


@on_ranks(2)
def test_warmup_steps_leave_alone_what_no_replica_uses(world: World) -> None:
    loss = {"loss": lambda model, batch: (model(batch["x"]).sum(), 1)}
    run = Run("fp64 sync=local:2", world=world, warmup_steps=2, **loss)
    model = run.prepare(Forked(world.rank))
    run.prepare(torch.optim.AdamW(run.parameters, lr=0.1, weight_decay=0.1))
    before = model.layers[2].weight.detach().clone()
    run.step({"x": torch.ones(2, 3, dtype=torch.float64)})
    assert torch.equal(model.layers[2].weight, before)
    assert not torch.equal(model.layers[0].weight, before)


@on_ranks(2)
def test_what_is_owed_is_paid_in_the_end(world: World) -> None:
    """What every exchange left out is a residual, until the last one gives all replicas the mean of their weights."""
    run = started(world, "sync=local:1 compress=topk:0.01 mb=6")
    local_sgd = run.composed.local_sgd
    assert local_sgd is not None
    for step in range(3):
        run.step(share(run, step))
    owed = {name: debt.clone() for one in local_sgd.fragments for name, debt in one.residuals()}
    assert any(debt.count_nonzero() for debt in owed.values())
    before = run.weights()
    mean = {name: sum(one[name] for one in world.all_gather_object(owed)) / world.size for name in owed}
    run.sync_replicas()
    for name, weight in run.weights().items():
        assert torch.allclose(weight, before[name] - mean[name], rtol=0, atol=1e-15), name
    assert not any(debt.count_nonzero() for one in local_sgd.fragments for _, debt in one.residuals())


@on_ranks(2)
def test_no_replica_updates_if_one_gradient_is_not_finite(world: World) -> None:
    """A gradient that is not finite on one replica: all drop the step, and no rank waits."""
    step = [0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        is_bad = world.rank == 1 and step[0] == 2
        return model(batch["x"]).sum() * (float("nan") if is_bad else 1.0)

    run = Run("fp64 sync=diloco:3", world=world, loss=loss, on_nan="skip")
    model = run.prepare(nn.Linear(3, 1))
    run.prepare(torch.optim.SGD(run.parameters, lr=0.1))
    for number in range(5):
        step[0] = number
        before = model.weight.detach().clone()
        run.step({"x": torch.ones(2, 3, dtype=torch.float64)})
        assert torch.equal(before, model.weight) == (number == 2) or run.steps_done == 3
        run.check_last_step()
    assert model.weight.isfinite().all()


@on_ranks(2)
def test_a_second_backward_is_refused_where_the_first_is_on_its_way(world: World) -> None:
    run = Run("fp64 compress=int8", world=world)
    model = run.prepare(nn.Linear(3, 1))
    run.prepare(torch.optim.SGD(run.parameters, lr=0.1))
    run.backward(model(torch.ones(2, 3, dtype=torch.float64)).mean())
    with pytest.raises(ShoalError, match=r"a second backward before update\(\)"):
        run.backward(model(torch.ones(2, 3, dtype=torch.float64)).mean())


@on_ranks(2)
def test_the_shared_weights_are_what_is_told(world: World) -> None:
    run = started(world, "sync=diloco:3")
    for step in range(4):  # one step after a meeting
        run.step(share(run, step))
    first, second = world.all_gather_object({n: p.detach().clone() for n, p in run.composed.named.items()})
    assert any(not torch.equal(first[name], second[name]) for name in first), "replicas did not train apart"
    assert run.composed.local_sgd is not None
    if world.is_main:
        assert all(torch.equal(w, run.composed.local_sgd.shared[n]) for n, w in run.weights().items())
    else:
        run.weights()
    run.sync_replicas()
    first, second = world.all_gather_object({n: p.detach().clone() for n, p in run.composed.named.items()})
    assert all(torch.equal(first[name], second[name]) for name in first)
    run.sync_replicas()  # nothing has happened since
    assert all(torch.equal(p, first[n]) for n, p in run.composed.named.items())


# ---- saved and loaded -----------------------------------------------------------------------------------------------

SAVED = [
    ("compress=1bit", {}),
    ("compress=topk:0.1", {}),
    ("compress=powersgd:2", {}),
    ("compress=int8", {}),
    ("sync=diloco:3", {}),
    ("sync=local:1 compress=topk:0.1", {"warmup_steps": 2}),
    ("sync=diloco:4 compress=1bit", {"outer": OuterOptimizer(fragments=2, delay=1)}),
]


@pytest.mark.parametrize(
    ("kind", "ranks", "plan"),
    [
        ("llama", 4, "dp_replicate=2 tp=2 sp=on"),
        wide("tied", 4, "dp_replicate=2 pp=2 1f1b mb=3"),
        wide("llama", 2, "cp=2 mb=6"),
    ],
)
def test_copies_that_owe_each_their_own_go_on_bit_for_bit(
    pool: Pool, tmp_path: Path, kind: str, ranks: int, plan: str
) -> None:
    options = {"kind": kind}
    undisturbed = pool.run(_begin, ranks, f"{plan} compress=1bit", options, str(tmp_path / "run"), 3, 3)[0]
    assert pool.run(_go_on, ranks, f"{plan} compress=1bit", options, str(tmp_path / "run"), 3)[0] == undisturbed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("sync=diloco:4", OuterOptimizer()), ("sync=diloco:4", OuterOptimizer(delay=2))),
        wide(("", OuterOptimizer()), ("sync=diloco:4", OuterOptimizer(delay=2))),
        wide(("sync=diloco:5", OuterOptimizer(delay=2)), ("sync=diloco:3", OuterOptimizer(delay=2))),
        (("sync=diloco:6", OuterOptimizer(fragments=2, delay=2)), ("sync=diloco:6", OuterOptimizer(fragments=3))),
    ],
)
def test_delayed_local_sgd_may_change_its_settings(
    pool: Pool, tmp_path: Path, before: tuple[str, OuterOptimizer], after: tuple[str, OuterOptimizer]
) -> None:
    """No weight goes where no gradient has pushed it."""
    undisturbed = pool.run(_begin, 2, before[0], {"outer": before[1]}, str(tmp_path / "run"), 6, 4)[0]
    found = pool.run(_go_on, 2, after[0], {"outer": after[1]}, str(tmp_path / "run"), 4)[0]
    assert found == pytest.approx(undisturbed, rel=0.01)


def _weights_after_loading(world: World, plan: str, folder: str) -> dict[str, Tensor]:
    run = started(world, plan)
    run.load(folder)
    return run.weights()


def test_a_run_without_local_sgd_loads_the_mean_of_the_replicas(pool: Pool, tmp_path: Path) -> None:
    pool.run(_begin, 2, "sync=diloco:100", {}, str(tmp_path / "run"), 4, 0)
    saved = whole(tmp_path / "run")
    for ranks in (1, 2):
        weights = pool.run(_weights_after_loading, ranks, "", str(tmp_path / "run"))[0]
        for name, weight in weights.items():
            mean = (saved[f"replica/0/model/{name}"] + saved[f"replica/1/model/{name}"]) / 2
            assert torch.allclose(weight, mean, rtol=1e-14), name
            assert not torch.equal(weight, saved[f"model/{name}"]), name


def _back_and_forth(world: World, folder: str) -> tuple[list[float], list[float]]:
    run = started(world, "sync=diloco:4", outer=OuterOptimizer(delay=2))
    for step in range(5):
        run.step(share(run, step))
    run.save(folder)
    first = [float(run.step(share(run, step))) for step in range(5, 9)]  # one meeting is under way now
    run.load(folder)
    return first, [float(run.step(share(run, step))) for step in range(5, 9)]


def test_what_was_on_its_way_is_forgotten_when_another_state_is_loaded(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(_back_and_forth, 2, str(tmp_path / "run"))[0]
    assert first == second


def _begin(world: World, plan: str, options: dict[str, Any], folder: str, steps: int, more: int) -> list[float]:
    run = started(world, plan, **options)
    for step in range(steps):
        run.step(share(run, step))
    run.save(folder)
    return [float(run.step(share(run, step))) for step in range(steps, steps + more)]


def _go_on(world: World, plan: str, options: dict[str, Any], folder: str, more: int) -> list[float]:
    run = started(world, plan, **options)
    step = run.load(folder)
    run.save(f"{folder}-again")
    return [float(run.step(share(run, n))) for n in range(step, step + more)]


SAVED_ON = [(2, "", *saved) for saved in SAVED] + [(4, "dp_replicate=2 zero=3", *saved) for saved in SAVED]


def traits(ranks: int, plan: str, words: str, options: dict[str, Any]) -> list[Hashable]:
    """Every first word, and both layouts with replicas that synchronize in every step and with local SGD."""
    return [words.split()[0].partition("=")[0], (plan, "sync" in words)]


@pytest.mark.parametrize(("ranks", "plan", "words", "options"), covered(SAVED_ON, traits, lambda ranks, *_: ranks))
def test_goes_on_bit_for_bit_on_the_same_layout(
    pool: Pool, tmp_path: Path, ranks: int, plan: str, words: str, options: dict[str, Any]
) -> None:
    folder = str(tmp_path / "run")
    undisturbed = pool.run(_begin, ranks, f"{plan} {words}", options, folder, 5, 2)[0]
    assert pool.run(_go_on, ranks, f"{plan} {words}", options, folder, 2)[0] == undisturbed
    assert_same(whole(Path(f"{folder}-again")), whole(Path(folder)))


@pytest.mark.parametrize(
    ("words", "options"), [saved if number == 4 else wide(*saved) for number, saved in enumerate(SAVED)]
)
def test_goes_on_with_another_number_of_replicas(
    pool: Pool, tmp_path: Path, words: str, options: dict[str, Any]
) -> None:
    """Residuals, and what replicas have learnt, on average, is the same before and after."""
    folder = str(tmp_path / "run")
    undisturbed = pool.run(_begin, 3, words, options, folder, 5, 2)[0]
    before = means(whole(Path(folder)))
    sharded = [(4, "dp_replicate=2 zero=1")] if words == "compress=topk:0.1" else []
    for ranks, plan in ((2, ""), (1, ""), *sharded):
        losses = pool.run(_go_on, ranks, f"{plan} {words}", options, folder, 2)[0]
        assert losses == pytest.approx(undisturbed, rel=0.02), ranks
        if ranks > 1:
            after = means(whole(Path(f"{folder}-again")))
            assert {n for n in before if not n.startswith("narrow")} <= after.keys()
            for name, value in before.items():
                if not name.startswith("narrow"):
                    assert torch.allclose(after[name], value, rtol=1e-12, atol=1e-14), name


def means(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What replicas have of their own, averaged over them; the rest as it is."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        plain = name.split("/", 2)[2] if name.startswith("replica/") else name
        found.setdefault(f"{name.startswith('replica/')}/{plain}".removeprefix("False/"), []).append(tensor)
    return {name: torch.stack(several).mean(0) for name, several in found.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [("compress=1bit", ""), wide("", "compress=1bit"), wide("compress=powersgd:2", "compress=powersgd:4"),
     wide("sync=diloco:3", ""), wide("", "sync=diloco:3"), wide("sync=diloco:3", "sync=diloco:2"),
     ("sync=diloco:3 compress=int8", "sync=local:3")],
)  # fmt: skip
def test_another_way_to_meet_after_a_resume(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    folder = str(tmp_path / "run")
    undisturbed = pool.run(_begin, 2, before, {}, folder, 5, 4)[0]
    losses = pool.run(_go_on, 2, after, {}, folder, 4)[0]
    assert losses == pytest.approx(undisturbed, rel=0.02)


@pytest.mark.parametrize("words", [wide("compress=int8 mb=2"), "cp=2 compress=powersgd:2"])
def test_verify_states_the_bound(words: str) -> None:
    tokens = torch.randint(VOCABULARY, (8, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    proof = shoal.verify(functools.partial(build, "llama"), batch, words, nproc=2)
    assert proof.equal
    assert proof.compression_error is not None
    assert 1e-6 < proof.compression_error.error <= proof.compression_error.bound < 1.01
    assert not replace(proof, compression_error=replace(proof.compression_error, error=2.0)).equal


@pytest.mark.parametrize(
    ("ranks", "plan", "options"),
    [
        (2, "compress=powersgd:2", {}),
        wide(4, "dp_replicate=2 tp=2 sp=on compress=1bit", {}),
        (2, "sync=diloco:4 compress=1bit", {"outer": OuterOptimizer(fragments=2, delay=1)}),
    ],
)
def test_every_name_in_a_checkpoint_is_documented(
    pool: Pool, tmp_path: Path, ranks: int, plan: str, options: dict[str, Any]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "checkpoints.md").read_text()
    documented = {*re.findall(r"^\| `([\w./]+/NAME)`", page, re.MULTILINE), "model/NAME", "optimizer/STATE/NAME"}
    placed = {"/R/": r"/\d+/", "tpT": r"tp\d+", "BEGIN": r"[\d,]+", "STATE": r"\w+", "NAME": r"[\w.]+"}
    patterns = [functools.reduce(lambda text, one: text.replace(*one), placed.items(), name) for name in documented]
    pool.run(_saved_once, ranks, plan, options, str(tmp_path / "run"))
    names = whole(tmp_path / "run")
    kinds = {"/".join(name.split("/")[:-1]) for name in names}
    assert len(kinds) > 3
    assert [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []


def _saved_once(world: World, plan: str, options: dict[str, Any], folder: str) -> None:
    run = started(world, plan, **options)
    for step in range(3):
        run.step(share(run, step))
    run.save(folder)


# ---- steps that are dropped -----------------------------------------------------------------------------------------


def owed(run: Run) -> dict[str, Tensor]:
    assert run.composed.reducer is not None
    return {name: residual.clone() for name, residual in run.composed.reducer.averager.residuals()}


@pytest.mark.parametrize(
    ("method", "bad"),
    covered([(m, bad) for m in ("1bit", "topk:0.1", "powersgd:2") for bad in ("nan", "inf")], lambda *row: row),
)
@on_ranks(2)
def test_a_step_that_is_dropped_leaves_what_is_owed(world: World, method: str, bad: str) -> None:
    """One gradient of one rank is not finite: weights and residuals of all stay as they were, and the run goes on."""
    run = started(world, f"compress={method}", on_nan="skip", bucket_mb=0.01)
    losses = []
    for step in range(6):
        if step == 3:
            assert run.composed.reducer is not None
            name = run.composed.reducer.averager.buckets[0].names[0]
            hook = run.composed.named[name].register_hook(
                lambda gradient: gradient * (float(bad) if world.rank == 1 else 1.0)
            )
        weights, before = {n: p.detach().clone() for n, p in run.composed.named.items()}, owed(run)
        losses.append(float(run.step(share(run, 0))))  # one batch, whose loss has to fall
        if step == 3:
            hook.remove()
            assert run.report is not None
            assert run.report.was_skipped
            assert_same(owed(run), before)
            assert_same({n: p.detach() for n, p in run.composed.named.items()}, weights)
        else:
            assert any(not torch.equal(now, before[name]) for name, now in owed(run).items())
    assert all(residual.isfinite().all() for residual in owed(run).values())
    assert losses[4] == pytest.approx(losses[3], rel=1e-12), "the dropped step changed something"
    assert losses[5] < losses[4] < losses[0]


@on_ranks(2)
def test_without_nan_checks_one_replica_spoils_all_at_the_exchange(world: World) -> None:
    """`on_nan: ignore` means it: nobody is asked whether gradients are finite, but the mean of all is not."""
    spoilt = []
    run = Run(
        "fp64 sync=local:3",
        world=world,
        on_nan="ignore",
        clip=1.0,
        loss=lambda model, batch: (model(batch["x"]).sum(), 1),
    )
    model = run.prepare(nn.Linear(3, 1))
    run.prepare(torch.optim.SGD(run.parameters, lr=0.1))
    for step in range(3):
        x = torch.full((2, 3), float("nan") if world.rank == 1 and step == 1 else 1.0, dtype=torch.float64)
        run.step({"x": x})
        spoilt.append(not model.weight.isfinite().all())
    assert spoilt == ([False, False, True] if world.rank == 0 else [False, True, True])
