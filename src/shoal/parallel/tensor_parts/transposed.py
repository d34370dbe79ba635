"""Split forms of linear layers whose weight has its inputs first, (in, out), as Conv1D of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Split


class ColumnParallelTransposed(nn.Module):
    """This rank's output features of x W + b."""

    cut: ClassVar[dict[str, int]] = {"weight": 1, "bias": 0}
    tensor: Any  # a shoal.parallel.tensor.TensorParallel
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Map a replicated tensor to this rank's features."""
        return F.linear(self.tensor.enter_layer(self, x), self.weight.T, self.bias)


class RowParallelTransposed(nn.Module):
    """This rank's input features of x W + b."""

    cut: ClassVar[dict[str, int]] = {"weight": 0}
    tensor: Any  # a shoal.parallel.tensor.TensorParallel
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's features to a replicated tensor. The bias is added once, after the sum."""
        total: Tensor = self.tensor.leave(F.linear(x, self.weight.T))
        return total if self.bias is None else total + self.bias.to(total.dtype)


TRANSPOSED_LAYERS: Mapping[Split, type[nn.Module]] = {
    Split.COLUMN: ColumnParallelTransposed,
    Split.ROW: RowParallelTransposed,
}
