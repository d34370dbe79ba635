"""Experts over ranks against one process that has all of them, every gradient; sequences over ranks against whole ones;
and the bytes that travel: the rows that were routed, no more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.traffic_counter import count
from shoal.comm.world import World
from shoal.models.moe import build
from shoal.numerics.init import initialise
from shoal.parallel.expert.aux_loss import AuxLoss
from shoal.parallel.expert.experts import ExpertParallel, Experts, divide, experts_in
from shoal.parallel.expert.router import Router, Routing, auxiliary_loss, note_routers, routers, update_bias
from tests.dist.pool import on_ranks

T, D, FFN, E = 13, 8, 6, 8


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def summed(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def whole_experts() -> Experts:
    experts = Experts(D, FFN, E).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(generator=generator)
    return experts


def rows_of(rank: int, case: str) -> tuple[Tensor, Routing]:
    """The tokens of a rank and where they want to go."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(T, D, dtype=torch.float64, generator=generator, requires_grad=True)
    if case == "two for each":
        experts = torch.rand(T, E, generator=generator).topk(2).indices.flatten()
        tokens, top_k = torch.arange(T).repeat_interleave(2), 2
    else:
        tokens, experts = (torch.rand(T, E, generator=generator) < 0.2 + 0.1 * rank).nonzero().unbind(1)
        top_k = None
    if case == "all to expert 0":
        experts = torch.zeros_like(experts)
    if case == "only the last rank has rows" and rank < dist.get_world_size() - 1:
        tokens, experts = tokens[:0], experts[:0]
    if case == "nobody has rows":
        tokens, experts = tokens[:0], experts[:0]
    weights = torch.rand(len(tokens), dtype=torch.float64, generator=generator, requires_grad=True)
    return x, Routing(tokens, experts, weights, T, top_k)


CASES = ["two for each", "uneven", "all to expert 0", "only the last rank has rows", "nobody has rows"]


@on_ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
def test_divided_experts_equal_whole_ones(world: World, case: str) -> None:
    use = torch.randn(world.size, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    whole = whole_experts()
    ours = copy.deepcopy(whole)
    divide(ours, ExpertParallel(everyone()))
    x, routing = rows_of(world.rank, case)
    y = ours(x, routing)
    (y * use[world.rank]).sum().backward()

    for rank in range(world.size):  # one process, one rank's tokens after the other
        x_there, routing_there = rows_of(rank, case)
        expected = whole(x_there, routing_there)
        (expected * use[rank]).sum().backward()
        if rank == world.rank:
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(x.grad, x_there.grad, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(routing.weight_R.grad, routing_there.weight_R.grad, rtol=1e-12, atol=1e-12)
    for name, parameter in ours.named_parameters():
        grad = whole.get_parameter(name).grad.chunk(world.size)[world.rank]
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert parameter.shape == grad.shape


@on_ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
def test_only_routed_rows_travel(world: World, case: str) -> None:
    experts = whole_experts()
    divide(experts, ExpertParallel(everyone()))
    x, routing = rows_of(world.rank, case)
    num_local = E // world.size
    arriving = sum(
        int((rows_of(rank, case)[1].expert_R // num_local == world.rank).sum()) for rank in range(world.size)
    )
    row = D * x.element_size()
    with count({"ep": everyone()}) as traffic:
        y = experts(x, routing)
    sent = len(routing.token_R)
    assert dict(traffic.calls) == {("ep", "all_to_all"): 3}
    assert traffic.of_axis("ep").bytes == (sent + arriving) * row + E * 4  # and int32 counts
    with count({"ep": everyone()}) as traffic:
        y.sum().backward()
    assert dict(traffic.calls) == {("ep", "all_to_all"): 2}
    assert traffic.of_axis("ep").bytes == (sent + arriving) * row


@on_ranks(2)
def test_rows_go_by_another_device_if_told(world: World) -> None:
    x, routing = rows_of(world.rank, "uneven")
    plain, wired = whole_experts(), whole_experts()
    divide(plain, ExpertParallel(everyone()))
    divide(wired, ExpertParallel(everyone(), comm_device=torch.device("cpu")))
    assert torch.equal(plain(x, routing), wired(x, routing))
    assert copy.deepcopy(wired).parallel is wired.parallel


@on_ranks(2)
def test_frozen_experts_stay_frozen(world: World) -> None:
    experts = whole_experts()
    experts.up_proj.requires_grad_(False)
    divide(experts, ExpertParallel(everyone()))
    assert [p.requires_grad for p in experts.parameters()] == [True, False, True]
    x, routing = rows_of(world.rank, "uneven")
    experts(x, routing).sum().backward()
    assert experts.up_proj.grad is None
    assert x.grad is not None


# ---- a sequence divided over ranks ----------------------------------------------------------------------------------

DIVIDED: list[dict[str, Any]] = [
    {"auxiliary_coefficient": 0.3, "z_coefficient": 0.2},
    {"auxiliary_coefficient": 0.3, "score": "sigmoid", "bias_rate": 0.1},
    {"capacity_factor": 0.7, "auxiliary_coefficient": 0.3},
    {"capacity_factor": 100.0},
    {"choice": "expert"},
    {"choice": "expert", "capacity_factor": 1.5, "z_coefficient": 0.2},
]
B, S = 3, 12


def tokens_of(rank: int, size: int, order: str) -> Tensor:
    """Which positions of a sequence a rank has."""
    if order == "in turn":
        return torch.arange(rank, S, size)
    half = S // (2 * size)  # zig-zag: one part from the front and one from the back
    return torch.cat([torch.arange(half) + half * rank, torch.arange(half) + S - half * (rank + 1)])


@on_ranks(2)
@pytest.mark.parametrize("settings", DIVIDED, ids=str)
@pytest.mark.parametrize("order", ["in turn", "zig-zag"])
def test_a_divided_sequence_is_routed_as_a_whole_one(world: World, settings: dict[str, Any], order: str) -> None:
    generator = torch.Generator().manual_seed(4)
    whole = Router(D, E, top_k=2, **settings).double()
    torch.nn.init.normal_(whole.weight, generator=generator)
    ours = copy.deepcopy(whole)
    ours.shared = AuxLoss(everyone())
    x = torch.randn(B, S, D, dtype=torch.float64, generator=generator)
    use = torch.randn(B, S, E, dtype=torch.float64, generator=generator)
    mine = tokens_of(world.rank, world.size, order)

    def table(routing: Routing, num_tokens: int) -> Tensor:
        empty = torch.zeros(B * num_tokens, E, dtype=torch.float64)
        return empty.index_put((routing.token_R, routing.expert_R), routing.weight_R).view(B, num_tokens, E)

    routing, auxiliary, load, dropped = whole(x)
    expected = table(routing, S)
    ((expected * use).sum() + (0 if auxiliary is None else auxiliary)).backward()
    routing_here, part, load_here, dropped_here = ours(x[:, mine])
    found = table(routing_here, len(mine))
    ((found * use[:, mine]).sum() + (0 if part is None else part)).backward()

    torch.testing.assert_close(found, expected[:, mine], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(summed(ours.weight.grad), whole.weight.grad, rtol=1e-11, atol=1e-12)
    assert torch.equal(summed(load_here), load)
    assert summed(dropped_here) == dropped
    assert (part is None) == (auxiliary is None)
    if part is not None:
        torch.testing.assert_close(summed(part.detach()), auxiliary.detach(), rtol=1e-12, atol=0)


# ---- a whole model --------------------------------------------------------------------------------------------------

MODELS: list[dict[str, Any]] = [
    {"auxiliary_coefficient": 0.1},
    {"score": "sigmoid", "bias_rate": 0.05, "num_shared_experts": 1, "num_dense_layers": 1, "scale": 2.0},
    {"capacity_factor": 1.0, "z_coefficient": 0.01},
    {"choice": "expert"},
]


@on_ranks(2)
@pytest.mark.parametrize("settings", MODELS, ids=str)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_model_with_divided_experts_takes_the_same_step(
    world: World, settings: dict[str, Any], recomputes: bool
) -> None:
    size = {"vocabulary": 40, "hidden": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "expert_ffn": 12}
    whole = build(**size, init_std=0.3, **settings).double()
    initialise(whole, seed=0)
    ours, balance = copy.deepcopy(whole), AuxLoss()
    for experts in experts_in(ours).values():
        divide(experts, ExpertParallel(everyone()))
    note_routers(ours, balance)
    if recomputes:
        for block in ours.model.layers:
            recompute(block)
    tokens = torch.randint(0, 40, (4, 10), generator=torch.Generator().manual_seed(1))

    (F.cross_entropy(whole(tokens).flatten(0, 1), tokens.flatten()) + auxiliary_loss(whole)).backward()
    balance.factor = lambda: 1 / len(tokens)
    for microbatch in tokens.chunk(world.size)[world.rank].split(1):
        logits = ours(microbatch).flatten(0, 1)
        (F.cross_entropy(logits, microbatch.flatten(), reduction="sum") / tokens.numel()).backward()
    for name, parameter in ours.named_parameters():
        expected = whole.get_parameter(name).grad
        if ".experts." in name:
            grad, expected = parameter.grad, expected.chunk(world.size)[world.rank]
        else:
            grad = summed(parameter.grad)
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    for name, router in routers(whole).items():
        load = summed(balance.loads[name])
        assert torch.equal(load, router.load)
        update_bias(routers(ours)[name], load)
        update_bias(router, router.load)
        if router.bias is not None:
            assert torch.equal(routers(ours)[name].bias, router.bias)
            assert router.bias.abs().max() > 0


def recompute(block: Any) -> None:
    """Let a block compute its forward again in the backward."""
    from torch.utils.checkpoint import checkpoint

    forward = block.forward
    block.forward = lambda *arguments: checkpoint(forward, *arguments, use_reentrant=False)
