"""Both halves of a split backward make the gradients of one that is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from shoal.parallel.pipeline.split_backward import add_gradients_of_weights, edges_of


class Both(torch.autograd.Function):
    """x, and a product of it: two outputs of one node, of unlike shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x.view_as(x), x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), (of_x, of_y) = ctx.saved_tensors, grads
        return of_x + of_y @ weight, of_y.T @ x


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = drawn(6, 4), drawn(4, 6)
        self.idle = drawn(3)
        self.frozen = drawn(4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "two outputs":
            passed, wide = Both.apply(x, self.up)
        else:
            passed, wide = x, x @ self.up.T
        if self.kind == "one weight twice":  # so what it comes from in the second use lies behind the first
            wide = wide + (wide @ self.down.T).tanh() @ self.up.T
        return passed + wide.tanh() @ self.down.T + self.frozen


class OneBias(nn.Module):
    """Of two layers: which nodes lead to which weights is no longer a matter of one node each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Added(nn.Module):
    """Two weights of the shape of what they are added to: autograd has one tensor for the gradients of both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.one, self.other = drawn(4, 4), drawn(5, 4), drawn(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight + self.one) + self.other).tanh()


MODELS = {
    **{kind: lambda kind=kind: Block(kind) for kind in ("plain", "two outputs", "one weight twice")},
    "one bias": OneBias,
    "added": Added,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_both_halves_are_the_whole(kind: str, num_microbatches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(MODELS[kind]() for _ in range(6)))
    inputs = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(num_microbatches)]
    for x in inputs:
        model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}  # zero_grad leaves them alone
    of_inputs = [x.grad for x in inputs]
    model.zero_grad(set_to_none=True)
    halves = []
    for x in inputs:
        x.grad = None
        outputs = [model(x).square().sum()]
        edges = edges_of(outputs)
        found, groups = stage_backward_input(outputs, None, [x], model.parameters())
        halves.append((found, groups, edges))
    for _, groups, _ in halves:
        add_gradients_of_weights(model.parameters(), groups)
    for (found, _, _), exact in zip(halves, of_inputs, strict=True):
        torch.testing.assert_close(found[0], exact)
    for name, parameter in model.named_parameters():
        if name.endswith(("idle", "frozen")):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, expected[name], msg=name)
