"""Find where the classes, the padding or the images of a recipe's data are not those of a model of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.data.dataset import Dataset, Part
from shoal.errors import Problem
from shoal.models.huggingface.adapt import DOCUMENTS
from shoal.models.huggingface.modules import attentions
from shoal.models.huggingface.pretrained.data.token_trials import mixes_documents, passes_positions

CLASSES = "single_label_classification"
"""The `problem_type` of a config whose loss is cross-entropy."""
FIX_OF_PACKED = (
    "--data.pack false; of texts --data.mask_documents false, with which documents of a sample see each other"
)
FEW = 6
"""Names of classes that a message lists."""


def check_data(model: Any, data: Dataset) -> Iterator[Problem]:
    """Problems of data of the model's own task."""
    if data.task == "next token":
        yield from check_language_model(model, has_documents=DOCUMENTS in data.batch(np.arange(1)))
        return
    kind, problem = type(model).__name__, getattr(model.config, "problem_type", None)
    if data.num_classes is not None and problem not in (None, CLASSES):
        what = f"{kind} is set to {problem!s:.40}, and the labels of the data are one class of each sample"
        yield Problem("M083", what, f"--model.problem_type {CLASSES}")
    elif data.num_classes is not None:
        yield from _check_classes(model, data, data.num_classes)
    if data.vocabulary is not None and data.tokens_per_sample is not None:
        words = model.get_input_embeddings().num_embeddings
        if data.vocabulary > words:
            what = f"the model must have at least {data.vocabulary} embeddings for the tokens of the data, got {words}"
            yield Problem("T056", what, "--data.tokenizer PATH/tokenizer.json of this model")
    sees_all = not all(one.is_causal for one in attentions(model).values())
    if data.task == "text class" and not sees_all and model.config.pad_token_id is None:
        what = f"{kind} finds the last token of a text by its padding token, and its config has none"
        yield Problem("M084", what, "--model.pad_token_id NUMBER, a token that no text ends with")
    size = getattr(model.config, "image_size", None)
    if data.task == "image class" and isinstance(size, int):
        given = int(data.batch(np.arange(1))["images"].shape[-1])
        if given != size:
            what = f"images must have the model's size of {size}, got {given}"
            yield Problem("M085", what, f"--data.image_size {size}")


def check_language_model(model: Any, *, has_documents: bool) -> Iterator[Problem]:
    """Documents that a model does not keep apart, which its class does not say; and a loss that no logits show."""
    kind = type(model).__name__
    takes = inspect.signature(model.forward).parameters
    if DOCUMENTS in takes and has_documents and _mixes(model):
        what = f"packed samples cannot be kept apart in this model: tokens of {kind} see other documents"
        yield Problem("L016", what, FIX_OF_PACKED)
    if getattr(model.config, "output_router_logits", False):
        what = f"output_router_logits must be false, since a recipe has no loss of the routers of {kind}, got true"
        yield Problem("M089", what, "--model.output_router_logits false")


def _mixes(model: Any) -> bool:
    tried = mixes_documents(model)
    return not passes_positions(model) if tried is None else tried


def _check_classes(model: Any, data: Dataset, num_classes: int) -> Iterator[Problem]:
    """Fewer outputs than classes, or other names: what the weights call class 0 would be trained as another."""
    config = model.config
    outputs, names = int(config.num_labels), _classes(data)
    if outputs < num_classes:
        kind = type(model).__name__
        yield Problem(
            "D033",
            f"the model must have at least {num_classes} outputs for the labels of the data, got {outputs}",
            f"transformers.{kind}.from_pretrained(FOLDER, num_labels={num_classes}, ignore_mismatched_sizes=True)"
            ".save_pretrained(NEW), and the same with AutoTokenizer or AutoImageProcessor",
        )
        return
    own = {int(number): str(name) for number, name in (config.id2label or {}).items()}
    is_named = any(name != f"LABEL_{number}" for number, name in own.items())
    if is_named and names and [own.get(number) for number in range(len(names))] != list(names):
        theirs = [own.get(number, "?") for number in range(min(outputs, FEW))]
        yield Problem(
            "M086",
            f"the classes of the data, {', '.join(names[:FEW])}, must be the model's, in its order:"
            f" {', '.join(theirs)}",
            "the model's numbers as labels; or a model for these classes: from_pretrained(FOLDER, id2label=...,"
            " ignore_mismatched_sizes=True).save_pretrained(NEW)",
        )


def _classes(data: Dataset) -> tuple[str, ...]:
    whole = data.whole if isinstance(data, Part) else data
    first = next(iter(getattr(whole, "members", ())), whole)
    return tuple(getattr(first.whole if isinstance(first, Part) else first, "classes", ()))
