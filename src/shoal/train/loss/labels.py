"""The label convention of models that compute a loss themselves, as those of transformers do.

Some shift labels (the logits of token t are compared with label t + 1, in most causal language models), and others
compare label t with logits t (masked language models, classifiers, most decoders of encoder-decoder models). Neither
the class nor the declared `loss_type` is reliable: BartForCausalLM does not shift. So the model gets its first batch
with labels, and the targets in the graph of its own loss, or the value of that loss, show the convention.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.batch import IGNORE
from shoal.errors import ShoalError
from shoal.train.loss.own_loss import OwnLoss, read_own_loss

OWN_LOSS = "Run(loss=lambda model, batch: model(**batch).loss)"
ROUTER_LOSS = (
    "model.config.output_router_logits = False; or, to balance each microbatch by itself, Run(loss=loss) with\n"
    "    def loss(model, batch):\n"
    "        count = (batch['labels'][:, 1:] != -100).sum()\n"
    "        return model(**batch).loss * count, count"
)
"""What to type for a model that adds a loss of its routers."""
ROUGHLY, ROUNDED = 1e-3, 2e-2
"""Relative differences of one loss, computed twice; those of 16 bits are rounded to 0.004."""


def shifted(labels: Tensor) -> Tensor:
    """Move each label to the token before; the last token has none.

    >>> shifted(torch.tensor([[1, 2, -100, 4]]))
    tensor([[   2, -100,    4, -100]])
    """
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE)


def takes_labels(model: nn.Module) -> bool:
    """Whether `forward` has an argument `labels`, or takes any and may pass it to a module inside that has."""
    parameters = _parameters(model)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return "labels" in parameters or (takes_any and holds_other(model))


def holds_other(model: nn.Module) -> bool:
    """Whether a module inside has a convention for labels."""
    return any("labels" in _parameters(module) for module in model.modules() if module is not model)


def needs_labels(model: nn.Module) -> bool:
    """Whether it needs labels even if its loss is not used: a decoder makes its inputs from them."""
    label = _parameters(model).get("labels")
    is_required = label is not None and label.default is inspect.Parameter.empty
    return is_required or bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    base = getattr(model, "get_base_model", None)  # of an adapter around a model, whose forward takes anything
    inner = base() if callable(base) else model
    return inspect.signature(inner.forward).parameters


def is_shifting(own: Tensor, logits: Tensor, labels: Tensor, *, adds_routers: bool = False) -> bool | None:
    """Whether a model's own loss compares logits with shifted labels; None: all labels are ignored.
    Raise if it is the cross-entropy of neither. `adds_routers`: the model adds a loss of its routers to it."""
    seen = read_own_loss(own, logits.shape[-1])
    if seen.other:
        raise _not_plain(seen, adds_routers=adds_routers)
    candidates = {False: labels} | ({True: shifted(labels)} if labels.dim() > 1 and logits.dim() > 2 else {})
    counting = {is_shifted for is_shifted, one in candidates.items() if bool((one != IGNORE).any())}
    if not counting:
        return None
    if seen.target is not None:
        for is_shifted, one in candidates.items():
            sliced = labels[..., 1:] if is_shifted else one
            if any(torch.equal(seen.target, same.flatten().to(seen.target)) for same in (one, sliced)):
                return is_shifted
    value = float(own.detach())
    if math.isnan(value) and counting == {False} and True in candidates:  # the mean over no label
        return True
    wide = (logits if logits.dtype.itemsize >= 4 else logits.float()).flatten(0, -2).detach()
    apart = {
        is_shifted: abs(float(F.cross_entropy(wide, candidates[is_shifted].flatten().long())) - value)
        for is_shifted in counting
    }
    nearest = min(apart, key=apart.__getitem__)
    rounding = 1e-9 if own.dtype == torch.float64 else 1e-4
    if not apart[nearest] <= rounding * max(abs(value), 1e-3):
        if adds_routers:
            raise _with_routers(f" of the first batch, {value:.6g}, has {apart[nearest]:.3g}")
        raise ShoalError(
            f"the model's own loss of the first batch, {value:.6g}, is not the cross-entropy of its logits and the"
            " labels, shifted or not: it has other terms, or leaves other labels out",
            fix=OWN_LOSS,
            code="T014",
        )
    return nearest


def _not_plain(seen: OwnLoss, *, adds_routers: bool) -> ShoalError:
    """The error for a loss whose graph shows something else, whatever its value for the first batch is."""
    if seen.has_terms and adds_routers:
        return _with_routers(" has a term")
    fix = OWN_LOSS
    if seen.ignored is not None:
        fix = f"-100 in place of {seen.ignored} in the labels, and ignore_index=-100 in the model; or {OWN_LOSS}"
    return ShoalError(
        "the model's own loss of the first batch is not the cross-entropy of its logits and the labels: it"
        f" {seen.other}",
        fix=fix,
        code="T014",
    )


def _with_routers(has: str) -> ShoalError:
    return ShoalError(
        f"the model's own loss{has} of its routers beside the cross-entropy: a product of means over all tokens, which"
        " is no sum over microbatches and ranks",
        fix=ROUTER_LOSS,
        code="T014",
    )


def reject_shifted_twice(inputs: Any, labels: Tensor) -> None:
    """Raise if labels are already the next tokens, for a model that shifts them."""
    for tokens in inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else [inputs]:
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.shape != labels.shape:
            continue
        counts = labels[..., :-1] != IGNORE
        is_next = bool((labels[..., :-1] == tokens[..., 1:])[counts].all()) and int(counts.sum()) > 1
        if is_next and not bool((labels == tokens)[labels != IGNORE].all()):
            raise ShoalError(
                "these labels are the tokens shifted by one already, and the model shifts labels itself: it would learn"
                " to predict the token after the next",
                fix="labels = input_ids.clone(), with -100 for what does not count",
                code="T015",
            )


def reject_copies(inputs: Any, labels: Tensor) -> None:
    """Raise if labels are the tokens themselves, for a model around one whose own loss would shift them."""
    counts = labels != IGNORE
    is_varied = labels.dim() > 1 and labels[counts].unique().numel() > 1
    for tokens in inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else [inputs]:
        is_alike = isinstance(tokens, Tensor) and not tokens.is_floating_point() and tokens.shape == labels.shape
        if is_alike and is_varied and bool((labels == tokens)[counts].all()):
            raise ShoalError(
                "the labels are the tokens at the same places, and the forward passes no labels to the model inside, or"
                " returns no loss of it; the model inside would shift them: it would learn to copy",
                fix="labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100); or"
                " def forward(self, ..., labels=None), which returns the output of the model inside",
                code="T015",
            )


def reject_changed(given: Tensor, labels: Tensor) -> None:
    """Raise if a forward has changed the labels that it was given: it does so in its own loss only."""
    if not torch.equal(given, labels):
        old, new = (int(one[given != labels][0]) for one in (given, labels))
        raise ShoalError(
            f"the model's forward changes the labels of its batch, here {old} to {new}, for its own loss alone",
            fix=f"{new} in place of {old} in the labels of the dataset; or {OWN_LOSS}",
            code="T014",
        )


def reject_other_logits(own: Tensor, recomputed: Tensor) -> None:
    """Raise if a model's loss has the batch's labels for targets, and is not that of the logits that it returns."""
    value, other = float(own.detach()), float(recomputed.detach())
    tolerance = ROUGHLY if own.dtype.itemsize >= 4 else ROUNDED
    if abs(value - other) > tolerance * max(abs(value), ROUNDED):
        raise ShoalError(
            f"the model's own loss of the first batch, {value:.6g}, must be the cross-entropy of the logits that it"
            f" returns, got {other:.6g} for these",
            fix=f"{OWN_LOSS}; or a forward that also returns the logits of its loss",
            code="T014",
        )
