"""Predictions on paper: the textbook for a model that divides evenly, the runtime's own cuts for one that does not."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.blueprint.context_parallel import attention_memory, contiguous, ring_steps, ring_work, zigzag
from shoal.blueprint.description import Description, Split
from shoal.blueprint.model_shapes import AttentionSite, DispatchSite, ModelShapes, RouterSite, Sizes, TPBoundary
from shoal.blueprint.placement import (
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
from shoal.blueprint.plan import Plan
from shoal.models import llama, moe
from shoal.numerics.ops.attention_kernels import attended
from shoal.parallel import compose
from shoal.parallel.context import ring, ulysses
from shoal.parallel.context.attention import Attention
from shoal.parallel.data import ddp
from shoal.parallel.inspect.trace_shapes import trace_shapes
from shoal.predict.exact.data_traffic import BUCKET_BYTES
from shoal.predict.exact.state_memory import memory
from shoal.predict.exact.traffic import Messages, traffic

D, T, V, LAYERS, BATCH = 64, 16, 128, 4, 16
ELEMENTS = 2 * V * D + LAYERS * 2 * D * D  # embedding, head, and two matrices a block
SIZES = Sizes(weight=4, compute=4, reduce=4, loss=4)


def textbook(**changes: object) -> ModelShapes:
    """Blocks of one column-parallel and one row-parallel matrix; no norms, nothing uneven."""
    blocks = tuple(f"blocks.{i}" for i in range(LAYERS))
    pieces = {f"{block}.{way}.weight": (D, D) for block in blocks for way in ("up", "down")}
    splits = {"blocks.*.up": Split.COLUMN, "blocks.*.down": Split.ROW, "embed": Split.VOCABULARY}
    tp_boundaries = [TPBoundary(module="embed", way="leave", shape=(T, D))]
    for block in blocks:
        tp_boundaries.append(TPBoundary(module=f"{block}.up", way="enter", shape=(T, D)))
        tp_boundaries.append(TPBoundary(module=f"{block}.down", way="leave", shape=(T, D), is_repeated=False))
    shapes = ModelShapes(
        description=Description(before_blocks=("embed",), blocks=blocks, after_blocks=("head",), splits=splits),
        parameters={"embed.weight": (V, D), **pieces, "head.weight": (V, D)},
        stream=(T, D),
        tp_boundaries=tuple(tp_boundaries),
        lookups=frozenset(["embed.weight"]),
    )
    return replace(shapes, **changes)  # type: ignore[arg-type]


def of(words: str, size: int, *, rank: int = 0, shapes: ModelShapes | None = None) -> dict[str, dict[str, Messages]]:
    return traffic(Plan.parse(words).resolve(size), shapes or textbook(), batch=BATCH, rank=rank, sizes=SIZES)


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
    step = of("pp=2 dp_replicate=2 mb=1", 4, shapes=large)
    rest = 4 * D * D * sum(name.startswith("blocks") for part in parts_of("pp=2", large) for name in part)
    assert step["dp_replicate"] == {"all_reduce": (2, BUCKET_BYTES + rest)}
    assert ddp.BUCKET_BYTES == BUCKET_BYTES


def parts_of(words: str, shapes: ModelShapes) -> list[list[str]]:
    return [list(part.pieces) for part in parts(Plan.parse(words).resolve(2), shapes, 0)]


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
    assert of("zero=1", 4, shapes=frozen)["dp_shard"] == {"all_gather": (6, P), "reduce_scatter": (5, P - LAST)}


# ---- context parallelism --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_each_token_has_one_rank_and_each_pair_is_computed_once(cp: int) -> None:
    tokens = 4 * cp
    for deal in (zigzag, contiguous):
        dealt = [token for rank in range(cp) for start, stop in deal(tokens, rank, cp) for token in range(start, stop)]
        assert sorted(dealt) == list(range(tokens))
    seen: list[tuple[int, int]] = []
    for rank in range(cp):
        own = held_by(tokens, rank, cp)
        for number, step in enumerate(ring_steps(rank, cp)):
            assert step.source == (rank - number) % cp
            queries = own if step.queries == "all" else own[len(own) // 2 :]
            theirs = held_by(tokens, step.source, cp)
            keys = theirs if step.keys == "all" else theirs[: len(theirs) // 2]
            seen += [(q, k) for q in queries for k in keys if not step.is_causal or k <= q]
    assert sorted(seen) == [(q, k) for q in range(tokens) for k in range(q + 1)]  # causal attention, nothing twice


def held_by(tokens: int, rank: int, cp: int) -> list[int]:
    return [token for start, stop in zigzag(tokens, rank, cp) for token in range(start, stop)]


@pytest.mark.parametrize("cp", [1, 2, 3, 5, 8])
def test_a_ring_is_balanced(cp: int) -> None:
    tokens = 6 * cp
    assert ring_work(cp, tokens) == [tokens * (tokens + 1) // 2 // cp] * cp
    assert ring_work(cp, tokens, causal=False) == [tokens * tokens // cp] * cp


N, K, H = 8, 2, 8  # heads, key/value heads, head dim


def attentive(**changes: Any) -> ModelShapes:
    attentions = tuple(
        AttentionSite(module=f"blocks.{i}.attention", queries=(N, T, H), keys=(K, T, H), **changes)
        for i in range(LAYERS)
    )
    return textbook(attentions=attentions)


def test_keys_and_values_go_round() -> None:
    block = 4 * 2 * K * (T // 4) * H  # bytes of keys and values of one sample and rank
    there, back = m * LAYERS * 3, m * LAYERS * 2 * 3  # forward; backward: again, and the gradients
    step = of("cp=4 mb=4", 4, shapes=attentive())
    assert step["cp"] == dict.fromkeys(("send", "recv"), (there + back, 4 * (there + back) * block))
    again = of("cp=4 mb=4 recompute=full", 4, shapes=attentive())["cp"]["send"]
    assert again == (2 * there + back, 4 * (2 * there + back) * block)
    frozen = of("cp=4 mb=4", 4, shapes=attentive(has_backward=False))["cp"]["send"]
    assert frozen == (there, 4 * there * block)


def test_gradients_of_keys_travel_in_float32() -> None:
    plan = Plan.parse("cp=4 mb=4 bf16").resolve(4)
    block = 4 * 2 * K * (T // 4) * H  # elements of keys and values of four samples
    rounds = m * LAYERS * 3
    assert traffic(plan, attentive(), batch=BATCH, rank=0)["cp"]["send"] == (3 * rounds, rounds * block * (2 + 2 + 4))


def test_heads_are_exchanged_for_tokens() -> None:
    out, kv = 4 * 4 * N * (T // 4) * H, 4 * 4 * 2 * 4 * (T // 4) * H  # two key/value heads become four
    twice = m * LAYERS * 2  # forward and backward, each there and back
    step = of("cp=4 ulysses mb=4", 4, shapes=attentive())
    assert step["cp"] == {"all_to_all": (2 * twice, twice * (out + kv + out))}
    last = of("cp=4 ulysses mb=4 recompute=full", 4, shapes=attentive(is_output_repeated=False))
    assert last["cp"]["all_to_all"] == (2 * twice + m * LAYERS, twice * (out + kv + out) + m * LAYERS * (out + kv))


def test_ranks_of_a_sequence_share_parameters_and_average_gradients() -> None:
    assert of("cp=4 mb=4", 4)["dp_cp"] == {"all_reduce": (None, P)}
    assert of("cp=2 dp_replicate=2 mb=2", 4)["dp_cp"] == {"all_reduce": (None, P)}
    assert of("cp=4 zero=1 mb=4", 4)["dp_shard_cp"] == {"all_gather": (6, P), "reduce_scatter": (6, P)}
    assert of("cp=2 dp_shard=2 zero=1 mb=2", 4)["dp_shard_cp"]["all_gather"] == (6, P)
    held = memory(Plan.parse("cp=2 dp_shard=2 zero=3").resolve(4), textbook(), rank=0, sizes=SIZES)
    assert (held.parameters, held.gradients, held.optimizer) == (P // 4, P // 4, 2 * P // 4)


def test_what_else_travels_is_of_a_part_of_the_tokens() -> None:
    S = 4 * 4 * T * D  # of a microbatch of four
    crossed = m * (1 + 2 * LAYERS)
    assert of("cp=2 tp=2 mb=4 sp=off", 4)["tp"] == {"all_reduce": (crossed, crossed * S // 2)}
    assert of("cp=2 pp=2 1f1b mb=4", 4)["pp"]["send"] == (m, m * S // 2)


# ---- experts --------------------------------------------------------------------------------------------------------

E, F = 8, 32
EXPERTS = 4 * 2 * E * F * D  # bytes of the experts of one block, two matrices each


def mixture(**changes: Any) -> ModelShapes:
    """The textbook with eight experts of two matrices in every block, of which each token visits two."""
    plain = textbook()
    homes = [f"{block}.experts" for block in plain.description.blocks]
    matrices = {f"{home}.{way}": (E * F, D) for home in homes for way in ("up", "down")}
    splits = {**plain.description.splits, "blocks.*.experts": Split.EXPERTS, "blocks.*.router": Split.SEQUENCE}
    return replace(
        plain,
        description=replace(plain.description, splits=splits, num_experts=E, active_experts=2),
        parameters={**plain.parameters, **matrices},
        dispatches=tuple(DispatchSite(module=home, num_experts=E, rows=2 * T, dim=D, **changes) for home in homes),
        routers=tuple(
            RouterSite(module=f"{block}.router", num_experts=E, has_auxiliary=True)
            for block in plain.description.blocks
        ),
    )


def test_rows_travel_to_their_experts_and_back() -> None:
    rows = 4 * 4 * 2 * T * D  # bytes of a microbatch of four, two experts a token
    calls = m * LAYERS
    step = of("dp_shard=4 ep=4 zero=3 mb=1", 4, shapes=mixture())["ep"]
    assert step == {"all_to_all": (5 * calls, calls * (4 * rows // 4 + 4 * E))}
    again = of("dp_shard=4 ep=4 zero=3 mb=1 recompute=full", 4, shapes=mixture())["ep"]["all_to_all"]
    assert again == (8 * calls, calls * (6 * rows // 4 + 2 * 4 * E))
    shared = of("cp=4 ep=4 zero=3 mb=4", 4, shapes=mixture())["ep"]["all_to_all"]  # a fourth of four samples' tokens
    assert shared == step["all_to_all"]
    assert "ep" not in of("dp_shard=4 zero=3 mb=1", 4, shapes=mixture())


def test_rows_that_are_chosen_as_they_come_are_not_predicted() -> None:
    step = of("dp_shard=4 ep=4 zero=3 mb=1", 4, shapes=mixture(is_predicted=False))["ep"]["all_to_all"]
    assert step == (5 * m * LAYERS, None)
    chosen = mixture()
    chosen = replace(chosen, routers=tuple(replace(router, gathers_scores=True) for router in chosen.routers))
    assert of("cp=4 mb=4", 4, shapes=chosen)["cp"]["all_gather"] == (m * LAYERS, None)


def test_divided_experts_are_shared_by_those_who_have_the_same() -> None:
    step = of("dp_shard=4 ep=2 zero=3 mb=1", 4, shapes=mixture())
    half = LAYERS * EXPERTS // 2
    assert step["edp"] == {
        "all_gather": (2 * m * LAYERS, 2 * m * half),
        "reduce_scatter": (m * LAYERS, m * half),
    }
    assert step["dp_shard"]["reduce_scatter"] == (6 * m, m * P)
    assert "edp" not in of("dp_shard=4 ep=4 zero=3 mb=1", 4, shapes=mixture())  # each alone
    assert of("dp_shard=4 zero=3 mb=1", 4, shapes=mixture())["dp_shard"]["reduce_scatter"].bytes == m * (P + 2 * half)
    hybrid = of("dp_replicate=2 dp_shard=2 ep=2 zero=3 mb=1", 4, shapes=mixture())["dp_replicate"]
    assert hybrid == {"all_reduce": (6 + LAYERS, P // 2 + half)}


@pytest.mark.parametrize(
    ("words", "expected"),
    [  # P of the rest on 4; X of experts, divided by ep, and shared by what is left
        ("ep=2 zero=3", (P // 4 + LAYERS * EXPERTS // 4,) * 2),
        ("ep=4 zero=3", (P // 4 + LAYERS * EXPERTS // 4,) * 2),
        ("ep=2 zero=1", (P + P // 4 + LAYERS * EXPERTS * 3 // 4, P + LAYERS * EXPERTS // 2)),
        ("ep=4 zero=1", (P + P // 4 + LAYERS * EXPERTS * 2 // 4, P + LAYERS * EXPERTS // 4)),  # shard and copy of all
        ("ep=4 zero=2", (P + P // 4 + LAYERS * EXPERTS * 2 // 4, P // 4 + LAYERS * EXPERTS // 4)),
    ],
)
def test_memory_of_experts(words: str, expected: tuple[int, int]) -> None:
    held = memory(Plan.parse(words).resolve(4), mixture(), rank=3, sizes=SIZES)
    assert (held.parameters, held.gradients) == expected
    assert held.optimizer == 2 * (P + LAYERS * EXPERTS) // 4


def test_routers_ask_for_the_rest_of_a_sequence_and_for_the_loads_of_all() -> None:
    loads = LAYERS * (E + 2) * 8
    for words in ("dp_replicate=4 mb=1", "pp=4 mb=1", "tp=4 mb=1"):  # all, whoever has which
        plain, routed = (of(words, 4, shapes=one)["world"]["all_reduce"] for one in (textbook(), mixture()))
        assert (routed.calls, routed.bytes) == (plain.calls + 1, plain.bytes + loads)  # type: ignore[operator]
    assert of("cp=4 mb=4", 4, shapes=mixture())["cp"] == {"all_reduce": (m * LAYERS, m * LAYERS * 4 * E * 8)}
    with_sp = of("tp=4 mb=4 sp=on", 4, shapes=mixture())["tp"]["all_reduce"]
    partial_gradients = LAYERS * EXPERTS  # of its own tokens only
    assert with_sp == (m * LAYERS + 1, m * LAYERS * 4 * E * 8 + partial_gradients)
    assert "cp_tp" in of("cp=2 tp=2 mb=4 sp=on", 4, shapes=mixture())
    assert "tp" not in of("dp_shard=4 zero=1 mb=1", 4, shapes=mixture())


def test_of_the_experts_only_active_ones_cost() -> None:
    assert matmul_elements(mixture(), "blocks.0") == 2 * D * D + 2 * E * F * D * 2 / E


# ---- the runtime's own cuts -----------------------------------------------------------------------------------------


def tiny(tied: bool = True, num_layers: int = 5) -> llama.Llama:
    with torch.device("meta"):
        return llama.build(num_layers=num_layers, hidden=16, ffn=24, vocabulary=37, tied=tied, preset="tiny")


def traced(model: llama.Llama) -> ModelShapes:
    tokens = torch.zeros(2, 12, dtype=torch.long)
    return trace_shapes(model, model.describe(), ((tokens,), {}))


def test_stages_are_cut_by_cost() -> None:
    shapes = traced(tiny(tied=True))
    blocks = {matmul_elements(shapes, name) for name in shapes.description.blocks}
    assert blocks == {float(sum(p.numel() for p in tiny().model.layers[0].parameters() if p.dim() > 1))}
    assert matmul_elements(shapes, "model.embed_tokens") == 0  # a lookup
    assert matmul_elements(shapes, "lm_head") == 37 * 16  # the same parameter, multiplied with
    assert stage_bounds(shapes, num_stages=2) == [(0, 3), (3, 5)]


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
    shapes = traced(model)
    part = parts(Plan().resolve(1), shapes, 0)[0]
    held = [name for _, pieces in sharded_units(Plan().resolve(1), shapes, part) for name in pieces]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())


def test_both_ends_of_a_pipeline_have_a_tied_parameter() -> None:
    shapes = traced(tiny(tied=True))
    plan = Plan.parse("pp=2 tp=2 1f1b").resolve(4)
    first, last = (parts(plan, shapes, rank)[0].pieces for rank in (1, 3))
    assert first["model.embed_tokens.weight"] == last["lm_head.weight"] == (18, 16)  # 37 rows: 19 and 18
    assert "lm_head.weight" not in first
    assert stages(plan, shapes)[1][-2:] == ("model.norm", "lm_head")


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


def test_tp_boundaries_of_a_llama() -> None:
    shapes = traced(tiny(num_layers=1))
    block = "model.layers.0"
    assert [(c.module, c.way, c.shape, c.is_repeated) for c in shapes.tp_boundaries[:5]] == [
        ("model.embed_tokens", "leave", (12, 16), True),
        (f"{block}.self_attn.q_proj", "enter", (12, 16), True),  # keys and values read the same
        (f"{block}.self_attn.o_proj", "leave", (12, 16), True),
        (f"{block}.mlp.gate_proj", "enter", (12, 16), True),
        (f"{block}.mlp.down_proj", "leave", (12, 16), False),  # nothing after it is kept
    ]
    assert [(c.module, c.way, c.shape) for c in shapes.tp_boundaries[5:]] == [
        ("lm_head", "enter", (12, 16)),
        ("lm_head", "logits", (12, 37)),
    ]
    assert (shapes.stream, shapes.lookups) == ((12, 16), {"model.embed_tokens.weight"})


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
    shapes = trace_shapes(model, Description(blocks=("0", "1"), splits=splits), ((torch.ones(3, 5, 4),), {}))
    assert [(c.module, c.is_repeated) for c in shapes.tp_boundaries] == [
        (f"{block}.{layer}", True) for block in (0, 1) for layer in ("up", "down")
    ]
    assert not shapes.tp_boundaries[0].has_backward  # of the input
    assert all(c.has_backward for c in shapes.tp_boundaries[1:])
    assert model[0].up.weight.device.type == "cpu"  # the model itself is untouched


def small_mixture(**options: Any) -> moe.Moe:
    with torch.device("meta"):
        return moe.build(
            num_layers=2, hidden=16, ffn=24, expert_ffn=8, num_experts=4, top_k=2, num_heads=4, num_kv_heads=2,
            vocabulary=37, max_sequence=12, preset="tiny", **options,
        )  # fmt: skip


def test_attentions_and_experts_of_a_model() -> None:
    shapes = traced(small_mixture(num_dense_layers=1, num_shared_experts=1))
    assert [(a.module, a.queries, a.keys) for a in shapes.attentions] == [
        (f"model.layers.{i}.self_attn.attention", (4, 12, 4), (2, 12, 4)) for i in range(2)
    ]
    assert all(a.has_backward and a.is_repeated and a.is_output_repeated for a in shapes.attentions)
    mlp = "model.layers.1.mlp"
    assert shapes.dispatches == (DispatchSite(module=f"{mlp}.experts", num_experts=4, rows=24, dim=16),)
    assert shapes.routers == (RouterSite(module=f"{mlp}.router", num_experts=4, has_auxiliary=True),)
    repeated = {boundary.module: boundary.is_repeated for boundary in shapes.tp_boundaries}
    assert not repeated["model.layers.0.mlp.down_proj"]
    assert repeated[f"{mlp}.shared.down_proj"]  # after it, the router keeps the loads


@pytest.mark.parametrize("options", [{"capacity_factor": 1.0}, {"choice": "expert"}])
def test_routers_that_compare_tokens(options: dict[str, Any]) -> None:
    shapes = traced(small_mixture(**options))
    assert all(router.gathers_scores for router in shapes.routers)
    assert not any(dispatched.is_predicted for dispatched in shapes.dispatches)


class Bare(nn.Module):
    """A block that ends with its attention; nothing after it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BNTH = x_BTD.unflatten(-1, (2, -1)).transpose(1, 2)
        return x_BTD + self.attention(x_BNTH, x_BNTH, x_BNTH).transpose(1, 2).flatten(2)


def test_a_block_that_ends_with_its_attention() -> None:
    shapes = trace_shapes(nn.Sequential(Bare()), Description(blocks=("0",)), ((torch.ones(3, 5, 4),), {}))
    assert [(a.has_backward, a.is_output_repeated) for a in shapes.attentions] == [(False, False)]
    x = torch.ones(3, 5, 4, requires_grad=True)
    shapes = trace_shapes(nn.Sequential(Bare()), Description(blocks=("0",)), ((x,), {}))
    assert [(a.has_backward, a.is_repeated, a.is_output_repeated) for a in shapes.attentions] == [(True, True, False)]


# ---- the memory of an attention, watched ----------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of all tensors that are alive, numbers left out; looked at after every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dim():
                self.watch(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def watch(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self.known:
            self.now += size
            self.known[key] = weakref.ref(storage, lambda _: self.forget(key, size))

    def forget(self, key: int, size: int) -> None:
        self.now -= size
        del self.known[key]


class Alone:
    """A group and a ring whose other ranks are not there: what is received is whatever was in memory."""

    group, comm_device = None, torch.device("cpu")

    def __init__(self, index: int, degree: int) -> None:
        self.index, self.degree = index, degree

    def size(self) -> int:
        return self.degree


def attend_alone(context: str | None, index: int, cp: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one_device = partial(attended, mask=None, causal=True)
    if context == "ring":
        return ring.ring_attention(q, k, v, None, Alone(index, cp), causal=True)  # type: ignore[arg-type]
    if context == "ulysses":
        return ulysses.ulysses_attention(q, k, v, one_device, Alone(index, cp), torch.device("cpu"))
    return one_device(q, k, v)


def watched(context: str | None, index: int, cp: int, heads: tuple[int, int], dtype: torch.dtype) -> list[int]:
    with Live() as live:
        leaves = [torch.zeros(2, n, 48 // cp, 16, dtype=dtype, requires_grad=True) for n in (*heads, heads[1])]
        given = live.now
        q, k, v = (leaf * 1 for leaf in leaves)
        out = attend_alone(context, index, cp, q, k, v)
        forward = live.peak - given
        edge, gradient = get_gradient_edge(out), torch.ones_like(out)
        del q, k, v, out
        kept = live.now - given - gradient.nbytes
        live.peak = 0
        torch.autograd.backward(edge, gradient)
        return [kept, forward, live.peak - given]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(12, 12), (12, 4), (12, 1)])
@pytest.mark.parametrize(
    ("context", "cp"),
    [(None, 1), ("ring", 2), ("ring", 3), ("ring", 4), ("ring", 6), ("ulysses", 2), ("ulysses", 3), ("ulysses", 6)],
)
def test_memory_of_an_attention_to_the_byte(
    context: str | None, cp: int, heads: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring.dist, "P2POp", lambda *arguments, **options: None)
    monkeypatch.setattr(ring.dist, "batch_isend_irecv", lambda operations: [])
    monkeypatch.setattr(ulysses, "_all_to_all", lambda received, sent, group: received.copy_(sent))
    seen = [watched(context, index, cp, heads, dtype) for index in range(cp)]
    expected = attention_memory(
        Plan.parse(f"cp={cp} {context or ''}").resolve(cp),
        **{"samples": 2, "tokens": 48, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 16},
        size_bytes=dtype.itemsize,
    )
    most = [max(ranks) for ranks in zip(*seen, strict=True)]
    assert most == [expected.kept, expected.peak_forward, expected.peak_backward]
