"""The proof of context and expert parallelism and of their compositions: losses, norms, gradients, weights and routing
biases of plain torch, which sees the whole batch on one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.models import llama, moe
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.compositions import PLANS, is_in_short, num_layers_for
from tests.dist.pool import Pool

STEPS, BATCH, TOKENS, CLIP, VOCABULARY, EXPERTS = 2, 8, 16, 0.5, 37, 4
SHAPE = {"hidden": 16, "num_heads": 4, "num_kv_heads": 2, "vocabulary": VOCABULARY}
SHAPE |= {"max_sequence": TOKENS, "ffn": 24}
ROUTERS: dict[str, dict[str, Any]] = {
    "moe": {"auxiliary_coefficient": 0.1, "z_coefficient": 0.01, "num_dense_layers": 1, "normalise": False},
    "bias": {"score": "sigmoid", "bias_rate": 0.05, "auxiliary_coefficient": 0, "num_shared_experts": 1, "scale": 1.5},
    "capacity": {"capacity_factor": 0.8, "auxiliary_coefficient": 0.1},
    "choice": {"choice": "expert", "auxiliary_coefficient": 0.0, "capacity_factor": 0.75},
}
Trace = dict[str, Any]


def build(kind: str, num_layers: int = 3) -> nn.Module:
    if kind in ROUTERS:
        return moe.build(num_layers=num_layers, **SHAPE, expert_ffn=12, num_experts=EXPERTS, top_k=2, **ROUTERS[kind])
    return llama.build(num_layers=num_layers, **SHAPE)


def batches(kind: str) -> list[dict[str, Tensor]]:
    """Global batches, ragged: some labels do not count. No token comes twice in a sample: a sample that begins with one
    token twice has two positions that no router can tell apart, and rounding would choose between them."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(STEPS):
        tokens = torch.rand(BATCH, VOCABULARY, generator=generator).argsort(1)[:, : TOKENS + 1]
        labels = tokens[:, 1:].clone()
        labels[torch.rand(BATCH, TOKENS, generator=generator) < 0.3] = -100
        made.append({"tokens": tokens[:, :-1].contiguous(), "labels": labels})
        if kind == "packed":
            begins = torch.rand(BATCH, TOKENS, generator=generator) < 0.2
            made[-1]["documents"] = begins.cumsum(1).int()
    return made


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    arguments = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**arguments).flatten(0, 1), batch["labels"].flatten())


def gates(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "bias_rate")]


def train_plainly(kind: str, num_layers: int) -> Trace:
    model = build(kind, num_layers)
    initialise(model, 7)
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    trace: Trace = {"loss": [], "norm": [], "grad": [], "weight": [], "bias": []}
    for batch in batches(kind):
        loss = loss_of(model, batch)
        extra = [gate.auxiliary_loss for gate in gates(model) if gate.auxiliary_loss is not None]
        sum(extra, loss).backward()  # type: ignore[union-attr]
        trace["loss"].append(loss.item())
        trace["grad"].append({name: p.grad.clone() for name, p in model.named_parameters()})  # type: ignore[union-attr]
        trace["norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        for gate in gates(model):
            load = gate.load.double()
            if gate.bias is not None:
                gate.bias += gate.bias_rate * (load.mean() - load).sign()
            gate.load = None
        trace["bias"].append(biases(model))
    trace["weight"].append({name: p.detach().clone() for name, p in model.named_parameters()})
    with torch.no_grad():
        trace["eval"] = loss_of(model, batch).item()
    return trace


def biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train_with_shoal(world: World, plan: str, kind: str) -> Trace:
    run = Run(f"fp64 {plan}", seed=7, clip=CLIP, world=world)
    with torch.device("meta"):
        model = build(kind, num_layers_for(plan, world.size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    run.prepare(model, optimizer)
    trace: Trace = {"loss": [], "norm": [], "grad": [], "weight": [], "bias": []}
    run.on_gradients = lambda: trace["grad"].append(dict(run.composed.full_tensors("gradient")))
    share = BATCH // run.degree
    for batch in batches(kind):
        mine = {name: value[run.coordinate * share :][:share] for name, value in batch.items()}
        trace["loss"].append(run.step(mine).item())
        assert run.report is not None
        trace["norm"].append(run.report.grad_norm.item())
        trace["bias"].append({k: v for part in run.composed.parts for k, v in biases(part.model).items()})
    trace["weight"].append(dict(run.composed.full_tensors("weight")))
    trace["eval"] = run.evaluate([mine])  # of the last batch
    return trace if world.is_main else {"bias": trace["bias"]}


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def check(ours: Trace, theirs: Trace) -> None:
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    for what in ("grad", "weight"):
        for step, (mine, reference) in enumerate(zip(ours[what], theirs[what], strict=True)):
            assert list(mine) == list(reference)
            for name, expected in reference.items():
                apart = difference(mine[name], expected)
                assert apart < 1e-10, f"{what} of {name} differs by {apart:.1e} (number {step})"
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-12)
    assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-12)


def check_biases(ours: list[Trace], theirs: Trace) -> None:
    """They decide the routing of the next step: every rank has those of one process, exactly."""
    for rank in ours:
        for mine, expected in zip(rank["bias"], theirs["bias"], strict=True):
            for name, bias in mine.items():
                assert torch.equal(bias, expected[name]), name


def cases() -> list[Any]:
    listed = [(size, *case) for size, some in PLANS.items() for case in some]
    return [case if is_in_short("test_compositions", *case) else wide(*case) for case in listed]


@pytest.mark.parametrize(("size", "plan", "kind"), cases())
def test_a_composition_computes_what_one_process_does(pool: Pool, size: int, plan: str, kind: str) -> None:
    ours = pool.run(train_with_shoal, size, plan, kind)
    theirs = train_plainly(kind, num_layers_for(plan, size))
    check(ours[0], theirs)
    check_biases(ours, theirs)
