"""LoRA of classifiers: the head trains whole, and goes with the adapters into checkpoints, files and merged folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.cli import main
from shoal.config.load import build_recipe
from shoal.parallel.lora.layers import adapted_layers
from shoal.train.inference.trained_model import trained_model
from shoal.train.recipe.invocation import RunInvocation
from shoal.train.recipe.loop import train
from shoal.train.recipe.preflight import preflight
from tests.rejects import rejects

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
import transformers

from tests.unit.test_recipe_tasks import ROWS, lines, save, tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
HEAD = {"classifier.weight", "classifier.bias"}


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name}


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("LlamaForSequenceClassification", {"score.weight"}),
        ("BertForTokenClassification", HEAD),
        ("BertForQuestionAnswering", {"qa_outputs.weight", "qa_outputs.bias"}),
        (  # two layers of it would be random numbers for ever if the last one alone were trained
            "DistilBertForSequenceClassification",
            HEAD | {"pre_classifier.weight", "pre_classifier.bias"},
        ),
        ("BertForMaskedLM", set()),
    ],
)
def test_the_head_of_a_classifier_trains_whole(kind: str, head: set[str]) -> None:
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")
    sizes = {"vocab_size": 11, "dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2} if "Distil" in kind else SIZES
    model = shoal.lora(getattr(transformers, kind)(config(**sizes)), rank=2)
    assert trained(model) == head
    assert not {name.partition(".")[0] for name in adapted_layers(model)} & {name.partition(".")[0] for name in head}


def test_modules_that_are_named_train_whole() -> None:
    def llama(**changes: Any) -> Any:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **changes))

    model = shoal.lora(llama(), rank=2, modules_to_save=["lm_head", "layers.0.mlp"])
    assert trained(model) == {"lm_head.weight"} | {
        f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")
    }
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {f"{one}_proj" for one in "qkvo"}
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES))
    assert trained(shoal.lora(classifier, modules_to_save=[])) == set()
    for code, names, values in (
        ("L009", ["lm_haed"], ("lm_haed", "modules_to_save of lm_head")),
        ("L009", ["rotary_emb"], ("rotary_emb",)),
        ("L009", "lm_head", ("['lm_head']",)),
        ("L017", ["lm_head"], ("lm_head.weight", "tie_word_embeddings")),
        ("L017", ["embed_tokens"], ("model.embed_tokens.weight",)),
    ):
        with rejects(code, *values):
            shoal.lora(llama(tie_word_embeddings=code == "L017"), rank=2, modules_to_save=names)
    without = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES))
    without.score = nn.Identity()
    with rejects("L008", "LlamaForSequenceClassification", "modules_to_save"):
        shoal.lora(without, rank=2)


def run(folder: Path, where: str, steps: int, **lora: Any) -> list[float]:
    data = {"source": str(folder / "rows.jsonl"), "format": "classes", "seq_len": 8, "validation": 0, "workers": 0}
    tree = {
        "model": {"name": f"hf:{folder}", "lora": {"rank": 2, **lora}},
        "data": {**data, "global_batch": 4, "tokenizer": str(folder / "tokenizer.json")},
        "launch": {"device": "cpu", "threads": 1},
        "plan": "bf16",  # the base is rounded, and the head is not
        "optim": {"lr": 0.05, "schedule": "constant", "weight_decay": 0},
        "run": {"duration": f"{steps}step", "dir": str(folder / where), "log_every": 1},
    }
    train(None, None, preflight(build_recipe(tree, title="test"), 1), RunInvocation(quiet=True, start_time=0.0))
    return [json.loads(line)["loss"] for line in (folder / where / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    save(path, "Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokenizer(path)
    lines(path / "rows.jsonl", ROWS * 4)
    return path


@pytest.mark.wide
def test_a_recipe_of_a_classifier(folder: Path) -> None:
    """It resumes with its head; the adapter of PEFT and the merged folder have it."""
    from safetensors.torch import load_file

    whole = run(folder, "whole", 4)
    assert whole[-1] < whole[0]
    run(folder, "parts", 2)
    assert run(folder, "parts", 4) == whole
    tuned = trained_model(folder / "whole").model
    assert main(["checkpoint", "export", str(folder / "whole"), str(folder / "adapter"), "--format", "peft"]) == 0
    saved, start = load_file(folder / "adapter" / "adapter_model.safetensors"), load_file(folder / "model.safetensors")
    said = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (said["task_type"], said["modules_to_save"], said["fan_in_fan_out"]) == ("SEQ_CLS", ["classifier"], False)
    for name in HEAD:
        assert torch.equal(saved[f"base_model.model.{name}"], tuned.get_parameter(name))
        assert not torch.equal(tuned.get_parameter(name), start[name])
    assert main(["checkpoint", "merge", str(folder / "whole"), str(folder / "merged"), "--format", "huggingface"]) == 0
    merged = transformers.BertForSequenceClassification.from_pretrained(folder / "merged").eval()
    tokens = torch.tensor([[2, 4, 5, 3], [2, 9, 8, 3]])
    with torch.no_grad():
        logits = tuned(tokens=tokens).logits
        torch.testing.assert_close(merged(tokens).logits, logits)
    run(folder, "again", 1, adapter=str(folder / "adapter"))  # starts from the file, and is trained
    again = trained_model(folder / "again").model
    for name in HEAD:
        step = (again.get_parameter(name) - tuned.get_parameter(name)).detach().abs().max()
        assert 0 < float(step) < 0.06
