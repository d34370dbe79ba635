"""FSDP's own settings: units by class and by size, prefetch, and reductions in bfloat16.

Units and prefetch change no number: gradients and weights are those of plain torch in float64. The bytes are those
that are predicted, and gathers happen as early as set.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Description
from shoal.blueprint.model_shapes import ModelShapes, Sizes
from shoal.blueprint.plan import Plan
from shoal.comm.traffic_counter import count
from shoal.comm.world import World
from shoal.models import llama, moe
from shoal.numerics.init import initialise
from shoal.parallel.data.fsdp_units import chosen_units
from shoal.parallel.data.shard_policy import ShardPolicy
from shoal.parallel.inspect.live_memory import live_memory
from shoal.parallel.inspect.trace_shapes import trace_shapes
from shoal.predict.exact.state_memory import memory
from shoal.predict.exact.traffic import traffic
from shoal.train.run import Run
from tests.cover import covered
from tests.dist.compositions import num_layers_for
from tests.dist.pool import Pool

BATCH, TOKENS, VOCABULARY = 8, 12, 37
SHAPE = {"hidden": 16, "num_heads": 4, "num_kv_heads": 2, "vocabulary": VOCABULARY}

BY_CLASS = {"wrap_classes": ("Block",)}
INNER = {"wrap_classes": ("SelfAttention", "FeedForward")}
NESTED = {"wrap_classes": ("SelfAttention", "Decoder")}
BY_SIZE = {"wrap_min_params": 300}
FORWARD, BOTH = {"forward_prefetch": 2}, {"forward_prefetch": 3, "backward_prefetch": 2}

CASES: list[tuple[int, str, str, dict[str, Any]]] = [
    (2, "zero=3 mb=2", "llama", BY_CLASS | BOTH),
    (2, "zero=3 mb=2 recompute=full", "tied", INNER | {"backward_prefetch": 2}),
    (2, "zero=2 mb=2", "llama", NESTED | FORWARD),
    (2, "zero=1 mb=2", "tied", BY_SIZE | FORWARD),
    (2, "zero=3 mb=2", "frozen", {"backward_prefetch": 3}),
    (2, "zero=3 mb=2", "frozen", INNER),
    (2, "ep=2 zero=3 mb=2", "moe", BY_CLASS | BOTH),
    (4, "tp=2 zero=3 mb=2", "tied", INNER | BOTH),
    (4, "pp=2 zero=2 1f1b mb=2", "llama", BY_CLASS),
    (4, "pp=2 zero=3 zbv mb=1", "tied", INNER),
    (4, "dp_replicate=2 zero=3 mb=1", "llama", NESTED | BOTH),
    (4, "cp=2 zero=3 mb=2", "llama", BY_SIZE | BOTH),
]


def traits(size: int, plan: str, kind: str, settings: dict[str, Any]) -> set[Any]:
    return {*settings.items(), kind, *(word for word in plan.split() if not word.startswith("mb="))}


def build(kind: str, num_layers: int) -> nn.Module:
    if kind == "moe":
        return moe.build(num_layers=num_layers, **SHAPE, ffn=24, expert_ffn=12, num_experts=4, top_k=2, z_coefficient=0)
    model = llama.build(num_layers=num_layers, **SHAPE, ffn=24, tied=kind == "tied", preset="tiny")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            kind != "frozen" or not name.startswith(("model.embed_tokens", "model.layers.0", "model.layers.1"))
        )
    return model


def batch() -> dict[str, Tensor]:
    tokens = torch.rand(BATCH, VOCABULARY, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :TOKENS]
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def shapes_of(plan: str, size: int, kind: str, settings: dict[str, Any]) -> ModelShapes:
    with torch.device("meta"):
        model = build(kind, num_layers_for(plan, size))
    return trace_shapes(model, model.describe(), ((batch()["tokens"],), {}), ShardPolicy(**settings))


def train(world: World, plan: str, kind: str, settings: dict[str, Any], precision: str = "fp64") -> Any:
    run = Run(f"{precision} {plan}", seed=7, world=world, **settings)
    with torch.device("meta"):
        model = build(kind, num_layers_for(plan, world.size))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run.prepare(model, torch.optim.SGD(trained, lr=1e-1, momentum=0.9))
    share = BATCH // run.degree
    mine = {name: value[run.coordinate * share :][:share] for name, value in batch().items()}
    gradients: dict[str, Tensor] = {}
    run.on_gradients = lambda: gradients.update(dict(run.composed.full_tensors("gradient")))  # type: ignore[arg-type]
    run.step(mine)
    run.on_gradients = None
    held = []
    run.on_microbatch = lambda number: held.append(live_memory(run.composed, run.optimizer))
    with count(run.mesh.groups) as seen:
        run.step(mine)
    weights = dict(run.composed.full_tensors("weight"))
    fullest = max(held, key=lambda one: one.total)
    loss = run.evaluate([mine])
    return seen.to_mapping(), fullest, (gradients, weights, loss) if world.is_main else None


def train_plainly(kind: str, num_layers: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    model = build(kind, num_layers)
    initialise(model, 7)
    model.double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-1, momentum=0.9)
    gradients: dict[str, Tensor] = {}
    for step in range(2):
        loss = F.cross_entropy(model(batch()["tokens"]).flatten(0, 1), batch()["labels"].flatten())
        auxiliary = [module.auxiliary_loss for module in model.modules() if hasattr(module, "bias_rate")]
        sum((one for one in auxiliary if one is not None), loss).backward()  # type: ignore[union-attr]
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = F.cross_entropy(model(batch()["tokens"]).flatten(0, 1), batch()["labels"].flatten())
    return gradients, {name: p.detach() for name, p in model.named_parameters()}, loss.item()


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def mapping_of(predicted: Any) -> dict[str, dict[str, dict[str, int]]]:
    return {axis: {op: m._asdict() for op, m in operations.items()} for axis, operations in predicted.items()}


@pytest.mark.parametrize(("size", "plan", "kind", "settings"), covered(CASES, traits, lambda size, *_: size**1.25))
def test_units_and_prefetch_change_no_number_and_no_prediction(
    pool: Pool, size: int, plan: str, kind: str, settings: dict[str, Any]
) -> None:
    ranks = pool.run(train, size, plan, kind, settings)
    gradients, weights, loss = train_plainly(kind, num_layers_for(plan, size))
    ours = ranks[0][2]
    for name, expected in gradients.items():
        assert difference(ours[0][name], expected) < 1e-10, name
    assert ours[1].keys() == weights.keys()
    for name, expected in weights.items():
        assert difference(ours[1][name], expected) < 1e-10, name
    assert ours[2] == pytest.approx(loss, rel=1e-10)
    resolved, shapes = Plan.parse(f"{plan} fp64").resolve(size), shapes_of(plan, size, kind, settings)
    for rank, (seen, held, _) in enumerate(ranks):
        predicted = mapping_of(traffic(resolved, shapes, batch=BATCH, rank=rank))
        for axis in set(predicted) | set(seen) if kind != "moe" else {"dp_shard", "edp"} & set(predicted):
            assert predicted.get(axis) == seen.get(axis), f"rank {rank}, {axis}"
        if "pp" not in plan:
            assert held == memory(resolved, shapes, rank=rank, optimizer_states=1)


# ---- how early ------------------------------------------------------------------------------------------------------


class Step(nn.Module):
    """A unit whose gather has a size that no sum of others has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.begin = nn.Identity()
        self.weight = nn.Parameter(torch.ones(2 * 2**number))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.begin(x) * self.weight.mean()
        return result


def gathered_before_each_step(world: World, settings: dict[str, Any]) -> tuple[list[set[int]], list[set[int]]]:
    """The units that were gathered since the one before, when each began its forward, and its backward."""
    run = Run("fp64 zero=3", loss=lambda model, x: model(x).mean(), world=world, wrap_classes=("Step",), **settings)
    model = nn.Sequential(*(Step(number) for number in range(5)))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    found: dict[str, list[int]] = {"forward": [], "backward": []}
    with count(run.mesh.groups) as seen:
        for unit in run.module.children():
            begin: nn.Module = unit.begin
            begin.register_forward_pre_hook(lambda *_: note("forward"))
            begin.register_full_backward_pre_hook(lambda *_: note("backward"))

        def note(way: str) -> None:
            found[way].append(seen.bytes["dp_shard", "all_gather"])

        run.step(torch.ones(2, 3, dtype=torch.float64, requires_grad=True))
    before, sets = 0, []
    for size in [*found["forward"], *found["backward"]]:
        more, before = (size - before) // 16, size
        sets.append({number for number in range(5) if more & 2**number})
    return sets[:5], sets[5:]


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({}, [{0}, {1}, {2}, {3}, {4}], [{4, 3}, {2}, {1}, {0}, set()]),
        ({"forward_prefetch": 2}, [{0, 1, 2}, {3}, {4}, set(), set()], [{4, 3}, {2}, {1}, {0}, set()]),
        ({"backward_prefetch": 2}, [{0}, {1}, {2}, {3}, {4}], [{4, 3, 2}, {1}, {0}, set(), set()]),
    ],
)
def test_gathers_are_as_early_as_set(
    pool: Pool, settings: dict[str, Any], forward: list[set[int]], backward: list[set[int]]
) -> None:
    for seen in pool.run(gathered_before_each_step, 2, settings):
        assert seen == (forward, backward)


# ---- reductions in bfloat16 -----------------------------------------------------------------------------------------


def gradients_of_ranks(size: int) -> list[dict[str, Tensor]]:
    """What each rank has before anything is reduced: the mean over its own samples."""
    found = []
    for rank in range(size):
        model = build("llama", 3)
        initialise(model, 7)
        mine = {name: value[rank * BATCH // size :][: BATCH // size] for name, value in batch().items()}
        F.cross_entropy(model(mine["tokens"]).flatten(0, 1), mine["labels"].flatten()).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_reductions_in_bfloat16(pool: Pool, zero: int) -> None:
    plan = f"zero={zero}"
    ranks = pool.run(train, 2, plan, "llama", {"reduce_dtype": "bf16"}, "fp32")
    each = gradients_of_ranks(2)
    apart = 0.0
    for name, ours in ranks[0][2][0].items():
        first, second = (one[name] for one in each)
        halves = (first.bfloat16() + second.bfloat16()).float() / 2
        assert difference(ours, halves) < 2**-7, name  # a rounding to 8 bits of a number that fp32 rounds otherwise
        apart = max(apart, difference(ours, (first + second) / 2))
    assert 2**-12 < apart < 2**-7
    resolved, shapes = Plan.parse(f"{plan} fp32").resolve(2), shapes_of(plan, 2, "llama", {})
    predicted = traffic(resolved, shapes, batch=BATCH, rank=0, sizes=Sizes.of(resolved, "bf16"))
    assert mapping_of(predicted) == ranks[0][0]
    wide = traffic(resolved, shapes, batch=BATCH, rank=0)["dp_shard"]["reduce_scatter"].bytes
    assert wide == 2 * ranks[0][0]["dp_shard"]["reduce_scatter"]["bytes"]


def test_gradients_that_wait_for_their_reduction_are_as_wide_as_it(pool: Pool) -> None:
    plan = "zero=1 mb=1"
    resolved, shapes = Plan.parse(f"{plan} fp32").resolve(2), shapes_of(plan, 2, "llama", {})
    for rank, (_, held, _) in enumerate(pool.run(train, 2, plan, "llama", {"reduce_dtype": "bf16"}, "fp32")):
        sizes = Sizes.of(resolved, "bf16")
        assert held == memory(resolved, shapes, rank=rank, sizes=sizes, optimizer_states=1)


# ---- which units ----------------------------------------------------------------------------------------------------


def test_units_are_in_the_order_of_the_forward() -> None:
    model = build("llama", 2)
    by_class = chosen_units(model, ShardPolicy(**NESTED), has_blocks=True)
    assert by_class == ("model.layers.0.self_attn", "model.layers.1.self_attn", "model")
    by_size = chosen_units(model, ShardPolicy(wrap_min_params=1100), has_blocks=True)
    assert by_size == ("model.layers.0.mlp", "model.layers.1.mlp", "model")
    assert chosen_units(model, ShardPolicy(), has_blocks=True) is None
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    assert chosen_units(layers, ShardPolicy(), has_blocks=bool(Description().blocks)) == ("0", "1", "2")
