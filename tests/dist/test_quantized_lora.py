"""Adapters beside frozen weights in 4 bits, on several ranks: as plain torch beside the rounded weights, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.comm.world import World
from shoal.models.llama import build
from shoal.numerics.init import initialise
from shoal.parallel.lora.quantize import quantized_layers
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool

SIZES: dict[str, Any] = {"vocabulary": 13, "hidden": 16, "ffn": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
STEPS, SAVED_AT = 3, 2


def adapted() -> nn.Module:
    model = shoal.lora(build(**SIZES), rank=3)
    initialise(model, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model.double()


def tokens(step: int) -> Tensor:
    return torch.randint(13, (4, 9), generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@cache
def plain() -> list[dict[str, Tensor]]:
    """The adapters after each step, by torch's own linear layers with the weights that the codes stand for."""
    model, packed = adapted(), shoal.quantize_base(adapted())
    for name, layer in quantized_layers(packed).items():
        model.get_parameter(f"{name}.weight").data = layer.packed.unpacked()
    optimizer, found = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(tokens(step)[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens(step)[:, 1:].flatten()).backward()
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})
    return found


def go(world: World, plan: str, steps: range, load: Path | None, save: Path | None) -> dict[str, Tensor]:
    run, model = Run(f"fp64 {plan}", world=world), shoal.quantize_base(adapted())
    run.prepare(model, torch.optim.SGD(trained(model), lr=0.1, momentum=0.9))
    if load is not None:
        assert run.load(load) == steps.start
    size = 4 // run.degree
    for step in steps:
        own = tokens(step)[run.coordinate * size : (run.coordinate + 1) * size]
        run.step({"tokens": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous()})
    if save is not None:
        run.save(save)
    return {name: weight for name, weight in run.weights().items() if "lora" in name}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "dp_replicate=2"), (2, "pp=2 1f1b mb=2")),
        wide((2, "zero=3"), (1, "recompute=full")),
        wide((2, "cp=2 zero=0"), (4, "pp=2 gpipe zero=1 mb=1")),
    ],
)
def test_adapters_beside_four_bits(pool: Pool, tmp_path: Path, first: tuple[int, str], second: tuple[int, str]) -> None:
    for (size, plan), steps, load, save in (
        (first, range(SAVED_AT), None, tmp_path),
        (second, range(SAVED_AT, STEPS), tmp_path, None),
    ):
        found, expected = pool.run(go, size, plan, steps, load, save)[0], plain()[steps.stop - 1]
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-11, atol=1e-13)
