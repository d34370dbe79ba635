"""Pipelines of models whose activations change their shape and skip stages, without a description of their own: the
losses, gradients and weights of one process, in float64, and the traffic that was predicted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shoal import Run
from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.verification.api import with_blocks
from shoal.verification.case import Case
from shoal.verification.rank import verify_in
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks


class UNet(nn.Module):
    """Skips around everything, changes in place, and code between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.deeper = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.middle = nn.ModuleList([nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)])
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        skip = self.relu(self.norm(self.down(images)))
        x = deep = self.deeper(skip)
        for layer in self.middle:
            x = layer(x)
            x += 0.5  # a stage that received it must not add again
        x = self.up(x + deep)
        return self.head(F.gelu(torch.cat([x, skip], 1)).mean((2, 3)))


def widths() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 3),
        nn.Sequential(nn.Linear(3, 9), nn.Tanh()),
        nn.Linear(9, 5),
    )


class Turn(nn.Module):
    """Returns a view whose numbers are not in order, as blocks of ConvNeXt do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def turned() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), Turn()) for width in (6, 4, 6)]
    return nn.Sequential(nn.Unflatten(1, (4, 6)), *layers, nn.Flatten(), nn.Linear(24, 5))


def of_transformers() -> nn.Module:
    """Its config says no size of images."""
    import transformers

    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8, 12], "depths": [1, 2, 1], "num_labels": 5}
    model: nn.Module = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))
    return model


def build(kind: str) -> nn.Module:
    torch.manual_seed(2)
    return {"widths": widths, "unet": UNet, "turned": turned, "resnet": of_transformers}[kind]()


def batch(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(5, (8,), generator=generator)
    if kind == "widths":
        return {"input": torch.randn(8, 6, generator=generator), "labels": labels}
    if kind == "turned":
        return {"input": torch.randn(8, 24, generator=generator), "labels": labels}
    name, size = ("pixel_values", 64) if kind == "resnet" else ("images", 8)
    return {name: torch.randn(8, 3, size, size, generator=generator), "labels": labels}


def differences(world: World, kind: str, plans: list[str]) -> list[float]:
    """The largest relative difference of each plan."""
    found = []
    for words in plans:
        case = Case(
            build=functools.partial(with_blocks, functools.partial(build, kind), batch(kind), None, 2),
            batches=[batch(kind)] * 2,
            plan=Plan.parse(f"fp64 {words}").resolve(world.size),
        )
        findings = verify_in(world, case)
        assert findings.predicted_traffic is not None
        for axis, operations in findings.predicted_traffic.items():
            for name, messages in operations.items():
                assert findings.traffic[axis][name]["bytes"] == messages.bytes, (words, axis, name)
        if findings.verdict is not None:
            assert findings.verdict.equal, f"{words}: {findings.verdict.first}"
            found.append(max(findings.verdict.worst.loss, findings.verdict.worst.grad, findings.verdict.worst.weight))
    return found


SCHEDULES = ["pp=2 1f1b mb=8", "pp=2 interleaved v=2 mb=2", "pp=2 zb mb=2", "pp=2 1f1b mb=2", "pp=2 gpipe mb=4"]


@pytest.mark.parametrize(
    ("kind", "plans"),
    [("widths", SCHEDULES[:1]), ("turned", SCHEDULES[3:4]), ("unet", SCHEDULES[:2]), wide("unet", SCHEDULES[2:])],
)
def test_stages_of_any_shape(pool: Pool, kind: str, plans: list[str]) -> None:
    assert max(pool.run(differences, 2, kind, plans)[0]) < 1e-12


@pytest.mark.wide
def test_a_convolutional_model_of_transformers(pool: Pool) -> None:
    pytest.importorskip("transformers")
    assert max(pool.run(differences, 2, "resnet", SCHEDULES[3:])[0]) < 1e-12


@pytest.mark.parametrize("kind", [wide("widths"), "unet"])
def test_stages_of_any_shape_with_shards(pool: Pool, kind: str) -> None:
    assert (
        max(pool.run(differences, 4, kind, ["pp=2 zero=3 1f1b mb=2", "pp=2 zero=1 1f1b mb=1 recompute=full"])[0])
        < 1e-12
    )


@on_ranks(2)
def test_blocks_are_found_from_the_samples_of_a_loader(world: World) -> None:
    """And an evaluation sends what a training step sends."""
    samples = batch("unet")
    data = TensorDataset(samples["images"], samples["labels"])
    losses = []
    for words in ("pp=2 1f1b mb=4", "dp_replicate=2 mb=4"):
        run = Run(f"fp32 {words}", world=world, seed=0)
        model = build("unet").eval()
        loaders: Any = DataLoader(data, batch_size=8)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loaders)
        held_out = run.prepare(DataLoader(data, batch_size=8))
        losses.append(run.evaluate(held_out))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@on_ranks(2)
def test_a_plain_sequential_needs_no_loader(world: World) -> None:
    run = Run("pp=2 mb=4", world=world)
    model = widths()
    run.prepare(model)
    assert "0.weight" in run.composed.named if world.is_main else "4.bias" in run.composed.named
