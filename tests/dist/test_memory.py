"""What a rank holds between microbatches, counted from live tensors, against the blueprint and the ZeRO paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.models import llama
from shoal.parallel.inspect.live_memory import live_memory, peak_bytes
from shoal.parallel.inspect.trace_shapes import trace_shapes
from shoal.predict.exact.state_memory import Memory, memory
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.compositions import num_layers_for
from tests.dist.pool import Pool, on_ranks

BATCH, TOKENS, VOCABULARY = 8, 8, 37


def build(num_layers: int = 3, tied: bool = False) -> llama.Llama:
    with torch.device("meta"):
        return llama.build(
            num_layers=num_layers, hidden=32, ffn=48, num_heads=4, num_kv_heads=4, vocabulary=VOCABULARY, tied=tied,
            max_sequence=TOKENS, preset="tiny",
        )  # fmt: skip


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def prepared(world: World, plan: str, tied: bool, optimizer: str) -> tuple[Run, dict[str, Tensor]]:
    run = Run(plan, world=world)
    model = build(num_layers_for(plan, world.size), tied)
    kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    run.prepare(model, kinds[optimizer](model.parameters(), lr=1e-2, **options))
    share = BATCH // run.degree
    return run, {name: value[run.coordinate * share :][:share] for name, value in batch().items()}


def hold(world: World, plan: str, tied: bool, optimizer: str) -> list[Memory]:
    """What is held before each microbatch of the second step; in a pipeline, of each stage of this rank."""
    run, mine = prepared(world, plan, tied, optimizer)
    run.step(mine)
    held: list[Memory] = []
    run.on_microbatch = lambda number: held.append(live_memory(run.composed, run.optimizer))
    run.step(mine)
    return held


def fullest(held: list[Memory]) -> Memory:
    return max(held, key=lambda one: one.total)


def predicted(plan: str, size: int, *, rank: int, tied: bool, states: int) -> Memory:
    model = build(num_layers_for(plan, size), tied)
    shapes = trace_shapes(model, model.describe(), ((batch()["tokens"],), {}))
    return memory(Plan.parse(plan).resolve(size), shapes, rank=rank, optimizer_states=states)


STAGES = [f"fp32 zero={zero} mb=1" for zero in range(4)]


@pytest.fixture(scope="module")
def of_adam(pool: Pool) -> dict[str, list[list[Memory]]]:
    """What four ranks hold in every stage of ZeRO."""
    return {plan: pool.run(hold, 4, plan, False, "adamw") for plan in STAGES}


@pytest.mark.parametrize("plan", STAGES)
def test_adam_within_one_percent(of_adam: dict[str, list[list[Memory]]], plan: str) -> None:
    for rank, held in enumerate(of_adam[plan]):
        expected, now = predicted(plan, 4, rank=rank, tied=False, states=2), fullest(held)
        assert (now.parameters, now.gradients) == (expected.parameters, expected.gradients)
        assert now.optimizer == pytest.approx(expected.optimizer, rel=0.01)  # Adam counts its steps, too


PLANS = [
    *(wide("zero=1 bf16 mb=1"), wide("zero=2 bf16 mb=1"), wide("dp_replicate=2 zero=2 mb=1"), "tp=2 zero=3 mb=2"),
    *(wide("tp=4 mb=4"), wide("pp=2 1f1b mb=1 zero=3"), wide("pp=2 zero=1 zbv mb=1"), wide("pp=2 mb=1 dp_replicate=2")),
]


@pytest.mark.parametrize("plan", PLANS)
def test_momentum_to_the_byte(pool: Pool, plan: str) -> None:
    for rank, held in enumerate(pool.run(hold, 4, plan, True, "sgd")):
        assert fullest(held) == predicted(plan, 4, rank=rank, tied=True, states=1)


def test_it_falls_as_the_zero_paper_says(of_adam: dict[str, list[list[Memory]]]) -> None:
    held = [fullest(of_adam[plan][0]) for plan in STAGES]
    whole = sum(parameter.numel() * 4 for parameter in build().parameters())
    parts = [[m.parameters / whole, m.gradients / whole, m.optimizer / whole] for m in held]
    # The paper's table for P of weights, P of gradients, 2P of state on N=4. FSDP2 adds the shard to what is gathered,
    # and 37 rows of vocabulary become 40.
    assert parts[0] == pytest.approx([1, 1, 2], rel=0.01)
    assert parts[1] == pytest.approx([1 + 1 / 4, 1, 2 / 4], rel=0.03)
    assert parts[2] == pytest.approx([1 + 1 / 4, 1 / 4, 2 / 4], rel=0.03)
    assert parts[3] == pytest.approx([1 / 4, 1 / 4, 2 / 4], rel=0.03)
    totals = [one.total for one in held]
    assert totals == sorted(totals, reverse=True)


@on_ranks(2)
def test_the_peak_of_a_process_rises(world: World) -> None:
    before = peak_bytes(world.device)
    large = torch.ones(64 * 2**20)  # 256 MiB
    assert before + 100 * 2**20 < peak_bytes(world.device)
    del large
