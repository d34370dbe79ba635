"""The files that a model without memory starts with, until it is laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.errors import ShoalError


class StartWeights:
    """Tensors of files under the names of the model. Copies of the model, such as its stages, share them."""

    def __init__(self, where: str, read: Callable[[], Mapping[str, LazyTensor]]) -> None:
        self.where, self._read = where, read

    @cached_property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """Name → its tensor, without values. In another process the headers of the files are read again."""
        return self._read()

    def __deepcopy__(self, memo: dict[int, object]) -> StartWeights:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return StartWeights, (self.where, self._read)


def start_weights_of(model: nn.Module) -> StartWeights | None:
    """The files that a model starts with; None: it has its values. Raises if they are those of a part of it."""
    for name, module in model.named_modules():
        start: StartWeights | None = getattr(module, "start_weights", None)
        if start is not None and name:
            raise ShoalError(
                f"weights can be read for a whole model, and {name} of {type(model).__name__}, a part, is to have those"
                f" of {start.where}",
                fix=f"{type(module).__name__}.from_pretrained of transformers for a part",
                code="T102",
            )
        if start is not None:
            return start
    return None


@torch.no_grad()
def fill_from_files(model: nn.Module) -> None:
    """Fill a model that has memory from the files that it starts with, if there are any."""
    start = start_weights_of(model)
    if start is None:
        return
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        for box in start.tensors[name].boxes if name in start.tensors else ():
            part = tuple(slice(first, first + size) for first, size in zip(box.begin, box.shape, strict=True))
            tensor[part].copy_(box.read())
