"""The longest sequence of a model whose positions are rows of a table. Rotary positions have no such limit."""

from __future__ import annotations

from typing import Any

from torch import nn

MOST_OFFSET = 2  # OPT and BART have two rows more than positions


def max_tokens_of(model: nn.Module, config: Any) -> int | None:
    """The positions of the text's table; None: there is none. `config`: that of the text."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        is_table = isinstance(module, nn.Embedding) and ("position" in last or last == "wpe")
        if is_table and most <= module.num_embeddings <= most + MOST_OFFSET:  # a table of images has another size
            return most if module.padding_idx is None else min(most, module.num_embeddings - module.padding_idx - 1)
    return None
