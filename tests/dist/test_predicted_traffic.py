"""Predicted traffic is what is counted: for every rank, axis and operation of one steady step, call by call.

The counter looks at what torch.distributed is handed; the prediction sees only shapes and the plan. They share no code.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.blueprint.description import Description, Split
from shoal.blueprint.model_shapes import ModelShapes
from shoal.blueprint.plan import Plan
from shoal.comm.traffic_counter import count
from shoal.comm.world import World
from shoal.models import llama
from shoal.parallel.expert.experts import Experts
from shoal.parallel.expert.router import Router
from shoal.parallel.inspect.trace_shapes import trace_shapes
from shoal.predict.exact.traffic import LossTraffic, traffic
from shoal.train.run import Run
from tests.cover import covered
from tests.dist.compositions import num_layers_for
from tests.dist.pool import Pool

BATCH, TOKENS, VOCABULARY = 8, 12, 37

PLANS = {  # words of this test: tied embeddings, kv= heads, freeze= what needs no gradient
    2: [
        *("dp_replicate=2 mb=2 tied", "dp_replicate=2 mb=2 freeze=layers.0"),
        *("zero=1 mb=2", "zero=2 mb=1 tied", "zero=3 mb=2", "zero=3 mb=2 tied", "zero=3 recompute=full"),
        *("zero=3 bf16 mb=2", "zero=3 mb=2 freeze=embed,layers.0", "zero=2 mb=2 tied freeze=layers.2"),
        *("tp=2 sp=off mb=2 tied", "tp=2 sp=on mb=2", "tp=2 bf16 mb=4", "tp=2 bf16 sp=off mb=4"),
        *("tp=2 recompute=full mb=4", "tp=2 recompute=selective mb=4", "tp=2 sp=off recompute=full mb=4"),
        *("tp=2 mb=4 freeze=embed,layers.0", "tp=2 sp=off recompute=selective mb=8"),
        *("pp=2 gpipe mb=2", "pp=2 1f1b mb=1 tied", "pp=2 interleaved mb=2 tied", "pp=2 looped mb=2"),
        *("pp=2 zb mb=1", "pp=2 zbv mb=1 tied", "pp=2 dualpipev mb=1", "pp=2 1f1b bf16 mb=2", "pp=2 1f1b mb=8"),
    ],
    4: [
        *("dp_replicate=4", "dp_replicate=2 zero=1 mb=1", "dp_replicate=2 zero=2 mb=1", "dp_replicate=2 zero=3 mb=1"),
        *("zero=3 mb=1 tied", "tp=4 mb=2 kv=4", "tp=2 zero=3 mb=2 tied", "tp=2 zero=1 mb=2 sp=off"),
        *("tp=2 dp_replicate=2 mb=2", "tp=2 zero=3 bf16 mb=2", "tp=2 pp=2 zero=1 1f1b mb=1 tied", "pp=2 tp=2 zbv mb=1"),
        *("pp=2 tp=2 1f1b mb=2 recompute=full", "pp=2 tp=2 dualpipev mb=1 sp=off", "pp=2 zero=3 1f1b mb=1 tied"),
        *("pp=2 zero=2 zbv mb=1 tied", "pp=2 dp_replicate=2 zb mb=1 tied", "pp=2 dp_replicate=2 gpipe mb=2"),
        *("pp=4 1f1b mb=1 tied", "pp=2 zero=1 interleaved mb=1", "pp=2 zero=2 bf16 1f1b mb=2"),
        *("pp=2 zero=3 interleaved v=4 mb=1", "pp=2 zero=3 looped v=4 mb=2"),
    ],
}


def read(size: int, words: str) -> tuple[str, dict[str, Any]]:
    """The plan among some words, and what to build for it."""
    said = dict(word.split("=") for word in words.split() if word.startswith(("kv=", "freeze=")))
    plan = [word for word in words.split() if word != "tied" and not word.startswith(tuple(f"{key}=" for key in said))]
    precision = [] if "bf16" in plan else ["fp64"]
    options = {"kv_heads": int(said.get("kv", 2)), "num_layers": num_layers_for(" ".join(plan), size)}
    return " ".join(plan + precision), {**options, "freeze": said.get("freeze", ""), "tied": "tied" in words.split()}


AXES = {"tp", "pp", "zero", "dp_replicate", "recompute"}


def traits(size: int, words: str) -> set[Hashable]:
    """Each word, but for the size of microbatches; pairs of axes are compared in `make test-all`."""
    said = [word.partition("freeze=")[1] or word for word in words.split() if not word.startswith(("mb=", "kv="))]
    return {*said} | ({"layouts"} if len({key_of(word) for word in said} & AXES) > 1 else set())


def key_of(word: str) -> str:
    """`zero=3` → `zero`; a word without a key is a schedule, or stands for itself."""
    key, is_said, _ = word.partition("=")
    return key if is_said or word in ("bf16", "tied") else "schedule"


def cost(size: int, words: str) -> float:
    return size**1.25


def build(*, tied: bool, kv_heads: int, num_layers: int, freeze: str) -> llama.Llama:
    with torch.device("meta"):
        model = llama.build(
            num_layers=num_layers, hidden=16, ffn=24, num_heads=4, num_kv_heads=kv_heads, vocabulary=VOCABULARY,
            tied=tied, max_sequence=TOKENS, preset="tiny",
        )  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in freeze.split(",") if word))
    return model


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def llama_shapes(**options: Any) -> ModelShapes:
    model = build(**options)
    return trace_shapes(model, model.describe(), ((batch()["tokens"],), {}))


def counted_step(run: Run, model: nn.Module, data: dict[str, Tensor]) -> dict[str, dict[str, dict[str, int]]]:
    """What this rank sends in one step, once it is steady."""
    run.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    share = BATCH // run.degree
    mine = {name: value[run.coordinate * share :][:share] for name, value in data.items()}
    for _ in range(2 if run.plan.dp_replicate != 1 else 1):  # in its second step DDP agrees on its buckets
        run.step(mine)
    with count(run.mesh.groups) as seen:
        run.step(mine)
    return seen.to_mapping()


def count_llama(world: World, plan: str, options: dict[str, Any], has_own_loss: bool = False) -> Any:
    loss = own_loss if has_own_loss else None
    return counted_step(Run(plan, loss=loss, clip=0.5, world=world), build(**options), batch())


def own_loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    logits = model(data["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())


def check(plan: str, of: ModelShapes, counted: list[Any], **options: Any) -> None:
    resolved = Plan.parse(plan).resolve(len(counted))
    for rank, seen in enumerate(counted):
        predicted = traffic(resolved, of, batch=BATCH, rank=rank, loss=LossTraffic(**options))
        for axis, operations in predicted.items():
            for operation, messages in operations.items():
                if messages.calls is None:  # not predicted
                    assert operation == "all_reduce"
                    operations[operation] = messages._replace(calls=seen[axis][operation]["calls"])
        as_counted = {axis: {op: m._asdict() for op, m in ops.items()} for axis, ops in predicted.items()}
        for axis in {*as_counted, *seen}:
            assert as_counted.get(axis) == seen.get(axis), f"predicted (left) is not counted on rank {rank}, {axis}"


# torch's norm on a CPU, where what a stage has received is in bf16 and its weights are not
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize(
    ("size", "words"), covered([(size, words) for size, plans in PLANS.items() for words in plans], traits, cost)
)
def test_traffic_is_what_was_predicted(pool: Pool, size: int, words: str) -> None:
    plan, options = read(size, words)
    check(plan, llama_shapes(**options), pool.run(count_llama, size, plan, options))


@pytest.mark.parametrize("plan", ["fp64 tp=2 sp=off mb=4", "bf16 tp=2 sp=on"])
def test_a_loss_of_ones_own_joins_the_logits(pool: Pool, plan: str) -> None:
    options = read(2, "")[1]
    of = {"splits_logits": False, "defers_count": "mb" in plan}  # one microbatch on one data rank is the whole batch
    check(plan, llama_shapes(**options), pool.run(count_llama, 2, plan, options, True), **of)


# ---- models that are not ours ---------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Neither blocks nor splits: sharded by size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


class PostNorm(nn.Module):
    """A block with biases that ends with a norm, whose backward needs what left the split region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


class PostNorms(nn.Module):
    """Three such blocks between linears that nobody may split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 3)
        self.blocks = nn.Sequential(*(PostNorm() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))

    def describe(self) -> Description:
        sequence = dict.fromkeys(("first", "blocks.*.norm", "last"), Split.SEQUENCE)
        splits = {"blocks.*.up": Split.COLUMN, "blocks.*.down": Split.ROW}
        return Description(
            blocks=("blocks.0", "blocks.1", "blocks.2"),
            before_blocks=("first",),
            after_blocks=("last",),
            splits={**splits, **sequence},
        )


# A linear with a bias returns a view of a matrix, and torch 2.13 warns of what nobody here does to it.
no_in_place = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


def inputs_and_labels() -> dict[str, Tensor]:
    return {"inputs": torch.ones(BATCH, 4, 7), "labels": torch.zeros(BATCH, 4, dtype=torch.long)}


def plain_loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(data["inputs"]).flatten(0, 1), data["labels"].flatten())


def count_other(world: World, kind: str, plan: str) -> Any:
    model = {"Plain": Plain, "PostNorms": PostNorms}[kind]()
    return counted_step(Run(plan, loss=plain_loss, clip=0.5, world=world), model, inputs_and_labels())


@no_in_place
@pytest.mark.parametrize("plan", ["zero=3 mb=2", "zero=2", "dp_replicate=2"])
def test_a_model_without_a_description(pool: Pool, plan: str) -> None:
    of = trace_shapes(Plain(), Description(), ((inputs_and_labels()["inputs"],), {}))
    check(plan, of, pool.run(count_other, 2, "Plain", plan), defers_count=True)


@no_in_place
@pytest.mark.parametrize("plan", ["tp=2 sp=off mb=4", "tp=2 sp=off mb=4 recompute=full", "pp=2 mb=2", "zero=3 mb=2"])
def test_a_model_with_a_description_of_its_own(pool: Pool, plan: str) -> None:
    model = PostNorms()
    of = trace_shapes(model, model.describe(), ((inputs_and_labels()["inputs"],), {}))
    check(plan, of, pool.run(count_other, 2, "PostNorms", plan), defers_count=True)


# ---- a mixture that does not say what its blocks are ----------------------------------------------------------------


class Sparse(nn.Module):
    """With its experts it is large enough to be a unit, without them it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.extra = Router(16, 4, top_k=2), Experts(16, 8, 4), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        routing, *facts = self.router(x)
        y = self.experts(x.flatten(0, 1), routing).view_as(x)
        attached: Tensor = self.router.attach_aux_loss(x + y + self.extra(x), *facts)
        return attached


class Mixture(nn.Module):
    """Two layers of experts, and layers of unlike sizes beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.wide, self.narrow = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 640), nn.Linear(640, 16)
        self.layers = nn.ModuleList(Sparse() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x + self.narrow(self.wide(x).tanh()))
        return logits

    def describe(self) -> Description:
        return Description(num_experts=4, active_experts=2, splits={"layers.*.experts": Split.EXPERTS})


def count_mixture(world: World, plan: str) -> Any:
    return counted_step(Run(plan, clip=0.5, world=world), Mixture().double(), batch())


@pytest.mark.parametrize("plan", ["ep=2 zero=3 mb=2 fp64", "ep=2 zero=1 mb=2 fp64", "zero=3 mb=2 fp64"])
def test_experts_of_a_model_without_blocks(pool: Pool, plan: str) -> None:
    model = Mixture()
    of = trace_shapes(model, model.describe(), ((batch()["tokens"],), {}))
    resolved = Plan.parse(plan).resolve(2)
    for rank, seen in enumerate(pool.run(count_mixture, 2, plan)):
        predicted = traffic(resolved, of, batch=BATCH, rank=rank)["dp_shard"]
        assert {name: (m.calls, m.bytes) for name, m in predicted.items()} == {
            name: (found["calls"], found["bytes"]) for name, found in seen["dp_shard"].items()
        }
