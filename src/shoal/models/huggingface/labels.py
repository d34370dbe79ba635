"""Whether a model of transformers shifts labels, found without its values.

Where ranks divide tokens or stages, no rank sees the loss that the model computes itself. So a copy without memory is
called once with labels. If it passes its logits and these labels, unchanged, to its `loss_function`, that function is
tried with numbers. If not, it is not known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.blueprint.description import Description
from shoal.models.huggingface.adapt import adapt
from shoal.parallel.pipeline.stage_io import skeleton_of
from shoal.train.loss.labels import shifted

TOKENS, WORDS = 5, 7


def shifts_labels(model: Any, description: Description) -> bool | None:
    """Whether logits are compared with the label of the next token; None: not known."""
    skeleton: Any = skeleton_of(model)
    adapt(skeleton, description, None)
    seen: list[tuple[Any, Any]] = []

    def note(logits: Any = None, labels: Any = None, *_: Any, **__: Any) -> Tensor:
        seen.append((logits, labels))
        return torch.zeros((), device="meta")

    try:
        skeleton.loss_function = note
        with torch.device("meta"):
            tokens, labels = (torch.zeros(1, TOKENS, dtype=torch.int64) for _ in range(2))
            output = skeleton(tokens, labels=labels)
    except Exception:  # it needs more than tokens, or real values
        return None
    if len(seen) != 1 or seen[0][0] is not output.logits or seen[0][1] is not labels:
        return None
    return _shift_of(model.loss_function)


def _shift_of(function: Any) -> bool | None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, TOKENS, WORDS, generator=generator)
    labels = torch.tensor([[3, 1, -100, 5, 0]])
    found = function(logits=logits, labels=labels, vocab_size=WORDS)
    for is_shifted, one in ((True, shifted(labels)), (False, labels)):
        if torch.allclose(found, F.cross_entropy(logits.flatten(0, 1), one.flatten()), rtol=1e-5):
            return is_shifted
    return None
