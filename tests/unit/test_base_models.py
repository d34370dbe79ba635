"""A folder of transformers without the head that a recipe trains, and one with too few rows for its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config.recipe import Recipe
from shoal.train.recipe.preflight import preflight
from tests.rejects import rejects

transformers = pytest.importorskip("transformers")
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32}


def checked(folder: Path, **data: object) -> None:
    preflight(Recipe.model_validate({"model": {"name": f"hf:{folder}"}, "data": {"source": "synthetic", **data}}), 1)


def test_a_base_model_is_to_be_saved_with_its_head(tmp_path: Path) -> None:
    transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "llama")
    transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)).save_pretrained(
        tmp_path / "gpt2"
    )
    for name, sibling in (("llama", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel")):
        with rejects("M079", sibling, "fix: transformers.AutoModelForCausalLM"):
            checked(tmp_path / name)


def test_an_encoder_has_no_such_head(tmp_path: Path) -> None:
    config = transformers.BertConfig(**LLAMA)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with rejects("M079", "fix: a loop of your own"):
        checked(tmp_path)


def test_more_tokens_than_the_model_has(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    with rejects("D033", "model.resize_token_embeddings(40)"):
        checked(tmp_path, vocabulary=40)
