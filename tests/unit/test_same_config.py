"""A pretrained model that starts with the weights of another folder: both config.json must compute the same."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import shoal
from shoal.config.recipe import Recipe
from shoal.models.llama import build
from shoal.train.recipe.preflight import preflight
from tests.rejects import rejects

pytest.importorskip("transformers")
import transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def saved(folder: Path, **changes: Any) -> str:
    """A tiny llama, whose config.json then says something else."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(folder)


def check(model: str, weights: str, **settings: Any) -> None:
    data = {"source": "synthetic", "vocabulary": 64, "seq_len": 32}
    sections = {"model": {"name": f"hf:{model}", **settings}, "data": data, "run": {"start_from": weights}}
    preflight(Recipe.model_validate({**sections, "plan": "fp32"}), 1)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rms_norm_eps", 0.01, "model.rms_norm_eps must be 0.01"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 500.0},
            "model.rope_parameters.rope_theta must be 500",
        ),
        ("hidden_act", "gelu", 'model.hidden_act must be "gelu"'),
        ("layer_scale", 2.0, "model.layer_scale must be 2.0"),
    ],
)
def test_weights_of_another_config_are_rejected(tmp_path: Path, key: str, value: Any, said: str) -> None:
    """The shapes of all tensors are the same: nothing else would notice."""
    ours, theirs = saved(tmp_path / "ours"), saved(tmp_path / "theirs", **{key: value})
    with rejects("C051", said, theirs, f"--model.name hf:{theirs}, without --run.start_from"):
        check(ours, theirs)


@pytest.mark.parametrize("value", [1e-6, 0.01, 0.5])
def test_a_value_that_is_set_is_meant(tmp_path: Path, value: float) -> None:
    check(saved(tmp_path / "ours"), saved(tmp_path / "theirs", rms_norm_eps=0.01), rms_norm_eps=value)


def test_the_fixes_keep_our_values(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ours, theirs = saved(tmp_path / "ours"), saved(tmp_path / "theirs", rms_norm_eps=0.01, rope_parameters=rope)
    with rejects("C051", "model.rope_parameters.factor must be 2.0", "got null") as caught:
        check(ours, theirs)
    words = [shlex.split(problem.fix)[-2:] for problem in caught.value.problems]
    assert ["--model.rms_norm_eps", "1.0e-06"] in words
    check(ours, theirs, **{flag.removeprefix("--model."): yaml.safe_load(value) for flag, value in words})


def test_weights_of_another_kind_are_rejected(tmp_path: Path) -> None:
    """The tensors of a Mistral have the names and the shapes of a llama, and its attention has a window."""
    ours, theirs = saved(tmp_path / "ours"), saved(tmp_path / "theirs", model_type="mistral", sliding_window=4)
    with rejects("M087", "'llama'", "'mistral'", f"--model.name hf:{theirs}, without --run.start_from"):
        check(ours, theirs)


def test_weights_under_another_head_are_rejected(tmp_path: Path) -> None:
    ours, theirs = saved(tmp_path / "ours"), saved(tmp_path / "theirs", architectures=["LlamaForQuestionAnswering"])
    with rejects("M087", "LlamaForCausalLM", "LlamaForQuestionAnswering"):
        check(ours, theirs)


def test_bookkeeping_may_differ(tmp_path: Path) -> None:
    names = {"_name_or_path": "x", "transformers_version": "4.30.0", "torch_dtype": "float16", "unsloth_fixed": True}
    training = {"attention_dropout": 0.1, "use_cache": False, "initializer_range": 0.5, "pad_token_id": 3}
    others = {"architectures": ["LlamaModel"], "id2label": {"0": "a"}, "pretraining_tp": 2, "temperature": 0.6}
    unknown = {"use_mrope": False, "scale_factor": None}
    check(saved(tmp_path / "ours"), saved(tmp_path / "theirs", **names, **training, **others, **unknown))


def test_a_key_that_only_the_other_file_has_is_not_to_be_set(tmp_path: Path) -> None:
    """--model.KEY takes keys of the model's own config."""
    ours, theirs = saved(tmp_path / "ours"), saved(tmp_path / "theirs", layer_scale=2.0)
    with rejects("C051", "model.layer_scale must be 2.0", "got null") as caught:
        check(ours, theirs)
    assert "layer_scale" not in caught.value.problems[0].fix


def test_an_older_file_of_the_same_config_is_taken(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "theirs", rope_theta=10000.0, rope_scaling=None)
    path = Path(theirs) / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({key: said[key] for key in said if key not in ("rope_parameters", "head_dim")}))
    check(saved(tmp_path / "ours"), theirs)


def checkpoint(folder: Path, model: Any, section: dict[str, Any] | None = None) -> str:
    """A step that says of which model it is."""
    with shoal.Run() as run:
        run.prepare(model)
        run.prepare(torch.optim.SGD(run.parameters, lr=0.1))
        run.model_section = section or run.model_section
        run.save(folder)
    return str(folder)


def test_a_checkpoint_of_another_config_is_rejected(tmp_path: Path) -> None:
    ours, theirs = saved(tmp_path / "ours"), saved(tmp_path / "theirs", rms_norm_eps=0.01)
    same = checkpoint(tmp_path / "same", shoal.from_pretrained(ours))
    check(ours, same)
    other = checkpoint(tmp_path / "other", shoal.from_pretrained(theirs))
    with rejects("C051", "model.rms_norm_eps must be 0.01", other, "--model.rms_norm_eps 0.01", "1.0e-06"):
        check(ours, other)
    check(ours, other, rms_norm_eps=0.01)
    check(ours, other, rms_norm_eps=1e-6)
    changed = checkpoint(tmp_path / "changed", shoal.from_pretrained(ours, rms_norm_eps=0.02))
    with rejects("C051", "model.rms_norm_eps must be 0.02", "--model.rms_norm_eps 0.02"):
        check(ours, changed)
    shutil.rmtree(theirs)  # nothing says more
    check(ours, other)


def test_a_checkpoint_of_another_kind_is_rejected(tmp_path: Path) -> None:
    """The tensors of shoal's llama have the names of the other one."""
    ours = saved(tmp_path / "ours")
    other = checkpoint(tmp_path / "other", shoal.from_pretrained(ours))
    with rejects("M087", "'llama'", f"'hf:{ours}'", "--format huggingface"):
        preflight(of_llama(other), 1)
    mistral = saved(tmp_path / "mistral", model_type="mistral", sliding_window=4, architectures=["MistralForCausalLM"])
    with rejects("M087", "'llama'", "'mistral'"):
        check(ours, checkpoint(tmp_path / "c", shoal.from_pretrained(mistral)))


LLAMA = {"vocabulary": 64, "hidden": 32, "ffn": 48, "num_layers": 2}


def of_llama(weights: str, **settings: Any) -> Recipe:
    data = {"source": "synthetic", "vocabulary": 64, "seq_len": 32}
    model = {"name": "llama", **LLAMA, **settings}
    return Recipe.model_validate({"model": model, "data": data, "run": {"start_from": weights}, "plan": "fp32"})


def test_a_checkpoint_of_another_llama_is_rejected(tmp_path: Path) -> None:
    section = {"name": "llama", **LLAMA, "rope_theta": 10000.0, "max_sequence": 128}
    where = checkpoint(tmp_path, build(**{k: v for k, v in section.items() if k != "name"}), section)
    with rejects("C051", "model.rope_theta must be 10000.0", "got 500000.0", "--model.rope_theta 10000.0"):
        preflight(of_llama(where), 1)
    preflight(of_llama(where, rope_theta=10000.0), 1)
    preflight(of_llama(where, rope_theta=500000.0), 1)  # it is meant
    preflight(of_llama(where, rope_theta=10000.0, max_sequence=64), 1)
