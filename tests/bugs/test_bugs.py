"""Bugs that were seen once and must not come back. Each test opens with its story."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.autograd_function import as_output
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.launch.local import launch
from shoal.models.llama import build as build_llama
from shoal.numerics.ops.experts.grouped_matmul import gated
from shoal.numerics.ops.fused_linear_cross_entropy import linear_cross_entropy
from shoal.parallel.expert.experts import collect, rows_by_expert, spread
from shoal.train.run import Run


def close_right_after_a_collective(placement: Placement, store: dist.Store, times: int) -> int:
    sys.setswitchinterval(100)  # a thread that wants Python's lock waits until it is let go, as on a busy machine
    for number in range(times):
        _train_and_close(
            placement, dist.PrefixStore(str(number), store)
        )  # the model dies after the group was destroyed
    return times


def _train_and_close(placement: Placement, store: dist.Store) -> None:
    with Run("fp32", world=World.start(placement, device="cpu", store=store)) as run:
        model = nn.Linear(4, 4)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step((torch.ones(2, 4), torch.zeros(2, dtype=torch.long)))
        run.world.all_gather_object(run.world.rank)


@pytest.mark.timeout(60)
def test_a_run_ends_when_its_last_act_is_a_collective() -> None:
    """torch 2.13, gloo: a run of two ranks made all its steps, gathered its summary and then hung for ever.

    DDP's reducer dropped the last reference to the process group while it held Python's lock, and the group's
    destructor waited for a thread that needed the lock to let go of the last collective's tensor. Without the reference
    that `World.close` keeps, this hangs within a few rounds.
    """
    assert launch(close_right_after_a_collective, (30,), nproc=2) == [30, 30]


class Doubled(torch.autograd.Function):
    """Written in place, as what a collective returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return as_output(x.clone().mul_(2.0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2.0


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("then", [lambda y: y, lambda y: y.relu_()], ids=["as it is", "changed in place"])
def test_a_compiled_function_that_writes_in_place_has_a_gradient(then: Any) -> None:
    """torch 2.11, `compile`: what came before row-parallel layers under tp, and experts with a capacity, did not train.

    Its compiler takes an output that was written in place for one without a gradient, and says nothing; nor did we,
    whose tests had been run with torch 2.13. A view instead of a copy has a gradient, but nothing may be written to it.
    """
    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    y = torch.compile(lambda x: then(Doubled.apply(x * 3.0)), backend="aot_eager")(x)
    (y * y.detach()).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 6.0 * y.detach())
    torch._dynamo.reset()


def test_a_gradient_of_a_gradient_is_refused_and_not_wrong() -> None:
    """Autograd took the backwards of shoal's own functions, which write in place or call kernels, for constants: with
    `create_graph=True` the penalty on a gradient had a gradient of 5.099 where plain torch has 5.941, without a word.
    """
    torch.manual_seed(0)
    h, weight = torch.randn(6, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    loss = linear_cross_entropy(h, weight, torch.randint(0, 8, (6,)), ignore=-100)
    model = build_llama(num_layers=1, hidden=16, num_heads=2, num_kv_heads=2, ffn=32, vocabulary=8, max_sequence=8)
    logits = model(torch.randint(0, 8, (2, 8)))
    for value, inputs in ((loss, [h, weight]), (logits.sum(), list(model.parameters()))):
        with pytest.raises(ShoalError, match="create_graph=True needs a second derivative"):
            torch.autograd.grad(value, inputs, create_graph=True)
        torch.autograd.grad(value, inputs)


def test_a_gradient_of_a_gradient_of_experts_is_refused_in_the_same_words() -> None:
    """The functions of experts, ring attention and Ulysses refused it twice: torch's `once_differentiable` switches
    gradients off before it calls a backward, which then saw nobody asking for them, and torch's own words came later.
    """
    torch.manual_seed(0)
    x, up = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    rows = rows_by_expert(torch.tensor([[4, 2]]), 6)
    for value in (gated(x, up, None), spread(x, rows), collect(x, rows)):
        with pytest.raises(ShoalError, match="create_graph=True needs a second derivative"):
            torch.autograd.grad(value.square().sum(), x, create_graph=True)
