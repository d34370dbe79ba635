"""Find what a model computes from some tokens of a sequence, such as a class from the first one.

Under cp a rank has other tokens, and its first or last one is another. Language models return a row for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.models.huggingface import experts
from shoal.models.huggingface.order import inputs_of
from shoal.parallel.pipeline.known_values import KnownValues
from shoal.parallel.pipeline.skeleton import skeleton_of

OF_TOKENS = ("start_logits", "end_logits")
"""Outputs with one number for every token."""


def pooled_output(model: Any) -> str | None:
    """Return the name of an output without a row for every token; "" if that cannot be found; None: there is none.
    Models whose only head is over the vocabulary have none, and are not run."""
    names = [name for name, _ in model.named_modules()]
    if model.get_output_embeddings() is not None and not any("pool" in name or "seq_rel" in name for name in names):
        return None
    inputs, known, skeleton = inputs_of(model), KnownValues(), skeleton_of(model)
    if inputs is None:
        return ""
    experts.install(skeleton)
    options = tree_map_only(Tensor, known.input_of(None), dict(inputs))
    try:
        with torch.no_grad(), torch.device("meta"), known:
            output = skeleton(**options)
    except Exception:  # it needs other inputs, or real values
        return ""
    rows = next(iter(inputs.values())).shape[:2]
    tensors = {name: one for name, one in output.items() if isinstance(one, Tensor) and one.dim()}
    flat = (name for name, one in tensors.items() if one.dim() < 3 or one.shape[:2] != rows)
    return next((name for name in flat if name not in OF_TOKENS), None)
