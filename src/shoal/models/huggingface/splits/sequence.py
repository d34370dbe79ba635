"""Where `sp` may divide the tokens of a model: from its embedding to its head, or between its blocks alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shoal.blueprint.description import Split
from shoal.blueprint.placement import is_inside
from shoal.models.huggingface.modules import CONVOLUTIONS, attentions, mixes_tokens, name_of, pattern_of
from shoal.models.huggingface.order import Order
from shoal.models.huggingface.splits.block_copies import block_copies
from shoal.models.huggingface.splits.found_splits import FoundSplits
from shoal.models.huggingface.splits.tokens import why_not_divided

_known: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def is_from_embedding(model: Any, order: Order, found: FoundSplits) -> bool:
    """Whether the code around the blocks is known to work with some of the tokens: the model declares that its
    embedding is before its blocks, and a norm and a head after them."""
    name = name_of(model, model.get_input_embeddings())
    is_around = any(name is not None and name.startswith(f"{part}.") for part in order.before)
    return order.is_declared and not is_around and found.why_no_sequence(attentions(model)) is None


def computes_each_token(model: Any, blocks: tuple[str, ...]) -> bool:
    """Whether a trial shows that blocks mix tokens in their attention alone, which is given all of them. A convolution
    may read farther than the few tokens of a trial."""
    known = attentions(model)
    tried = 0
    for block in block_copies(model, blocks):
        first = f"{block.names[0]}."
        inside = {name.removeprefix(first): Split.ALL_TOKENS for name in known if name.startswith(first)}
        unknown = list(mixes_tokens(model, block.names[:1]))
        if any(is_inside(name, known) or isinstance(model.get_submodule(name), CONVOLUTIONS) for name in unknown):
            return False
        if why_not_divided(block, inside) is not None:
            return False
        tried += len(block.names)
    return tried == len(blocks)


def why_not_between_blocks(model: Any, order: Order, found: FoundSplits, splits: Mapping[str, Split]) -> str | None:
    """Why tokens cannot be divided between the blocks of a model; None: they can."""
    if model not in _known:
        _known[model] = _why_not(model, order, found, splits)
    return _known[model]


def _why_not(model: Any, order: Order, found: FoundSplits, splits: Mapping[str, Split]) -> str | None:
    if getattr(model.config, "is_encoder_decoder", False):
        return "has an encoder and a decoder, which reads the tokens of both"
    if not order.blocks:
        return order.why_not or "has no blocks that could be found"
    if (home := found.why_no_sequence(attentions(model))) is not None:
        return f"has split layers in {pattern_of(home)} that do not all read its input"
    outside = (name for name, how in splits.items() if how in (Split.COLUMN, Split.ROW))
    if any(not any(name.startswith(f"{block}.") for block in order.blocks) for name in outside):
        return "has split layers outside of its blocks"
    tried = 0
    for block in block_copies(model, order.blocks):
        tried += len(block.names)
        inside = {
            name.removeprefix(f"{block.names[0]}."): how
            for name, how in splits.items()
            if name.startswith(f"{block.names[0]}.")
        }
        why = why_not_divided(block, inside) if block.is_chained else "do not read what the block before returns"
        if why is not None:
            return f"has blocks that {why} ({pattern_of(block.names[0])})"
    return None if tried == len(order.blocks) else "has blocks that cannot be run alone"
