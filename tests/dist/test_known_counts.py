"""A dataset that says how many labels of its samples count is trained on as one whose labels are counted in every step.

`shoal verify` has its own batches, whose labels are always counted; the shortcut of `shoal train` is held to it here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.comm.world import World
from shoal.data.loader import Loader, RankStream
from shoal.data.sources.synthetic import SyntheticTokens
from shoal.errors import ShoalError
from shoal.models import llama, moe
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import on_ranks

STEPS = 3
SIZES = {"preset": "tiny", "num_layers": 2, "hidden": 32, "ffn": 48, "vocabulary": 64}


def loader_of(run: Run, batch: int, *, labels_per_sample: int | None) -> Loader:
    data = SyntheticTokens(seed=1, num_samples=64, sequence=16, vocabulary=64)
    data.labels_per_sample = labels_per_sample  # type: ignore[assignment]
    return Loader(RankStream(data, seed=2, batch=batch, coordinate=run.coordinate, degree=run.degree), workers=0)


def trained(world: World, plan: str, batch: int, *, labels_per_sample: int | None) -> list[Any]:
    """Losses, norms and what ranks agree on of each step, loads of experts, and the weights at the end."""
    model = (moe if "ep" in plan else llama).build(**SIZES)
    initialise(model, 0)
    run = Run(plan, clip=0.5, world=world)
    run.prepare(model)
    run.prepare(torch.optim.AdamW(run.parameters, lr=1e-2))
    loader, found = loader_of(run, batch, labels_per_sample=labels_per_sample), []
    for taken in run.batches(loader):
        run.signals = {"stop": float(world.rank == 1), "seconds": float(run.steps_done + 1) * world.is_main}
        loss = run.step(taken)
        assert run.report is not None
        experts = None if run.report.experts is None else run.report.experts.tolist()
        found.append([float(loss), float(run.report.grad_norm), experts])
        if run.steps_done == STEPS:
            break
    loader.close()
    found.append([dict(run.agreed)])
    return [*found, {name: weight.tolist() for name, weight in run.weights().items()}]


@pytest.mark.parametrize(
    ("plan", "batch"),
    [
        wide("fp64 mb=1", 5),
        ("fp64 cp=2 mb=1", 3),
        wide("fp64 tp=2 sp=on mb=2", 4),
        ("fp64 pp=2 1f1b mb=1", 4),
        ("fp64 ep=2 mb=1", 4),
    ],
)
@on_ranks(2)
def test_the_same_is_computed(world: World, plan: str, batch: int) -> None:
    *known, known_agreed, known_weights = trained(world, plan, batch, labels_per_sample=16)
    *counted, counted_agreed, counted_weights = trained(world, plan, batch, labels_per_sample=None)
    for mine, theirs in zip(known, counted, strict=True):
        assert mine[:2] == pytest.approx(theirs[:2], rel=1e-14)
        assert mine[2] == theirs[2]
    assert known_weights == counted_weights
    # Signals of a step are those that were set before it was opened.
    assert known_agreed == counted_agreed == [{"stop": 1.0, "seconds": float(STEPS - 1)}]


@on_ranks(2)
def test_a_dataset_that_is_wrong_about_its_labels_is_rejected(world: World) -> None:
    with pytest.raises(ShoalError, match="16 labels of 1 samples count, and the dataset says that 15 of each do"):
        trained(world, "fp64", 2, labels_per_sample=15)


@on_ranks(2)
def test_a_loop_with_a_loss_of_the_scripts_own_keeps_loss_and_signals(world: World) -> None:
    """Its count is known after its forward: the loss is corrected, and signals still travel."""
    found = []
    for labels_per_sample in (16, None):
        model = llama.build(**SIZES)
        initialise(model, 0)
        run = Run("fp64 mb=1", world=world)
        run.prepare(model)
        run.prepare(torch.optim.SGD(run.parameters, lr=1e-2))
        loader = loader_of(run, 4, labels_per_sample=labels_per_sample)
        for taken in run.batches(loader):
            run.signals = {"stop": 1.0}
            for part in run.microbatches(taken):
                rows = run.model(part["tokens"]).flatten(0, 1)
                run.backward(torch.nn.functional.cross_entropy(rows, part["labels"].flatten()))
            report = run.update()
            found.append((run.steps_done, float(report.loss), dict(run.agreed)))
            if run.steps_done == 2:
                break
        loader.close()
    for mine, theirs in zip(found[:2], found[2:], strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], rel=1e-14)
        assert mine[2] == theirs[2]
    assert found[1][2] == {"stop": 2.0}
