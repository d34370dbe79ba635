"""A class of transformers whose values come when it is laid out, part by part: from files, or from the seed.

is_loaded_later   whether files replace all weights, so that none is drawn
model_section     the section of a recipe that builds the same, for an export of a checkpoint
start_weights     the files that `Run.prepare` reads; None: a recipe names them, or there are none
init_parameter    weights from the seed and the name, by transformers' own rules, whatever rank draws them
init_buffer       buffers such as rotary frequencies, which no file has, as the class computes them
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def _init_parameter(self: Any, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if self.is_loaded_later:
        parameter.fill_(torch.nan)
    else:
        self.twin.draw(name, parameter, generator)


def _init_buffer(self: Any, name: str) -> Tensor:
    buffer: Tensor = self.twin.model.get_buffer(name)
    return torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer  # one that a file has to fill


VALUES_LATER = {
    "init_parameter": _init_parameter,
    "init_buffer": _init_buffer,
    "is_loaded_later": False,
    "model_section": None,
    "start_weights": None,
    "first_names": property(lambda self: self.twin.firsts),
}
"""Members of such a class."""


@cache
def with_values_later(kind: Any) -> Any:
    """The class with these members, and its own names, parameters and forward."""

    def reduce(self: Any) -> tuple[Any, ...]:  # pickle finds classes by their names, and finds the first one
        return _empty, (kind,), self.__dict__

    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce, **VALUES_LATER}
    return type(kind.__name__, (kind,), members)


def _empty(kind: Any) -> Any:
    made = with_values_later(kind)
    return made.__new__(made)
