"""shoal's llama with the weights of a folder: its sizes and its rotary positions are those of the folder's config, so
it computes what transformers computes. The export says the same again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.formats.huggingface import config_of, model_of
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.config.recipe import ModelSection, Recipe
from shoal.train.build_model import build_model
from shoal.train.recipe.preflight import preflight
from shoal.train.recipe.saving.start_weights import foreign_tensors
from tests.rejects import rejects

pytest.importorskip("transformers")
import transformers

from shoal.models.huggingface.pretrained.conversion import full

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
FIRST = {"original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 100.0},
    "linear": {"rope_theta": 100.0, "factor": 2.0},
    "llama3": {"rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **FIRST},
    "yarn": {"rope_theta": 100.0, "factor": 4.0, **FIRST},
    "yarn, with its own numbers": {
        **{"rope_theta": 1000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
        **FIRST,
    },
}


def saved(folder: Path, rope: dict[str, Any], kind: str = "default") -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS, rope_parameters={"rope_type": kind, **rope})
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)  # so that attention depends on positions
    model.save_pretrained(folder)
    return model.eval()


def recipe_of(folder: Path, **model: Any) -> Recipe:
    data = {"source": "synthetic", "vocabulary": 64, "seq_len": 48}
    run = {"start_from": str(folder)}
    return Recipe.model_validate({"model": {"name": "llama", **model}, "data": data, "run": run, "plan": "fp32"})


@pytest.mark.parametrize("name", ROPES)
def test_a_llama_from_a_folder_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    rope, kind = ROPES[name], name.partition(",")[0]
    reference = saved(tmp_path, rope, kind)
    section = preflight(recipe_of(tmp_path), 1).recipe.model
    model = build_model(section)
    model.load_state_dict({key: full(one) for key, one in foreign_tensors(model, str(tmp_path)).items()})
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = reference(input_ids=tokens).logits, model(tokens)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    named = {"name": "llama", **section.arguments}
    tensors: dict[str, LazyTensor] = foreign_tensors(model, str(tmp_path))  # type: ignore[assignment]
    exported = config_of(named, tensors)
    assert exported is not None
    assert named.items() <= (model_of(exported, tmp_path) or {}).items()
    again = transformers.LlamaForCausalLM(transformers.LlamaConfig(**exported))
    again.load_state_dict(reference.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=tokens).logits, expected)


def test_other_sizes_than_those_of_the_weights_are_rejected(tmp_path: Path) -> None:
    """The shapes of all tensors are the same under another rope_theta: nothing else would notice."""
    saved(tmp_path, ROPES["default"])
    with rejects("C051", "model.rope_theta must be 100.0", "500000.0", "leave out --model.rope_theta"):
        preflight(recipe_of(tmp_path, rope_theta=500000.0), 1)
    with rejects("C051", "model.hidden must be 64"):
        preflight(recipe_of(tmp_path, preset="tiny"), 1)
    assert preflight(recipe_of(tmp_path, hidden=64, max_sequence=64), 1).recipe.model.arguments["max_sequence"] == 64


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "yarn", **FIRST}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, **FIRST}, "mscale"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": False, **FIRST}, "truncate"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rotary_positions_of_other_kinds_are_rejected(tmp_path: Path, rope: dict[str, Any], said: str) -> None:
    saved(tmp_path, ROPES["default"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": {"rope_theta": 100.0, **rope}}))
    with rejects("C045", said):
        preflight(recipe_of(tmp_path), 1)


def test_weights_of_another_kind_are_rejected(tmp_path: Path) -> None:
    """The tensors of a Mistral have the names and the shapes of a llama, and its attention has a window."""
    saved(tmp_path, ROPES["default"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mistral", "sliding_window": 4}))
    with rejects("C045", "'mistral'", f"--model.name hf:{tmp_path}"):
        preflight(recipe_of(tmp_path, hidden=64), 1)


def test_numbers_that_no_frequency_can_be_computed_from() -> None:
    with rejects("M008", "rope_type must be default, linear, llama3 or yarn, got 'longest'"):
        build_model(ModelSection.model_validate({"name": "llama", "rope_type": "longest"}))
    with rejects("M008", "rope_factor must be at least 1, got 0.5"):
        build_model(ModelSection.model_validate({"name": "llama", "rope_factor": 0.5}))
    with rejects("M008", "rope_low_freq must be below"):
        build_model(ModelSection.model_validate({"name": "llama", "rope_type": "llama3", "rope_low_freq": 4}))
