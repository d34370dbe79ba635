"""What tokens of a model see is found with numbers: later ones, and other documents of a packed sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.train.recipe.preflight import preflight
from tests.cover import wide

pytest.importorskip("transformers")
import transformers

from shoal.models.huggingface.pretrained.data.batches import task_of
from shoal.models.huggingface.pretrained.data.token_trials import looks_ahead, mixes_documents, passes_positions
from shoal.verification.options import RecipeSettings
from shoal.verification.recipe.cases import case_of
from tests import huggingface

BERT = {"max_position_embeddings": 16}
OWN = {"n_layers": 2, "n_heads": 4}
BIDIRECTIONAL: dict[str, tuple[str, dict[str, Any]]] = {
    "XLM": ("XLMWithLMHeadModel", {"emb_dim": 16, **OWN}),
    "RoFormer": ("RoFormerForCausalLM", BERT),
    "RemBert": ("RemBertForCausalLM", {**BERT, "input_embedding_size": 16, "output_embedding_size": 16}),
    "MegatronBert": ("MegatronBertForCausalLM", BERT),
    "BigBird": ("BigBirdForCausalLM", BERT),
    "XLNet": ("XLNetLMHeadModel", {"d_model": 16, "d_inner": 24, "n_layer": 2, "n_head": 4}),
}
"""First part of a class's name → the class, whose tokens see later ones by default, and sizes."""
SIZES = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL = ["mamba", "recurrent-gemma", "bloom", *(wide(kind) for kind in ("mamba2", "falcon-mamba", "jamba", "bamba"))]
CAUSAL += [wide(kind) for kind in ("gpt-neo", "codegen", "gptj", "falcon", "mpt", "jetmoe", "dbrx", "openai-gpt")]
LARGE = ["Mamba", "Bloom", "OpenAIGPT", *map(wide, ("CodeGen", "Mamba2", "Bamba", "Rwkv", "Mpt"))]


def bidirectional(kind: str) -> Any:
    name, sizes = BIDIRECTIONAL[kind]
    given = {key: size for key, size in SIZES.items() if kind not in ("XLM", "XLNet") or key == "vocab_size"}
    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**given, **sizes))


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
def test_a_model_that_sees_later_tokens_is_no_language_model(kind: str) -> None:
    model = bidirectional(kind)
    assert looks_ahead(model) is True
    assert task_of(model) is None


def test_a_decoder_of_the_same_class_is_one() -> None:
    config = transformers.RoFormerConfig(**SIZES, **BERT, is_decoder=True)
    assert task_of(transformers.RoFormerForCausalLM(config)) == "next token"


@pytest.mark.parametrize("kind", CAUSAL)
def test_models_without_known_attention_are_language_models(kind: str) -> None:
    assert task_of(huggingface.build(kind)) == "next token"


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_model_is_tried_as_a_tiny_one(kind: str) -> None:
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config = getattr(transformers, f"{kind}Config")()
    with torch.device("meta"):
        model = getattr(transformers, known[config.model_type])(config)
    assert looks_ahead(model) is False


def test_a_large_model_that_takes_no_cache_by_name_keeps_documents_apart() -> None:
    with torch.device("meta"):
        model = transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig())
    assert mixes_documents(model) is False


def problems(folder: Path, *, verifies: bool = False, **settings: Any) -> list[str]:
    """Code and fix of what a run, or a verification of a small copy, finds before it starts."""
    own = {"source": str(folder / "data.jsonl"), "seq_len": 8, "global_batch": 2, "validation": 0, **settings}
    data = {"tokenizer": "bytes", "mask_documents": True, **own}
    (folder / "data.jsonl").write_text('{"text": "one and another"}\n' * 20)
    recipe = Recipe.model_validate({"model": {"name": f"hf:{folder}", "init": "random"}, "data": data, "plan": "mb=1"})
    try:
        if verifies:
            case_of(recipe, 1, RecipeSettings())
        else:
            preflight(recipe, 1)
    except ShoalError as error:
        return [f"{problem.code} {problem.fix}" for problem in error.problems]
    return []


@pytest.mark.parametrize("kind", ["gpt-oss", "afmoe"])
def test_documents_that_see_each_other_are_rejected(kind: str, tmp_path: Path) -> None:
    """Their classes make masks without the positions by which transformers knows packed samples."""
    model: Any = huggingface.build(kind)
    model.config.vocab_size = 300
    model.config.save_pretrained(tmp_path)
    assert mixes_documents(model) is True
    assert [one[:4] for one in problems(tmp_path)] == ["L016"]
    assert problems(tmp_path, mask_documents=False) == []
    assert [one[:4] for one in problems(tmp_path, verifies=True)] == ["L016"]
    assert problems(tmp_path, mask_documents=False, verifies=True) == []
    assert [one[:4] for one in problems(tmp_path, mask_documents=False, pack=True, verifies=True)] == ["L016"]


def test_the_text_of_a_class_shows_its_masks() -> None:
    """Where a copy cannot be tried."""
    assert passes_positions(huggingface.build("llama"))
    assert not passes_positions(huggingface.build("afmoe"))
    assert not passes_positions(huggingface.build("gpt-oss"))


def test_documents_that_are_kept_apart_are_not_rejected(tmp_path: Path) -> None:
    model: Any = huggingface.build("llama")
    model.config.vocab_size = 300
    model.config.save_pretrained(tmp_path)
    assert problems(tmp_path) == []
    assert problems(tmp_path, verifies=True) == []


def test_a_loss_of_routers_is_rejected(tmp_path: Path) -> None:
    """A recipe compares logits alone."""
    model: Any = huggingface.build("mixtral")
    model.config.vocab_size, model.config.output_router_logits = 300, True
    model.config.save_pretrained(tmp_path)
    assert problems(tmp_path) == ["M089 --model.output_router_logits false"]
    assert problems(tmp_path, verifies=True) == ["M089 --model.output_router_logits false"]
