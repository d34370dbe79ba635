"""`shoal train` of a classifier of texts or images, and of an encoder with a decoder, on two ranks: each loss of a step
is that of a plain loop with transformers. Then its export, what generate says, and a proof without data.

Batches are those of tests/unit/test_recipe_tasks.py, which compares them with transformers' own tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.recipe import Recipe
from shoal.data.order import stream_ids
from shoal.data.sources.open import open_datasets
from tests.cli.host import Host

pytest.importorskip("transformers")
import transformers

from tests.unit.test_recipe_tasks import PAIRS, ROWS, lines, save, tokenizer

BATCH, STEPS, LR = 4, 6, 3e-3
OPTIM = ["--optim.schedule=constant", "--optim.weight_decay=0", "--optim.clip=null", f"--optim.lr={LR}"]
NO_DROPOUT: dict[str, Any] = {
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5": {"dropout_rate": 0.0},
    "ViT": {},
}
CLASSES = {
    "Bert": "BertForSequenceClassification",
    "T5": "T5ForConditionalGeneration",
    "ViT": "ViTForImageClassification",
}


def losses_of_transformers(kind: str, folder: Path, data: dict[str, Any]) -> list[float]:
    training, _ = open_datasets(Recipe.model_validate({"data": data}).data, 0)
    model = getattr(transformers, CLASSES[kind]).from_pretrained(folder).double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0)
    found = []
    for step in range(STEPS):
        batch = training.batch(stream_ids(0, len(training), step * BATCH, BATCH))
        if kind == "ViT":
            inputs: dict[str, Any] = {"pixel_values": batch["images"].double()}
        else:
            inputs = {"input_ids": batch["tokens"], "attention_mask": batch["attention_mask"]}
        loss = model(**inputs, labels=batch["labels"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "plan", "data"),
    [
        ("Bert", "fp64 tp=2 mb=2", {"source": "rows.jsonl", "format": "classes", "seq_len": 8}),
        ("T5", "fp64 pp=2 1f1b mb=2", {"source": "pairs.jsonl", "seq_len": 8}),
        ("ViT", "fp64 zero=3", {"source": "synthetic", "synthetic_kind": "images", "vocabulary": 3, "image_size": 8}),
    ],
)
def test_a_task_is_trained_as_by_transformers(
    host: Host, tmp_path: Path, kind: str, plan: str, data: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    save(folder, kind, **NO_DROPOUT[kind])
    if kind == "ViT":
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    else:
        tokenizer(folder)
        data = {**data, "source": str(lines(tmp_path / data["source"], (ROWS if kind == "Bert" else PAIRS) * 4))}
    data = {**data, "validation": 0, "global_batch": BATCH, "tokenizer": str(folder / "tokenizer.json")}
    words = [f"--model.name=hf:{folder}", *(f"--data.{key}={value}" for key, value in data.items()), *OPTIM]
    words += ["--device=cpu", "--nproc=2", f"--run.duration={STEPS}step"]
    ran = host.run("train", "--json", *words, f"--plan={plan}", "--run.dir=run", cwd=tmp_path)
    assert ran.code == 0, ran.said
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in logged if "loss" in one]
    assert losses == pytest.approx(losses_of_transformers(kind, folder, data), rel=1e-6)  # T5 has a softmax in float32
    out = tmp_path / "out"
    assert host.run("checkpoint", "export", "run", str(out), "--format", "huggingface", cwd=tmp_path).code == 0
    again = getattr(transformers, CLASSES[kind]).from_pretrained(out)
    assert not any(torch.isnan(one).any() for one in again.parameters())
    assert (out / "preprocessor_config.json").is_file() == (kind == "ViT")
    said = host.run("generate", "run", "--prompt", "a film", "--tokenizer", "bytes", cwd=tmp_path)
    assert said.code == 2
    assert "L023" in said.said
    proven = host.run("verify", f"--model.name=hf:{folder}", "--nproc=2", f"--plan={plan}", cwd=tmp_path)
    assert proven.code == 0, proven.said
