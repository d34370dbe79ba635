"""The ends of the residual stream: lookups in bfloat16, and rotary angles that stay in float32.

Under autocast transformers looks up rows in float32, and all sums between blocks are then in float32: twice the bytes.
Here the stream is in bfloat16, as in models whose weights are. Rotary angles would follow it, so they are requested in
float32.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.huggingface.fast.probe import Swapped, become, drawn, is_free, small_copy
from shoal.numerics.ops.embedding import looked_up
from shoal.numerics.precision import narrowed, wide
from shoal.verification.exact_casts import keeping_float64

ROWS = 5


class FastEmbedding(Swapped):
    """A lookup in the precision of the products that follow."""

    row_scale: float

    def forward(self: Any, input: Tensor) -> Tensor:
        """(B, T) → (B, T, D)."""
        rows = looked_up(input, self)
        if rows is None:
            return narrowed(super().forward(input))  # type: ignore[misc]
        return rows if self.row_scale == 1.0 else rows * self.row_scale


def swap_embedding(module: nn.Module) -> bool:
    """Replace the forward of a module, if it is a lookup of rows that are perhaps scaled."""
    if not isinstance(module, nn.Embedding) or not is_free(module):
        return False
    has_rules = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    if has_rules or len(list(module.parameters())) != 1:
        return False
    weight = nn.Parameter(drawn(ROWS, 6))
    numbers = torch.tensor([[1, 3, 2, 4]])
    try:
        probe = copy.deepcopy(module, {id(module.weight): weight}).cpu().double()  # with its own scale
        probe.padding_idx = None if module.padding_idx is None else 0
        with torch.no_grad(), keeping_float64("fp64", is_foreign=True):
            found, rows = probe(numbers), weight[numbers]
            scale = float((found / rows).mean())
    except Exception:  # it takes other arguments, or its scale has no value yet
        return False
    if not torch.allclose(found, rows * scale, rtol=1e-12, atol=0.0):
        return False
    become(module, FastEmbedding, row_scale=scale)
    return True


class FastRotary(Swapped):
    """Rotary angles in at least float32."""

    def forward(self: Any, x: Tensor, *arguments: Any, **options: Any) -> Any:
        """The cosine and the sine of each token's angles. Of x, the dtype and the device are used."""
        return super().forward(x[..., :1].to(wide(x.dtype)), *arguments, **options)  # type: ignore[misc]


def swap_rotary(module: nn.Module, kinds: set[str]) -> bool:
    """Replace the forward of a module that computes rotary angles, the same for both halves of a head's features."""
    if not is_free(module) or not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
        return False
    probe = small_copy(module)
    positions = torch.arange(3)[None]
    for kind in ((), *((one,) for one in sorted(kinds))):
        try:
            with torch.no_grad(), keeping_float64("fp64", is_foreign=True):
                whole, part = (probe(x, positions, *kind) for x in (drawn(1, 3, 8), drawn(1, 3, 1)))
        except Exception:  # it takes the kind of a layer, or not
            continue
        halves = [(a, a.roll(a.shape[-1] // 2, -1)) for a in whole]
        if not all(torch.equal(a, b) for a, b in [*zip(whole, part, strict=True), *halves]):
            return False
        if kind == () or kind[0] == max(kinds):
            become(module, FastRotary)
            return True
    return False
