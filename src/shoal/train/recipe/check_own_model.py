"""Find where a model of a script's own has too few embeddings or outputs for the data, by a forward without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import Problem
from shoal.parallel.pipeline.skeleton import Call


def check_own_model(model: nn.Module, call: Call, vocabulary: int, num_classes: int | None = None) -> Iterator[Problem]:
    """Problems of a model on the meta device that describes nothing of itself. A forward that fails says nothing.
    `num_classes` None: labels are tokens."""
    arguments, options = _on_meta(call[0]), _on_meta(call[1])
    given = [value for value in (*arguments, *options.values()) if isinstance(value, Tensor)]
    embeddings: dict[str, nn.Embedding] = {}
    hooks = [
        module.register_forward_pre_hook(_recorder(embeddings, name, given))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    output: Any = None
    with suppress(Exception), torch.no_grad():  # anything may fail in a forward without values
        output = model(*arguments, **options)
    for hook in hooks:
        hook.remove()
    for name, embedding in embeddings.items():
        if embedding.num_embeddings < vocabulary:
            what = f"{name} must have at least {vocabulary} rows for the tokens of the data"
            yield Problem(
                "T056", f"{what}, got {embedding.num_embeddings}", f"nn.Embedding({vocabulary}, ...), or other data"
            )
    needed = num_classes or vocabulary
    outputs = output.shape[-1] if isinstance(output, Tensor) and output.dim() > 1 else needed
    if outputs < needed:
        yield Problem(
            "D033",
            f"the model must have at least {needed} outputs for the labels of the data, got {outputs}",
            f"{needed} outputs in the last layer of {type(model).__name__}, or other data",
        )


def _on_meta(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _on_meta(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_on_meta(value) for value in values]
    return values.to("meta") if isinstance(values, Tensor) else values


def _recorder(found: dict[str, nn.Embedding], name: str, given: list[Tensor]) -> Any:
    """A hook that notes an embedding which reads an argument of the model as it is."""

    def note(module: nn.Embedding, arguments: tuple[Any, ...]) -> None:
        if any(argument is tensor for argument in arguments for tensor in given):
            found[name] = module

    return note
