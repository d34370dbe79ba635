"""What is the least regret in a sweep for a predictor that has not seen the run itself?

python benchmarks/planner/floor.py nanotron_sweep.csv [--devices 512]

Every run of a cell is predicted from all *other* runs of that cell, measured times included, by learners of several
kinds: the nearest runs, a kernel, a quadratic, a Gaussian process. Each learns measured times (alone), or how far the
planner is off (with the planner). That is more than a planner ever has: where they miss the fastest run, its neighbours
do not predict it.

planner   regret of its own pick
second    regret of the second fastest run: all that can be reached without picking the very fastest
learners  regret of the run that a learner predicts as the fastest, each run by one that was not fitted to it: the least
          and the median of all learners, and how many are within 15 %
fastest   the fastest run as predicted by learners that were not fitted to it, over measured: the least and the most
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from shoal.planner.backtest.predict import Prediction, predict
from shoal.planner.backtest.rows import read
from shoal.planner.backtest.score import cells, grouped

Learner = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Features and values of known runs, features of another one → its value."""
CLOSE = 0.15


def nearest(count: int) -> Learner:
    """The mean of so many nearest runs."""
    return lambda known, values, one: values[(known - one).norm(dim=1).argsort(stable=True)[:count]].mean()


def kernel(width: float) -> Learner:
    """The mean of all runs, near ones weighing more."""

    def learner(known: Tensor, values: Tensor, one: Tensor) -> Tensor:
        weights = _bell(known, one[None], width)[:, 0] + 1e-12
        return (weights * values).sum() / weights.sum()

    return learner


def quadratic(penalty: float) -> Learner:
    """All features, their squares and their products."""

    def terms(x: Tensor) -> Tensor:
        ones = torch.cat([torch.ones(len(x), 1), x], 1)
        i, j = torch.triu_indices(ones.shape[1], ones.shape[1])
        return ones[:, i] * ones[:, j]

    def learner(known: Tensor, values: Tensor, one: Tensor) -> Tensor:
        a, middle = terms(known), values.mean()
        found = torch.linalg.solve(a.T @ a + penalty * torch.eye(a.shape[1]), a.T @ (values - middle))
        return middle + (terms(one[None]) @ found)[0]

    return learner


def process(width: float, noise: float) -> Learner:
    """A Gaussian process."""

    def learner(known: Tensor, values: Tensor, one: Tensor) -> Tensor:
        spread, middle = _bell(known, known, width) + noise**2 * torch.eye(len(known)), values.mean()
        return middle + (_bell(one[None], known, width) @ torch.linalg.solve(spread, values - middle))[0]

    return learner


def _bell(a: Tensor, b: Tensor, width: float) -> Tensor:
    return (-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * width**2)).exp()


LEARNERS: tuple[Learner, ...] = (
    *(nearest(count) for count in (1, 3, 5)),
    *(kernel(width) for width in (0.5, 1.0)),
    *(quadratic(penalty) for penalty in (0.1, 1.0)),
    *(process(width, noise) for width, noise in ((1.0, 0.1), (2.0, 0.1), (2.0, 0.3))),
)


def features(one: Prediction) -> list[float]:
    """All that a row prints of its plan, in doublings; two of them for ZeRO."""
    degrees = [one.row.number(name) or 1.0 for name in ("tp", "pp", "micro_batch", "dp")]
    doublings = torch.tensor(degrees).log2().tolist()
    doublings[3] = 8 - doublings[3] - doublings[2]  # microbatches, of 256 sequences
    return [*doublings, 2.0 * bool(one.row.number("zero_stage"))]


def left_out(learner: Learner, known: Tensor, values: Tensor) -> Tensor:
    """Each value by a learner that has seen all others."""
    others = ~torch.eye(len(values), dtype=torch.bool)
    return torch.stack([learner(known[rest], values[rest], known[i]) for i, rest in enumerate(others)])


def main() -> None:
    """One line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="+", help="of runs that nanotron has made")
    parser.add_argument("--devices", type=int, help="only cells of so many")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    found = [predict(row) for row in read(args.table) if "nanotron" in row.text("source")]
    print("cell | runs | planner | second | learners: least, median, within 15 % | fastest")
    for cell, runs in zip(cells(found), (runs for runs in grouped(found) if len(runs) >= 5), strict=True):
        if args.devices in (None, cell.devices):
            print(f"{cell.model} on {cell.devices} | {cell.count} | {cell.regret:.0%} | {floor(runs)}")


def floor(runs: list[Prediction]) -> str:
    """What learners make of one cell."""
    known = torch.tensor([features(one) for one in runs])
    measured = torch.tensor([one.measured_s for one in runs]).log()
    planned = torch.tensor([one.predicted_s for one in runs]).log()
    fastest = int(measured.argmin())
    regrets, ratios = [], []
    for learner in LEARNERS:
        for base in (torch.zeros_like(planned), planned):
            learnt = left_out(learner, known, measured - base) + base
            regrets.append(float((measured[learnt.argmin()] - measured[fastest]).exp()) - 1)
            ratios.append(float((learnt[fastest] - measured[fastest]).exp()))
    second = float((measured.sort().values[1] - measured[fastest]).exp()) - 1
    close = sum(regret <= CLOSE for regret in regrets)
    reached = f"{min(regrets):.0%}, {median(regrets):.0%}, {close} of {len(regrets)}"
    return f"{second:.0%} | {reached} | {min(ratios):.1f} to {max(ratios):.1f}"


if __name__ == "__main__":
    main()
