"""The learning rate as a pure function of the run's progress. The optimizer step is the only clock.

factor
 1 |    /‾‾‾\\.            cosine, warm-up over the first 20 %, final_lr 0.1
   |   /      '\\.
   |  /          '-._
.1 | /               ‾‾
   +------------------- progress 0 → 1
"""

from __future__ import annotations

import math


def lr_factor(kind: str, progress: float, *, warmup: float = 0.0, final: float = 0.0) -> float:
    """Return the factor of the peak learning rate at `progress` (0 at the first step, 1 at the end of the run).

    `warmup` is the part of the run in which the factor rises linearly. It never starts at zero, since a step with a
    learning rate of zero is wasted: `progress` is taken at the end of the step.

    >>> [round(lr_factor("linear", p, warmup=0.5), 2) for p in (0.25, 0.5, 0.75, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup:
        return progress / warmup
    if kind == "constant":
        return 1.0
    decayed = min((progress - warmup) / (1.0 - warmup), 1.0) if warmup < 1.0 else 0.0  # no time left to decay
    shape = (1.0 + math.cos(math.pi * decayed)) / 2.0 if kind == "cosine" else 1.0 - decayed
    return final + (1.0 - final) * shape


def scaled_lr(lr: float, *, batch: int, tuned_for_batch: int | None) -> float:
    """Apply the linear scaling rule (Goyal et al. 2017): k times the batch, k times the learning rate. None: keep `lr`.

    >>> scaled_lr(0.1, batch=8192, tuned_for_batch=256)
    3.2
    """
    return lr if tuned_for_batch is None else lr * batch / tuned_for_batch
