"""What learners make of a cell that have not seen the run in question (benchmarks/planner/floor.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.planner.floor import LEARNERS, Learner, left_out, nearest, process, quadratic


def grid() -> torch.Tensor:
    return torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0), torch.arange(3.0))


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)


@pytest.mark.parametrize("learner", [quadratic(1e-6), process(2.0, 0.01)], ids=["quadratic", "process"])
def test_a_law_that_is_smooth_is_learnt_without_the_run(learner: Learner) -> None:
    known = grid()
    values = (known[:, 0] - 2) ** 2 + 0.5 * known[:, 1] * known[:, 2]
    assert left_out(learner, known, values) == pytest.approx(values, abs=0.2)


def test_nearest_runs_are_averaged() -> None:
    known, values = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([1.0, 2.0, 9.0])
    assert left_out(nearest(1), known, values).tolist() == [2.0, 1.0, 2.0]
    assert left_out(nearest(2), known, values).tolist() == [5.5, 5.0, 1.5]


@pytest.mark.parametrize("learner", LEARNERS)
def test_no_learner_sees_the_run_that_it_predicts(learner: Learner) -> None:
    known, values = grid(), torch.linspace(0, 1, 48)
    lucky = values.clone()
    lucky[7] = -9.0
    assert left_out(learner, known, lucky)[7] == left_out(learner, known, values)[7]
