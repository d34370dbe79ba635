"""Which parameters of a model an optimizer updates how."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: weight decay for matrices, none for norms, biases and other vectors. Empty ones are left
    out."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(
    parameters: Iterable[nn.Parameter], matrices: Collection[nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Return the groups of `shoal.Muon`: the matrices, and what AdamW updates, with weight decay and without."""
    own, every = set(matrices), list(parameters)
    chosen = decay_groups([p for p in every if p in own], weight_decay)
    others = decay_groups([p for p in every if p not in own], weight_decay)
    return [{**group, "algorithm": "muon"} for group in chosen] + [{**group, "algorithm": "adamw"} for group in others]


def matrices_in_blocks(models: Iterable[nn.Module], blocks: Sequence[str]) -> list[str]:
    """Return the names of the weights that Muon updates: matrices of the repeated blocks, without embeddings.

    `models`: the model, or the stages of a pipeline, whose modules have the same names.
    """
    inside = tuple(f"{block}." for block in blocks)
    return [
        f"{name}.{key}"
        for model in models
        for name, module in model.named_modules()
        if f"{name}.".startswith(inside) and not isinstance(module, nn.Embedding)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 2
    ]


def moments_of(name: str, model: nn.Module, blocks: Sequence[str]) -> float | None:
    """Return how many numbers an optimizer keeps for a trained parameter, on average over a model; None: as many for
    every one."""
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    total = sum(parameter.numel() for parameter in trained.values())
    if not total or name not in ("muon", "adafactor"):
        return None
    if name == "muon":
        matrices = trained.keys() & set(matrices_in_blocks([model], blocks))
        return 2 - sum(trained[key].numel() for key in matrices) / total
    return sum(map(_of_adafactor, trained.values())) / total


def _of_adafactor(parameter: nn.Parameter) -> float:
    """The numbers that torch's Adafactor keeps: one for each row and each column of a matrix, one for each element of a
    vector."""
    if parameter.ndim < 2:
        return parameter.numel()
    rows, columns = parameter.shape[-2:]
    return parameter.numel() / columns + parameter.numel() / rows
