"""Derive the `Description` of a model of transformers from what its classes declare, by strings alone.

    transformers declares                          shoal reads
    pp_plan: the entry that is a list of modules   blocks
    pp_plan: entries before and after it           before_blocks, after_blocks
    _no_split_modules, without a pp_plan           blocks; a run without memory shows the others
    tp_plan: colwise, rowwise                      Split.COLUMN, Split.ROW
    tp_plan: embedding_rowwise; the output head    Split.VOCABULARY
    tp_plan: replicated_with_grad_allreduce        Split.HEADS

A *region* is the parent of the layers that are split together: an attention or a feed-forward. If some layer of it is
of an unknown style, or is covered by nothing, all of the region stays whole on every rank of tp. It is then right, and
only saves nothing. Everything with parameters outside of regions is whole, too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shoal.blueprint.description import Description, Split, matches
from shoal.models.huggingface.modules import attentions, mixes_tokens, name_of, pattern_of
from shoal.models.huggingface.order import order_of

STYLES = {"colwise": Split.COLUMN, "rowwise": Split.ROW, "replicated_with_grad_allreduce": Split.HEADS}
"""Words of a tp_plan that mean the same here. `_gather_output` and `_split_input` gather activations: not followed."""


def describe(model: Any) -> Description:
    """What can be derived of a model. `why_not` says what cannot, and why."""
    order = order_of(model)
    why_not = dict(_why_not(model, order.blocks))
    splits = {} if "tp" in why_not else _splits(model)
    config = _text_config(model)
    head = model.get_output_embeddings()
    return Description(
        blocks=order.blocks,
        before_blocks=order.before,
        after_blocks=order.after,
        splits=splits,
        tied=tuple(_tied(model)) if order.blocks else (),
        head=name_of(model, head) if _returns_head(model, head) else None,
        num_heads=getattr(config, "num_attention_heads", None),
        num_kv_heads=getattr(config, "num_key_value_heads", None),
        num_outputs=getattr(head, "out_features", None),
        positions="position_ids" if "cp" not in why_not else None,
        documents="attention_mask" if _takes(model, "attention_mask") else None,
        why_not=why_not,
    )


def _text_config(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def _takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


# ---- what cannot be divided -----------------------------------------------------------------------------------------


def _why_not(model: Any, blocks: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Axis → the property of the architecture that is in its way."""
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        what = f"{kind} has an encoder and a decoder, which share no order of blocks"
        yield from ((axis, what) for axis in ("tp", "pp", "cp"))
        return
    if not blocks:
        yield "pp", f"{kind} has no blocks that run one after the other, with all else before or after them"
    if not (getattr(model, "tp_plan", None) or {}):
        yield "tp", f"{kind} declares no tp_plan, so it is not known how its layers may be split"
    yield "sp", f"{kind} reshapes by the tokens of its input, and they would be gathered inside"
    if (why := _why_not_context(model, blocks)) is not None:
        yield "cp", f"{kind} {why}"


def _why_not_context(model: Any, blocks: tuple[str, ...]) -> str | None:
    if not blocks:
        return "has no blocks that could be found"
    if not _takes(model, "position_ids"):
        return "takes no position_ids, which tokens of a divided sequence need"
    if not getattr(model, "_supports_flash_attn", False):
        return (
            "declares that flash attention cannot compute its attention, so that needs more than a scale and a window"
        )
    found = attentions(model)
    without = next((name for name in blocks if not any(one.startswith(f"{name}.") for one in found)), None)
    if without is not None:
        return f"has no attention in {without}"
    mixing = next((name for name in mixes_tokens(model, blocks)), None)
    return None if mixing is None else f"mixes tokens in {mixing}, outside of attention"


# ---- splits ---------------------------------------------------------------------------------------------------------


def _splits(model: Any) -> dict[str, Split]:
    """Pattern → split, for every module that has parameters of its own."""
    owners = {
        name: module
        for name, module in model.named_modules()
        if next(iter(module.parameters(recurse=False)), None) is not None
    }
    declared = {name: _declared(model.tp_plan, name, module) for name, module in owners.items()}
    found: dict[str, Split] = {}
    vocabulary = [model.get_input_embeddings(), model.get_output_embeddings()]
    regions = {name.rpartition(".")[0] for name, style in declared.items() if style in (Split.COLUMN, Split.ROW)}
    whole = {region for region in regions if not _is_split_whole(region, declared)}
    for name, module in owners.items():
        region = next((region for region in regions if name.startswith(f"{region}.")), None)
        if any(module is one for one in vocabulary):
            how = Split.VOCABULARY
        elif region is not None and region not in whole:
            how = declared[name]  # type: ignore[assignment]
        else:
            how = Split.SEQUENCE
        found[pattern_of(name)] = how
    return found


def _is_split_whole(region: str, declared: Mapping[str, Split | None]) -> bool:
    """Whether every layer of a region has a split that is known, and the last of them sums over ranks."""
    inside = [how for name, how in declared.items() if name.startswith(f"{region}.")]
    return None not in inside and Split.COLUMN in inside and Split.ROW in inside


def _declared(plan: Mapping[str, str], name: str, module: nn.Module) -> Split | None:
    """The split of a module by the words of a tp_plan; None: not declared, or not one that is followed."""
    style = next((style for pattern, style in plan.items() if matches(pattern, name)), None)
    how = STYLES.get(style or "")
    is_linear = type(module) is nn.Linear
    return how if is_linear or how is Split.HEADS else None


def _tied(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of one parameter: the first, and each of the others."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            yield first[id(parameter)], name


def _returns_head(model: Any, head: Any) -> bool:
    """Whether logits are the output of the last layer as it is. Every setting that scales or caps them has one of these
    words in its name."""
    is_plain = type(head) is nn.Linear and getattr(head, "bias", None) is None
    if not is_plain or getattr(model.config, "is_encoder_decoder", False):  # that needs labels, and computes a loss
        return False
    words = re.compile(r"logit_scale|logits_scal|logit_softcap|lm_head_multiplier")
    settings = _text_config(model).to_dict()
    return not any(words.search(name) and value not in (None, 1, 1.0, False) for name, value in settings.items())
