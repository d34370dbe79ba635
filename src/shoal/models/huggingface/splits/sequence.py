"""Where `sp` may divide the tokens of a model: from its embedding to its head, or between its blocks alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shoal.blueprint.description import Split
from shoal.blueprint.placement import is_inside
from shoal.models.huggingface.modules import CONVOLUTIONS, attentions, mixes_tokens, name_of, pattern_of
from shoal.models.huggingface.order import Order
from shoal.models.huggingface.splits.block_copies import block_copies
from shoal.models.huggingface.splits.divisions import division_of
from shoal.models.huggingface.splits.found_splits import FoundSplits
from shoal.models.huggingface.splits.tokens import Division, others_of, why_not_divided


@dataclass(frozen=True)
class TokenDivision:
    """How tokens are divided between the blocks of a model, or why not."""

    blocks: tuple[str, ...] = ()
    splits: Mapping[str, Split] = field(default_factory=dict)
    """Modules that mix tokens outside of attention."""
    arguments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    why_not: str | None = None


_known: WeakKeyDictionary[nn.Module, TokenDivision] = WeakKeyDictionary()


def is_from_embedding(model: Any, order: Order, found: FoundSplits) -> bool:
    """Whether the code around the blocks is known to work with some of the tokens: the model declares that its
    embedding is before its blocks, and a norm and a head after them."""
    name = name_of(model, model.get_input_embeddings())
    is_around = any(name is not None and name.startswith(f"{part}.") for part in order.before)
    is_home_read = found.unread() is None and found.around(attentions(model)) is None
    return order.is_declared and not is_around and is_home_read


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
        others = dict.fromkeys(others_of(block) or (), "divide")  # the model has computed them from some tokens
        if why_not_divided(block, Division(inside, {"": others})) is not None:
            return False
        tried += len(block.names)
    return tried == len(blocks)


def between_blocks(model: Any, order: Order, found: FoundSplits, splits: Mapping[str, Split]) -> TokenDivision:
    """How tokens are divided between the blocks of a model."""
    if model not in _known:
        _known[model] = _between_blocks(model, order, found, splits)
    return _known[model]


def _between_blocks(model: Any, order: Order, found: FoundSplits, splits: Mapping[str, Split]) -> TokenDivision:
    blocks = order.blocks
    if getattr(model.config, "is_encoder_decoder", False):  # without the last norm of the encoder
        blocks = tuple(name for name in blocks if name.rpartition(".")[2].isdecimal())
    if not blocks:
        return TokenDivision(why_not=order.why_not or "has no blocks that could be found")
    if (home := found.around(attentions(model))) is not None:
        return TokenDivision(why_not=f"has split layers in {pattern_of(home)} beside an attention")
    outside = (name for name, how in splits.items() if how in (Split.COLUMN, Split.ROW))
    if not all(is_inside(name, blocks) for name in outside):
        return TokenDivision(why_not="has split layers outside of its blocks")
    mixing: dict[str, Split] = {}
    arguments: dict[str, Mapping[str, str]] = {}
    tried = 0
    for block in block_copies(model, blocks):
        tried += len(block.names)
        first = f"{block.names[0]}."
        inside = {name.removeprefix(first): how for name, how in splits.items() if name.startswith(first)}
        way = division_of(block, inside) if block.is_chained else "do not read what the block before returns"
        if isinstance(way, str):
            return TokenDivision(why_not=f"has blocks that {way} ({pattern_of(block.names[0])})")
        divided = {one: how for one, how in way.arguments.get("", {}).items() if how == "divide"}
        way = Division(way.splits, {**way.arguments, "": divided})
        for name in block.names:
            mixing |= {f"{name}.{one}": how for one, how in way.splits.items() if inside.get(one) is not how}
            arguments |= {f"{name}.{one}".removesuffix("."): ways for one, ways in way.arguments.items() if ways}
    if tried != len(blocks):
        return TokenDivision(why_not="has blocks that cannot be run alone")
    return TokenDivision(blocks, mixing, arguments)
