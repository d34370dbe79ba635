"""Models from folders of transformers: shapes, first weights, buffers and conversions of weights, without ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.formats.huggingface import read
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.config.pretrained_folder import folder_of
from shoal.config.recipe import ModelSection, Recipe
from shoal.numerics.init import initialise, materialise
from shoal.predict.presets.models import find_model
from shoal.train.build_model import build_for_layout, build_model, without_memory
from shoal.train.recipe.preflight import preflight
from shoal.train.recipe.saving.start_weights import check_weights, foreign_tensors
from tests.cover import wide
from tests.rejects import rejects

pytest.importorskip("transformers")
import transformers

from shoal.models.huggingface.pretrained.conversion import full, to_files
from shoal.models.huggingface.pretrained.weights import weights_of
from tests import huggingface

CONVERTED = ["llama tied", "mixtral", wide("gpt2"), wide("gpt-oss"), wide("qwen3-moe"), wide("deepseek-v3")]


def saved(folder: Path, kind: str) -> Any:
    """A tiny model in a folder, as transformers writes it, and reads it again."""
    torch.manual_seed(0)
    huggingface.build(kind).save_pretrained(folder)
    return type(huggingface.build(kind)).from_pretrained(folder)


def on_meta(folder: Path, **arguments: Any) -> Any:
    model = without_memory(lambda: build_model(ModelSection(name=f"hf:{folder}", **arguments)))
    assert model is not None
    return model


@pytest.mark.parametrize("kind", CONVERTED)
def test_weights_are_converted_as_transformers_does_and_back(tmp_path: Path, kind: str) -> None:
    reference = saved(tmp_path, kind)
    model = on_meta(tmp_path)
    found = weights_of(model, tmp_path)
    expected = reference.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(full(found[name]), tensor) for name, tensor in expected.items())
    in_files = read(tmp_path)
    back = to_files(model, {name: tensor for name, tensor in found.items() if name not in model.first_names})
    assert back.keys() == in_files.keys()
    assert all(torch.equal(full(back[name]), full(tensor)) for name, tensor in in_files.items())


def test_a_stacked_tensor_is_read_box_by_box(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")
    stacked = weights_of(on_meta(tmp_path), tmp_path)["model.layers.0.mlp.experts.gate_up_proj"]
    assert [box.begin for box in stacked.boxes] == [(e, row, 0) for row in (0, 24) for e in range(4)]


def test_an_unknown_conversion_is_computed_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = saved(tmp_path, "mixtral")
    for name in ("_STACKED", "_TAKEN_APART"):
        monkeypatch.setattr(f"shoal.models.huggingface.pretrained.conversion.{name}", [])
    model = on_meta(tmp_path)
    found = weights_of(model, tmp_path)
    assert all(torch.equal(full(found[name]), tensor) for name, tensor in reference.state_dict().items())
    assert all(torch.equal(full(to_files(model, found)[name]), full(one)) for name, one in read(tmp_path).items())


ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    "yarn": {"original_max_position_embeddings": 8},
    "linear": {},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_frequencies_are_those_of_the_class(tmp_path: Path, rope: str) -> None:
    import transformers

    parameters = {"rope_type": rope, "rope_theta": 100.0, "factor": 4.0, **ROPES[rope]}
    config = transformers.LlamaConfig(**huggingface.SMALL, rope_parameters=parameters)
    config.save_pretrained(tmp_path)
    model = filled(build_for_layout(ModelSection(name=f"hf:{tmp_path}", init="random"), 0))
    expected = transformers.LlamaForCausalLM(config).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**huggingface.SMALL)).model.rotary_emb.inv_freq
    assert not torch.equal(expected, plain)


def filled(model: Any) -> Any:
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    materialise(model, "cpu")
    initialise(model, 0)
    return model


def test_random_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    reference = type(loaded := saved(tmp_path, "mixtral"))(loaded.config)  # with first weights of its own
    first = filled(build_for_layout(ModelSection(name=f"hf:{tmp_path}", init="random"), 0))
    layers = first.model.layers
    assert not torch.equal(layers[0].self_attn.q_proj.weight, layers[1].self_attn.q_proj.weight)
    torch.manual_seed(7)
    second = build_model(ModelSection(name=f"hf:{tmp_path}", init="random"))
    initialise(second, 0)
    for (name, one), other, theirs in zip(
        first.named_parameters(), second.parameters(), reference.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        assert one.std().detach() == pytest.approx(theirs.std().detach().item(), rel=0.3), name  # transformers' rule


def test_a_model_takes_the_batch_of_a_recipe(tmp_path: Path) -> None:
    reference = saved(tmp_path, "llama tied")
    model: nn.Module = build_model(ModelSection(name=f"hf:{tmp_path}"))
    model.load_state_dict(reference.state_dict())
    tokens = torch.randint(huggingface.VOCABULARY, (2, 8))
    out: Tensor = model(tokens=tokens).logits
    assert torch.equal(out, reference(input_ids=tokens).logits)


def test_settings_replace_those_of_the_config(tmp_path: Path) -> None:
    saved(tmp_path, "llama tied")
    model = on_meta(tmp_path, num_hidden_layers=1)
    assert len(model.model.layers) == 1


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "use_cache"])
def test_settings_that_change_nothing_are_rejected(tmp_path: Path, key: str) -> None:
    saved(tmp_path, "llama tied")
    with rejects("M088", f"model.{key}", "leave out --model.use_cache" if key == "use_cache" else "optim.param_dtype"):
        build_model(ModelSection(name=f"hf:{tmp_path}", **{key: "bfloat16"}))


def test_no_value_is_read_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "mixtral")

    def reads(*_: Any) -> Any:
        raise AssertionError("a value was read")

    monkeypatch.setattr("shoal.checkpoint.formats.safetensors._rows", reads)
    found: dict[str, LazyTensor] = weights_of(on_meta(tmp_path), tmp_path)
    assert len(found) == 21


def test_a_name_of_the_hub_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    assert folder_of("hf:owner/name") == snapshot
    with rejects("M071", "owner/other", "hf download owner/other"):
        folder_of("hf:owner/other")


def test_a_run_of_shoals_llama_starts_from_a_folder(tmp_path: Path) -> None:
    reference = saved(tmp_path, "llama")
    sizes = {"vocabulary": 41, "hidden": 16, "ffn": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    recipe = Recipe.model_validate({"model": {"name": "llama", **sizes}, "run": {"start_from": str(tmp_path)}})
    model = without_memory(lambda: build_model(recipe.model))
    assert model is not None
    assert check_weights(recipe, model) == []
    found = foreign_tensors(model, str(tmp_path))
    assert all(torch.equal(full(found[name]), one) for name, one in reference.named_parameters())
    wrong = without_memory(lambda: build_model(ModelSection(name="llama", **sizes | {"num_layers": 3})))
    assert wrong is not None
    assert [problem.code for problem in check_weights(recipe, wrong)] == ["C011"]


def test_values_that_the_class_computes_follow_settings(tmp_path: Path) -> None:
    """head_dim is hidden_size / heads, unless the file says it."""
    saved(tmp_path, "llama")
    path = tmp_path / "config.json"
    said = {key: value for key, value in json.loads(path.read_text()).items() if key != "head_dim"}
    path.write_text(json.dumps(said))
    model = on_meta(tmp_path, hidden_size=2 * said["hidden_size"], init="random")
    assert model.config.head_dim == 2 * said["hidden_size"] // said["num_attention_heads"]
    assert model.model.layers[0].self_attn.q_proj.weight.shape[0] == 2 * said["hidden_size"]


def test_the_fix_of_weights_that_do_not_fit_names_the_setting(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    with rejects("M075", "layers.2.self_attn.q_proj.weight is missing", "--model.num_hidden_layers 2, as in"):
        weights_of(on_meta(tmp_path, num_hidden_layers=3), tmp_path)


def test_a_tied_pair_with_two_values_is_rejected(tmp_path: Path) -> None:
    """transformers keeps both; the head would be lost."""
    saved(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    with rejects("M075", "lm_head.weight", "model.embed_tokens.weight"):
        weights_of(on_meta(tmp_path), tmp_path)


def test_a_config_with_an_infinite_number_is_read(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8}
    config = transformers.Mamba2Config(**sizes, state_size=8, n_groups=1, chunk_size=8)
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    assert on_meta(tmp_path).config.time_step_limit[1] == float("inf")
    with rejects("Q022", "state_size"):
        find_model(f"hf:{tmp_path}")


def test_a_task_without_data_is_rejected(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    recipe = Recipe.model_validate({"model": {"name": f"hf:{tmp_path}"}, "data": {"source": "synthetic"}})
    with rejects("M079", "BertForMaskedLM"):
        preflight(recipe, 1)


def test_a_class_of_the_folders_own_code_is_not_replaced_by_that_of_its_model_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain llama was trained, without what the folder's code adds to it."""
    saved(tmp_path, "llama tied")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Mine"], "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("import transformers\nclass Mine(transformers.LlamaForCausalLM): pass\n")
    with rejects("M072", "Mine", "trust_remote_code"):
        build_model(ModelSection(name=f"hf:{tmp_path}"))
    cache = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    model = build_model(ModelSection(name=f"hf:{tmp_path}", trust_remote_code=True))
    assert type(model).__mro__[1].__name__ == "Mine"


def test_a_config_that_is_rejected_by_its_class_is_reported_with_its_values(tmp_path: Path) -> None:
    """The message ended before the reason, which transformers puts on a second line."""
    transformers.LlamaConfig(**huggingface.SMALL).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 5}))
    with rejects("M073", "16", "(5)"):
        build_model(ModelSection(name=f"hf:{tmp_path}"))
