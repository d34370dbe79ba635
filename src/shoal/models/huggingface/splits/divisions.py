"""Find how the tokens of a block may be divided under `sp`: which modules need all of them, and what else they read.

Every way that is found is tried (`tokens`). Modules that mix tokens outside of the attention interface, as the
convolution and the state of Mamba, are found by running them with some of the tokens, and stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from torch import Tensor

from shoal.blueprint.description import Split
from shoal.blueprint.placement import is_inside
from shoal.models.huggingface.splits.block_copies import BlockCopy
from shoal.models.huggingface.splits.tokens import (
    ACTIVATION,
    GATHERED,
    TOKENS,
    Division,
    Part,
    Recorded,
    others_of,
    recorded,
    some,
    why_not_divided,
)
from shoal.models.huggingface.splits.trial import is_close

SPLIT = (Split.COLUMN, Split.ROW, Split.EXPERTS, *GATHERED)
MOST_OTHERS = 3
"""Further arguments of a block of which every way is tried."""


def division_of(block: BlockCopy, splits: Mapping[str, Split]) -> Division | str:
    """How the tokens of a block may be divided, or why they cannot. `splits`: those of its submodules."""
    whole, others = recorded(block), others_of(block)
    first = why_not_divided(block, Division(splits), whole)
    if whole is None or others is None or len(others) > MOST_OTHERS:
        return first or Division(splits)
    for ways in product(("enter", "divide"), repeat=len(others)):
        chosen = dict(zip(others, ways, strict=True))
        plain = _with_arguments(splits, whole, chosen)
        why = why_not_divided(block, plain, whole)
        if why is None:
            return plain
        mixing = dict.fromkeys(_mixing(block, plain, whole), Split.ALL_TOKENS)
        if mixing:
            tried = _with_arguments({**splits, **mixing}, whole, chosen)
            if why_not_divided(block, tried, whole) is None:
                return tried
        first = why if not others or first is None else first
    return first or "cannot be run alone"


def _with_arguments(splits: Mapping[str, Split], whole: Recorded, chosen: Mapping[str, str]) -> Division:
    """What happens to arguments of modules inside, of which most are known by what they are."""
    entered = {id(whole.inputs[""][name]) for name, way in chosen.items() if way == "enter"}
    found: dict[str, dict[str, str]] = {"": dict(chosen)} if chosen else {}
    for name, how in splits.items():
        if name not in whole.inputs or not isinstance(whole.first(name), Tensor):
            continue
        ways = dict(_ways(name, how, whole, entered, is_in_region=_is_in_region(name, splits)))
        if ways:
            found[name] = ways
    return Division(splits, found)


def _is_in_region(name: str, splits: Mapping[str, Split]) -> bool:
    return any(how is Split.REGION and name.startswith(f"{one}.") for one, how in splits.items())


def _ways(
    name: str, how: Split, whole: Recorded, entered: set[int], *, is_in_region: bool
) -> Iterator[tuple[str, str]]:
    x, first = whole.first(name), whole.first_name(name)
    if how is Split.COLUMN and id(x) in entered:
        yield first, "enter"
    elif how is Split.COLUMN and x.dim() < ACTIVATION and not is_in_region:
        yield first, "gather"
    if how is not Split.ALL_TOKENS:
        return
    for one, value in whole.inputs[name].items():
        if id(value) in entered:
            yield one, "enter"
        elif one != first and _is_like(value, x):
            yield one, "gather"


def _is_like(value: Any, x: Tensor) -> bool:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and value.dim() == x.dim() and value.shape[:-1] == x.shape[:-1]


def _mixing(block: BlockCopy, division: Division, whole: Recorded) -> Iterator[str]:
    """The outermost modules that do not compute each token alone, and hold nothing that is split."""
    inside: list[str] = [name for name, how in division.splits.items() if how in GATHERED]
    for name, _ in block.module.named_modules():
        if not name or is_inside(name, inside):
            continue
        if name not in whole.inputs or name in whole.twice or not _has_tokens(name, whole):
            continue
        if _computes_each_token(block, division, whole, name):
            inside.append(name)
        elif not any(how in SPLIT and is_inside(one, [name]) for one, how in division.splits.items()):
            inside.append(name)
            yield name


def _has_tokens(name: str, whole: Recorded) -> bool:
    x, stream = whole.first(name), whole.first("")
    return isinstance(x, Tensor) and x.dim() >= ACTIVATION and x.shape[TOKENS] == stream.shape[TOKENS]


def _computes_each_token(block: BlockCopy, division: Division, whole: Recorded, name: str) -> bool:
    output = whole.outputs.get(name)
    expected = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(expected, Tensor) or expected.dim() < ACTIVATION:
        return False
    middle = whole.first("").shape[TOKENS] // 2
    for tokens in (slice(None, middle), slice(middle, None)):
        found = Part(block, division, whole, tokens).of_module(name)
        if not found or not is_close(found[0], some(expected, tokens)):
            return False
    return True
