"""The reference run: one process in plain torch, which every plan has to equal.

Nothing of shoal's step is used here. The model gets the full batch at once. Only a model with batch norm, whose result
depends on the samples of a microbatch, gets the microbatches of the plan's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.checkpoint.formats.start_weights import fill_from_files
from shoal.data.batch import IGNORE, length, rows, to_device
from shoal.numerics.init import has_init_rule, init_missing, initialise, materialise
from shoal.numerics.precision import precision_of, silence_matmul_warning
from shoal.parallel.expert.router import auxiliary_loss, biases, update_biases
from shoal.train.build_model import adapter_of
from shoal.train.loss.labels import OWN_LOSS, is_shifting, shifted, takes_labels
from shoal.train.loss.objective import reject_shapes
from shoal.verification.case import Case
from shoal.verification.compare import Observation
from shoal.verification.exact_casts import keeping_float64

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def observe_reference(case: Case) -> tuple[list[Observation], dict[str, Tensor]]:
    """Train on one device; returns an observation of each step, and the initial weights."""
    precision = precision_of(case.plan.precision)
    device = torch.device(case.device)
    model = fresh_model(case).to(device, precision.weight_dtype)
    fill_from_files(model)
    initial = _copies(model)
    optimizer = optimizer_for(case, list(model.parameters()))
    lower, adapter = precision.is_lower, adapter_of(model)
    is_foreign = adapter is not None
    if adapter is not None:
        adapter.written_out(model)
    silence_matmul_warning(device)
    observations = []
    for batch in case.batches:
        on_device = to_device(batch, device, precision.wide_dtype)
        pieces = list(_pieces(on_device, case)) if has_batch_norm(model) else [on_device]
        total = sum(_weight(piece) for piece in pieces)
        loss = 0.0
        for piece in pieces:
            exact = keeping_float64(case.plan.precision, is_foreign=is_foreign)
            with torch.autocast(device.type, dtype=precision.compute_dtype, enabled=lower), exact:
                mean = _mean(_loss(model, piece, case))
            part = mean * (_weight(piece) / total)
            (part + auxiliary_loss(model).to(part)).backward()  # of experts, if there are any
            loss += part.item()
        gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        largest = float("inf") if case.clip is None else case.clip
        norm = torch.nn.utils.clip_grad_norm_(trained, largest)
        optimizer.step()
        update_biases(model)
        optimizer.zero_grad()
        observations.append(Observation(loss, float(norm), gradients, _copies(model)))
    return observations, initial


def fresh_model(case: Case) -> nn.Module:
    """The full model with its initial values, on the CPU, without dropout."""
    torch.manual_seed(case.seed)  # for a model that draws its own values when it is built
    model = case.build()
    if (adapter := adapter_of(model)) is not None:
        adapter.register_head_last(model)  # a tied weight has the same name as in a layout
    if any(parameter.is_meta for parameter in model.parameters()):
        materialise(model, "cpu")
    if has_init_rule(model):
        initialise(model, case.seed)
    init_missing(model, case.seed)  # as `Run.prepare` does for torch's own layers on the meta device
    turn_off_dropout(model)
    return model


def turn_off_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities to zero: no two layouts draw the same masks."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        else:  # a number, as of nn.MultiheadAttention, nn.RNNBase and of modules that call a function
            for name, value in list(vars(module).items()):
                if isinstance(value, float) and name.endswith(("dropout", "dropout_p", "dropout_prob", "layerdrop")):
                    setattr(module, name, 0.0)


def optimizer_for(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in float64, SGD otherwise. AdamW divides by the size of a gradient, so where that is nearly zero it would
    amplify the noise of lower precisions to the size of a step."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if case.plan.precision == "fp64":
        return torch.optim.AdamW(trained, lr=case.lr, foreach=False)
    return torch.optim.SGD(trained, lr=case.lr, momentum=0.9, foreach=False)


def _mean(loss: Any) -> Tensor:
    """The mean of a loss that is a mean, or (sum, count)."""
    mean: Tensor = loss[0] / loss[1] if isinstance(loss, tuple | list) else loss
    return mean


def _loss(model: nn.Module, batch: Any, case: Case) -> Any:
    if case.loss is not None:
        return case.loss(model, batch)
    labels = batch["labels"] if isinstance(batch, Mapping) else batch[1]
    given = {"labels": labels} if takes_labels(model) else {}
    if isinstance(batch, Mapping):
        output = model(**{name: value for name, value in batch.items() if name != "labels"}, **given)
    else:
        output = model(batch[0], **given)
    logits, own = getattr(output, "logits", output), getattr(output, "loss", None)
    reject_shapes(logits, labels, fix="" if own is None else OWN_LOSS)
    adds_routers = getattr(output, "aux_loss", None) is not None
    if isinstance(own, Tensor) and is_shifting(own, logits, labels, adds_routers=adds_routers):
        labels = shifted(labels)
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORE)


def _weight(batch: Any) -> float:
    """The count in the mean of a batch: labels that are not ignored, else samples."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch[-1]
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return float((labels != IGNORE).sum())
    return float(length(batch))


def _pieces(batch: Any, case: Case) -> Iterator[Any]:
    """The microbatches of the plan's ranks, rank by rank."""
    size = case.plan.microbatch_size(length(batch))
    for start in range(0, length(batch), size):
        yield rows(batch, start, start + size)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the output for a sample depends on the other samples of its microbatch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _gradient(parameter: nn.Parameter) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach().to("cpu", copy=True)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, and of the routers' biases, which a step also changes."""
    tensors = {**dict(model.named_parameters()), **biases(model)}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
