"""Under `zero`, find parameters that one rank used in a step and another did not.

FSDP2 sends the gradients that a rank has as one message per unit, without the parameters that its backward did not
reach, and messages are added up place by place:

    rank 0 used a, not b      [grad of a]      sum: the gradient of a on rank 0 + that of b on rank 1, taken for
    rank 1 used b, not a      [grad of b]      either: wrong, without a word; or an abort, where their sizes differ

Here a parameter without a gradient, beside one with a gradient in its unit, is sent as zeros. A rank keeps a digest of
what it has filled, and the message of the global norm holds the digests of all ranks against each other. What no rank
used has no gradient in the end, as on one device.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.numerics.local_tensor import is_fsdp

MOST_DIGEST = 2**20
"""Sums of digests over all ranks are exact in float64."""
FEW = 3
IN_NO_UNIT = -1


class ParameterUse:
    """Which parameters of this rank had no gradient of their own in the reductions of a step."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.digest = 0
        """Of this step; 0: every parameter had a gradient in every reduction."""
        self._num_reductions: Counter[int] = Counter()
        self._whole: set[int] = set()
        """Units whose parameters have all had a gradient."""
        self._used: set[int] = set()
        self._filled: dict[int, tuple[int, nn.Parameter]] = {}
        """Parameters that were filled with zeros, by their identity, and their units."""
        for number, group in enumerate(parameter_groups(models)):
            self._observe(number, group)

    def _observe(self, number: int, group: Any) -> None:
        """Look at a unit each time before its gradients are reduced."""
        reduce = group.post_backward

        def look_and_reduce(*unused: Any) -> Any:
            if group.reduce_grads:
                self._look(number, group)
            return reduce(*unused)

        group.post_backward = look_and_reduce

    def _look(self, number: int, group: Any) -> None:
        trained = (one for one in group.fsdp_params if one.sharded_param.requires_grad)
        params = [one for one in trained if hasattr(one, "_unsharded_param")]
        has = [one.unsharded_accumulated_grad is not None or one._unsharded_param.grad is not None for one in params]
        self._num_reductions[number] += 1
        if all(has):
            self._whole.add(number)
            return
        self._note((number, self._num_reductions[number], has))
        for one, is_used in zip(params, has, strict=True):
            if is_used:
                self._used.add(id(one.sharded_param))
            elif any(has):
                one.unsharded_param.grad = torch.zeros_like(one.unsharded_param)
                self._filled[id(one.sharded_param)] = number, one.sharded_param

    def fill(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look at parameters that are in no unit, once a step: those without a gradient get zeros."""
        has = [parameter.grad is not None for parameter in parameters]
        if not all(has):
            self._note((IN_NO_UNIT, has))
        for parameter, is_used in zip(parameters, has, strict=True):
            if not is_used:
                parameter.grad = torch.zeros_like(parameter)
                self._filled[id(parameter)] = IN_NO_UNIT, parameter

    def _note(self, place: tuple[Any, ...]) -> None:
        self.digest = (self.digest + zlib.crc32(repr(place).encode())) % MOST_DIGEST or 1

    def unused(self) -> list[nn.Parameter]:
        """Parameters that had no gradient of their own in this step, only zeros."""
        return [
            parameter
            for key, (number, parameter) in self._filled.items()
            if key not in self._used and number not in self._whole
        ]

    def drop_zeros(self) -> None:
        """Leave parameters that no rank has used without a gradient."""
        for parameter in self.unused():
            parameter.grad = None

    def begin_step(self) -> None:
        """Forget the step before."""
        self.digest = 0
        for one in (self._num_reductions, self._whole, self._used, self._filled):
            one.clear()

    def reject(self, named: Mapping[str, nn.Parameter], zero: int) -> NoReturn:
        """Raise for a step in which ranks have used different parameters."""
        filled = {id(parameter) for parameter in self.unused()}
        names = sorted(name for name, parameter in named.items() if id(parameter) in filled)
        more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
        without = f"{', '.join(names[:FEW])}{more}" if names else "others"
        raise ShoalError(
            f"every rank must use the same parameters in a step under zero={zero}, got a rank without {without}",
            fix='--plan "zero=0" --run.find_unused_parameters true; or a forward that uses the same parameters on every'
            " rank, if need be times 0",
            code="T100",
        )


def parameter_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers and reduces together. torch has no public access to them; tests
    fail if the private one changes."""
    for module in modules:
        for unit in module.modules():
            if is_fsdp(unit):
                state: Any = unit._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)  # up to torch 2.11 there is one
                yield from (one for one in groups or [getattr(state, "_fsdp_param_group", None)] if one is not None)
