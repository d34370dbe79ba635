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
from shoal.checkpoint.state.base_fingerprint import fingerprint
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.models.llama import build
from shoal.numerics.init import initialise
from shoal.parallel.lora.quantize import quantized_layers
from shoal.train.build_model import build_for_layout
from shoal.train.recipe.saving.start_weights import expect_weights, start_with_weights
from shoal.train.run import Run
from shoal.verification.exact_casts import keeping_float64
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks
from tests.rejects import rejects

SIZES: dict[str, Any] = {"vocabulary": 13, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
WIDE = {"hidden": 128, "ffn": 128}
"""A rank of tp=2 has 64 columns of layers that are split by rows: a block."""
STEPS, SAVED_AT = 3, 2


def adapted() -> nn.Module:
    model = shoal.lora(build(**SIZES, **WIDE), rank=3)
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
        ((2, "tp=2 sp=on"), (2, "zero=3")),
        wide((1, "recompute=full"), (2, "tp=2 sp=off recompute=full mb=1")),
        wide((2, "cp=2 zero=0"), (4, "pp=2 gpipe zero=1 mb=1")),
        wide((4, "tp=2 zero=2"), (4, "tp=2 pp=2 1f1b mb=2")),
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


@on_ranks(2)
def test_a_cut_inside_of_a_block_is_rejected(world: World) -> None:
    model = shoal.lora(build(**SIZES, hidden=64, ffn=128), rank=3)
    initialise(model, seed=0)
    with rejects("L032", "tp=2", "o_proj", "[64, 64]", "after 32 columns"):
        Run("fp64 tp=2", world=world).prepare(shoal.quantize_base(model))


def of_recipe(world: World, plan: str, folder: Path) -> tuple[dict[str, Tensor], str, int]:
    """The adapters after two steps from a folder, the fingerprint of the base, and this rank's numbers in floating
    point that are neither adapters nor small."""
    recipe = Recipe.model_validate({"model": {"name": f"hf:{folder}", "lora": {"rank": 3, "base": "nf4"}}})
    torch.manual_seed(0)
    run = Run(f"fp64 {plan}", world=world, fused_layers=world.size > 1)  # which on one device compute the same
    model = build_for_layout(recipe.model, 0)
    expect_weights(recipe, model)
    run.prepare(model)
    run.prepare(torch.optim.SGD(trained(run.composed.model), lr=0.1, momentum=0.9))
    start_with_weights(run, recipe)
    size = 4 // run.degree
    for step in range(2):
        own = tokens(step)[run.coordinate * size : (run.coordinate + 1) * size]
        with keeping_float64("fp64", is_foreign=True):
            run.step({"tokens": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous()})
    left = sum(p.numel() for n, p in run.composed.named.items() if "proj.weight" in n)
    return {n: w for n, w in run.weights().items() if "lora" in n}, fingerprint(run.composed, world), left


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 13, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def on_one_rank(pool: Pool, llama: Path) -> tuple[dict[str, Tensor], str, int]:
    found: tuple[dict[str, Tensor], str, int] = pool.run(of_recipe, 1, "", llama)[0]
    return found


@pytest.mark.parametrize(
    "plan",
    ["zero=3", wide("zero=1"), wide("zero=2 mb=1"), wide("tp=2 sp=off"), wide("tp=2 sp=on"), wide("pp=2 1f1b mb=2")],
)
def test_a_base_that_a_recipe_packs(pool: Pool, llama: Path, on_one_rank: tuple[Any, ...], plan: str) -> None:
    """As on one rank, from the same files: no rank has a frozen weight of a layer with adapters."""
    (found, base, left), (expected, same, _) = pool.run(of_recipe, 2, plan, llama)[0], on_one_rank
    assert (base, left) == (same, 0)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-11, atol=1e-13)
