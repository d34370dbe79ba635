"""Models on paper: parameters and FLOPs of presets, of a config.json, and of plain dimensions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.predict.huggingface_config import from_hugging_face
from shoal.predict.presets.models import MODELS, find_model
from shoal.predict.workload import Block, Workload
from tests.rejects import rejects

PUBLISHED = {  # billions of parameters, and of active ones where they differ, as the reports print them
    "llama2-7b": (6.74, None),
    "llama2-70b": (68.98, None),
    "llama3-1b": (1.236, None),
    "llama3-8b": (8.03, None),
    "llama3-70b": (70.55, None),
    "llama3-405b": (405.85, None),
    "gpt3-175b": (174.6, None),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.1),
    "qwen2.5-72b": (72.7, None),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.1, 22.2),
    "deepseek-v3": (671.0, 37.5),
    "gpt-oss-120b": (116.8, 5.7),
    "resnet50": (0.02556, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_reports(name: str) -> None:
    total, active = PUBLISHED[name]
    assert MODELS[name].parameters / 1e9 == pytest.approx(total, rel=0.002)
    if active is not None:  # reports count an embedding in, which costs nothing
        model = MODELS[name]
        assert (model.active_parameters + model.embedding_parameters) / 1e9 == pytest.approx(active, rel=0.02)


def test_flops_of_a_token_are_six_per_parameter_and_attention() -> None:
    model = MODELS["llama3-8b"]
    matrices = model.parameters - model.embedding_parameters - 65 * model.hidden  # less the norms
    attention = 6 * 32 * 4096 * 8192  # per layer and token: 12 x features x tokens, half of it masked
    assert model.flops_per_token(8192) == pytest.approx(6 * matrices + attention, rel=1e-6)


def test_a_window_bounds_what_a_token_attends_to() -> None:
    model = MODELS["llama3-8b"]
    assert model.attended(8192) == 4096
    assert model.resized(window=1024).attended(8192) == pytest.approx(1024 * (1 - 1024 / 16384))
    assert model.resized(causal=False).attended(8192) == 8192


def test_resnet_counts_the_flops_that_everybody_quotes() -> None:
    assert sum(block.flops for block in MODELS["resnet50"].blocks) == pytest.approx(2 * 4.09e9, rel=0.02)


def test_a_model_of_blocks_is_what_its_blocks_are() -> None:
    blocks = tuple(Block(name=f"b{i}", parameters=1000, flops=2e6, saved=4e3) for i in range(3))
    model = Workload(name="mine", blocks=blocks)
    assert not model.is_transformer
    assert model.parameters == 3000
    assert model.flops_per_token(1) == 3 * 6e6


CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}


def test_a_config_is_the_preset_of_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert find_model(str(path)).parameters == MODELS["llama3-8b"].parameters


def test_a_config_with_experts_and_latent_attention() -> None:
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    assert from_hugging_face(config, name="v3").parameters == MODELS["deepseek-v3"].parameters


def test_gpt2_has_no_gate_and_a_tied_head() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    assert from_hugging_face(config, name="gpt2").parameters == pytest.approx(124.4e6, rel=0.001)


@pytest.mark.parametrize(
    ("what", "said", "fix"),
    [
        ("llama3-9b", "there is no model 'llama3-9b'", "llama3-8b"),
        ("nowhere/config.json", "cannot be read", "config.json"),
    ],
)
def test_an_unknown_model_is_one_message(what: str, said: str, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        find_model(what)
    assert said in str(caught.value)
    assert fix in str(caught.value)


def test_a_config_names_all_that_is_missing() -> None:
    with rejects("Q022", "hidden_size", "vocab_size"):
        from_hugging_face({"num_hidden_layers": 2, "num_attention_heads": 2}, name="x")


def test_dimensions_that_cannot_be() -> None:
    with rejects("Q024", "heads=0"):
        Workload(name="x", hidden=8, layers=1, heads=0, vocabulary=10)
    with rejects("Q024", "top_k=9", "of 8"):
        MODELS["mixtral-8x7b"].resized(top_k=9)
    with rejects("Q024", match="hidden"):
        MODELS["mixtral-8x7b"].resized(hidden_=9)
