"""What stages of a pipeline exchange: found by a run without memory, through skips, changes in place and closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal import Description, ShoalError
from shoal.blueprint.model_shapes import ModelShapes
from shoal.blueprint.placement import stage_bounds
from shoal.parallel.pipeline.calls import Forward, trace_calls
from shoal.parallel.pipeline.skeleton import skeleton_of
from shoal.parallel.pipeline.stage_io import Boundaries, live, traced
from shoal.parallel.pipeline.tape import Tape
from shoal.parallel.tensor import TensorParallel
from shoal.train.build_model import describe
from shoal.train.trace.find_blocks import attach_blocks

X = torch.zeros(2, 4)


class Chain(nn.Module):
    """Layers that a function puts together."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor], num_layers: int = 3) -> None:
        super().__init__()
        for number in range(num_layers):
            setattr(self, f"l{number}", nn.Linear(4, 4))
        self.dropout, self.how = nn.Dropout(0.5), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)

    def describe(self) -> Description:
        return Description(blocks=tuple(name for name, _ in self.named_children() if name[0] == "l"))


def crossing(how: Callable[[Any, Tensor], Tensor]) -> list[list[str]]:
    """The modules whose outputs cross the boundary before each block."""
    model = Chain(how)
    forward = traced(skeleton_of(model), model.describe(), ((X,), {}))
    return [sorted(forward.calls[number].module for number, _ in live(forward, start)) for start in (1, 2)]


def stashed(model: Any, x: Tensor) -> Tensor:
    model.stash = model.l0(x)
    return model.l2(model.l1(x) + model.stash)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (lambda m, x: m.l2(m.l1(m.l0(x))), [["l0"], ["l1"]]),
        (lambda m, x: m.l2(torch.cat([m.l1(y := m.l0(x)), y])[:2]), [["l0"], ["l0", "l1"]]),
        (lambda m, x: m.l2(m.l1(x).add_(m.l0(x))), [["l0"], ["l0", "l1"]]),  # changed in place
        (stashed, [["l0"], ["l0", "l1"]]),
        (lambda m, x: m.l2(m.l1(m.l0(x).detach())), [["l0"], ["l1"]]),
        (lambda m, x: m.l2(m.l1(m.dropout(m.l0(x)))), [["dropout"], ["l1"]]),  # drawn once, by the stage of l0
        (lambda m, x: m.l2(m.l1(m.l0(x)).view(4, 2).T.reshape(2, 4)), [["l0"], ["l1"]]),
        (lambda m, x: m.l0(x) + m.l1(x) + m.l2(x), [["l0"], ["l0", "l1"]]),  # the output reads them
    ],
)
def test_what_crosses_a_boundary(how: Callable[[Any, Tensor], Tensor], expected: list[list[str]]) -> None:
    assert crossing(how) == expected


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (lambda m, x: m.l1(m.l0(m.l2(x))), "M041"),
        (lambda m, x: m.l0(m.l1(m.l0(x))) + m.l2(x), "M041"),
        (lambda m, x: m.l1(m.l0(x)), "M045"),
        (lambda m, x: m.l2(F.linear(m.l1(m.l0(x)), m.l0.weight)), "M044"),
        (lambda m, x: m.l2(m.l1(y := F.dropout(m.l0(x))) + y), "M112"),
    ],
)
def test_what_stages_cannot_compute(how: Callable[[Any, Tensor], Tensor], code: str) -> None:
    model = Chain(how)
    with pytest.raises(ShoalError) as error:
        traced(skeleton_of(model), model.describe(), ((X,), {}))
    assert [problem.code for problem in error.value.problems] == [code]


class Leaves(nn.Linear):
    """Leaves a loss behind."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.square().mean()
        return y


def test_a_value_that_a_module_does_not_return() -> None:
    model = Chain(lambda m, x: m.l2(m.l1(m.l0(x))) + m.l0.loss)
    model.l0 = Leaves(4, 4)
    with pytest.raises(ShoalError) as error:
        traced(skeleton_of(model), model.describe(), ((X,), {}))
    assert [problem.code for problem in error.value.problems] == ["M114"]


def test_a_change_in_place_is_noted_where_it_happens() -> None:
    def forward_of(how: Callable[[Any, Tensor], Tensor]) -> Forward:
        model = Chain(how)
        return trace_calls(skeleton_of(model), model.describe(), ((X,), {}))

    between = forward_of(lambda m, x: m.l2(m.l1(m.l0(x).mul_(2))))
    assert (between.changed_between, between.changed_inside) == ({(0, 0)}, set())
    inside = forward_of(lambda m, x: m.l2(m.l1(F.relu(m.l0(x)))))
    assert (inside.changed_between, inside.changed_inside) == (set(), set())


def test_a_stage_that_ends_with_a_part_of_the_features() -> None:
    """As under tp, after a layer that is split by columns."""
    model = Chain(lambda m, x: m.l2(m.l1(m.l0(x))))
    boundaries = Boundaries(skeleton_of(model), model.describe(), [(0, 1), (1, 3)], TensorParallel())
    tape, routes = Tape(), boundaries(((X,), {}), is_training=True)[0]
    for width, sent in ((4, X), (2, None)):
        tape.begin(routes, None, None, torch.device("cpu"))
        tape.returned(tape.next("l0"), torch.zeros(2, width))
        if sent is not None:
            assert tape.packed(torch.device("cpu"), None).shape == sent.shape
            continue
        with pytest.raises(ShoalError, match=r"l0 must return the shape \[2, 4\] to the next stage, got \[2, 2\]"):
            tape.packed(torch.device("cpu"), None)


def test_a_forward_that_calls_other_modules() -> None:
    model = Chain(lambda m, x: m.l2(m.l1(m.l0(x))))
    tape = Tape()
    boundaries = Boundaries(skeleton_of(model), model.describe(), [(0, 1), (1, 3)], TensorParallel())
    tape.begin(boundaries(((X,), {}), is_training=True)[0], None, None, torch.device("cpu"))
    with pytest.raises(ShoalError, match="the forward calls l1 where a run without memory"):
        tape.next("l1")


def test_values_from_inputs_alone_are_known() -> None:
    """Whether positions restart is read; whether a layer is skipped is drawn."""

    def how(model: Any, x: Tensor) -> Tensor:
        positions = torch.arange(4)
        if bool((positions.diff() == 1).all()) and not torch.rand([]) < 0.0:
            x = model.l0(x)
        return model.l2(model.l1(x))

    assert crossing(how) == [["l0"], ["l1"]]


def test_blocks_are_found_with_their_costs() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(inplace=True), nn.Linear(64, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    found = shoal.trace_blocks(model, X)
    assert found.blocks == ("0", "2", "3", "4")
    assert dict(found.costs) == {"0": 1024.0, "2": 2048.0, "3": 128.0, "4": 64.0}
    shapes = ModelShapes(description=found, parameters={}, stream=())
    assert stage_bounds(shapes, num_stages=2) == [(0, 1), (1, 4)]


def test_a_model_that_has_no_order_says_why() -> None:
    found = shoal.trace_blocks(Chain(lambda m, x: m.l0(m.l1(m.l0(x))) + m.l2(x)), X)
    assert found.blocks == ()
    assert "l0 reads what l1 has computed" in found.why_not["pp"]


def test_a_model_that_reads_values_says_so() -> None:
    model = nn.Sequential(Reads(4, 4), nn.Linear(4, 4))
    attach_blocks(model, 2, lambda: ((X,), {}))
    assert "Sequential cannot be run without memory (RuntimeError" in describe(model).why_not["pp"]
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    attach_blocks(other, 2, lambda: ((), {"tokens": X}))  # of other data
    assert describe(other) == Description()


class Reads(nn.Linear):
    """Looks at what it has computed."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y
