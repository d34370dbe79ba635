"""What tokens of a model see, found with numbers: a tiny copy is called twice with some other tokens.

A class says neither whether it sees later tokens nor whether it keeps packed documents apart. The copy has the config
with small sizes, in float32, and random weights of which every one matters.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.parallel.context.attention import positions_in_documents

TOKENS, FIRST, FIRST_WORD, DRAWN = 8, 3, 4, 8
"""Tokens of a trial, those before a cut, the first word that is no special token, and the number of words drawn."""
FEW_HEADS, HEAD, FEATURES, LAYERS, WORDS = 4, 8, 64, 2, 64
MOST_PARAMETERS, OWN_SIZE = 5 * 10**7, 10**6
"""Parameters of a copy, and of a model whose copy has its own sizes."""
TOLERANCE = 1e-4
"""Difference of logits, of their largest, that is rounding."""
LAYER_KEYS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
FEATURE_KEYS = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff")
TOKEN_KEYS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id")


def looks_ahead(model: Any) -> bool | None:
    """Whether logits depend on later tokens; None: that could not be tried."""
    tokens, others = _tokens(slice(FIRST, None))
    for copy in _copies(model):
        pair = _logits(copy, {"input_ids": tokens}, {"input_ids": others})
        if pair is not None and _differ(pair, slice(FIRST, None)):
            return _differ(pair, slice(None, FIRST))
    return None


def mixes_documents(model: Any) -> bool | None:
    """Whether logits of a packed document depend on another one; None: that could not be tried."""
    tokens, others = _tokens(slice(None, FIRST))
    positions = positions_in_documents((torch.arange(TOKENS, device="cpu") >= FIRST).int()[None])
    packed = {"position_ids": positions}
    for copy in _copies(model):
        pair = _logits(copy, {"input_ids": tokens, **packed}, {"input_ids": others, **packed})
        alone = _logits(copy, {"input_ids": tokens[:, FIRST:]}, {"input_ids": tokens[:, FIRST:]})
        if pair is not None and alone is not None and _differ(pair, slice(None, FIRST)):
            own = (pair[0][:, FIRST:], alone[0])
            return _differ(pair, slice(FIRST, None)) or _differ(own, slice(None))
    return None


def _tokens(changed: slice) -> tuple[Tensor, Tensor]:
    """Random tokens, and the same with others in one place."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        tokens = torch.randint(FIRST_WORD, FIRST_WORD + DRAWN, (1, TOKENS), generator=generator)
    others = tokens.clone()
    others[:, changed] = FIRST_WORD + (tokens[:, changed] - FIRST_WORD + 3) % DRAWN
    return tokens, others


def _differ(pair: tuple[Tensor, Tensor], where: slice) -> bool:
    """Whether two results differ in a place by more than rounding."""
    one, other = pair
    return bool((one - other)[:, where].abs().max() > TOLERANCE * one.abs().max())


def _logits(copy: Any, one: dict[str, Any], other: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The logits of two batches; None: the copy cannot compute them."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            plain = {"use_cache": False} if "use_cache" in inspect.signature(copy.forward).parameters else {}
            found = [copy(**plain, **batch).logits for batch in (one, other)]
    except Exception:  # its sizes do not fit each other, or it needs other inputs
        return None
    is_known = all(x.dim() == 3 and x.shape[1] == one["input_ids"].shape[1] and x.isfinite().all() for x in found)
    return (found[0], found[1]) if is_known else None


def _copies(model: Any) -> Iterator[Any]:
    """Tiny copies of a model, from the one that is most like it."""
    config, kind = model.config, type(model)
    said = config.to_dict()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for changes in _changes(config, said, num_parameters):
        try:
            with torch.device("meta"), _silence():
                size = sum(p.numel() for p in kind(type(config).from_dict({**said, **changes})).parameters())
            if size > MOST_PARAMETERS:
                continue
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), _silence():
                torch.default_generator.manual_seed(0)
                copy = kind(type(config).from_dict({**said, **changes})).float().eval()
                for parameter in copy.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        except Exception:  # these sizes do not fit each other
            continue
        yield copy


@contextmanager
def _silence() -> Iterator[None]:
    """Without messages about sizes that users have not set."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _changes(config: Any, said: dict[str, Any], num_parameters: int) -> Iterator[dict[str, Any]]:
    """Values of the config of a tiny copy: a few heads, small heads, heads of their size, and features as they are."""
    if num_parameters <= OWN_SIZE:
        yield {}
    own_name, base = getattr(config, "attribute_map", {}), _fewer(config, said)

    def sizes(heads: int, size: int, **others: int) -> dict[str, Any]:
        kv = getattr(config, "num_key_value_heads", None)
        wanted = {
            **{"num_attention_heads": heads, "hidden_size": heads * size, "head_dim": size},
            **({} if kv is None else {"num_key_value_heads": min(kv, heads) if heads % min(kv, heads) == 0 else 1}),
            **others,
        }
        named = {own_name.get(name, name): value for name, value in wanted.items()}
        return base | {name: value for name, value in named.items() if isinstance(said.get(name), int)}

    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if isinstance(heads, int) and heads > 0 and isinstance(hidden, int):
        size = said.get("head_dim") or hidden // heads
        for few in (min(heads, FEW_HEADS), heads):
            yield sizes(few, HEAD, **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD))
        yield sizes(min(heads, FEW_HEADS), size)
    elif isinstance(hidden, int):
        yield base | {"hidden_size": FEATURES}
    yield base | _of_recurrence(said, hidden)
    yield base


def _fewer(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    """Few layers, words and features between layers, where there are more."""
    own_name = getattr(config, "attribute_map", {})
    wanted = {**dict.fromkeys(LAYER_KEYS, LAYERS), **dict.fromkeys(FEATURE_KEYS, FEATURES), "vocab_size": WORDS}
    named = {own_name.get(name, name): value for name, value in wanted.items()}
    found: dict[str, Any] = {k: v for k, v in named.items() if isinstance(said.get(k), int) and said[k] > v}
    for key in ("layer_types", "layers_block_type", "block_types"):
        kinds = said.get(key)
        if isinstance(kinds, list) and kinds:
            layers = max(LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))
            found |= {key: kinds[:layers], own_name.get("num_hidden_layers", "num_hidden_layers"): layers}
    tokens = (own_name.get(key, key) for key in TOKEN_KEYS)
    return found | {key: 0 for key in tokens if isinstance(said.get(key), int) and said[key] >= FIRST_WORD}


def _of_recurrence(said: dict[str, Any], hidden: Any) -> dict[str, Any]:
    """Sizes of recurrent models: all that equal the features, and heads that divide an expansion of them (Mamba 2)."""
    found: dict[str, Any] = {"hidden_size": FEATURES, **{key: FEATURES for key in said if said[key] == hidden}}
    for heads, size, expand, groups in (
        ("num_heads", "head_dim", "expand", "n_groups"),
        ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups"),
    ):
        if isinstance(said.get(heads), int) and isinstance(said.get(expand), int):
            found |= {heads: said[expand] * FEATURES // HEAD, size: HEAD, groups: 1}
    few = {"num_attention_heads": FEW_HEADS, "num_key_value_heads": 2, "head_dim": FEATURES // FEW_HEADS}
    return found | {key: value for key, value in few.items() if isinstance(said.get(key), int) and key not in found}
