"""On a GPU: the step computes what it does on a CPU, every precision trains, two ranks share the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.config.load import build_recipe
from shoal.data.loader import Loader, RankStream
from shoal.data.sources.open import open_datasets
from shoal.launch.local import launch
from shoal.numerics.init import initialise
from shoal.train.build_model import build_model
from shoal.train.recipe.invocation import RunInvocation
from shoal.train.recipe.loop import train
from shoal.train.recipe.preflight import preflight
from shoal.train.run import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device; CI has none, run by hand with one"),
]

MODEL = {"name": "llama", "preset": "tiny", "num_layers": 2, "hidden": 64, "ffn": 96}


def steps(run: Run, num_steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    recipe = build_recipe(
        {"model": MODEL, "data": {"seq_len": 64, "global_batch": 8, "mask_documents": True}}, title="test"
    )
    dataset, _ = open_datasets(recipe.data, 0)
    model = build_model(recipe.model)
    initialise(model, 0)
    run.prepare(model)
    run.prepare(torch.optim.AdamW(run.module.parameters(), lr=1e-2, fused=True))
    loader = Loader(
        RankStream(dataset, seed=0, batch=8, coordinate=run.coordinate, degree=run.degree),
        pin=run.device.type == "cuda",
        workers=0,
    )
    losses = []
    for batch in run.batches(loader):
        losses.append(float(run.step(batch)))
        if run.steps_done == num_steps:
            break
    loader.close()
    return losses, {name: weight.detach().cpu() for name, weight in run.module.named_parameters()}


def test_a_gpu_computes_what_a_cpu_does() -> None:
    results = []
    for device in ("cpu", "cuda"):
        with Run("fp64 mb=2", device=device, clip=0.5) as run:
            results.append(steps(run))
    (losses, weights), (on_gpu, gpu_weights) = results
    assert on_gpu == pytest.approx(losses, rel=1e-10)
    for name, weight in weights.items():
        assert ((gpu_weights[name] - weight).norm() / weight.norm()).item() < 1e-9, name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_every_precision_learns(precision: str) -> None:
    tree = {
        "model": MODEL,
        "data": {"seq_len": 64, "global_batch": 16, "validation": 0.0001},
        "optim": {"lr": 1e-2, "warmup": "5step"},
        "plan": f"{precision} mb=8",
        "launch": {"device": "cuda"},
        "run": {"duration": "60step", "fp8_min_features": 16 if precision == "fp8" else None},
    }
    job = preflight(build_recipe(tree, title="test"), 1)
    summary = train(None, None, job, RunInvocation(save=False, quiet=True, start_time=0.0))
    assert summary["loss_first"] > 5.0
    assert summary["loss_last"] < 3.5
    assert summary["memory_gib_max"] > 0


def two_on_one(placement: Placement, store: dist.Store) -> Any:
    with Run("fp64 mb=2", clip=0.5, world=World.start(placement, device="cuda", backend="gloo", store=store)) as run:
        return steps(run)


def test_two_ranks_on_one_gpu_equal_one() -> None:
    with Run("fp64 mb=2", device="cuda", clip=0.5) as run:
        losses, weights = steps(run)
    for ours, our_weights in launch(two_on_one, nproc=2):
        assert ours == pytest.approx(losses, rel=1e-10)
        for name, weight in weights.items():
            assert ((our_weights[name] - weight).norm() / weight.norm()).item() < 1e-9, name


def test_batches_are_pinned() -> None:
    recipe = build_recipe({"data": {"seq_len": 64}}, title="test")
    loader = Loader(RankStream(open_datasets(recipe.data, 0)[0], seed=0, batch=4), pin=True, workers=0)
    assert next(loader)["tokens"].is_pinned()
    loader.close()


def test_deterministic_runs_repeat_bit_for_bit() -> None:
    outcomes = []
    for _ in range(2):
        with Run("bf16 mb=2", device="cuda", deterministic=True) as run:
            outcomes.append(steps(run))
    torch.use_deterministic_algorithms(False)
    assert outcomes[0][0] == outcomes[1][0]
    for name, weight in outcomes[0][1].items():
        assert torch.equal(weight, outcomes[1][1][name]), name


def test_half_precision_weights_stay_in_float32() -> None:
    with Run("bf16", device="cuda") as run:
        assert {p.dtype for p in run.prepare(nn.Linear(2, 2)).parameters()} == {torch.float32}
