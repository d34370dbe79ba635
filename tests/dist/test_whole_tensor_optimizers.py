"""Optimizers that read whole tensors, over shards: as on one device, and through a checkpoint on another layout.

The references below are in plain torch, over whole tensors in float64, and share no code with shoal's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.world import World
from shoal.config.recipe import OptimSection
from shoal.models import llama
from shoal.numerics.init import initialise
from shoal.train.optim.build import optimizer_of_run
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool

BATCH, TOKENS, VOCABULARY = 12, 8, 13
STEPS, SAVED_AT = 3, 2
LR, DECAY = 1e-2, 0.1
# 13, 9 and 2 rows: shards that are not alike, and empty ones on four ranks
SIZES: dict[str, Any] = {"hidden": 8, "num_heads": 4, "num_kv_heads": 1, "ffn": 9, "vocabulary": VOCABULARY}


def build() -> torch.nn.Module:
    model = llama.build(num_layers=2, max_sequence=TOKENS, **SIZES)
    initialise(model, seed=3)
    return model


def tokens(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def go(world: World, plan: str, name: str, steps: range, load: Path | None, save: Path | None) -> dict[str, Tensor]:
    """The weights after some steps, of a run that resumes and is saved."""
    run = Run(f"fp64 {plan}", world=world, seed=0)
    run.prepare(build())
    run.prepare(optimizer_of_run(run, OptimSection(name=name, weight_decay=DECAY), lr=LR))  # type: ignore[arg-type]
    if load is not None:
        assert run.load(load) == steps.start
    size = BATCH // run.degree
    for step in steps:
        own = tokens(step)[run.coordinate * size : (run.coordinate + 1) * size]
        run.step({"tokens": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous()})
    if save is not None:
        run.save(save)
    return run.weights()


# ---- one device, in plain torch --------------------------------------------------------------------------------------

Rule = Callable[[dict[str, Any], str, Tensor, Tensor, int], Tensor]
"""State, name, weight, gradient and number of a step → the weight after it."""


def adam_direction(state: dict[str, Any], g: Tensor, step: int) -> Tensor:
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    state["v"] = 0.95 * state.get("v", 0.0) + 0.05 * g * g
    return state["m"] / (1 - 0.9**step) / ((state["v"] / (1 - 0.95**step)).sqrt() + 1e-8)


def muon(state: dict[str, Any], name: str, w: Tensor, g: Tensor, step: int) -> Tensor:
    if w.dim() != 2 or "layers." not in name:
        return w - LR * (DECAY * w * (w.dim() > 1) + adam_direction(state, g, step))
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    u, s, v = torch.linalg.svd(0.1 * g + 0.9 * state["m"], full_matrices=False)
    s = s / s.norm()
    for _ in range(5):  # the polynomial of Newton-Schulz acts on singular values alone
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return w - LR * (DECAY * w + 0.2 * math.sqrt(max(w.shape)) * (u * s) @ v)


def lamb(state: dict[str, Any], name: str, w: Tensor, g: Tensor, step: int) -> Tensor:
    r = adam_direction(state, g, step)
    if w.dim() == 1:
        return w - LR * r
    r = r + DECAY * w
    return w - LR * w.norm() / r.norm() * r


def lars(state: dict[str, Any], name: str, w: Tensor, g: Tensor, step: int) -> Tensor:
    ratio, decay = 1.0, 0.0
    if w.dim() > 1:
        ratio, decay = 1e-3 * w.norm() / (g.norm() + DECAY * w.norm()), DECAY
    state["v"] = 0.9 * state.get("v", 0.0) + LR * ratio * (g + decay * w)
    return w - state["v"]


RULES: dict[str, Rule] = {"muon": muon, "lamb": lamb, "lars": lars}


@cache
def plain(name: str) -> list[dict[str, Tensor]]:
    """The weights after each step."""
    model = build().double()
    groups = [[p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False)]
    torchs = torch.optim.Adafactor(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True)], lr=LR
    )
    states: dict[str, dict[str, Any]] = {key: {} for key, _ in model.named_parameters()}
    found = []
    for step in range(STEPS):
        model.zero_grad()
        logits = model(tokens(step)[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens(step)[:, 1:].flatten()).backward()
        if name == "adafactor":
            torchs.step()
        for key, p in model.named_parameters() if name in RULES else ():
            assert p.grad is not None
            p.data = RULES[name](states[key], key, p.data, p.grad, step + 1)
        found.append({key: p.detach().clone() for key, p in model.named_parameters()})
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")


ROWS = [
    ("muon", (2, "zero=3"), (2, "pp=2 1f1b mb=2")),
    wide("muon", (2, "zero=1"), (1, "")),
    wide("muon", (4, "dp_replicate=2 zero=3"), (3, "zero=2")),
    wide("muon", (2, "pp=2 gpipe mb=2"), (4, "pp=2 gpipe zero=3 mb=1")),
    wide("muon", (2, "dp_replicate=2"), (4, "zero=3")),
    wide("muon", (2, "cp=2 zero=3"), (2, "zero=0 cp=2")),
    ("lamb", (2, "zero=2"), (2, "pp=2 1f1b mb=2")),
    wide("lamb", (4, "dp_replicate=2 zero=3"), (4, "zero=1")),
    ("lars", (2, "zero=1"), (1, "")),
    wide("lars", (4, "dp_replicate=2 zero=3"), (2, "dp_replicate=2")),
    ("adafactor", (2, "pp=2 1f1b mb=2"), (2, "dp_replicate=2")),
    wide("adafactor", (1, ""), (2, "cp=2 zero=0")),
]


@pytest.mark.parametrize(("name", "first", "second"), ROWS)
def test_whole_tensors_are_updated_as_on_one_device(
    pool: Pool, tmp_path: Path, name: str, first: tuple[int, str], second: tuple[int, str]
) -> None:
    """Some steps on a layout, and the rest on another that has loaded its checkpoint."""
    for (size, plan), steps, load, save in (
        (first, range(SAVED_AT), None, tmp_path),
        (second, range(SAVED_AT, STEPS), tmp_path, None),
    ):
        found = pool.run(go, size, plan, name, steps, load, save)[0]
        assert_same(found, plain(name)[steps.stop - 1])
