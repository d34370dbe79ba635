"""One forward of a stage: which call of a module comes next, what it returns, and what the stage sends.

Modules of other stages return what the stage has received. Outputs that nothing on this stage reads have the right
shape and no values; they need no memory unless code between modules computes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.parallel.pipeline.calls import Leaf, Source, flattened, rebuilt
from shoal.parallel.pipeline.stage_io import StageRoutes


class StopForward(Exception):
    """Raised by the first call of a module that this stage needs nothing of."""


class Tape:
    """The calls of the current forward of a stage."""

    def __init__(self) -> None:
        self._routes: StageRoutes | None = None
        self._number = 0
        self._values: dict[Source, Tensor] = {}
        self._given: dict[Source, Tensor] = {}
        self._device: torch.device | None = None
        self._dtype: torch.dtype | None = None
        self._last = -1
        self._zeros: dict[tuple[torch.dtype, torch.device | None], Tensor] = {}

    def begin(self, routes: StageRoutes, x: Tensor | None, dtype: torch.dtype | None, device: torch.device) -> None:
        """Start a forward with the tensor that was received, in the dtype of the computation."""
        self._routes, self._number, self._last = routes, 0, routes.last_call
        self._dtype, self._device = dtype, device
        self._values, self._given = {}, {}
        if x is not None:
            self._unpack(x.to(device, dtype), routes)

    def _unpack(self, x: Tensor, routes: StageRoutes) -> None:
        pieces: Sequence[Tensor] = [x]
        if len(routes.receives) > 1:
            shapes = [routes.shape(source) for source in routes.receives]
            flat = x.split([torch.Size(shape).numel() for shape in shapes])
            pieces = [piece.view(shape) for piece, shape in zip(flat, shapes, strict=True)]
        for source, piece in zip(routes.receives, pieces, strict=True):
            value = piece.clone() if source in routes.forward.changed_inside else piece  # a leaf may not be changed
            self._values[source] = value
            self._given[source] = value.clone() if source in routes.forward.changed_between else value

    def packed(self, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """The tensor that is sent to the next stage."""
        assert self._routes is not None
        for source in self._routes.sends:
            if (shape := tuple(self._values[source].shape)) != self._routes.shape(source):
                module, expected = self._routes.forward.calls[source[0]].module, list(self._routes.shape(source))
                raise ShoalError(
                    f"{module} must return the shape {expected} to the next stage, got {list(shape)}",
                    fix="another pp or v; under tp, stages that end after a layer that is split by ROW",
                    code="M043",
                )
        values = [self._values[source].to(device, dtype) for source in self._routes.sends]
        # A block of images may return a permuted view, and messages have to be contiguous.
        return values[0].contiguous() if len(values) == 1 else torch.cat([value.flatten() for value in values])

    def end(self) -> None:
        """Let go of all tensors."""
        self._routes, self._values, self._given = None, {}, {}

    # ---- calls -------------------------------------------------------------------------------------------------------

    def next(self, module: str) -> int:
        """The number of a call that begins."""
        assert self._routes is not None
        number, calls = self._number, self._routes.forward.calls
        self._number += 1
        expected = calls[number].module if number < len(calls) else "nothing more"
        if expected != module:
            raise ShoalError(
                f"the forward calls {module} where a run without memory with the same shapes called {expected}",
                fix="a forward that calls the same modules for all inputs of one shape, or pp=1",
                code="M111",
            )
        return number

    def runs(self, number: int) -> bool:
        """Whether this stage runs a call itself."""
        assert self._routes is not None
        place = self._routes.forward.calls[number].position
        return place is None or place in self._routes.positions

    def returned(self, number: int, output: object) -> None:
        """Keep what one of its own calls returns, if it is sent."""
        assert self._routes is not None
        wanted = self._routes.sent_of_call.get(number)
        if wanted is None:
            return
        leaves = flattened(output)
        for leaf in wanted:
            source = (number, leaf)
            changes = source in self._routes.forward.changed_between  # the next stage makes the change itself
            self._values[source] = leaves[leaf].clone() if changes else leaves[leaf]

    def stand_in(self, number: int) -> Any:
        """Return what a call of another stage would return."""
        assert self._routes is not None
        if number > self._last:
            raise StopForward
        call = self._routes.forward.calls[number]
        leaves = [
            self._given[number, place] if (number, place) in self._given else self._without_values(number, place)
            for place in range(len(call.leaves))
        ]
        return rebuilt(call, leaves)

    def _without_values(self, number: int, place: int) -> Any:
        assert self._routes is not None
        leaf = self._routes.forward.calls[number].leaves[place]
        if not isinstance(leaf, Leaf):
            return leaf
        shape = self._routes.shape((number, place))
        dtype = self._dtype if leaf.dtype.is_floating_point and self._dtype is not None else leaf.dtype
        if (number, place) in self._routes.forward.between:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        if (dtype, self._device) not in self._zeros:
            self._zeros[dtype, self._device] = torch.zeros((), dtype=dtype, device=self._device)
        return self._zeros[dtype, self._device].expand(shape)


class OwnCall:
    """A hook of a stage's own module."""

    def __init__(self, name: str, tape: Tape) -> None:
        self.name, self.tape = name, tape

    def __call__(self, _module: nn.Module, _given: object, output: object) -> None:
        """Keep what is sent."""
        self.tape.returned(self.tape.next(self.name), output)
