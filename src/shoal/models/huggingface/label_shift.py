"""Whether a loss function of transformers compares logits with the label of the next token, found with numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shoal.train.loss.labels import shifted

TOKENS, WORDS = 5, 7


def shift_of(function: Any) -> bool | None:
    """Whether labels are shifted; None: it is not the mean of a cross-entropy."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, TOKENS, WORDS, generator=generator, dtype=torch.float32)  # whatever the default is
    labels = torch.tensor([[3, 1, -100, 5, 0]])
    found = function(logits=logits, labels=labels, vocab_size=WORDS)
    for is_shifted, one in ((True, shifted(labels)), (False, labels)):
        if torch.allclose(found, F.cross_entropy(logits.flatten(0, 1), one.flatten()), rtol=1e-5):
            return is_shifted
    return None
