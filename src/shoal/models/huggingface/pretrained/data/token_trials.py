"""What tokens of a model see, found with numbers: a tiny copy is called twice with some other tokens.

A class says neither whether it sees later tokens nor whether it keeps packed documents apart. The copy has the config
with small sizes, in float32, and random weights of which every one matters.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
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
LARGE = 100.0
"""More than a class begins with: a weight that it does not draw."""
LAYER_KEYS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
FEATURE_KEYS = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff")
MASK = re.compile(r"create_\w*causal_mask")
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
    packed = {"position_ids": positions, "use_cache": False}
    for copy in _copies(model):
        pair = _logits(copy, {"input_ids": tokens, **packed}, {"input_ids": others, **packed})
        alone = _logits(copy, {"input_ids": tokens[:, FIRST:]}, {"input_ids": tokens[:, FIRST:]})
        if pair is not None and alone is not None and _differ(pair, slice(None, FIRST)):
            own = (pair[0][:, FIRST:], alone[0])
            return _differ(pair, slice(FIRST, None)) or _differ(own, slice(None))
    return None


def passes_positions(model: Any) -> bool:
    """Whether all masks in the code of a model's class are made with positions, as far as its text shows."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(sys.modules[type(model).__module__]))))
    calls = [x for x in nodes if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and MASK.fullmatch(x.func.id)]
    shared = {
        target.id
        for x in nodes
        if isinstance(x, ast.Assign) and isinstance(x.value, ast.Dict) and "'position_ids'" in ast.unparse(x.value)
        for target in x.targets
        if isinstance(target, ast.Name)
    }
    given = [{one.arg or ast.unparse(one.value) for one in call.keywords} for call in calls]
    return bool(given) and all(names & {"position_ids", *shared} for names in given)


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
            found = [copy(**batch).logits for batch in (one, other)]
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
                copy.config.use_cache = False  # a cache has no documents
                for parameter in copy.parameters():
                    is_drawn = bool(parameter.isfinite().all() and parameter.abs().max() < LARGE)  # not left as it was
                    parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter if is_drawn else 0.0))
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
    depth = getattr(config, "num_hidden_layers", None)
    of_layers = {key: one for key, one in said.items() if isinstance(one, list) and one and len(one) == depth}
    if of_layers:  # all kinds of layers
        firsts = (one.index(kind) + 1 for one in of_layers.values() for kind in one if isinstance(kind, str | int))
        layers = max((LAYERS, *firsts))
        found |= {key: one[:layers] for key, one in of_layers.items()}
        found[own_name.get("num_hidden_layers", "num_hidden_layers")] = layers
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
