"""A checkpoint of packed layers, of which a tp rank has several boxes, is read by other layouts and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.world import World
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool

pytest.importorskip("transformers")
from tests import huggingface


def started(world: World, kind: str, plan: str) -> Run:
    run = Run(f"fp64 {plan} mb=1", world=world)  # not closed: the world is the next test's
    run.prepare(huggingface.build(kind))
    run.prepare(torch.optim.AdamW(run.parameters, lr=1e-2))
    return run


def step(run: Run, kind: str) -> float:
    size = huggingface.BATCH // run.degree
    own = {key: x[run.coordinate * size :][:size] for key, x in huggingface.batch(kind).items()}
    return float(run.step(own))


def losses(world: World, kind: str, folder: str, plans: list[str]) -> list[Any]:
    """Each plan loads what the one before it has saved, and makes one step."""
    found = []
    for number, plan in enumerate(plans):
        run = started(world, kind, plan)
        if number:
            run.load(f"{folder}/{number - 1}")
        found.append(step(run, kind))
        run.save(f"{folder}/{number}")
    alone = started(world, kind, plans[0])
    return [found, [step(alone, kind) for _ in plans]]


@pytest.mark.parametrize(
    ("num_ranks", "kind", "plans"),
    [
        (2, "phi3", ["tp=2 sp=off", "zero=3", "tp=2 sp=on"]),
        wide(2, "gpt2", ["tp=2 sp=off", "zero=3", "tp=2 sp=on"]),  # its parts are along dim 1
        wide(4, "phi3", ["tp=2 zero=3", "zero=1", "tp=2 zero=3"]),
        wide(4, "gpt2", ["tp=2 zero=3", "zero=1", "tp=2 zero=3"]),
    ],
)
def test_a_run_continues_under_another_layout(
    pool: Pool, tmp_path: Path, num_ranks: int, kind: str, plans: list[str]
) -> None:
    found, expected = pool.run(losses, num_ranks, kind, str(tmp_path), plans)[0]
    assert found == pytest.approx(expected, rel=1e-6)  # its norms are computed in float32
