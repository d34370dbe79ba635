"""A model's last layer that can compute the loss in place of the logits.

A model returns logits. A loss that never needs all of them at once must be computed inside the forward of that layer,
where sharding has gathered its weight and expects its gradient. So a loss passes its labels first and then calls the
model as usual:

    with head.takes(labels):
        loss_sum = model(tokens)      # tokens ─ blocks ─ norm ─[lm_head: logits and loss, chunk by chunk]─ loss

Called without labels, the layer returns logits.

Some models scale or cap logits after the layer, and so would do with a loss. Their loss is computed from such logits,
and the layer returns a tiny part of it: a cap is linear there. `restored` undoes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.batch import IGNORE
from shoal.errors import ShoalError
from shoal.numerics.ops.fused_linear_cross_entropy import capped, linear_cross_entropy
from shoal.numerics.ops.memory_saving_linear import has_hooks
from shoal.numerics.precision import wide

SMALL = 2**20
"""Bytes of logits. Below this a CPU computes all logits at once, because there the calls of a small step take longer
than the arithmetic: for 32 tokens and 256 words, torch's own two functions took 0.32 ms, forward and backward, and the
fused one 0.66 (measured, Intel Xeon, one thread)."""


TINY = 2.0**-60
"""The part of a loss that passes through a softcap: tanh(x) is x for numbers this small, and they are not yet rounded
to 0 in float32."""


class LossHead:
    """Replaces a linear layer's forward; names and parameters of the layer stay."""

    def __init__(
        self,
        layer: nn.Linear,
        *,
        fp8: bool = False,
        always: bool = False,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self.layer = layer
        self.fp8 = fp8
        self.scale, self.softcap = scale, softcap
        """What the model makes of the output of the layer; see `linear_cross_entropy`."""
        self.always = always
        """Fuse small losses on a CPU, too."""
        self.labels: Tensor | None = None
        self.factor: float | Callable[[], float] = 1.0
        """The expected gradient of the loss; see `linear_cross_entropy`."""
        self._loss: Tensor | None = None
        """The last loss that was returned, until the model is known to return it unchanged."""
        self._is_known = False
        self._logits = layer.forward
        layer.forward = self.forward  # type: ignore[method-assign, assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, or for labels the sum of their losses."""
        labels, self.labels = self.labels, None
        if labels is None:
            return self._logits(x)
        if labels.is_floating_point() or labels.numel() != x[..., 0].numel():
            raise ShoalError(
                f"labels must be one integer for each of the head's {x[..., 0].numel()} outputs, got"
                f" {labels.dtype} of shape {tuple(labels.shape)}",
                fix="labels of the shape of the tokens; or Run(loss=lambda model, batch: ...)",
                code="T020",
            )
        loss = self._fused(x, labels) if self.always or not self._is_small(x) else self._plain(x, labels)
        self._loss = None if self._is_known else loss.detach().clone()
        return loss if self.softcap is None else loss * TINY

    def _is_small(self, x: Tensor) -> bool:
        num_logits = x.numel() // x.shape[-1] * self.layer.out_features
        return x.device.type == "cpu" and num_logits * wide(x.dtype).itemsize <= SMALL

    def _plain(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self._logits(x.flatten(0, -2))
        rows = capped(logits.to(wide(logits.dtype)) * self.scale, self.softcap)
        return F.cross_entropy(rows, labels.flatten().long(), ignore_index=IGNORE, reduction="sum")

    def _fused(self, x: Tensor, labels: Tensor) -> Tensor:
        h, weight = x.flatten(0, -2), self.layer.weight
        how = {"fp8": self.fp8, "factor": self.factor, "scale": self.scale, "softcap": self.softcap}
        loss: Tensor = linear_cross_entropy(h, weight, labels.flatten().long(), ignore=IGNORE, **how)
        return loss

    def restored(self, output: Any) -> Any:
        """The loss, of the output of a model that scales or caps what the layer returns."""
        if not isinstance(output, Tensor) or output.dim():
            return output
        part = self.scale * (1.0 if self.softcap is None else TINY)
        return output if part == 1.0 else output / part

    def has_returned(self, output: Any) -> bool:
        """Whether this is the loss that the layer returned last. A forward that changes logits, such as by a scale,
        must not do so to a loss. The numbers are compared once, since that waits for a GPU."""
        if not isinstance(output, Tensor) or output.dim():
            return False
        if self._loss is None:
            return True
        is_same = torch.allclose(output.detach(), self._loss.to(output.dtype), rtol=1e-6, atol=0.0, equal_nan=True)
        self._is_known = is_same and bool(self._loss)  # a loss of 0 shows no change
        return is_same

    @contextmanager
    def takes(self, labels: Tensor) -> Iterator[None]:
        """Make one call of the model inside return the sum of the losses of these labels."""
        self.labels = labels
        try:
            yield
            if self.labels is not None:
                raise ShoalError(
                    "describe() names a head, and the forward did not call it",
                    fix="leave head= out of the description",
                    code="M040",
                )
        finally:
            self.labels = None

    @contextmanager
    def with_grad_scale(self, factor: Callable[[], float]) -> Iterator[None]:
        """Declare the factor of the losses that are computed inside. It is read when a loss is computed: the sum over
        ranks that it depends on is in flight while the layers before the head compute."""
        self.factor = factor
        try:
            yield
        finally:
            self.factor = 1.0


def why_not_fused(layer: nn.Module) -> str | None:
    """Return why a layer cannot compute the loss without its logits; None: it can."""
    if type(layer) is not nn.Linear:
        return f"its head is a {type(layer).__name__}, not an nn.Linear"
    if getattr(layer, "bias", None) is not None:
        return "its head has a bias"
    if has_hooks(layer):
        return "its head has a hook, which would get a loss in place of logits"
    forward = layer.__dict__.get("forward")
    is_ours = isinstance(getattr(forward, "__self__", None), LossHead)  # of an earlier run
    return "its head has a forward of its own" if forward is not None and not is_ours else None
