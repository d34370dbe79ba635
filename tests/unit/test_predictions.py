"""Predictions on paper: the textbook for a model that divides evenly, the runtime's own cuts for one that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shoal.blueprint.anatomy import (
    Anatomy,
    Crossing,
    Sizes,
    is_partial,
    matmul_elements,
    named,
    owners,
    parts,
    sharded_units,
    splits_tokens,
    stage_bounds,
    stages,
    units,
)
from shoal.blueprint.description import Description, Split
from shoal.blueprint.memory import memory
from shoal.blueprint.plan import Plan
from shoal.blueprint.traffic import BUCKET_BYTES, Messages, traffic
from shoal.models import llama
from shoal.parallel import compose, replicate
from shoal.parallel.holdings import anatomy_of

D, T, V, LAYERS, BATCH = 64, 16, 128, 4, 16
ELEMENTS = 2 * V * D + LAYERS * 2 * D * D  # embedding, head, and two matrices a block
SIZES = Sizes(weight=4, compute=4, reduce=4, loss=4)


def textbook(**changes: object) -> Anatomy:
    """Blocks of one column-parallel and one row-parallel matrix; no norms, nothing uneven."""
    blocks = tuple(f"blocks.{i}" for i in range(LAYERS))
    pieces = {f"{block}.{way}.weight": (D, D) for block in blocks for way in ("up", "down")}
    splits = {"blocks.*.up": Split.COLUMN, "blocks.*.down": Split.ROW, "embed": Split.VOCABULARY}
    crossings = [Crossing(module="embed", way="leave", shape=(T, D))]
    for block in blocks:
        crossings.append(Crossing(module=f"{block}.up", way="enter", shape=(T, D)))
        crossings.append(Crossing(module=f"{block}.down", way="leave", shape=(T, D), is_repeated=False))
    anatomy = Anatomy(
        description=Description(before_blocks=("embed",), blocks=blocks, after_blocks=("head",), splits=splits),
        parameters={"embed.weight": (V, D), **pieces, "head.weight": (V, D)},
        stream=(T, D),
        crossings=tuple(crossings),
        lookups=frozenset(["embed.weight"]),
    )
    return replace(anatomy, **changes)  # type: ignore[arg-type]


def of(words: str, size: int, *, rank: int = 0, anatomy: Anatomy | None = None) -> dict[str, dict[str, Messages]]:
    return traffic(Plan.parse(words).resolve(size), anatomy or textbook(), batch=BATCH, rank=rank, sizes=SIZES)


# ---- the textbook ---------------------------------------------------------------------------------------------------

P = 4 * ELEMENTS  # bytes of the weights
LAST = 4 * V * D  # the head: gathered once
m = 4  # microbatches


@pytest.mark.parametrize(
    ("words", "axis", "expected"),
    [
        ("zero=0 mb=1", "dp_replicate", {"all_reduce": (None, P)}),
        ("zero=1 mb=1", "dp_shard", {"all_gather": (6, P), "reduce_scatter": (6, P)}),
        ("zero=2 mb=1", "dp_shard", {"all_gather": (6, P), "reduce_scatter": (6 * m, P * m)}),
        ("zero=3 mb=1", "dp_shard", {"all_gather": (11 * m, (2 * P - LAST) * m), "reduce_scatter": (6 * m, P * m)}),
    ],
)
def test_data_parallelism(words: str, axis: str, expected: dict[str, tuple[int, int]]) -> None:
    assert of(words, 4)[axis] == expected


def test_hybrid_sharding_reduces_its_own_shard_over_replicas() -> None:
    step = of("dp_replicate=2 dp_shard=2 zero=3 mb=1", 4)
    assert step["dp_replicate"] == {"all_reduce": (6, P // 2)}
    assert step["dp_shard"]["reduce_scatter"].bytes == m * P


def test_tensor_parallelism() -> None:
    S = 4 * (BATCH // m) * T * D  # bytes of an activation
    crossed = m * (1 + 2 * LAYERS)  # embedding; up and down of every block, one of them in the backward
    assert of("tp=4 mb=4 sp=off", 4)["tp"] == {"all_reduce": (crossed, crossed * S)}
    both = m * (1 + 2 * LAYERS)
    assert of("tp=4 mb=4 sp=on", 4)["tp"] == {"all_gather": (both, both * S), "reduce_scatter": (both, both * S)}
    again = m * LAYERS  # a recomputed block gathers again; what it ends with nobody needs
    assert of("tp=4 mb=4 sp=on recompute=full", 4)["tp"]["all_gather"].calls == both + again
    assert of("tp=4 mb=4 sp=on recompute=full", 4)["tp"]["reduce_scatter"].calls == both


def test_a_pipeline_sends_over_each_boundary_both_ways() -> None:
    S = 4 * 1 * T * D
    ends, middle = (BATCH, BATCH * S), (2 * BATCH, 2 * BATCH * S)
    sent = [of("pp=4 1f1b mb=1", 4, rank=rank)["pp"]["send"] for rank in range(4)]
    assert sent == [ends, middle, middle, ends]
    in_a_v = [of("pp=2 zbv mb=1", 2, rank=rank)["pp"]["send"] for rank in range(2)]
    assert in_a_v == [middle, middle]  # two boundaries each; the one inside rank 1 costs nothing


def test_large_gradients_of_a_pipeline_are_averaged_in_buckets() -> None:
    rows = BUCKET_BYTES // 4 // D  # one such matrix fills a bucket
    large = textbook(parameters={**textbook().parameters, "embed.weight": (rows, D)})
    step = of("pp=2 dp_replicate=2 mb=1", 4, anatomy=large)
    rest = 4 * D * D * sum(name.startswith("blocks") for part in parts_of("pp=2", large) for name in part)
    assert step["dp_replicate"] == {"all_reduce": (2, BUCKET_BYTES + rest)}
    assert replicate.BUCKET_BYTES == BUCKET_BYTES


def parts_of(words: str, anatomy: Anatomy) -> list[list[str]]:
    return [list(part.pieces) for part in parts(Plan.parse(words).resolve(2), anatomy, 0)]


@pytest.mark.parametrize(
    ("zero", "expected"),
    [  # P of weights, P of gradients, 2 P of Adam's state, on N = 4; FSDP2's own shard beside what is gathered
        (0, (P, P, 2 * P)),
        (1, (P + P // 4, P, 2 * P // 4)),
        (2, (P + P // 4, P // 4, 2 * P // 4)),
        (3, (P // 4, P // 4, 2 * P // 4)),
    ],
)
def test_memory_of_the_zero_paper(zero: int, expected: tuple[int, int, int]) -> None:
    held = memory(Plan.parse(f"zero={zero}").resolve(4), textbook(), rank=0, sizes=SIZES)
    assert (held.parameters, held.gradients, held.optimizer) == expected
    assert held.total == sum(expected)


def test_memory_in_lower_precision() -> None:
    held = memory(Plan.parse("zero=1 bf16").resolve(4), textbook(), rank=0)
    assert held.parameters == P // 4 + P // 2  # shards in float32, the gathered copy in bfloat16
    assert held.gradients == P


def test_frozen_parameters_are_held_and_gathered_but_have_no_gradient() -> None:
    frozen = textbook(frozen=frozenset(["embed.weight"]))
    held = memory(Plan.parse("zero=3").resolve(4), frozen, rank=0, sizes=SIZES)
    assert (held.parameters, held.gradients) == (P // 4, (P - LAST) // 4)
    assert of("zero=1", 4, anatomy=frozen)["dp_shard"] == {"all_gather": (6, P), "reduce_scatter": (5, P - LAST)}


# ---- the runtime's own cuts -----------------------------------------------------------------------------------------


def tiny(tied: bool = True, num_layers: int = 5) -> llama.Llama:
    with torch.device("meta"):
        return llama.build(num_layers=num_layers, hidden=16, ffn=24, vocabulary=37, tied=tied, preset="tiny")


def traced(model: llama.Llama) -> Anatomy:
    tokens = torch.zeros(2, 12, dtype=torch.long)
    return anatomy_of(model, model.describe(), ((tokens,), {}))


def test_stages_are_cut_by_cost() -> None:
    anatomy = traced(tiny(tied=True))
    blocks = {matmul_elements(anatomy, name) for name in anatomy.description.blocks}
    assert blocks == {float(sum(p.numel() for p in tiny().model.layers[0].parameters() if p.dim() > 1))}
    assert matmul_elements(anatomy, "model.embed_tokens") == 0  # a lookup
    assert matmul_elements(anatomy, "lm_head") == 37 * 16  # the same parameter, multiplied with
    assert stage_bounds(anatomy, num_stages=2) == [(0, 3), (3, 5)]


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("pp=2 1f1b", (0, 1)),
        ("pp=3 interleaved", (0, 1, 2, 0, 1, 2)),
        ("pp=2 zbv", (0, 1, 1, 0)),
        ("pp=2 dualpipev", (0, 1, 1, 0)),
        ("pp=4 gpipe", (0, 1, 2, 3)),
    ],
)
def test_who_owns_a_stage(words: str, places: tuple[int, ...]) -> None:
    assert owners(Plan.parse(words).resolve(Plan.parse(words).pp or 1)) == places


@pytest.mark.parametrize("tied", [True, False])
def test_units_are_those_of_the_runtime(tied: bool) -> None:
    model = tiny(tied)
    theirs = list(compose._units(model, model.describe()))
    ours = list(units(model.describe(), named(model.describe())))
    what = ("names", "is_block", "is_last", "is_root")
    assert [[getattr(u, w) for w in what] for u in ours] == [[getattr(u, w) for w in what] for u in theirs]
    anatomy = traced(model)
    part = parts(Plan().resolve(1), anatomy, 0)[0]
    held = [name for _, pieces in sharded_units(anatomy, part) for name in pieces]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())


def test_both_ends_of_a_pipeline_have_a_tied_parameter() -> None:
    anatomy = traced(tiny(tied=True))
    plan = Plan.parse("pp=2 tp=2 1f1b").resolve(4)
    first, last = (parts(plan, anatomy, rank)[0].pieces for rank in (1, 3))
    assert first["model.embed_tokens.weight"] == last["lm_head.weight"] == (18, 16)  # 37 rows: 19 and 18
    assert "lm_head.weight" not in first
    assert stages(plan, anatomy)[1][-2:] == ("model.norm", "lm_head")


def test_whose_gradients_are_shares() -> None:
    description = Description(splits={"norm": Split.SEQUENCE, "out": Split.ROW, "attn.q_norm": Split.HEADS})
    names = ["norm.weight", "norm.inner.bias", "out.bias", "attn.q_norm.weight", "out.weight", "other.weight"]
    assert [is_partial(description, name, splits_tokens=True) for name in names] == [True] * 4 + [False] * 2
    assert [is_partial(description, name, splits_tokens=False) for name in names] == [*[False] * 3, True, False, False]
    assert not splits_tokens(Plan.parse("tp=2").resolve(2), description)  # nothing divides the tokens
    both = {"wte": Split.VOCABULARY, "head": Split.VOCABULARY}
    embeds = replace(description, before_blocks=("wte",), splits={**description.splits, **both})
    assert not splits_tokens(Plan.parse("tp=2").resolve(2), embeds)  # nothing puts them together again
    embeds = replace(embeds, after_blocks=("head",))
    assert splits_tokens(Plan.parse("tp=2").resolve(2), embeds)
    assert not splits_tokens(Plan.parse("tp=2 sp=off").resolve(2), description)
    assert not splits_tokens(Plan().resolve(1), description)


# ---- reading a model ------------------------------------------------------------------------------------------------


def test_crossings_of_a_llama() -> None:
    anatomy = traced(tiny(num_layers=1))
    block = "model.layers.0"
    assert [(c.module, c.way, c.shape, c.is_repeated) for c in anatomy.crossings[:5]] == [
        ("model.embed_tokens", "leave", (12, 16), True),
        (f"{block}.self_attn.q_proj", "enter", (12, 16), True),  # keys and values read the same
        (f"{block}.self_attn.o_proj", "leave", (12, 16), True),
        (f"{block}.mlp.gate_proj", "enter", (12, 16), True),
        (f"{block}.mlp.down_proj", "leave", (12, 16), False),  # nothing after it is kept
    ]
    assert [(c.module, c.way, c.shape) for c in anatomy.crossings[5:]] == [
        ("lm_head", "enter", (12, 16)),
        ("lm_head", "logits", (12, 37)),
    ]
    assert (anatomy.stream, anatomy.lookups) == ((12, 16), {"model.embed_tokens.weight"})


class PostNorm(nn.Module):
    """A block that ends with a norm, whose backward needs what left the split region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


def test_a_block_that_ends_with_a_norm_crosses_again() -> None:
    model = nn.Sequential(PostNorm(), PostNorm())
    splits = {"*.up": Split.COLUMN, "*.down": Split.ROW, "*.norm": Split.SEQUENCE}
    anatomy = anatomy_of(model, Description(blocks=("0", "1"), splits=splits), ((torch.ones(3, 5, 4),), {}))
    assert [(c.module, c.is_repeated) for c in anatomy.crossings] == [
        (f"{block}.{layer}", True) for block in (0, 1) for layer in ("up", "down")
    ]
    assert not anatomy.crossings[0].has_backward  # of the input
    assert all(c.has_backward for c in anatomy.crossings[1:])
    assert model[0].up.weight.device.type == "cpu"  # the model itself is untouched
