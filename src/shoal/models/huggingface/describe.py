"""Derive the `Description` of a model of transformers from what its classes declare, by strings alone.

    transformers declares                          shoal reads
    pp_plan: the entry that is a list of modules   blocks
    pp_plan: entries before and after it           before_blocks, after_blocks
    _no_split_modules, without a pp_plan           blocks; a run without memory shows the others
    tp_plan: colwise, rowwise                      Split.COLUMN, Split.ROW
    tp_plan: embedding_rowwise; the output head    Split.VOCABULARY
    tp_plan: replicated_with_grad_allreduce        Split.HEADS
    no tp_plan                                     splits that a numeric trial of each kind of block has proven

A *region* is the parent of the layers that are split together: an attention or a feed-forward. If some layer of it is
of an unknown style, or is covered by nothing, all of the region stays whole on every rank of tp. It is then right, and
only saves nothing. Everything with parameters outside of regions is whole, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from shoal.blueprint.description import Description, Split, matches
from shoal.blueprint.placement import is_inside
from shoal.models.huggingface.attention import has_interface
from shoal.models.huggingface.logits import LogitRule, logit_rule
from shoal.models.huggingface.long_rope import REMEMBERS, rotary_of
from shoal.models.huggingface.modules import attentions, experts_in, mixes_tokens, name_of, pattern_of
from shoal.models.huggingface.order import Order, order_of
from shoal.models.huggingface.pooled import pooled_output
from shoal.models.huggingface.position_table import max_tokens_of
from shoal.models.huggingface.splits.found_splits import FoundSplits, found_splits, heads_of, vocabulary_of
from shoal.models.huggingface.splits.sequence import (
    TokenDivision,
    between_blocks,
    computes_each_token,
    is_from_embedding,
)
from shoal.parallel.lora.layers import LoRALinear

T = TypeVar("T")
STYLES = {"colwise": Split.COLUMN, "rowwise": Split.ROW, "replicated_with_grad_allreduce": Split.HEADS}
"""Words of a tp_plan that mean the same here. `_gather_output` and `_split_input` gather activations: not followed."""

NO_POSITIONS = "takes no position_ids, which tokens of a divided sequence need"


def describe(model: Any) -> Description:
    """What can be derived of a model. `why_not` says what cannot, and why."""
    register_head_last(model)
    order = order_of(model)
    why_not = dict(_why_not(model, order))
    owners = _owners(model)
    declared = {name: _declared(getattr(model, "tp_plan", None) or {}, name, one) for name, one in owners.items()}
    regions = {name.rpartition(".")[0] for name, style in declared.items() if style in (Split.COLUMN, Split.ROW)}
    followed = {region for region in regions if _is_split_whole(region, declared)}
    found = FoundSplits() if "tp" in why_not else found_splits(model, followed)
    is_divided = bool(followed or found.splits or (getattr(model, "tp_plan", None) and order.before))
    if "tp" not in why_not and not is_divided:
        why_not["tp"] = f"{type(model).__name__} {_why_not_split(order, found)}"
    named = {} if "tp" in why_not else _splits(model, declared, followed, found, has_order=bool(order.before))
    tokens = TokenDivision()
    if "tp" in why_not:
        why_not["sp"] = why_not["tp"]
    elif "cp" in why_not or not is_from_embedding(model, order, found):
        tokens = between_blocks(model, order, found, named)
        named |= tokens.splits
    if tokens.why_not is not None:
        why_not["sp"] = f"{type(model).__name__} {tokens.why_not}"
    config = _text_config(model)
    experts = experts_in(model)
    splits = _as_patterns(named, model) | _as_patterns(dict.fromkeys(experts, Split.EXPERTS), model)
    numbers = {int(module.num_experts) for module in experts.values()}
    if len(numbers) > 1:
        why_not["ep"] = f"{type(model).__name__} has layers of {' and '.join(map(str, sorted(numbers)))} experts"
    ways = {name: tuple(found.items()) for name, found in tokens.arguments.items()}
    is_split = any(named.get(name) is not Split.ALL_TOKENS for name in attentions(model))
    head = model.get_output_embeddings()
    rule = _logit_rule(model, head)
    return Description(
        blocks=order.blocks,
        before_blocks=order.before,
        after_blocks=order.after,
        costs=order.costs,
        splits=splits,
        parts=_as_patterns(found.parts, model),
        cuts=_as_patterns(found.cuts, model),
        token_blocks=tokens.blocks,
        sp_arguments={pattern: dict(ways) for pattern, ways in _as_patterns(ways, model).items()},
        per_rank=_as_patterns(found.per_rank, model),
        tied=tuple(_tied(model, order)),
        head=None if rule is None else name_of(model, head),
        logit_scale=1.0 if rule is None else rule.scale,
        logit_softcap=None if rule is None else rule.softcap,
        num_heads=heads_of(model, getattr(config, "num_attention_heads", None)),
        num_kv_heads=getattr(config, "num_key_value_heads", None) if is_split else None,
        num_experts=min(numbers, default=None),
        active_experts=getattr(config, "num_experts_per_tok", None) if experts else None,
        num_outputs=getattr(head, "out_features", None),
        max_tokens=max_tokens_of(model, config),
        positions="position_ids" if "cp" not in why_not else None,
        documents="attention_mask" if _takes(model, "attention_mask") else None,
        why_not=why_not,
    )


def _text_config(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def _takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


# ---- what cannot be divided -----------------------------------------------------------------------------------------


def _why_not(model: Any, order: Order) -> Iterator[tuple[str, str]]:
    """Axis → the property of the architecture that is in its way."""
    kind = type(model).__name__
    is_pair = getattr(model.config, "is_encoder_decoder", False)
    if is_pair:
        yield "cp", f"{kind} {_why_not_context_of_pair(model)}"
        if getattr(model, "tp_plan", None):
            yield "tp", f"{kind} has an encoder and a decoder, and splits are derived for one of them alone"
    for axis in ("pp", "tp", "cp") if order.uncalled else ():
        yield axis, f"{kind} reads the parameters of {order.uncalled[0]} without calling it"
    if order.why_not is not None:
        yield "pp", f"{kind} {order.why_not}"
        if order.blocks and not order.before:  # what is around the blocks has no place
            yield "tp", f"{kind} {order.why_not}"
    remembering = next((name for name, _ in rotary_of(model, REMEMBERS)), None)
    if remembering is not None:
        yield "pp", f"{kind} compares the length of each sequence with the longest one that {remembering} has seen"
    if not is_pair and not order.uncalled and (why := _why_not_context(model, order)) is not None:
        yield "cp", f"{kind} {why}"


def _why_not_context_of_pair(model: Any) -> str:
    if not _takes(model, "position_ids"):
        return NO_POSITIONS
    return "has a decoder that also attends to the tokens of an encoder, and cp divides one sequence"


def _why_not_context(model: Any, order: Order) -> str | None:
    blocks = order.blocks
    if not blocks:
        return order.why_not or "has no blocks that could be found"
    if not _takes(model, "position_ids"):
        return NO_POSITIONS
    tables = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.Embedding))
    counted = next((name for name, one in tables if "position" in name and one.padding_idx is not None), None)
    if counted is not None:  # RoBERTa
        return f"counts positions from its padding token ({counted}), where shoal would count from 0"
    masked = next((name for name, one in model.named_modules() if _counts_from_mask(one)), None)
    if masked is not None:  # OPT
        return f"counts positions from its attention_mask ({masked}), where shoal would count from 0"
    scaled = next((name for name, one in model.named_modules() if getattr(one, "token_dropout", False)), None)
    if scaled is not None:  # ESM
        return f"scales every token by the number of masked tokens in its sample ({scaled})"
    if not getattr(model, "_supports_flash_attn", False):
        return (
            "declares that flash attention cannot compute its attention, so that needs more than a scale and a window"
        )
    if not has_interface(model):
        return "computes its attention itself, without transformers' attention interface"
    found = attentions(model)
    without = next((name for name in blocks if not any(one.startswith(f"{name}.") for one in found)), None)
    if without is not None:
        return f"has no attention in {without}"
    mixing = next((name for name in mixes_tokens(model, blocks)), None)
    if mixing is not None and not computes_each_token(model, blocks):
        return f"may mix tokens in {mixing}, outside of attention"
    pooled = pooled_output(model)
    return (
        None if pooled is None else f"computes {pooled or 'its output'} from some tokens of a sequence, not from each"
    )


def _why_not_split(order: Order, found: FoundSplits) -> str:
    if found.unproven:
        return f"mixes all features on the way from {found.unproven[0]}, so no half of them can be computed alone"
    if order.why_not is not None:
        return order.why_not
    return "has no linear layers of which each reads the output of the one before alone"


def _counts_from_mask(module: nn.Module) -> bool:
    is_table = isinstance(module, nn.Embedding)
    return is_table and "attention_mask" in inspect.signature(module.forward).parameters


# ---- splits ---------------------------------------------------------------------------------------------------------


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Norms, and modules that have parameters of their own."""
    return {
        name: module
        for name, module in model.named_modules()
        if next(iter(module.parameters(recurse=False)), None) is not None or "Norm" in type(module).__name__
    }


def _splits(
    model: Any, declared: Mapping[str, Split | None], followed: set[str], proven: FoundSplits, *, has_order: bool
) -> dict[str, Split]:
    """Name → split, for every region, norm, attention that stays whole, and module that has parameters of its
    own. `followed`: the regions that are split as the tp_plan declares."""
    found = dict.fromkeys(declared, Split.SEQUENCE)
    found |= {name: how for name, how in declared.items() if how is not None and is_inside(name, followed)}
    found |= dict.fromkeys(followed, Split.REGION)
    if has_order:  # else it is whole on every rank, with all that is outside of the blocks
        found |= dict.fromkeys(vocabulary_of(model), Split.VOCABULARY)
    found |= dict.fromkeys(attentions(model).keys() - followed - proven.homes.keys(), Split.ALL_TOKENS)
    return found | proven.splits


def _as_patterns(found: Mapping[str, T], model: nn.Module) -> dict[str, T]:
    """One pattern for all layers, where all modules or parameters of that pattern are split alike."""
    alike: dict[str, set[T | None]] = {}
    for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False)):
        alike.setdefault(pattern_of(name), set()).add(found.get(name))
    return {pattern_of(name) if len(alike[pattern_of(name)]) == 1 else name: how for name, how in found.items()}


def _is_split_whole(region: str, declared: Mapping[str, Split | None]) -> bool:
    """Whether every layer of a region has a split that is known, and the last of them sums over ranks. Parameters of
    the region itself have none."""
    inside = [how for name, how in declared.items() if f"{name}.".startswith(f"{region}.")]
    return None not in inside and Split.COLUMN in inside and Split.ROW in inside


def _declared(plan: Mapping[str, str], name: str, module: nn.Module) -> Split | None:
    """The split of a module by the words of a tp_plan; None: not declared, or not one that is followed."""
    style = next((style for pattern, style in plan.items() if matches(pattern, name)), None)
    how = STYLES.get(style or "")
    is_linear = type(module) is nn.Linear or isinstance(module, LoRALinear)
    return how if is_linear or how is Split.HEADS else None


def register_head_last(model: Any) -> None:
    """Move the child with the output layer behind the other children. A tied weight then has the name of its embedding,
    as in most models: it belongs to the first stage. XLM-RoBERTa registers its output layer first."""
    head = model.get_output_embeddings()
    name = next((name for name, child in model.named_children() if head in child.modules()), None)
    if name is not None:
        model._modules[name] = model._modules.pop(name)


def _tied(model: nn.Module, order: Order) -> Iterator[tuple[str, str]]:
    """Names of one parameter, the first before the blocks and the first after them."""
    first: dict[int, str] = {}
    second: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if is_inside(known, order.before) and is_inside(name, order.after):
            second.setdefault(id(parameter), name)
    yield from ((first[key], name) for key, name in second.items())


def _logit_rule(model: Any, head: Any) -> LogitRule | None:
    """What becomes of the output of the last layer; None: not known, or the layer is not a plain product."""
    is_plain = type(head) is nn.Linear and getattr(head, "bias", None) is None
    if not is_plain or getattr(model.config, "is_encoder_decoder", False):  # that needs labels, and computes a loss
        return None
    return logit_rule(model, head)
