"""A random batch for a model, so that `shoal verify` needs no data.

Its shapes are those of the model's own input (order.py), its labels fit the logits of a run without memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.data.batch import IGNORE
from shoal.errors import ShoalError
from shoal.models.huggingface import experts
from shoal.models.huggingface.order import inputs_of
from shoal.models.huggingface.pretrained.build import build
from shoal.models.huggingface.pretrained.data.batches import NAMES, is_language_model
from shoal.parallel.pipeline.known_values import KnownValues
from shoal.parallel.pipeline.skeleton import skeleton_of

IGNORED = 0.25
"""The fraction of the labels of tokens that do not count."""


def random_batch(model: Any, *, num_samples: int, num_tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch with the names of the model's forward, for a loop of your own."""
    if is_language_model(model):
        return _next_tokens(model, (num_samples, num_tokens), generator)
    return _drawn(model, type(model).__name__, num_samples, num_tokens, generator)


def recipe_batch(
    name: str, arguments: Mapping[str, Any], *, num_samples: int, num_tokens: int, generator: torch.Generator
) -> dict[str, Tensor] | None:
    """A batch as recipes have it; None: the model predicts next tokens, whose labels are no own ones."""
    with torch.device("meta"):
        model: Any = build(name, **arguments)
    if model.recipe_task == "next token":
        return None
    batch = _drawn(model, f"{type(model).__name__} of {name!r}", num_samples, num_tokens, generator)
    return {NAMES.get(key, key): one for key, one in batch.items()}


def _next_tokens(model: Any, shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens that are their own labels, of which some do not count. No sample starts with the same token twice, since a
    router of experts cannot distinguish these two."""
    words = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(words, shape, generator=generator)
    tokens[:, 1] = (tokens[:, 0] + 1 + tokens[:, 1] % (words - 1)) % words
    labels = tokens.masked_fill(torch.rand(shape, generator=generator) < IGNORED, IGNORE)
    return {"input_ids": tokens, "labels": labels}


def _drawn(model: Any, called: str, num_samples: int, num_tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    inputs = inputs_of(model)
    if inputs is None or "labels" not in inspect.signature(model.forward).parameters:
        what = f"{called} takes no labels" if inputs is not None else f"the inputs of {called} are not known"
        raise _not_drawn(what)
    batch: dict[str, Tensor] = {}
    for key, one in inputs.items():
        if one.is_floating_point():
            batch[key] = torch.randn(num_samples, *one.shape[1:], generator=generator)
        elif key != "decoder_input_ids":  # which are made from labels
            batch |= _tokens(model, key, (num_samples, num_tokens), generator)
    batch["labels"] = _labels(model, batch, num_tokens, generator)
    return batch


def _tokens(model: Any, key: str, shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Random tokens; with padding at the ends of some samples, if the model takes a mask."""
    tokens = torch.randint(model.get_input_embeddings().num_embeddings, shape, generator=generator)
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return {key: tokens}
    lengths = torch.randint(shape[1] // 2, shape[1] + 1, (shape[0], 1), generator=generator)
    mask = (torch.arange(shape[1]) < lengths).long()
    padding = getattr(model.config, "pad_token_id", None)
    if padding is not None:  # elsewhere a model may take it for padding
        tokens = tokens.masked_fill(tokens == padding, int(padding == 0)).masked_fill(mask == 0, padding)
    return {key: tokens, "attention_mask": mask}


def _labels(model: Any, batch: Mapping[str, Tensor], num_tokens: int, generator: torch.Generator) -> Tensor:
    num_samples = len(next(iter(batch.values())))
    if getattr(model.config, "is_encoder_decoder", False):
        longest = getattr(model.config, "max_target_positions", num_tokens)
        shape: tuple[int, ...] = (num_samples, min(num_tokens, longest))
        num_classes = model.get_output_embeddings().out_features
    else:
        logits = _logits_of(model, batch)
        shape, num_classes = (num_samples, *logits.shape[1:-1]), logits.shape[-1]
    if num_classes < 2 or len(shape) > 2 or (len(shape) == 2 and shape[1] != num_tokens):
        kind = type(model).__name__
        raise _not_drawn(f"{kind} returns logits of shape {(*shape, num_classes)}, which are no classes")
    labels = torch.randint(num_classes, shape, generator=generator)
    if len(shape) == 2:
        labels[torch.rand(shape, generator=generator) < IGNORED] = IGNORE
    return labels


def _logits_of(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    skeleton, known = skeleton_of(model), KnownValues()
    experts.install(skeleton)
    given = tree_map_only(Tensor, known.input_of(torch.float32), dict(batch))
    try:
        with torch.no_grad(), torch.device("meta"), known:
            found = getattr(skeleton(**given), "logits", None)
    except Exception as error:  # it needs other inputs, or real values
        reason = str(error).partition("\n")[0][:200]
        raise _not_drawn(f"{type(model).__name__} cannot be run on a random batch: {reason}") from error
    if not isinstance(found, Tensor) or found.dim() < 2:
        raise _not_drawn(f"{type(model).__name__} returns no logits")
    return found


def _not_drawn(what: str) -> ShoalError:
    return ShoalError(
        f"shoal verify draws random inputs and labels, and {what}",
        fix="shoal.verify(model, batch, plan, loss=...) in a script, with a batch of your own (docs/verify.md)",
        code="M082",
    )
