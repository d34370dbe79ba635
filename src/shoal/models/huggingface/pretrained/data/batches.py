"""Let a model of transformers take the batches of recipes, which have other names, and padding that is not the model's.

a recipe gives              the model gets
tokens                      input_ids; where attention_mask is 0, the padding token of its config, which some models
                            look for to find the last token or to count positions
documents                   position_ids that start over in each document
images, mean and deviation  pixel_values, as its preprocessor_config.json says (pretrained/data/pixels.py)
0.5
labels of next tokens       none: they are shifted already, and logits are compared outside of the model
other labels                labels: its own loss shows its convention, as in a loop of your own
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

from torch import Tensor

from shoal.data.task import Task
from shoal.models.huggingface.adapt import DOCUMENTS, with_positions
from shoal.models.huggingface.modules import attentions
from shoal.models.huggingface.pretrained.data.token_trials import looks_ahead
from shoal.models.huggingface.pretrained.deferred import VALUES_LATER

ENDINGS: dict[str, Task] = {"ForSequenceClassification": "text class", "ForImageClassification": "image class"}
NAMES = {"input_ids": "tokens", "pixel_values": "images"}
"""Argument of a forward → entry of a recipe's batch."""
INPUTS = {"text class": "input_ids", "image class": "pixel_values"}


def task_of(model: Any) -> Task | None:
    """The task of a model by its class; None: another one, for which recipes have no data."""
    kind = type(model).__name__
    if is_language_model(model):
        return "next token" if _is_causal(model) else None
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
    if kind.endswith("ForConditionalGeneration") and is_pair and model.main_input_name == "input_ids":
        return "target text"
    task = next((task for ending, task in ENDINGS.items() if kind.endswith(ending)), None)
    return task if task is not None and model.main_input_name == INPUTS[task] else None


def is_language_model(model: Any) -> bool:
    """Whether a class predicts tokens from those before."""
    kind, known = type(model).__name__, sys.modules["transformers"].models.auto.modeling_auto
    return kind in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or kind.endswith(("ForCausalLM", "LMHeadModel"))


def _is_causal(model: Any) -> bool:
    """Whether tokens do not see later ones, which a model would learn to copy. Attention that says nothing is tried."""
    known = attentions(model).values()
    return all(one.is_causal for one in known) if known else looks_ahead(model) is False


@cache
def for_recipes(kind: Any, task: Task | None) -> Any:
    """A class of transformers that takes the batches of recipes. Its names and parameters are those of the class."""

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        return kind.forward(self, *arguments, **with_positions(_renamed(self, options)))

    forward.__signature__ = _signature(kind, task)  # type: ignore[attr-defined]
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "forward": forward,
        "recipe_task": task,
        "pixel_rule": None,
        **VALUES_LATER,
    }
    return type(kind.__name__, (kind,), members)


def _renamed(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Entries of a batch under the names of transformers."""
    found = dict(options)
    if "images" in found:
        images = found.pop("images")
        found["pixel_values"] = images if model.pixel_rule is None else model.pixel_rule.of(images)
    if "tokens" in found:
        tokens, mask = found.pop("tokens"), found.get("attention_mask")
        padding = getattr(model.config, "pad_token_id", None)
        is_padded = isinstance(mask, Tensor) and mask.shape == tokens.shape and padding is not None
        found["input_ids"] = tokens.masked_fill(mask == 0, padding) if is_padded else tokens
    return found


def _signature(kind: Any, task: Task | None) -> inspect.Signature:
    """That of the class, with the names of recipes, and without names that it only passes on."""
    given = inspect.signature(kind.forward).parameters.values()
    named = [p for p in given if p.kind is not p.VAR_KEYWORD and (p.name != "labels" or task != "next token")]
    takes = [p.replace(name=NAMES.get(p.name, p.name)) for p in named]
    makes_masks = hasattr(sys.modules[kind.__module__], "create_causal_mask")  # by documents, from positions
    packs = task == "next token" and makes_masks and any(p.name == "position_ids" for p in named)
    documents = [inspect.Parameter(DOCUMENTS, inspect.Parameter.KEYWORD_ONLY, default=None)] if packs else []
    return inspect.Signature([*takes, *documents])
