"""The tensors between the stages of a pipeline: found once for each shape of a microbatch, by a run without memory.

A stage receives every output of earlier modules that its own modules, or later ones, read (`calls`). So activations may
change their shape, skip stages and be several:

    stage 0   encoder            sends     encoder output
    stage 1   decoder.0          receives  encoder output           sends  encoder output, x
    stage 2   decoder.1, head    receives  encoder output, x

Several tensors travel as one flat tensor, so every schedule of torch can send them, and their gradients add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor, nn

from shoal.blueprint.description import Description
from shoal.errors import Problem, ShoalError, raise_if
from shoal.parallel.pipeline.calls import BEFORE, Forward, Source, positions, trace_calls
from shoal.parallel.pipeline.skeleton import Call
from shoal.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class StageRoutes:
    """The calls of a forward as one stage sees them."""

    forward: Forward
    positions: range
    """Where its own modules are placed."""
    receives: tuple[Source, ...]
    sends: tuple[Source, ...]
    divided: int = 1
    """Ranks of tp that share the tokens of what is received and sent."""

    @cached_property
    def last_call(self) -> int:
        """The number of its own last call."""
        return max(n for n, call in enumerate(self.forward.calls) if call.position in self.positions)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """The shape of all that it receives, as one tensor."""
        return self._packed(self.receives)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """The shape of all that it sends, as one tensor."""
        return self._packed(self.sends)

    @cached_property
    def sent_of_call(self) -> dict[int, list[int]]:
        """Number of a call → which of its leaves are sent."""
        found: dict[int, list[int]] = {}
        for call, leaf in self.sends:
            found.setdefault(call, []).append(leaf)
        return found

    def shape(self, source: Source) -> tuple[int, ...]:
        """The shape that a tensor has on a rank."""
        shape = self.forward.leaf(source).shape
        if self.divided > 1 and shape in self._between:
            return (*shape[:-2], shape[-2] // self.divided, shape[-1])
        return shape

    @cached_property
    def _between(self) -> set[tuple[int, ...]]:
        return {self.forward.leaf(one).shape for one in (*self.receives, *self.sends)}

    def _packed(self, sources: Sequence[Source]) -> tuple[int, ...]:
        shapes = [self.shape(source) for source in sources]
        return shapes[0] if len(shapes) == 1 else (sum(map(prod, shapes)),)


@dataclass
class Boundaries:
    """What stages exchange, for each shape of a microbatch."""

    skeleton: nn.Module
    description: Description
    bounds: Sequence[tuple[int, int]]
    """The blocks of each stage: number of the first, and of the one after the last."""
    tensor: TensorParallel
    _known: dict[Any, list[StageRoutes]] = field(default_factory=dict)

    def __call__(self, call: Call, *, is_training: bool) -> list[StageRoutes]:
        """Return the routes of every stage for a call of the model."""
        key = is_training, shapes_of(call)
        if key not in self._known:
            self.skeleton.train(is_training)
            forward = traced(self.skeleton, self.description, call)
            self._known[key] = list(self._routes(forward))
        return self._known[key]

    def _routes(self, forward: Forward) -> Iterator[StageRoutes]:
        carried = [live(forward, start) for start, _ in self.bounds[1:]]
        raise_if([problem for sources in carried for problem in _unfit(forward, sources)])
        degree = self.tensor.degree if self.tensor.splits_tokens else 1
        several = next((sources for sources in carried if len(sources) > 1), None)
        if degree > 1 and several is not None:
            what = f"sequence parallelism in a pipeline sends one tensor between stages, got {len(several)}"
            raise ShoalError(what, fix="sp=off, or pp=1", code="P070")
        last = len(self.bounds) - 1
        for index, (start, stop) in enumerate(self.bounds):
            own = range(start if index else BEFORE, stop if index < last else len(self.description.blocks) + 1)
            receives = carried[index - 1] if index else ()
            yield StageRoutes(forward, own, receives, carried[index] if index < last else (), degree)


def shapes_of(call: Call) -> tuple[object, ...]:
    """What the shapes inside a model depend on."""
    arguments, options = call
    named: list[tuple[object, Any]] = [*enumerate(arguments), *options.items()]
    return tuple((name, x.shape) for name, x in named if isinstance(x, Tensor))


def traced(model: nn.Module, description: Description, call: Call) -> Forward:
    """The calls of a model, run without memory. Rejects a model that stages would compute otherwise than one device."""
    forward = trace_calls(model, description, call)
    raise_if(
        [
            *_order(forward, description),
            *_unrun(forward, description),
            *_loose(forward),
            *_drawn(forward),
            *_hidden(forward),
        ]
    )
    return forward


def live(forward: Forward, start: int) -> tuple[Source, ...]:
    """The tensors that cross the boundary before a block: computed before it, and read by it or later."""
    calls = forward.calls
    later = [call.reads for call in calls if call.position is not None and call.position >= start]
    read = forward.output.union(*later)
    return tuple(sorted(source for source in read if _place(forward, source) < start))


def _place(forward: Forward, source: Source) -> int:
    place = forward.calls[source[0]].position
    assert place is not None
    return place


# ---- what stages cannot compute -------------------------------------------------------------------------------------


def _order(forward: Forward, description: Description) -> Iterator[Problem]:
    for call in forward.calls:
        for source in sorted(call.reads):
            if call.position is not None and _place(forward, source) > call.position:
                other = forward.calls[source[0]].module
                what = f"{call.module} reads what {other} has computed, which is placed after it"
                fix = "blocks=(...) in the order of the forward, each of them run in one place; or pp=1"
                yield Problem("M041", what, fix)
                return


def _unrun(forward: Forward, description: Description) -> Iterator[Problem]:
    ran = {call.module for call in forward.calls}
    blocks = [name for name, place in positions(description).items() if 0 <= place < len(description.blocks)]
    if missing := [name for name in blocks if name not in ran]:
        num_run = len(blocks) - len(missing)
        what = (
            f"the forward runs {num_run} of the {len(blocks)} blocks that the description names, and not {missing[0]}"
        )
        yield Problem("M045", what, "pp=1, or in blocks=(...) exactly the modules that run")


def _loose(forward: Forward) -> Iterator[Problem]:
    for name in sorted(forward.loose):
        module = name.rpartition(".")[0]
        what = f"the forward reads {name} outside of {module}, and only one stage has it"
        yield Problem("M044", what, f"call {module}(...) in its place, or pp=1")
        return


def _drawn(forward: Forward) -> Iterator[Problem]:
    """Random numbers that several stages would each draw."""
    for readers in forward.drawn:
        places = {forward.calls[number].position if number >= 0 else None for number in readers}
        if len(places) > 1:
            names = sorted({forward.calls[number].module for number in readers if number >= 0})
            what = f"{names[0]} and later modules read one random result that is drawn between modules"
            yield Problem("M112", what, "nn.Dropout as a submodule in place of F.dropout, or pp=1")
            return


def _hidden(forward: Forward) -> Iterator[Problem]:
    for name in sorted(forward.hidden):
        what = f"the forward reads a value that {name} computes and does not return"
        yield Problem("M114", what, f"return it from {name}, beside the activation, or pp=1")
        return


def _unfit(forward: Forward, sources: Sequence[Source]) -> Iterator[Problem]:
    for source in sources:
        leaf, module = forward.leaf(source), forward.calls[source[0]].module
        if not leaf.dtype.is_floating_point:
            what = f"stages exchange floating-point tensors, but {module} returns {leaf.dtype} that a later stage reads"
            yield Problem("M110", what, "compute it from the model's input, outside of the described modules; or pp=1")
        if source in forward.changed_between and source in forward.changed_inside:
            what = f"what {module} returns is changed in place both by a module and between modules"
            yield Problem("M113", what, "x = x + y in place of x += y, or pp=1")
