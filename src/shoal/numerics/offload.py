"""`offload=optimizer`: the optimizer's state, and the copy of the weights that it updates, are in host memory.

Adam's state is twice the size of the weights, and is read once a step. So the optimizer updates copies in host memory.
A step copies the gradients there and the new weights back:

    device   gradient ──▶                                   ──▶ weight
    host                 gradient ─ optimizer step ─ weight
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class HostCopies:
    """Copies of an optimizer's parameters in host memory, which replace them in the optimizer."""

    def __init__(self, optimizer: Optimizer, piece: Callable[[Tensor], Tensor]) -> None:
        self.optimizer, self.piece = optimizer, piece
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            here = [self._copied(parameter) for parameter in group["params"]]
            self.pairs += zip(group["params"], here, strict=True)
            group["params"] = here

    def _copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Copy to host memory; pinned if there is a GPU, so that transfers need no staging buffer."""
        own = self.piece(parameter.detach())
        host = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
        return nn.Parameter(host.copy_(own), requires_grad=parameter.requires_grad)

    @torch.no_grad()
    def step(self) -> None:
        """Copy gradients to the host, step the optimizer there, copy weights back to the device."""
        for parameter, host in self.pairs:
            if parameter.grad is None:
                host.grad = None
            else:
                gradient = self.piece(parameter.grad)
                if host.grad is None:
                    host.grad = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=gradient.is_cuda)
                host.grad.copy_(gradient, non_blocking=True)
        if any(parameter.is_cuda for parameter, _ in self.pairs):
            torch.cuda.current_stream().synchronize()
        self.optimizer.step()
        for parameter, host in self.pairs:
            self.piece(parameter.detach()).copy_(host, non_blocking=True)
