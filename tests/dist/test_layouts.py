"""The proof of every parallelism: a plan on its ranks gives the losses, norms, gradients and weights of plain torch.

The reference is a loop in plain torch over the whole batch, on one process, in float64. It shares with shoal what it is
given: the initial weights and the batches. A right layout differs by rounding, a wrong one by much more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.world import World
from shoal.models import llama
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.compositions import LAYOUTS, is_in_short, num_layers_for
from tests.dist.pool import Pool

STEPS, BATCH, TOKENS, CLIP, VOCABULARY = 2, 8, 12, 0.5, 37

BOTH = ("zero=3 mb=2", "tp=2 sp=on mb=2", "pp=2 1f1b mb=1", "pp=2 zbv mb=2", "pp=2 dp_replicate=2 gpipe mb=2")
"""Plans that are tried with a tied embedding and without; the others with one of the two, by turns."""


def cases() -> list[Any]:
    listed = [(size, plan) for size, plans in LAYOUTS.items() for plan in plans]
    ways = [((True, False) if plan in BOTH else (number % 2 == 0,)) for number, (_, plan) in enumerate(listed)]
    tried = [(size, plan, tied) for (size, plan), tries in zip(listed, ways, strict=True) for tied in tries]
    return [case if is_in_short("test_layouts", case[0], plan_in(case[1]), "llama") else wide(*case) for case in tried]


def plan_in(words: str) -> str:
    return " ".join(word for word in words.split() if not word.startswith("kv="))


def batches() -> list[dict[str, Tensor]]:
    """Global batches, ragged: some labels do not count."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(BATCH, TOKENS, generator=generator) < 0.3] = -100
        made.append({"tokens": tokens[:, :-1].contiguous(), "labels": labels})
    return made


def build(tied: bool, kv_heads: int, num_layers: int) -> llama.Llama:
    return llama.build(
        num_layers=num_layers, hidden=16, ffn=24, num_heads=4, num_kv_heads=kv_heads, vocabulary=VOCABULARY, tied=tied,
        max_sequence=TOKENS, preset="tiny",
    )  # fmt: skip


Trace = dict[str, Any]


def train_plainly(tied: bool, kv_heads: int, num_layers: int) -> Trace:
    model = build(tied, kv_heads, num_layers)
    initialise(model, 7)
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    trace: Trace = {"loss": [], "norm": [], "grad": [], "weight": []}
    for batch in batches():
        logits = model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        trace["loss"].append(loss.item())
        trace["grad"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        trace["norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        trace["weight"].append({name: p.detach().clone() for name, p in model.named_parameters()})
    trace["eval"] = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()).item()
    return trace


def train_with_shoal(world: World, plan: str, tied: bool, kv_heads: int, on_meta: bool = True) -> Trace | None:
    run = Run(f"fp64 {plan}", seed=7, clip=CLIP, world=world)
    with torch.device("meta" if on_meta else "cpu"):
        model = build(tied, kv_heads, num_layers_for(plan, world.size))
    if not on_meta:
        initialise(model, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    run.prepare(model, optimizer)
    layout = run.plan.layout
    assert (run.composed.head is not None) == (layout.tp == layout.pp == 1), "who computes the loss"
    trace: Trace = {"loss": [], "norm": [], "grad": [], "weight": []}
    run.on_gradients = lambda: trace["grad"].append(dict(run.composed.full_tensors("gradient")))
    share = BATCH // run.degree
    for batch in batches():
        mine = {name: value[run.coordinate * share :][:share] for name, value in batch.items()}
        trace["loss"].append(run.step(mine).item())
        assert run.report is not None
        trace["norm"].append(run.report.grad_norm.item())
        trace["weight"].append(dict(run.composed.full_tensors("weight")))
    trace["eval"] = run.evaluate([mine])  # of the last batch
    assert run.weights().keys() == (trace["weight"][-1].keys() if world.is_main else set())
    return trace if world.is_main else None


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def check(ours: Trace, theirs: Trace) -> None:
    for step in range(STEPS):
        assert ours["loss"][step] == pytest.approx(theirs["loss"][step], rel=1e-12)
        assert ours["norm"][step] == pytest.approx(theirs["norm"][step], rel=1e-12)
        for what in ("grad", "weight"):
            assert list(ours[what][step]) == list(theirs[what][step])
            for name, expected in theirs[what][step].items():
                apart = difference(ours[what][step][name], expected)
                assert apart < 1e-10, f"step {step}: {what} of {name} differs by {apart:.1e}"
    assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-12)


@pytest.mark.parametrize(("size", "plan", "tied"), cases())
def test_a_layout_computes_what_one_process_does(pool: Pool, size: int, plan: str, tied: bool) -> None:
    kv_heads = 4 if "kv=4" in plan else 2
    ours = pool.run(train_with_shoal, size, plan_in(plan), tied, kv_heads)[0]
    check(ours, train_plainly(tied, kv_heads, num_layers_for(plan_in(plan), size)))
