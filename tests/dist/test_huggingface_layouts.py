"""Unmodified models of transformers, without a description of their own, under every layout: losses, gradients and
weights of plain torch with transformers' own attention, in float64.

`make test` tries a few architectures, `make test-all` every one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal import ShoalError
from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.train.build_model import adapt, describe
from shoal.train.run import Run
from shoal.verification.case import Case
from shoal.verification.exact_casts import keeping_float64
from shoal.verification.rank import verify_in
from tests.cover import wide
from tests.dist.pool import Pool
from tests.rejects import rejects

pytest.importorskip("transformers")
import transformers

from tests import huggingface

LAYOUTS = ["zero=3 mb=1", "tp=2 sp=off mb=2", "tp=2 sp=on mb=2", "pp=2 1f1b mb=2", "cp=2 mb=2", "cp=2 ulysses mb=2"]
WITH_EXPERTS = [*LAYOUTS, "ep=2 zero=3 mb=1"]
SHORT = ["qwen3-moe"]


def largest_differences(world: World, kind: str, pads: bool, plans: list[str]) -> dict[str, float | None]:
    """Plan → the largest relative difference of a loss, gradient or weight; None: rejected as it should be. Traffic is
    as predicted."""
    found: dict[str, float | None] = {}
    for words in plans:
        case = Case(
            build=functools.partial(huggingface.build, kind),
            batches=[huggingface.batch(kind, pads=pads)] * 2,
            plan=Plan.parse(f"fp64 {words}").resolve(world.size),
        )
        if any(word in words.split() for word in huggingface.REJECTED.get(kind, ())):
            with pytest.raises(ShoalError, match="cannot divide this model"):
                verify_in(world, case)
            found[words] = None
            continue
        findings = verify_in(world, case)
        is_predicted = (kind, words.split()[0]) not in huggingface.more.OTHER_TRAFFIC
        for axis, operations in (findings.predicted_traffic or {}).items():
            for name, messages in operations.items():
                counted = findings.traffic.get(axis, {}).get(name, {})
                if axis == "ep":  # a mean over ranks: routers send more to some
                    continue
                assert counted.get("bytes", 0) == messages.bytes or not is_predicted, (words, axis, name)
        if findings.predicted_traffic is None and is_predicted:
            raise AssertionError(f"{words}: nothing was predicted")
        if findings.verdict is not None:
            assert findings.verdict.equal, f"{words}: {findings.verdict.first}"
            worst = findings.verdict.worst
            found[words] = max(worst.loss, worst.grad, worst.weight, worst.grad_norm)
    return found


@pytest.mark.parametrize("kind", [kind if kind in SHORT else wide(kind) for kind in huggingface.ALL if kind != "clip"])
def test_a_model_of_transformers_under_every_layout(pool: Pool, kind: str) -> None:
    plans = WITH_EXPERTS if kind in huggingface.EXPERTS or kind in huggingface.more.WITH_EXPERTS else LAYOUTS
    found = pool.run(largest_differences, 2, kind, False, plans)[0]
    assert found.keys() == set(plans)
    assert max(difference for difference in found.values() if difference is not None) < 1e-10


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("afmoe", "tp=2 sp=on mb=2"),  # a layer is split inside of a module with a bias for its router, on flat tokens
        ("dbrx", "zero=3 mb=1"),  # reads weights of a module without calling it
        ("bart", "tp=2 sp=on mb=2"),  # a decoder divides its tokens, and reads all of the encoder's
        wide("t5", "tp=2 sp=on mb=2"),  # whole attentions that pass a bias on
        wide("beit", "tp=2 sp=on mb=2"),  # layers are split inside of a block with scales of its own
        wide("lfm2", "tp=2 sp=on mb=2"),  # a convolution over tokens is inside of a region
    ],
)
def test_layers_inside_of_modules_with_parameters(pool: Pool, kind: str, words: str) -> None:
    assert len(pool.run(largest_differences, 2, kind, False, [words])[0]) == 1


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["lfm2", "t5", "bart", "jamba", "qwen3-next", "mpnet", "bloom", "gemma3n"])
def test_padded_tokens_are_masked_where_tokens_are_divided(pool: Pool, kind: str) -> None:
    plans = ["tp=2 sp=on mb=2", "tp=2 sp=off mb=2"]
    assert len(pool.run(largest_differences, 2, kind, True, plans)[0]) == len(plans)


@pytest.mark.parametrize("kind", ["llama", wide("gemma2"), wide("mistral window"), wide("modernbert")])
def test_padding_is_not_attended_to(pool: Pool, kind: str) -> None:
    plans = LAYOUTS if os.environ.get("SHOAL_ALL") else LAYOUTS[-3:]
    assert len(pool.run(largest_differences, 2, kind, True, plans)[0]) == len(plans)


@pytest.mark.parametrize(
    ("num_ranks", "kind", "words"),
    [
        (2, "gemma2", "pp=2 1f1b mb=1 recompute=full"),  # another microbatch's mask must not be seen
        (2, "vit", "tp=2 mb=2 recompute=full"),  # a recomputation stops inside of a split region
        wide(2, "olmo2", "tp=2 sp=on mb=2"),  # whole attention gathers tokens that are divided around it
        wide(4, "whisper", "tp=2 pp=2 1f1b mb=2"),
        wide(4, "bert", "tp=2 zero=3 mb=1"),
        wide(4, "phi3", "tp=2 zero=3 mb=1"),
        wide(2, "gemma2", "zero=2 mb=1 recompute=full"),
        wide(4, "qwen3-moe", "cp=2 tp=2 mb=2"),
        wide(4, "qwen3-moe", "tp=2 pp=2 1f1b mb=2"),
    ],
)
def test_layouts_together(pool: Pool, num_ranks: int, kind: str, words: str) -> None:
    assert len(pool.run(largest_differences, num_ranks, kind, kind == "gemma2", [words])[0]) == 1


@pytest.mark.parametrize("words", ["pp=2 1f1b mb=2", "cp=2 mb=2", "tp=2 sp=on"])
def test_packed_positions_are_rejected(words: str) -> None:
    model = huggingface.build("llama")
    adapt(model, describe(model), Plan.parse(words).resolve(2))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ShoalError, match="position_ids"):
        model(tokens, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]))


def test_embeddings_are_rejected_where_tokens_are_divided() -> None:
    model = huggingface.build("llama")
    adapt(model, describe(model), Plan.parse("tp=2 sp=on").resolve(2))
    with pytest.raises(ShoalError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 8, model.config.hidden_size))


def test_the_config_of_a_script_stays_its_own() -> None:
    model = huggingface.build("gemma2")
    config, kind = model.config, type(model)
    adapt(model, describe(model), Plan.parse("tp=2 sp=on").resolve(2))
    assert model.config._attn_implementation == "shoal"
    assert config._attn_implementation != "shoal"
    assert all(getattr(module, "config", model.config) is model.config for module in model.modules())
    kind(config)(torch.zeros(1, 8, dtype=torch.int64))  # another model of the same config


def test_the_model_still_generates() -> None:
    """With a cache, from samples that are padded at the start, after its attention was replaced."""
    generated = []
    for words in ("", "pp=2 1f1b"):
        model: Any = huggingface.build("gemma2")
        adapt(model, describe(model), Plan.parse(words or "zero=0").resolve(2))
        tokens = torch.tensor([[0, 0, 5, 7], [3, 4, 5, 6]])
        options = {"attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), "max_new_tokens": 6, "pad_token_id": 0}
        generated.append(model.generate(tokens, do_sample=False, **options))
    assert torch.equal(*generated)


def test_what_is_derived() -> None:
    description = describe(huggingface.build("llama tied"))
    assert description.blocks == ("model.layers.0", "model.layers.1")
    assert description.before_blocks == ("model.embed_tokens",)
    assert description.after_blocks == ("model.norm", "lm_head")
    assert description.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert description.head == "lm_head"
    granite, gemma = (describe(huggingface.build(kind)) for kind in ("granite", "gemma2"))
    assert (granite.head, granite.logit_scale, granite.logit_softcap) == ("lm_head", 0.5, None)
    assert (gemma.head, gemma.logit_scale, gemma.logit_softcap) == ("lm_head", 1.0, 3.0)


def test_positions_that_do_not_count_from_0() -> None:
    sizes = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(**sizes, num_attention_heads=4, max_position_embeddings=16)
    assert "counts positions from its padding token" in describe(transformers.RobertaForMaskedLM(config)).why_not["cp"]


@pytest.mark.wide
@pytest.mark.parametrize("words", ["pp=2 1f1b mb=2", "tp=2"])
def test_a_model_itself_is_verified(words: str) -> None:
    """A model that has values, as from_pretrained returns it."""
    model = huggingface.build("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert shoal.verify(model, huggingface.batch("qwen2"), words, steps=1).verdict.equal
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert getattr(model.config, "_attn_implementation", None) == "sdpa"


def with_next_tokens(world: World) -> None:
    run = Run("fp64 cp=2", world=world)
    run.prepare(huggingface.build("llama"))
    run.prepare(torch.optim.SGD(run.parameters, lr=0.0))
    ids = torch.randint(huggingface.VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ShoalError, match="shifted by one already"):
        run.step({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})


def own_description() -> nn.Module:
    """Its labels are shifted, its padding is masked and its casts are exact as without a description of its own."""
    model = huggingface.build("llama")
    derived = describe(model)
    model.describe = lambda: replace(derived, num_kv_heads=None)
    return model


def verified(world: World, build: Callable[[], nn.Module], words: str) -> bool:
    case = Case(build=build, batches=[huggingface.batch("llama")], plan=Plan.parse(f"fp64 {words}").resolve(world.size))
    verdict = verify_in(world, case).verdict
    return verdict is None or verdict.equal


def classifier(name: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, num_labels=3, pad_token_id=0)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model: nn.Module = getattr(transformers, f"{name}ForSequenceClassification")(config)
    return model


def classified(world: World, name: str, labels: Tensor) -> bool:
    ids = torch.randint(1, 32, (4, 6), generator=torch.Generator().manual_seed(0))
    ids[0, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
    plan = Plan.parse("fp64 pp=2 1f1b mb=2" if world.size == 2 else "fp64 mb=2").resolve(world.size)
    verdict = verify_in(world, Case(build=functools.partial(classifier, name), batches=[batch], plan=plan)).verdict
    return verdict is None or verdict.equal


@pytest.mark.parametrize("name", ["Bert", wide("Qwen3")])
def test_a_pipeline_of_a_classifier(pool: Pool, name: str) -> None:
    assert all(pool.run(classified, 2, name, torch.arange(4) % 3))


def rejected(world: World) -> None:
    with rejects("T021", "whole numbers as labels"):
        classified(world, "Bert", torch.rand(4, 3))


def test_labels_of_several_classes_need_a_loss_of_your_own(pool: Pool) -> None:
    pool.run(rejected, 1)


@pytest.mark.parametrize("words", ["pp=2 1f1b mb=2", "cp=2 mb=2"])
def test_a_description_of_your_own_replaces_the_derived_one_alone(pool: Pool, words: str) -> None:
    assert all(pool.run(verified, 2, own_description, words))


def test_labels_that_are_shifted_already_are_rejected(pool: Pool) -> None:
    pool.run(with_next_tokens, 2)


def losses_and_weights(world: World, kind: str, words: str, fused: bool | None) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = huggingface.build(kind).double()
    run = Run(f"fp64 {words}", world=world, fused_layers=fused, fused_loss=False)
    with keeping_float64("fp64", is_foreign=True):
        run.prepare(model)
        run.prepare(torch.optim.SGD(run.parameters, lr=0.3))
        assert (run.fused_layers is not None) == (bool(fused) and run.plan.layout.tp == 1)
        share = 4 // run.degree
        batch = {name: x[run.coordinate * share :][:share] for name, x in huggingface.batch(kind).items()}
        return [float(run.step(one)) for one in run.batches([batch])], run.weights()


def swapped_and_plain(world: World, kind: str, layouts: list[str]) -> list[str]:
    """Layouts in which a loss or a weight differs."""
    wrong = []
    for words in layouts:
        (found, mine), (expected, theirs) = (losses_and_weights(world, kind, words, fused) for fused in (True, False))
        is_same = all(abs(a / b - 1) < 1e-12 for a, b in zip(found, expected, strict=True))
        is_same &= all(float((mine[name] - one).norm()) <= 1e-12 * float(one.norm()) for name, one in theirs.items())
        wrong += [] if is_same and found else [words]
    return wrong


@pytest.mark.parametrize("kind", ["gemma3", wide("llama tied"), wide("qwen3-moe")])
def test_swapped_layers_hold_under_every_layout(pool: Pool, kind: str) -> None:
    """Under tp they are not swapped."""
    layouts = ["zero=3 mb=1", "pp=2 1f1b mb=2", "cp=2 mb=2", "tp=2 sp=off mb=2"]
    assert pool.run(swapped_and_plain, 2, kind, layouts)[0] == []
