"""Loops of one's own under context and expert parallelism: whatever a person does with batches, the losses are those of
one process, or a message says what to do."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal import Description, ShoalError, Split
from shoal.comm.world import World
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool
from tests.dist.test_compositions import batches, build

BATCH = 4


class Pair(NamedTuple):
    tokens: Tensor
    labels: Tensor


def samples(kind: str) -> list[dict[str, Tensor]]:
    whole = batches(kind)[0]
    return [{name: tensor[i] for name, tensor in whole.items()} for i in range(8)]


def prepared(world: World, plan: str, kind: str, **options: Any) -> tuple[Run, nn.Module, Any]:
    run = Run(f"fp64 {plan}", seed=7, world=world, **options)
    model = build(kind)
    initialise(model, 7)
    model, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.3), DataLoader(samples(kind), batch_size=BATCH)
    )
    return run, model, loader


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    arguments = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**arguments).flatten(0, 1), batch["labels"].flatten())


def one_batch_again_and_again(run: Run, model: nn.Module, loader: Any) -> list[float]:
    batch = next(iter(run.batches(loader)))
    return [run.step(batch).item() for _ in range(3)]


def backward_without_microbatches(run: Run, model: nn.Module, loader: Any) -> list[float]:
    losses = []
    for batch in run.batches(loader):
        run.backward(loss_of(model, batch))
        losses.append(run.update().loss.item())
    return losses


def batches_that_are_copied(run: Run, model: nn.Module, loader: Any) -> list[float]:
    return [run.step({k: v.clone() for k, v in batch.items()}).item() for batch in run.batches(loader)]


def evaluations(run: Run, model: nn.Module, loader: Any) -> list[float]:
    return [run.evaluate(loader), run.evaluate(iter(loader)), run.evaluate(list(loader))]


LOOPS = [one_batch_again_and_again, backward_without_microbatches, batches_that_are_copied, evaluations]


def go(world: World, loop: int, plan: str, kind: str) -> tuple[list[float], Tensor | None]:
    run, model, loader = prepared(world, plan, kind)
    losses = LOOPS[loop](run, model, loader)
    experts = run.report.experts if run.report is not None else None
    return losses, experts


@pytest.mark.parametrize("loop", range(len(LOOPS)), ids=[loop.__name__ for loop in LOOPS])
@pytest.mark.parametrize(
    ("plan", "kind"), [wide("cp=2", "packed"), ("ep=2 zero=2", "moe"), wide("cp=2 ulysses", "moe")]
)
def test_a_loop_computes_what_it_does_on_one_process(pool: Pool, loop: int, plan: str, kind: str) -> None:
    (theirs, their_experts), *_ = pool.run(go, 1, loop, "mb=4", kind)
    for ours, experts in pool.run(go, 2, loop, plan, kind):
        assert ours == pytest.approx(theirs, rel=1e-12)
        if experts is not None:
            assert their_experts is not None
            assert experts.sum() > 0
            torch.testing.assert_close(experts, their_experts, rtol=1e-12, atol=0)


def other_forms(world: World, plan: str) -> list[float]:
    """Named tuples, ids beside the tokens, nests."""
    found = []
    whole = batches("llama")[0]
    for form in ("pair", "ids", "nest"):
        run = Run(f"fp64 {plan}", seed=7, world=world, loss=LOSSES[form])
        model = build("llama")
        initialise(model, 7)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
        batch: Any = Pair(**whole)
        if form == "ids":
            batch = {"id": torch.arange(8), **whole}
        if form == "nest":
            batch = {"inputs": {"tokens": whole["tokens"]}, "labels": whole["labels"]}
        found.append(run.step(batch).item())
    return found


def score(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


LOSSES = {
    "pair": lambda model, batch: score(model(batch.tokens), batch.labels),
    "ids": lambda model, batch: score(model(batch["tokens"]), batch["labels"]),
    "nest": lambda model, batch: score(model(**batch["inputs"]), batch["labels"]),
}


def test_batches_may_have_any_form(pool: Pool) -> None:
    (theirs,) = pool.run(other_forms, 1, "")
    for ours in pool.run(other_forms, 2, "cp=2"):
        assert ours == pytest.approx(theirs, rel=1e-12)


def whole_logits(world: World, plan: str) -> tuple[Tensor, Tensor]:
    run, model, _ = prepared(world, plan, "packed")
    batch = batches("packed")[0]
    mine = run.own_tokens(batch)
    with torch.no_grad():
        logits = model(**{name: value for name, value in mine.items() if name != "labels"})
    return run.gather_tokens(logits), run.gather_tokens(mine["labels"])


@pytest.mark.parametrize("plan", ["cp=2", "cp=2 ulysses"])
def test_logits_of_all_tokens_in_order(pool: Pool, plan: str) -> None:
    ((theirs, labels),) = pool.run(whole_logits, 1, "")
    for ours, our_labels in pool.run(whole_logits, 2, plan):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert torch.equal(our_labels, labels)


# ---- what is refused ------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A person's own: no blocks, a head layout of its own, experts of shoal's."""

    def __init__(self, attaches: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.attention = shoal.Attention()
        self.router = shoal.Router(16, 4, top_k=2)
        self.experts = shoal.Experts(16, 8, 4)
        self.head = nn.Linear(16, 37, bias=False)
        self.attaches = attaches

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, 2)).permute(2, 0, 4, 1, 3)  # features do not lie side by side
        x = x + self.attention(q, k, v).transpose(1, 2).flatten(2)
        routing, *facts = self.router(x)
        y = self.experts(x.flatten(0, 1), routing).view_as(x)
        if self.attaches:
            y = self.router.attach_aux_loss(y, *facts)
        logits: Tensor = self.head(x + y)
        return logits

    def describe(self) -> Description:
        return Description(positions="positions", num_experts=4, active_experts=2, splits={"experts": Split.EXPERTS})


def own_model(world: World, plan: str, attaches: bool) -> list[float]:
    torch.manual_seed(0)
    run = Run(f"fp64 {plan}", seed=7, world=world)
    model = Small(attaches)
    for parameter in (model.router.weight, model.experts.gate_proj, model.experts.up_proj, model.experts.down_proj):
        nn.init.normal_(parameter, std=0.3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    whole = batches("llama")[0]
    share = 8 // run.degree
    mine = {name: value[run.coordinate * share :][:share] for name, value in whole.items()}
    return [run.step(mine).item() for _ in range(3)]


@pytest.mark.parametrize("plan", [wide("cp=2"), wide("cp=2 ulysses"), wide("ep=2 zero=3"), "cp=2 ep=2 zero=1"])
def test_a_model_of_ones_own_without_blocks(pool: Pool, plan: str) -> None:
    (theirs,) = pool.run(own_model, 1, "", True)
    for ours in pool.run(own_model, 2, plan, True):
        assert ours == pytest.approx(theirs, rel=1e-10)


def refused(world: World, what: str) -> str:
    """The words of the refusal; empty: there was none."""
    try:
        if what == "attach":
            own_model(world, "ep=2 zero=1", False)
        elif what == "direct":
            run, _, loader = prepared(world, "cp=2", "llama")
            for batch in loader:
                run.step(batch)
        elif what == "unknown batch":
            run, model, _ = prepared(world, "cp=2", "llama")
            run.backward(loss_of(model, run.own_tokens(batches("llama")[0])))
        elif what == "whole tokens":
            run, model, _ = prepared(world, "cp=2", "llama")
            run.own_tokens(batches("llama")[0])
            model(batches("llama")[0]["tokens"])
        elif what == "too long":
            run, _, _ = prepared(world, "cp=2", "llama")
            run.step({"tokens": torch.zeros(2, 64, dtype=torch.int64), "labels": torch.zeros(2, 64, dtype=torch.int64)})
        elif what == "routers":
            run, model, _ = prepared(world, "dp_replicate=2", "moe")
            run.backward(loss_of(model, batches("moe")[0]))
    except ShoalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("attach", "router.attach_aux_loss"),
        ("direct", "run.batches"),
        ("unknown batch", "has to know the batch"),
        ("routers", "has to know the batch"),
        ("whole tokens", "run.own_tokens"),
        ("too long", "at most the model's 16 tokens"),
    ],
)
def test_what_would_go_wrong_is_refused(pool: Pool, what: str, words: str) -> None:
    for said in pool.run(refused, 2, what):
        assert words in said
