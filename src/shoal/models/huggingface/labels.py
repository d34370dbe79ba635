"""Whether a model of transformers shifts labels, found without its values.

Where ranks divide tokens or stages, no rank sees the loss that the model computes itself. So a copy without memory is
called once with labels. If it passes its logits and these labels, unchanged, to its `loss_function`, that function is
tried with numbers. If it passes views of both to torch's cross-entropy, it shifts nothing. Else it is not known; nor is
it if the loss that the model returns is not what that function returned, since it then has other terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.blueprint.description import Description
from shoal.models.huggingface.adapt import adapt
from shoal.models.huggingface.label_shift import shift_of
from shoal.models.huggingface.order import inputs_of
from shoal.parallel.pipeline.known_values import KnownValues
from shoal.parallel.pipeline.skeleton import skeleton_of

PLAIN = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
"""The options of a cross-entropy that is the mean over all labels that count."""


class _Losses(TorchFunctionMode):
    """Record logits and labels of cross-entropies, and what they return. Those with options are no plain mean."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if func is F.cross_entropy and len(args) > 1:
            is_plain = len(args) == 2 and all(PLAIN.get(name) == given for name, given in (kwargs or {}).items())
            self.seen.append((*args[:2], returned if is_plain else None))
        return returned


def shifts_labels(model: Any, description: Description) -> bool | None:
    """Whether logits are compared with the label of the next token; None: not known. What blocks compute does not
    matter: if they need values, as some mixtures, they are left out."""
    inputs = inputs_of(model)
    if inputs is None:
        return None
    tokens = inputs.get("decoder_input_ids", next(iter(inputs.values())))
    shapes = dict.fromkeys((tokens.shape if tokens.dim() == 2 else tokens.shape[:1], tokens.shape[:1]))
    for shape in shapes:  # a label for each token; for each sample
        for with_blocks in (True, False):
            with suppress(Exception):  # a block needs real values, or the model other inputs or labels
                return _shifts_labels(model, description, inputs, shape, with_blocks=with_blocks)
    return None


class _Through(nn.Module):
    """In place of a block: it returns the activations that it gets."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def _shifts_labels(
    model: Any, description: Description, inputs: Mapping[str, Tensor], shape: torch.Size, *, with_blocks: bool
) -> bool | None:
    skeleton: Any = skeleton_of(model).float()  # a cast of logits to float32 is then none
    adapt(skeleton, description, None)
    for name in () if with_blocks else description.blocks:
        skeleton.set_submodule(name, _Through())
    labels = torch.zeros(shape, dtype=torch.int64, device="meta")
    passed: list[tuple[Any, Any]] = []
    noted = torch.zeros((), device="meta")

    def note(logits: Any = None, labels: Any = None, *_: Any, **__: Any) -> Tensor:
        passed.append((logits, labels))
        return noted

    known = KnownValues()
    inputs = {name: known.input_of(torch.float32)(value) for name, value in inputs.items()}
    with torch.device("meta"), known, _Losses() as losses:
        output = skeleton(**inputs, labels=labels)
        is_plain = len(losses.seen) == 1 and losses.seen[0][2] is output.loss
        if is_plain and all(map(_is_all_of, losses.seen[0][:2], (output.logits, labels))):
            return False
        skeleton.loss_function = note
        losses.seen.clear()
        output = skeleton(**inputs, labels=labels)
    is_passed = len(passed) == 1 and not losses.seen and passed[0][0] is output.logits and passed[0][1] is labels
    return shift_of(model.loss_function) if is_passed and output.loss is noted and not noted._version else None


def _is_all_of(view: Tensor, whole: Tensor) -> bool:
    base = whole if whole._base is None else whole._base
    return (view is whole or view._base is base) and view.numel() == whole.numel() == base.numel()
