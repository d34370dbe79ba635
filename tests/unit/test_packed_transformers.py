"""Packed samples in a model of transformers: each document as if it were alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.train.build_model import adapt, describe
from tests.rejects import rejects

pytest.importorskip("transformers")
from shoal.models.huggingface.pretrained.build import build
from tests import huggingface

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model = huggingface.build("llama").double()
    model.config.save_pretrained(path)
    return path


def test_documents_do_not_see_each_other(folder: Path) -> None:
    model = build(f"hf:{folder}").double().eval()
    alone = [model(tokens=part).logits for part in TOKENS.split([3, 5], 1)]
    packed = model(tokens=TOKENS, documents=DOCUMENTS).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(packed, model(tokens=TOKENS).logits)


def test_a_model_that_mixes_tokens_rejects_them(folder: Path) -> None:
    model = build(f"hf:{folder}")
    description = describe(model)
    from dataclasses import replace

    adapt(model, replace(description, why_not={"cp": "it has a convolution"}), None)
    with rejects("L016", "it has a convolution", "--data.pack false"):
        model(tokens=TOKENS, documents=DOCUMENTS)
