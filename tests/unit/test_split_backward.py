"""Both halves of a split backward make the gradients of one that is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from shoal.parallel.split_backward import add_gradients_of_weights, held_by


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


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.idle = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "two outputs":
            passed, wide = Both.apply(x, self.up)
        else:
            passed, wide = x, x @ self.up.T
        if self.kind == "one weight twice":  # so what it comes from in the second use lies behind the first
            wide = wide + (wide @ self.down.T).tanh() @ self.up.T
        return passed + wide.tanh() @ self.down.T


@pytest.mark.parametrize("kind", ["plain", "two outputs", "one weight twice"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_both_halves_are_the_whole(kind: str, num_microbatches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind) for _ in range(3)))
    inputs = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(num_microbatches)]
    for x in inputs:
        model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    of_inputs = [x.grad for x in inputs]
    model.zero_grad(set_to_none=True)
    halves = []
    for x in inputs:
        x.grad = None
        outputs = [model(x).square().sum()]
        held = held_by(outputs)
        found, groups = stage_backward_input(outputs, None, [x], model.parameters())
        halves.append((found, groups, held))
    for _, groups, _ in halves:
        add_gradients_of_weights(model.parameters(), groups)
    for (found, _, _), exact in zip(halves, of_inputs, strict=True):
        torch.testing.assert_close(found[0], exact)
    for name, parameter in model.named_parameters():
        if name.endswith("idle"):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, expected[name], msg=name)
