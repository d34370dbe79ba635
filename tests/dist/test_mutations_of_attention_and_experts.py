"""`verify` can fail for divided tokens and experts: each deliberate defect is caught, and its axis or tensor named."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.models import llama, moe
from shoal.numerics.gradients import global_norm, norms_of
from shoal.numerics.local_tensor import to_local
from shoal.numerics.ops.attention import AttentionOutput
from shoal.parallel import parallel_model
from shoal.parallel.context import attention, ring
from shoal.parallel.context.attention import ContextParallel
from shoal.parallel.data import ddp, fsdp
from shoal.parallel.expert import experts, loads, router
from shoal.train import run_state
from shoal.train.loss.global_loss import GlobalLoss
from shoal.verification.case import Case
from shoal.verification.rank import verify_in
from tests.cover import covered
from tests.dist.pool import Pool, on_ranks

BATCH, TOKENS, VOCABULARY, EXPERTS = 4, 8, 31, 4
SHAPE = {"num_layers": 2, "hidden": 16, "ffn": 24, "num_heads": 4, "num_kv_heads": 2, "vocabulary": VOCABULARY}
SPARSE = {**SHAPE, "expert_ffn": 12, "num_experts": EXPERTS, "top_k": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": functools.partial(llama.build, **SHAPE),
    "moe": functools.partial(moe.build, **SPARSE, auxiliary_coefficient=0.1, normalise=False),
    "plain": functools.partial(moe.build, **SPARSE, auxiliary_coefficient=0.0),
    "bias": functools.partial(moe.build, **SPARSE, auxiliary_coefficient=0.0, score="sigmoid", bias_rate=0.05),
}


def case(plan: str, size: int, model: str) -> Case:
    """Ragged batches without a token twice in a sample: between two like positions rounding would route."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(2):
        tokens = torch.rand(BATCH, VOCABULARY, generator=generator).argsort(1)[:, : TOKENS + 1]
        labels = tokens[:, 1:].clone()
        labels[torch.rand(BATCH, TOKENS, generator=generator) < 0.3] = -100
        batches.append({"tokens": tokens[:, :-1].contiguous(), "labels": labels})
    return Case(build=MODELS[model], batches=batches, plan=Plan.parse(f"fp64 {plan}").resolve(size), seed=7)


# ---- defects of divided sequences -----------------------------------------------------------------------------------


def a_block_of_the_step_before() -> Any:
    """ring: every step computes with the keys and values of the step before it."""
    original = ring.around

    def around(block: Tensor, *others: Any) -> Iterator[tuple[Any, Tensor]]:
        stale = block
        for step, fresh in original(block, *others):
            yield step, stale
            stale = fresh

    return patch.object(ring, "around", around)


def parts_merged_evenly() -> Any:
    """ring: parts are averaged, whatever the weight of their keys."""

    def merge_(total: AttentionOutput, part: AttentionOutput) -> None:
        total.out.add_(part.out).div_(2)
        total.lse.copy_(torch.logaddexp(total.lse, part.lse))

    return patch.object(ring, "merge_", merge_)


def every_rank_counts_from_0() -> Any:
    """The model is not told where in its sequence its tokens are."""
    return patch.object(attention, "_places", lambda tokens, *_: torch.arange(tokens.shape[1])[None])


def labels_cut_in_another_order() -> Any:
    """ring: tokens are cut zig-zag, labels one part after the other."""
    original = run_state.cut_batch

    def cut_batch(batch: Any, description: Any, of: ContextParallel) -> Any:
        return {**original(batch, description, of), "labels": batch["labels"].chunk(of.degree, 1)[of.index]}

    return patch.object(run_state, "cut_batch", cut_batch)


def gradients_of_keys_do_not_come_home() -> Any:
    """ring: what other ranks find for a block of keys and values is lost on its way."""
    original = ring.Exchange.start

    def start(block: Tensor, of: Any, tag: int) -> Any:
        return original(torch.zeros_like(block) if tag == ring.GRADIENTS else block, of, tag)

    return patch.object(ring.Exchange, "start", start)


def queries_learn_from_own_keys_only() -> Any:
    """ring: the gradients of queries that come from the keys of other ranks are dropped."""
    original = ring.attend_backward

    def backward(*arguments: Any, is_causal: bool, rule: Any) -> Any:
        d_q, *d_kv = original(*arguments, is_causal=is_causal, rule=rule)
        return d_q * is_causal, *d_kv

    return patch.object(ring, "attend_backward", backward)


def heads_come_back_permuted() -> Any:
    """ulysses: heads are put together in the order (head of a rank, rank)."""
    original = attention.ulysses_attention

    def permuted(*arguments: Any) -> Tensor:
        return original(*arguments).unflatten(1, (arguments[4].size(), -1)).transpose(1, 2).flatten(1, 2)

    return patch.object(attention, "ulysses_attention", permuted)


def gradients_stay_with_their_tokens() -> Any:
    """zero=0: DDP never synchronises."""
    original = DistributedDataParallel.forward

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.no_sync():
            return original(self, *arguments, **options)

    return patch.object(DistributedDataParallel, "forward", forward)


def gradients_of_stages_stay_with_their_tokens() -> Any:
    """pp: the average over cp is forgotten."""
    return patch.object(ddp, "average_gradients", lambda gradients, group: None)


def gradients_of_shards_stay_with_their_tokens() -> Any:
    """zero=1: FSDP2 is never told that a microbatch is the last, and reduces nothing."""
    return patch.object(fsdp, "_set", lambda module, **_: module.set_requires_gradient_sync(False))


def norm_of_own_shard() -> Any:
    """zero=1: every rank clips by the norm of its own shard, and cp ranks have shards too."""

    def norm(self: Any, parameters: list[nn.Parameter], **_: Any) -> Tensor:
        return global_norm(norms_of([to_local(p.grad) for p in parameters if p.grad is not None]))

    return patch.object(parallel_model.ParallelModel, "norm", norm)


def mean_of_means() -> Any:
    """Every rank divides by the number of its own tokens that count."""
    return patch.object(
        GlobalLoss, "total_weight", lambda self, step, *_: sum(step.weights) * self.state.gradient_degree
    )


def sum_over_ranks_for_the_mean() -> Any:
    """Losses and gradients of all tokens are divided by the tokens of one rank."""
    original = GlobalLoss.total_weight
    return patch.object(
        GlobalLoss, "total_weight", lambda self, *step: original(self, *step) / self.state.gradient_degree
    )


# ---- defects of divided experts -------------------------------------------------------------------------------------


def two_experts_change_places() -> Any:
    """The first expert of all and the last lie on each other's rank."""
    original = experts.part

    def part(whole: Tensor, *arguments: Any, **options: Any) -> Tensor:
        first, *between, last = whole.chunk(EXPERTS)
        return original(torch.cat([last, *between, first]), *arguments, **options)

    return patch.object(experts, "part", part)


def rows_of_an_expert_are_lost() -> Any:
    """What arrives for the first expert of the second rank is read as zeros."""
    original = experts.Experts._computed

    def computed(self: Any, x_RD: Tensor, ends_L: Tensor, weight_R: Tensor | None) -> Tensor:
        if self.parallel is not None and self.parallel.index == 1:
            x_RD = x_RD * (torch.arange(len(x_RD)) >= ends_L[0])[:, None]
        return original(self, x_RD, ends_L, weight_R)

    return patch.object(experts.Experts, "_computed", computed)


def rows_come_home_in_another_order() -> Any:
    """Results go back in the order of experts, not in the order in which rows arrived."""
    original = experts.rows_by_expert

    def rows(arriving_PL: Tensor, num_rows: int) -> Any:
        return dataclasses.replace(original(arriving_PL, num_rows), place_Tk=torch.arange(num_rows)[:, None])

    return patch.object(experts, "rows_by_expert", rows)


def gradients_of_rows_do_not_come_home() -> Any:
    """Experts learn, but what they send back to the tokens of other ranks is lost."""
    original = experts._exchanged
    calls = []

    def exchanged(x_RD: Tensor, *arguments: Any) -> Tensor:
        calls.append(x_RD)
        return original(x_RD.detach() if len(calls) % 2 else x_RD, *arguments)

    return patch.object(experts, "_exchanged", exchanged)


def gradients_of_experts_are_sums() -> Any:
    """What an expert learns from the tokens of all ep ranks is not divided by ep."""
    original = parallel_model.ParallelModel.finish_gradients

    def finish(self: Any, step: int) -> None:
        divided, self.experts = self.experts, frozenset()
        original(self, step)
        self.experts = divided

    return patch.object(parallel_model.ParallelModel, "finish_gradients", finish)


def weights_of_the_router_are_forgotten() -> Any:
    """Results of experts are summed as they are."""
    original = experts.Experts.forward

    def forward(self: Any, x_TD: Tensor, routed: Any) -> Tensor:
        if self.parallel is not None:
            routed = dataclasses.replace(routed, weight_R=torch.ones_like(routed.weight_R))
        return original(self, x_TD, routed)

    return patch.object(experts.Experts, "forward", forward)


# ---- defects of routers ---------------------------------------------------------------------------------------------


def auxiliary_loss_once_per_rank() -> Any:
    """The auxiliary loss weighs as many times more as there are ranks."""
    original = GlobalLoss.auxiliary_factor
    return patch.object(
        GlobalLoss, "auxiliary_factor", lambda self, *step: original(self, *step) * self.state.world.size
    )


def auxiliary_loss_of_own_tokens() -> Any:
    """Choices are counted over a rank's own tokens, not over the whole sequence."""
    return patch.object(router, "_summed", lambda counts, group: counts * group.size())


def routers_keep_the_gradient_of_their_tokens() -> Any:
    """tp with sp: routers see half the tokens, and their gradients are not summed."""
    original = parallel_model.ParallelModel.finish_gradients

    def finish(self: Any, step: int) -> None:
        partial = self.tensor.partial
        self.tensor.partial = {name for name in partial if "router" not in name}
        original(self, step)
        self.tensor.partial = partial

    return patch.object(parallel_model.ParallelModel, "finish_gradients", finish)


def bias_of_own_loads() -> Any:
    """Every rank balances its routers by the tokens that it has seen itself."""
    original = parallel_model.ParallelModel.balance_experts

    def balance(self: Any, **options: Any) -> Any:
        own = dict(self.balance.loads)
        with patch.object(loads, "update_bias", lambda one, *_: router.update_bias(one, own[one.name])):
            return original(self, **options)

    return patch.object(parallel_model.ParallelModel, "balance_experts", balance)


FORWARD_OF_CP = ("The forward is already wrong", "look at cp (", "positions", "labels", "attention")
BACKWARD_OF_CP = ("backward of attention over cp", "layers.1.self_attn")
NO_SUM_OVER_CP = ("Ranks along cp hold different gradients", "the reduction over cp is missing")
FORWARD_OF_EP = ("The forward is already wrong", "look at ep (", "router's weights")
AUXILIARY = ("probably the auxiliary loss", "layers.1.mlp.router")

DEFECTS: list[tuple[Callable[[], Any], int, str, str, tuple[str, ...]]] = [
    # defect, ranks, plan, model, words that the cause must have
    (a_block_of_the_step_before, 2, "cp=2 mb=4", "llama", FORWARD_OF_CP),
    (a_block_of_the_step_before, 4, "cp=4 mb=4", "llama", FORWARD_OF_CP),
    (parts_merged_evenly, 2, "cp=2 mb=4", "llama", FORWARD_OF_CP),
    (every_rank_counts_from_0, 2, "cp=2 mb=4", "llama", FORWARD_OF_CP),
    (labels_cut_in_another_order, 2, "cp=2 mb=4", "llama", FORWARD_OF_CP),
    (
        gradients_of_keys_do_not_come_home,
        2,
        "cp=2 mb=4",
        "llama",
        (*BACKWARD_OF_CP, "that of k_proj and v_proj is not"),
    ),
    (
        gradients_of_keys_do_not_come_home,
        4,
        "cp=4 mb=4",
        "llama",
        (*BACKWARD_OF_CP, "that of k_proj and v_proj is not"),
    ),
    (queries_learn_from_own_keys_only, 2, "cp=2 mb=4", "llama", (*BACKWARD_OF_CP, "that of q_proj is not")),
    (heads_come_back_permuted, 2, "cp=2 ulysses mb=2", "llama", FORWARD_OF_CP),
    (gradients_stay_with_their_tokens, 2, "cp=2 mb=4", "llama", NO_SUM_OVER_CP),
    (gradients_of_stages_stay_with_their_tokens, 4, "cp=2 pp=2 1f1b mb=2", "llama", NO_SUM_OVER_CP),
    (
        gradients_of_shards_stay_with_their_tokens,
        2,
        "cp=2 zero=1 mb=4",
        "llama",
        ("Every gradient is zero", "reduction over cp"),
    ),
    (
        norm_of_own_shard,
        2,
        "cp=2 zero=1 mb=4",
        "llama",
        ("Every gradient is right", "that of dp_shard_cp rank 0 alone"),
    ),
    (mean_of_means, 2, "cp=2 mb=4", "llama", (*FORWARD_OF_CP, "number of tokens")),
    (sum_over_ranks_for_the_mean, 2, "cp=2 mb=4", "llama", ("2 times too large", "summed over cp")),
    (two_experts_change_places, 2, "ep=2 zero=1 mb=1", "moe", ("in the order 3, 1, 2, 0", "ranks along ep")),
    (
        rows_of_an_expert_are_lost,
        2,
        "ep=2 zero=1 mb=1",
        "moe",
        ("Expert 2 of", "of ep rank 1", "lost in the dispatch over ep"),
    ),
    (rows_come_home_in_another_order, 2, "ep=2 zero=1 mb=1", "moe", FORWARD_OF_EP),
    (gradients_of_rows_do_not_come_home, 2, "ep=2 zero=1 mb=1", "moe", ("layers.1.mlp", "are returned over ep")),
    (gradients_of_experts_are_sums, 2, "ep=2 zero=1 mb=1", "moe", ("experts", "not divided by ep=2")),
    (gradients_of_experts_are_sums, 4, "ep=2 cp=2 zero=3 mb=2", "moe", ("experts", "not divided by ep=2")),
    (weights_of_the_router_are_forgotten, 2, "ep=2 zero=1 mb=1", "plain", ("summed without the router's weights",)),
    (weights_of_the_router_are_forgotten, 2, "ep=2 zero=1 mb=1", "moe", FORWARD_OF_EP),
    (auxiliary_loss_once_per_rank, 2, "ep=2 zero=1 mb=1", "moe", AUXILIARY),
    (auxiliary_loss_of_own_tokens, 2, "cp=2 mb=2", "moe", (*AUXILIARY, "over the whole sequence")),
    (routers_keep_the_gradient_of_their_tokens, 2, "tp=2 mb=2", "moe", ("router", "its sum over tp is missing")),
    (bias_of_own_loads, 2, "ep=2 zero=1 mb=1", "bias", ("model.layers.0.mlp.router.bias", "loads")),
]


@contextmanager
def broken(defect: str) -> Iterator[None]:
    with globals()[defect]():
        yield


def verify_with(world: World, defect: str | None, plan: str, model: str) -> tuple[Any, str | None]:
    if defect is None:
        found = verify_in(world, case(plan, world.size, model))
    else:
        with broken(defect):
            found = verify_in(world, case(plan, world.size, model))
    return found.verdict, found.cause


@pytest.mark.parametrize(
    ("defect", "size", "plan", "model", "words"),
    covered(DEFECTS, lambda _, __, plan, model, ___: [model, plan.partition("=")[0]], lambda _, size, *__: size),
    ids=[f"{defect.__name__}-{size}-{model}" for defect, size, _, model, _ in DEFECTS],
)
def test_a_defect_is_caught_and_named(
    pool: Pool, defect: Callable[[], Any], size: int, plan: str, model: str, words: tuple[str, ...]
) -> None:
    verdict, cause = pool.run(verify_with, size, defect.__name__, plan, model)[0]
    assert not verdict.equal
    assert all(word in cause for word in words), cause


@pytest.mark.parametrize(
    ("size", "plan", "model"),
    covered(
        sorted({(size, plan, model) for _, size, plan, model, _ in DEFECTS}),
        lambda _, plan, model: [model == "llama"],
        lambda size, *_: size,
    ),
)
def test_the_same_without_a_defect_is_equal(pool: Pool, size: int, plan: str, model: str) -> None:
    verdict, cause = pool.run(verify_with, size, None, plan, model)[0]
    assert verdict.equal, cause


@on_ranks(2, 4)
def test_tokens_are_joined_in_the_order_of_their_sequence(world: World) -> None:
    """And a wrong inverse of the zig-zag shows: it is not its own inverse."""
    group = torch.distributed.group.WORLD
    assert group is not None
    whole = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(1))
    for kind in ("ring", "ulysses"):
        parallel = ContextParallel(group, kind=kind, comm_device=world.device)  # type: ignore[arg-type]
        assert torch.equal(parallel.join(parallel.part(whole)), whole)
    parallel = ContextParallel(group, kind="ring", comm_device=world.device)
    with patch.object(torch.Tensor, "argsort", lambda order: order):
        assert not torch.equal(parallel.join(parallel.part(whole)), whole)
