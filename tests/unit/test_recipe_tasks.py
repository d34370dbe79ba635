"""Recipes of classifiers and of encoders with decoders: their batches are those of transformers' own tokenizers, their
losses those of the models. What does not fit is one message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.config.recipe import ModelSection, Recipe
from shoal.data.dataset import Dataset
from shoal.data.sources.open import open_datasets
from shoal.errors import ShoalError
from shoal.models.huggingface.pretrained.data.pixels import PixelRule
from shoal.train.build_model import build_model
from shoal.train.recipe.preflight import check_recipe, preflight
from shoal.verification.options import RecipeSettings
from shoal.verification.recipe.cases import case_of
from tests.rejects import rejects

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *["a", "film", "was", "good", "bad", "very", "one", "two", "three", "four"],
]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = {"vocab_size": len(WORDS)}
ROWS = [
    {"text": "a very good film", "label": "yes"},
    {"text": "bad", "label": "no"},
    {"text": "a film was good good good very very good", "label": "yes"},
    {"text": "a bad film", "label": "no"},
]
PAIRS = [{"source": "one two", "target": "three"}, {"source": "two", "target": "four four one three one two four"}]


def lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def tokenizer(folder: Path) -> Any:
    """One that puts tokens around a text, as that of BERT."""
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    around = [("[CLS]", 2), ("[SEP]", 3)]
    own.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]", eos_token="[SEP]")
    found.save_pretrained(folder)
    return found


def save(folder: Path, kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    both: dict[str, Any] = {**SIZES, **VOCABULARY, **changes}
    if kind == "Bert":
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**{"num_labels": 2, **both}))
    elif kind == "Llama":
        model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**{"num_labels": 2, **both}))
    elif kind == "T5":
        own = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**VOCABULARY, **own, pad_token_id=0, **changes)
        )
    else:
        sizes = {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 3}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes | changes))
    model.save_pretrained(folder)
    return model.eval()


def data_of(path: Path, **settings: Any) -> Dataset:
    recipe = Recipe.model_validate({"data": {"source": str(path), "validation": 0, "seq_len": 7, **settings}})
    return open_datasets(recipe.data, 0)[0]


def batch_of(data: Dataset) -> dict[str, Any]:
    """All samples, in the order of their tokens: a dataset shuffles them."""
    return data.batch(np.arange(len(data)))


def problems(folder: Path, data: Path | str, **settings: Any) -> list[str]:
    own = {"source": str(data), "validation": 0, "seq_len": 7, "global_batch": 2, "tokenizer": str(folder), **settings}
    recipe = Recipe.model_validate({"model": {"name": f"hf:{folder}", "init": "random"}, "data": own, "plan": "mb=1"})
    try:
        preflight(recipe, 1)
    except ShoalError as error:
        return [problem.code for problem in error.problems]
    return []


@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_a_classifier_gets_what_transformers_gives_it(tmp_path: Path, kind: str) -> None:
    own = tokenizer(tmp_path)
    model = save(tmp_path, kind, pad_token_id=0)
    data = data_of(lines(tmp_path / "rows.jsonl", ROWS), format="classes", tokenizer=str(tmp_path))
    found = batch_of(data)
    texts = {tuple(own(row["text"], truncation=True, max_length=7)["input_ids"]): row for row in ROWS}
    for tokens, mask, label in zip(found["tokens"], found["attention_mask"], found["labels"], strict=True):
        row = texts.pop(tuple(tokens[mask.bool()].tolist()))
        assert ["no", "yes"][label] == row["label"]
    assert not texts
    assert (data.task, data.num_classes) == ("text class", 2)
    taken: Any = build_model(ModelSection(name=f"hf:{tmp_path}"))
    taken.load_state_dict(model.state_dict())
    padded = found["tokens"].masked_fill(found["attention_mask"] == 0, 0)  # with its own padding token
    with torch.no_grad():
        expected = model(input_ids=padded, attention_mask=found["attention_mask"], labels=found["labels"]).loss
        assert torch.equal(taken.eval()(**found).loss, expected)
    assert problems(tmp_path, tmp_path / "rows.jsonl", format="classes") == []


def test_targets_are_the_tokens_of_another_text(tmp_path: Path) -> None:
    own = tokenizer(tmp_path)
    model = save(tmp_path, "T5")
    path = lines(tmp_path / "pairs.jsonl", PAIRS)
    found = batch_of(data_of(path, tokenizer=str(tmp_path)))  # known by the keys of the first row
    pairs = {}
    for tokens, mask, labels in zip(found["tokens"], found["attention_mask"], found["labels"], strict=True):
        pairs[tuple(tokens[mask.bool()].tolist())] = labels[labels != -100].tolist()
    cut = {"truncation": True, "max_length": 7}
    ids = [[own(row[key], **cut)["input_ids"] for key in ("source", "target")] for row in PAIRS]
    assert pairs == {tuple(source): target for source, target in ids}
    taken: Any = build_model(ModelSection(name=f"hf:{tmp_path}"))
    taken.load_state_dict(model.state_dict())
    given = {"input_ids": found["tokens"], **{key: found[key] for key in ("attention_mask", "labels")}}
    with torch.no_grad():
        assert torch.allclose(taken.eval()(**found).loss, model(**given).loss, rtol=1e-6)
    assert problems(tmp_path, path) == []


def test_images_have_the_mean_of_the_folder(tmp_path: Path) -> None:
    model = save(tmp_path, "ViT")
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}')
    pixels = torch.rand(2, 3, 8, 8)  # from 0 to 1
    taken: Any = build_model(ModelSection(name=f"hf:{tmp_path}"))
    taken.load_state_dict(model.state_dict())
    mean, deviation = torch.tensor([0.1, 0.2, 0.3])[:, None, None], torch.tensor([0.5, 0.6, 0.7])[:, None, None]
    with torch.no_grad():
        found = taken.eval()(images=(pixels - 0.5) / 0.5).logits
        assert torch.allclose(found, model(pixel_values=(pixels - mean) / deviation).logits, atol=1e-6)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": ["x"], "image_std": [0]}')
    with rejects("M073", "image_mean"):
        build_model(ModelSection(name=f"hf:{tmp_path}"))
    assert PixelRule((0.5,), (0.5,)).of(torch.ones(1, 3, 2, 2)).unique().tolist() == [1.0]


def test_data_of_another_task_is_rejected(tmp_path: Path) -> None:
    tokenizer(tmp_path)
    rows, pairs = lines(tmp_path / "rows.jsonl", ROWS), lines(tmp_path / "pairs.jsonl", PAIRS)
    save(tmp_path, "T5")
    assert problems(tmp_path, rows, format="classes") == ["M083"]
    save(tmp_path, "Bert")
    assert problems(tmp_path, rows) == ["M083"]  # texts without labels: their next tokens
    assert problems(tmp_path, pairs) == ["M083"]
    save(tmp_path, "Bert", id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1})
    assert problems(tmp_path, rows, format="classes") == ["M086"]
    three = lines(tmp_path / "three.jsonl", [*ROWS, {"text": "a film", "label": "perhaps"}])
    save(tmp_path, "Bert")
    assert problems(tmp_path, three, format="classes") == ["D033"]
    save(tmp_path, "Bert", problem_type="multi_label_classification")
    assert problems(tmp_path, rows, format="classes") == ["M083"]
    save(tmp_path, "Llama", pad_token_id=None)
    assert problems(tmp_path, rows, format="classes") == ["M084"]
    images = {"synthetic_kind": "images", "vocabulary": 3}
    save(tmp_path, "ViT")
    assert problems(tmp_path, "synthetic", **images, image_size=16) == ["M085"]
    assert problems(tmp_path, "synthetic", **images, image_size=8) == []


def test_a_classifier_of_your_own_has_an_output_for_each_class(tmp_path: Path) -> None:
    """Far fewer than tokens."""
    text = "import torch\nclass Bag(torch.nn.Module):\n    def __init__(self, outputs):\n        super().__init__()\n"
    text += "        self.bag = torch.nn.EmbeddingBag(257, outputs)\n"
    text += "    def forward(self, tokens, attention_mask):\n"
    text += "        return self.bag(tokens, per_sample_weights=None)\ndef bag(outputs): return Bag(outputs)\n"
    (tmp_path / "own.py").write_text(text)
    data = {"source": str(lines(tmp_path / "rows.jsonl", ROWS)), "format": "classes", "validation": 0}
    for outputs, codes in ((2, []), (1, ["D033"])):
        model = {"name": f"{tmp_path / 'own.py'}:bag", "outputs": outputs}
        recipe = Recipe.model_validate({"model": model, "data": {**data, "global_batch": 2}, "plan": "mb=1"})
        assert [problem.code for problem in check_recipe(recipe, 1).problems] == codes


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"text": "a"}, "D103"),
        ({"text": 3, "label": "no"}, "D019"),
        ({"text": "a", "label": 3}, "D104"),
        ({"text": "a", "label": 0.5}, "D104"),
        ({"text": "a", "label": None}, "D103"),
        ([1], "D017"),
    ],
)
def test_bad_rows(tmp_path: Path, row: Any, code: str) -> None:
    with rejects(code, "rows.jsonl line 5"):
        data_of(lines(tmp_path / "rows.jsonl", [*ROWS, row]), format="classes")


def test_numbers_are_classes_from_0(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 2}]
    assert data_of(lines(tmp_path / "rows.jsonl", rows), format="classes").num_classes == 3
    for label in (-1, True):
        with rejects("D104", "line 3"):
            data_of(lines(tmp_path / "rows.jsonl", [*rows, {"text": "c", "label": label}]), format="classes")


def test_sources_of_a_mixture_have_the_same_classes(tmp_path: Path) -> None:
    one, other = lines(tmp_path / "one.jsonl", ROWS), lines(tmp_path / "other.jsonl", [{"text": "a", "label": "maybe"}])
    data = {"source": {str(one): 1, str(other): 1}, "format": "classes", "validation": 0}
    with rejects("D084", "no, yes", "maybe"):
        open_datasets(Recipe.model_validate({"data": data}).data, 0)


def test_a_verification_draws_the_inputs_of_a_model(tmp_path: Path) -> None:
    """No data is opened: there is none of this name."""
    for kind, keys in (
        ("Bert", {"tokens", "attention_mask"}),
        ("T5", {"tokens", "attention_mask"}),
        ("ViT", {"images"}),
    ):
        save(tmp_path, kind)
        data = {"source": str(tmp_path / "none.jsonl")}
        recipe = Recipe.model_validate({"model": {"name": f"hf:{tmp_path}"}, "data": data, "plan": "zero=3"})
        case = case_of(recipe, 2, RecipeSettings())
        assert case.batches[0].keys() == {*keys, "labels"}
        assert not torch.equal(case.batches[0]["labels"], case.batches[1]["labels"])
    transformers.BertModel(transformers.BertConfig(**SIZES, **VOCABULARY)).save_pretrained(tmp_path)
    with rejects("M082", "BertModel", "takes no labels"):
        case_of(recipe, 2, RecipeSettings())


def test_a_short_table_of_positions_is_no_limit_of_a_verification(tmp_path: Path) -> None:
    sizes = {"vocab_size": 41, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 8}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    recipe = Recipe.model_validate({"model": {"name": f"hf:{tmp_path}"}, "plan": "zero=3"})
    case = case_of(recipe, 2, RecipeSettings())
    model: Any = case.build()
    assert model.config.n_positions >= case.batches[0]["tokens"].shape[1] > 8
