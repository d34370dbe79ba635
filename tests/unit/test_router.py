"""The router against a reference that decides token by token and expert by expert, in float64, with every gradient."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import ShoalError
from shoal.numerics.init import can_fill, initialise, materialise
from shoal.parallel.expert.router import (
    AuxLoss,
    Router,
    Routing,
    auxiliary_loss,
    hottest,
    note_routers,
    routers,
    update_bias,
    update_biases,
)

B, T, D, E = 3, 11, 7, 6
SETTINGS: list[dict[str, Any]] = [
    {},
    {"normalise": False},
    {"top_k": 1, "normalise": False},
    {"top_k": 6},
    {"scale": 2.5},
    {"score": "sigmoid"},
    {"score": "sigmoid", "normalise": False, "scale": 0.5},
    {"bias_rate": 0.1},
    {"score": "sigmoid", "bias_rate": 0.1, "auxiliary_coefficient": 0.3},
    {"capacity_factor": 1.0},
    {"capacity_factor": 0.4, "auxiliary_coefficient": 0.3},
    {"capacity_factor": 100.0},
    {"capacity_factor": 1.0, "score": "sigmoid", "bias_rate": 0.1, "scale": 2.0, "normalise": False},
    {"auxiliary_coefficient": 0.3},
    {"z_coefficient": 0.2},
    {"auxiliary_coefficient": 0.3, "z_coefficient": 0.2, "score": "sigmoid", "top_k": 3},
    {"choice": "expert"},
    {"choice": "expert", "capacity_factor": 1.7, "z_coefficient": 0.2, "scale": 3.0},
    {"choice": "expert", "capacity_factor": 99.0, "score": "sigmoid"},
]


def router_and_input(**settings: Any) -> tuple[Router, Tensor]:
    generator = torch.Generator().manual_seed(1)
    router = Router(D, E, **{"top_k": 2} | settings).double()
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        if router.bias is not None:
            router.bias.normal_(std=0.3, generator=generator)
    return router, torch.randn(B, T, D, dtype=torch.float64, generator=generator, requires_grad=True)


def dense(routing: Routing) -> Tensor:
    """Rows as a table: what each expert counts for in each token, zero where it does not compute it."""
    pairs = torch.stack([routing.token_R, routing.expert_R], 1).tolist()
    assert len({tuple(pair) for pair in pairs}) == len(pairs), "a pair occurs twice"
    table = torch.zeros(routing.num_tokens, E, dtype=routing.weight_R.dtype)
    return table.index_put((routing.token_R, routing.expert_R), routing.weight_R)


def reference(router: Router, x: Tensor, weight: Tensor) -> tuple[list[list[Tensor]], Tensor, list[int], int]:
    """weights by token and expert, the auxiliary sum, the load of each expert, the number dropped."""
    table: list[list[Tensor]] = []
    total, load, dropped = x.new_zeros(()), [0] * E, 0
    k = router.top_k
    for sequence in x:
        logits = [[token @ weight[e] for e in range(E)] for token in sequence]
        if router.score == "softmax":
            scores = [[torch.exp(z) / sum(torch.exp(o) for o in row) for z in row] for row in logits]
        else:
            scores = [[1 / (1 + torch.exp(-z)) for z in row] for row in logits]
        rows = [[x.new_zeros(()) for _ in range(E)] for _ in range(T)]
        room = math.ceil((router.capacity_factor or 1.0) * T * k / E)
        chosen: list[list[int]] = []
        if router.choice == "token":
            bias = [0.0] * E if router.bias is None else router.bias.tolist()
            chosen = [sorted(range(E), key=lambda e: -(row[e].item() + bias[e]))[:k] for row in scores]
            for t, experts in enumerate(chosen):
                share = sum(scores[t][e] for e in experts) if router.normalise else 1
                for e in experts:
                    rows[t][e] = scores[t][e] / share * router.scale
            if router.capacity_factor is not None:
                for e in range(E):
                    queue = sorted((t for t in range(T) if e in chosen[t]), key=lambda t: -scores[t][e].item())
                    dropped += len(queue[room:])
                    for t in queue[room:]:
                        rows[t][e] = x.new_zeros(())
            for e in range(E):
                load[e] += sum(e in experts for experts in chosen)
                share = sum(e in experts for experts in chosen) / (T * k)
                mean = sum(row[e] / sum(row) for row in scores) / T
                total = total + router.auxiliary_coefficient * E * share * mean
        else:
            for e in range(E):
                best = sorted(range(T), key=lambda t: -scores[t][e].item())[:room]
                load[e] += len(best)
                for t in best:
                    rows[t][e] = scores[t][e] * router.scale
            dropped += sum(all(value.item() == 0 for value in row) for row in rows)
        total = total + router.z_coefficient * sum(torch.log(sum(torch.exp(z) for z in row)) ** 2 for row in logits) / T
        table += rows
    return table, total, load, dropped


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_losses_and_every_gradient_equal_the_reference(settings: dict[str, Any]) -> None:
    router, x = router_and_input(**settings)
    routing, auxiliary, load, dropped = router(x)
    x_too, weight_too = (value.detach().clone().requires_grad_() for value in (x, router.weight))
    rows, total, loads, num_dropped = reference(router, x_too, weight_too)
    table = torch.stack([torch.stack(row) for row in rows])

    torch.testing.assert_close(dense(routing), table, rtol=1e-12, atol=1e-13)
    assert load.tolist() == loads
    assert dropped.item() == num_dropped
    has_loss = settings.get("auxiliary_coefficient", 0) or settings.get("z_coefficient", 0)
    assert (auxiliary is not None) == bool(has_loss)
    if auxiliary is not None:
        torch.testing.assert_close(auxiliary, total, rtol=1e-12, atol=0)

    use = torch.randn(table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ((dense(routing) * use).sum() + (0 if auxiliary is None else 3 * auxiliary)).backward()
    ((table * use).sum() + 3 * total).backward()
    torch.testing.assert_close(x.grad, x_too.grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(router.weight.grad, weight_too.grad, rtol=1e-10, atol=1e-13)


def test_without_a_limit_rows_are_in_order_of_tokens() -> None:
    for settings, top_k in (({}, 2), ({"capacity_factor": 50.0}, 2), ({"capacity_factor": 1.0}, None)):
        router, x = router_and_input(**settings)
        routing = router(x)[0]
        assert routing.top_k == top_k
        if top_k:
            assert routing.token_R.tolist() == [token for token in range(B * T) for _ in range(top_k)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_sequence_does_not_care_which_others_lie_beside_it(settings: dict[str, Any]) -> None:
    router, x = router_and_input(**settings)
    together = dense(router(x)[0]).view(B, T, E)
    for alone, part in zip(x.split(1), together, strict=True):
        torch.testing.assert_close(dense(router(alone)[0]), part, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("settings", [{}, {"score": "sigmoid", "bias_rate": 0.1}, {"capacity_factor": 0.4}], ids=str)
def test_logits_are_never_rounded(settings: dict[str, Any]) -> None:
    router, x = router_and_input(**settings)
    router, x = router.to(torch.bfloat16), x.detach().bfloat16()
    if router.bias is not None:
        router.bias.zero_()
    expected = dense(copy.deepcopy(router).float()(x.float())[0])
    assert torch.equal(dense(router(x)[0]), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(dense(router.float()(x.float())[0]), expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_shapes_on_meta(settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        router = Router(D, E, **{"top_k": 2} | settings)
        x = torch.empty(B, T, D, requires_grad=True)
    routing, auxiliary, load, _ = router(x)
    expert_choice = settings.get("choice") == "expert"
    num_rows = B * E * router.capacity(T, None) if expert_choice else B * T * router.top_k
    assert [value.shape for value in (routing.token_R, routing.expert_R, routing.weight_R)] == [(num_rows,)] * 3
    assert load.shape == (E,)
    (routing.weight_R.sum() + (0 if auxiliary is None else auxiliary)).backward()
    assert x.grad is not None
    assert router.weight.grad is not None


def test_a_router_from_meta_starts_without_a_bias() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Router(D, E, top_k=2, bias_rate=0.1))
    materialise(model, "cpu")
    initialise(model, seed=0)
    assert can_fill(nn.Sequential(nn.Linear(1, 1))) is False  # nobody there has a law
    assert model[0].bias.tolist() == [0.0] * E
    assert 0.01 < model[0].weight.std() < 0.04


# ---- what routers share with a run ----------------------------------------------------------------------------------


class Layer(nn.Module):
    """A router whose rows are used, as simply as can be."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        routing, *facts = self.router(x)
        y = x * dense(routing).sum(-1).view(B, T, 1)
        return self.router.attach_aux_loss(y, *facts)


@pytest.mark.parametrize("recomputes", [False, True])
def test_attached_losses_get_their_gradient_and_loads_are_summed_once(recomputes: bool) -> None:
    router, x = router_and_input(auxiliary_coefficient=0.3, z_coefficient=0.1, normalise=False, capacity_factor=0.5)
    plain = nn.ModuleDict({"a": Layer(copy.deepcopy(router))})
    balance = AuxLoss()
    run = nn.ModuleDict({"a": Layer(router)})
    assert list(note_routers(run, balance)) == ["a.router"]
    balance.factor = lambda: 0.25
    for _ in range(2):  # microbatches
        (plain["a"](x).square().sum() + 0.25 * B * auxiliary_loss(plain)).backward()
        y = checkpoint(run["a"], x, use_reentrant=False) if recomputes else run["a"](x)
        y.square().sum().backward()
    torch.testing.assert_close(router.weight.grad, plain["a"].router.weight.grad, rtol=1e-12, atol=1e-13)
    _, auxiliary, load, dropped = router(x)
    assert torch.equal(balance.loads["a.router"], 2 * load)
    assert torch.equal(plain["a"].router.load, 2 * load)
    assert balance.dropped["a.router"] == 2 * dropped > 0
    torch.testing.assert_close(balance.auxiliary["a.router"], 2 * auxiliary.detach())
    assert not balance.auxiliary["a.router"].requires_grad
    balance.clear()
    assert not balance.loads


def test_a_batch_that_counts_for_nothing_leaves_no_trace() -> None:
    router, x = router_and_input(auxiliary_coefficient=0.3)
    balance = AuxLoss()
    note_routers(router, balance)
    y = balance.attach(x * 1, *router(x)[1:], "router")
    y.sum().backward()
    assert (balance.loads, balance.dropped, balance.auxiliary) == ({}, {}, {})
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))


def test_without_any_loss_loads_are_summed_all_the_same() -> None:
    router, x = router_and_input()
    balance = AuxLoss()
    balance.factor = lambda: 1.0
    balance.attach(x * 1, *router(x)[1:], "r").sum().backward()
    assert balance.loads["r"].sum() == B * T * 2
    assert balance.auxiliary == {}
    with torch.no_grad():
        balance.attach(x, *router(x)[1:], "r")
    assert balance.loads["r"].sum() == B * T * 2


def test_copies_share_the_balance_and_forget_the_graph() -> None:
    router, x = router_and_input(auxiliary_coefficient=0.3)
    layer = Layer(router)
    layer(x)
    assert router.auxiliary_loss is not None
    assert copy.deepcopy(layer).router.auxiliary_loss is None
    assert pickle.loads(pickle.dumps(layer)).router.weight.shape == (E, D)
    balance = AuxLoss()
    note_routers(layer, balance)
    assert copy.deepcopy(layer).router.shared is balance


# ---- balance without a loss -----------------------------------------------------------------------------------------


def test_the_bias_moves_towards_idle_experts() -> None:
    router, _ = router_and_input(bias_rate=0.01)
    before = router.bias.clone()
    update_bias(router, torch.tensor([4, 9, 4, 1, 4, 2]))  # mean 4
    torch.testing.assert_close(router.bias - before, torch.tensor([0, -0.01, 0, 0.01, 0, 0.01], dtype=torch.float64))


def test_the_bias_balances_a_skewed_router() -> None:
    router, x = router_and_input(bias_rate=0.01, score="sigmoid")
    x = x.detach() + 1
    with torch.no_grad():
        router.bias.zero_()
        router.weight.mul_(0.3)[0] += 1  # always the favourite
    layer = Layer(router)
    layer(x)
    first = hottest(router.load).item()
    update_biases(layer)
    assert router.load is None
    for _ in range(200):
        layer(x)
        update_biases(layer)
    layer(x)
    assert first > 2.5
    assert hottest(router.load).item() < 1.5
    assert routers(layer) == {"router": router}


def test_hottest() -> None:
    assert hottest(torch.tensor([1, 2, 3])).item() == 1.5


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"score": "relu"}, "score must be softmax or sigmoid, got 'relu' [M039]\n    fix: score: softmax"),
        ({"choice": "me"}, "choice must be token or expert, got 'me' [M039]\n    fix: choice: token"),
        ({"top_k": 7}, "top_k must be from 1 to num_experts=6, got 7 [M039]\n    fix: top_k: 2"),
        ({"capacity_factor": 0.0}, "capacity_factor must be above 0, got 0.0 [M008]\n    fix: capacity_factor: null"),
        ({"bias_rate": -1.0}, "bias_rate must be 0 or more, got -1.0 [M008]\n    fix: bias_rate: 0"),
        ({"choice": "expert", "bias_rate": 0.1}, "bias_rate=0.1 needs choice 'token', got choice 'expert'"),
        ({"top_k": 1}, "gives every token the weight 1"),
    ],
)
def test_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ShoalError) as error:
        Router(D, E, **{"top_k": 2} | settings)
    assert text in str(error.value).replace("\n      ", "\n    ")
