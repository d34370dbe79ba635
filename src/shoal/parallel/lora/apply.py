"""Give linear layers of a model LoRA, in place, and freeze everything else."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from shoal.blueprint.placement import is_inside
from shoal.errors import Problem, ShoalError, nearest, raise_if
from shoal.numerics.init import init_adapters
from shoal.parallel.lora.layers import adapt, adapted_layers, without_lora
from shoal.parallel.lora.quantize import quantized_layers
from shoal.parallel.lora.uncalled import also_read, uncalled
from shoal.parallel.lora.whole_modules import ATTRIBUTE, check_whole, choose
from shoal.parallel.tensor_parts.linear_dims import TRANSPOSED, linear_dims

ALL_LINEAR = "all-linear"
"""Every linear layer except the head, and those that share their weight with another module."""

Model = TypeVar("Model", bound=nn.Module)


def lora(
    model: Model,
    *,
    rank: int = 16,
    alpha: float | None = None,
    targets: str | Sequence[str] = ALL_LINEAR,
    dropout: float = 0.0,
    seed: int | None = None,
    modules_to_save: Sequence[str] | None = None,
) -> Model:
    """Add LoRA to linear layers of a model, in place, and freeze its other parameters. Returns the model.

    Call it before `run.prepare`, and before the optimizer is built over `model.parameters()`.

    rank     columns of the update, as PEFT's `r`
    alpha    the update is scaled by alpha / rank; None: twice the rank
    targets  last parts of names (`["q_proj", "v_proj"]`), a regular expression that matches whole names, or
             "all-linear": every linear layer except the head, and those that share their weight
    dropout  of the input of the update
    seed     decides the initial values; the update is zero at first. None: the seed of the run, if the model has no
             memory yet, as that of shoal.from_pretrained; else 0
    modules_to_save    last parts of the names of modules that train whole and are saved with the adapters; None: the
                       head of a classifier of transformers, which begins with random weights

    >>> from torch import nn
    >>> model = lora(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), rank=2, targets=["0"])
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['0.lora_A', '0.lora_B']
    """
    alpha = 2.0 * rank if alpha is None else alpha
    problems = (*_problems(model, rank, alpha, dropout), *check_whole(model, modules_to_save))
    raise_if(problems, title="shoal.lora")
    whole = choose(model, modules_to_save)
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if _is_linear(layer)}
    layers = {name: layer for name, layer in layers.items() if not is_inside(name, whole)}
    chosen = _chosen(model, layers, targets)
    model.requires_grad_(False)
    for name in whole:
        model.get_submodule(name).requires_grad_(True)
    setattr(model, ATTRIBUTE, whole)
    for layer in chosen.values():
        adapt(layer, rank, alpha / rank, dropout, seed)
    init_adapters(model, 0)
    return model


def _problems(model: nn.Module, rank: int, alpha: float, dropout: float) -> Iterator[Problem]:
    if not isinstance(rank, int) or rank < 1:
        yield Problem("L001", f"rank must be an integer of at least 1, got {rank}", "rank=16")
    if not alpha > 0:
        yield Problem("L001", f"alpha must be greater than 0, got {alpha}", "alpha=32")
    if not 0 <= dropout < 1:
        yield Problem("L001", f"dropout must be at least 0 and less than 1, got {dropout}", "dropout=0.05")
    if adapted_layers(model):
        yield Problem(
            "L002", f"{type(model).__name__} has LoRA already", "call shoal.lora once, with all targets in one list"
        )


def _is_linear(layer: nn.Module) -> bool:
    """Whether it is an `nn.Linear`, of whatever class, or computes x W + b as Conv1D of GPT-2."""
    return isinstance(layer, nn.Linear) or linear_dims(layer) is TRANSPOSED


def _chosen(model: nn.Module, layers: dict[str, Any], targets: str | Sequence[str]) -> dict[str, Any]:
    """The layers that the targets name."""
    head = _head_of(model)
    shared = _shared_weights(model)
    if targets == ALL_LINEAR:
        is_head = {name: name == head or layer is head for name, layer in layers.items()}
        found = {n: layer for n, layer in layers.items() if not is_head[n] and layer.weight not in shared}
    elif isinstance(targets, str):
        found = {name: layer for name, layer in layers.items() if re.fullmatch(targets, name)}
    else:
        unknown = [target for target in targets if not any(_ends_with(name, target) for name in layers)]
        if unknown:
            raise _without_target(model, unknown, layers, targets)
        found = {name: layer for name, layer in layers.items() if any(_ends_with(name, one) for one in targets)}
    if not found:
        raise _without_target(model, [str(targets)], layers)
    for name, layer in found.items():
        if name == head or layer is head:
            raise ShoalError(
                f"{name} is the head of {type(model).__name__}, which computes the loss and gets no LoRA",
                fix=f"targets without {name.rpartition('.')[2]!r}",
                code="L004",
            )
        if layer.weight in shared:
            raise ShoalError(
                f"LoRA needs layers with a weight of their own, and that of {name} is also a weight of another module:"
                " merged, both would have the sum of all updates",
                fix=f"targets without {_last(name)!r}, or a model whose weights are not tied",
                code="L019",
            )
    _reject_other_layers(model, found)
    return found


def _shared_weights(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that more than one module has."""
    uses = Counter(one for module in model.modules() for one in module.parameters(recurse=False))
    return {parameter for parameter, count in uses.items() if count > 1}


def _reject_other_layers(model: nn.Module, found: Mapping[str, Any]) -> None:
    """Reject layers whose product is not computed by `nn.Linear` itself, so that an update would be lost."""
    partly = []
    for name, layer in found.items():
        why, parent = None, model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, nn.Linear) and type(layer) is not nn.Linear:
            why = f"is a {type(layer).__name__}"
        elif type(layer.weight) is not nn.Parameter or not layer.weight.is_floating_point():
            why = f"has a weight of {layer.weight.dtype}, as a {type(layer.weight.data).__name__}"
        elif uncalled(parent, _last(name)):
            why = f"is in a {type(parent).__name__}, which reads its weight without calling it"
        elif also_read(parent, _last(name)):
            partly.append(name)
        if why is not None:
            raise ShoalError(
                f"LoRA needs plain nn.Linear layers in floating point, and {name} {why}",
                fix=f"a base that is not quantized, or targets without {_last(name)!r}",
                code="L007",
            )
    if partly:
        kind = type(model.get_submodule(partly[0].rpartition(".")[0])).__name__
        warnings.warn(
            f"{kind} calls {_last(partly[0])} on one path and reads its weight on another, as for a fused kernel: there"
            f" the LoRA of {len(partly)} layers such as {partly[0]} has no effect and gets no gradient. Leave"
            f" {', '.join(sorted({_last(name) for name in partly}))} out of the targets unless you know the path",
            stacklevel=4,
        )


def _head_of(model: Any) -> Any:
    """The name of the head, or the head itself; None: the model does not say which layer it is."""
    if callable(describe := getattr(model, "describe", None)):
        return getattr(describe(), "head", None)
    getter = getattr(model, "get_output_embeddings", None)  # of transformers
    return getter() if callable(getter) else None


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _without_target(
    model: nn.Module, unknown: Sequence[str], layers: dict[str, Any], targets: Sequence[str] = ()
) -> ShoalError:
    """The error of targets that name no layer. The fix keeps the others of the list."""
    head = _head_of(model)
    known = list(dict.fromkeys(_last(name) for name, one in layers.items() if name != head and one is not head))
    some = ", ".join(known[:8]) or "none"
    what = f"LoRA targets must name linear layers of the model ({some}), got {unknown[0]!r}"
    fix = "train the whole model, without shoal.lora (without --model.lora)"
    meant = {one: nearest(one, known) for one in unknown}
    kept = list(dict.fromkeys(name for one in targets or unknown if (name := meant.get(one, one)))) or known[:1]
    if known:
        fix = f"targets={json.dumps(kept)} (--model.lora.targets '[{', '.join(kept)}]')"
        fix += ', or targets="all-linear"' * (unknown[0] != ALL_LINEAR)
    return ShoalError(what, fix=fix, code="L003")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


@torch.no_grad()
def merge_lora(model: Model) -> Model:
    """Add the updates of LoRA to the weights below them, in place, and make the layers plain ones again.

    Weights that `shoal.quantize_base` has packed are unpacked: the result has the rounded ones, and the updates.
    """
    for packed in quantized_layers(model).values():
        packed.unpack()
    for layer in adapted_layers(model).values():
        update = layer.lora_B.double() @ layer.lora_A.double() * layer.lora_scale
        update = update.T if layer.weight_dims is TRANSPOSED else update
        layer.weight.copy_(layer.weight.double() + update.to(layer.weight.device))
    without_lora(model)
    return model
