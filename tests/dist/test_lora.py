"""LoRA under every layout: losses, gradients and weights of one process, in float64; and only adapters travel."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import shoal
from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.models.llama import build
from shoal.train.run import Run
from shoal.verification.case import Case
from shoal.verification.rank import verify_in
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks
from tests.rejects import rejects

LAYOUTS = ["zero=0 mb=1", "zero=3 mb=1", "tp=2 sp=on recompute=full mb=2", "pp=2 zb mb=1"]
OTHERS = ["zero=1 mb=1", "zero=2 mb=1", "tp=2 sp=off mb=2", "tp=2 sp=on mb=2", "pp=2 1f1b mb=1", "cp=2 mb=2"]
SIZES = {"vocabulary": 13, "hidden": 16, "ffn": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def llama() -> nn.Module:
    return shoal.lora(build(**SIZES), rank=3)


def of_transformers(name: str) -> nn.Module:
    from tests import huggingface

    torch.manual_seed(0)
    model = shoal.lora(huggingface.build(name), rank=3)
    for one, parameter in model.named_parameters():
        if one.endswith("lora_B"):  # else A has no gradient in the first step
            parameter.data.normal_(std=0.1)
    return model


transformers_qwen2, transformers_gpt2, transformers_phi3 = (
    partial(of_transformers, name) for name in ("qwen2", "gpt2", "phi3")
)


def classifier() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_labels=3)
    torch.manual_seed(0)
    return shoal.lora(transformers.LlamaForSequenceClassification(config), rank=3)


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    if name == "classes":
        tokens = torch.randint(1, 13, (4, 8), generator=torch.Generator().manual_seed(1))
        return [{"input_ids": tokens, "labels": torch.tensor([0, 2, 1, 2])}] * 2
    tokens = torch.randint(13, (4, 8), generator=torch.Generator().manual_seed(1))
    shifted = tokens.roll(-1, 1) if name == "tokens" else tokens  # transformers shifts by itself
    return [{name: tokens, "labels": shifted}] * 2


def worst(world: World, build_model: str, name: str, plans: list[str]) -> dict[str, float]:
    """Plan → the largest relative difference; traffic is counted as predicted."""
    found = {}
    for words in plans:
        case = Case(
            build=globals()[build_model], batches=batches(name), plan=Plan.parse(f"fp64 {words}").resolve(world.size)
        )
        findings = verify_in(world, case)
        assert findings.predicted_traffic is not None, words
        for axis, operations in findings.predicted_traffic.items():
            for operation, messages in operations.items():
                assert findings.traffic.get(axis, {}).get(operation, {}).get("bytes", 0) == messages.bytes, words
        if findings.verdict is not None:
            assert findings.verdict.equal, f"{words}: {findings.verdict.first}"
            differences = findings.verdict.worst
            found[words] = max(differences.loss, differences.grad, differences.weight)
    return found


@pytest.mark.parametrize("plans", [LAYOUTS, wide(OTHERS)])
def test_lora_under_every_layout(pool: Pool, plans: list[str]) -> None:
    found = pool.run(worst, 2, "llama", "tokens", plans)[0]
    assert found.keys() == set(plans)
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("gpt2", ["tp=2 sp=on mb=2"]),  # layers whose weight has the inputs first; queries, keys and values in one
        wide("gpt2", ["tp=2 sp=off mb=2", "tp=2 sp=on recompute=full mb=1", "zero=3 mb=1", "pp=2 1f1b mb=1", "cp=2"]),
        wide("qwen2", ["tp=2 sp=on recompute=full mb=2", "pp=2 1f1b mb=1"]),  # q, k and v have a bias
        wide("phi3", ["tp=2 sp=off mb=2"]),
    ],
)
def test_lora_on_a_model_of_transformers(pool: Pool, name: str, plans: list[str]) -> None:
    found = pool.run(worst, 2, f"transformers_{name}", "input_ids", plans)[0]
    assert found.keys() == set(plans)
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize("plans", [["zero=3 mb=1"], wide(["zero=0 mb=1", "tp=2 sp=off mb=2", "tp=2 sp=on mb=2"])])
def test_a_classifier_whose_head_trains_whole(pool: Pool, plans: list[str]) -> None:
    found = pool.run(worst, 2, "classifier", "classes", plans)[0]
    assert found.keys() == set(plans)
    assert max(found.values()) < 1e-10


def trained_with_dropout(world: World, plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = Run(f"fp64 {plan} mb=2", world=world)
    run.prepare(shoal.lora(build(**SIZES), rank=3, dropout=0.3))
    run.prepare(torch.optim.SGD([p for p in run.parameters if p.requires_grad], lr=0.5))
    return [float(run.step(batch)) for batch in batches("tokens")], run.weights()


@pytest.mark.parametrize("plan", ["tp=2 sp=on", wide("tp=2 sp=off"), wide("tp=2 recompute=full")])
def test_dropout_draws_what_one_device_draws(pool: Pool, plan: str) -> None:
    (losses, weights), (expected, theirs) = (pool.run(trained_with_dropout, n, p)[0] for n, p in ((2, plan), (1, "")))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert all(float((weights[name] - one).norm()) <= 1e-12 * float(one.norm()) for name, one in theirs.items())
    assert any(float(one.norm()) for name, one in weights.items() if "lora_B" in name)


@on_ranks(2)
def test_the_frozen_base_is_in_the_precision_of_the_arithmetic(world: World) -> None:
    run = Run("zero=3 bf16", world=world)
    run.prepare(llama())
    dtypes = {name: parameter.dtype for name, parameter in run.composed.named.items()}
    assert {dtype for name, dtype in dtypes.items() if "lora" not in name} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if "lora" in name} == {torch.float32}
    optimizer = torch.optim.AdamW([p for p in run.parameters if p.requires_grad], lr=1e-2)
    run.prepare(optimizer)
    losses = [float(run.step(batches("tokens")[0])) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05
    assert len(optimizer.state) == 2 * 7 * 2


@on_ranks(2)
def test_a_stage_without_adapters_is_rejected(world: World) -> None:
    model = shoal.lora(build(**SIZES), targets=r"model\.layers\.1\..*")
    with rejects("L005", "pp=2", "model.layers.0"):
        Run("pp=2 1f1b", world=world).prepare(model)
    with rejects("L006", "fp8"):
        Run("zero=3 fp8", world=world).prepare(llama())
