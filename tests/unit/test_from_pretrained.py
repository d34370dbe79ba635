"""`shoal.from_pretrained`, `Run.prepare("hf:...")` and `shoal.verify("hf:...")`: models of folders in a script."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.checkpoint.formats.adapter import config_of
from shoal.checkpoint.formats.start_weights import fill_from_files
from shoal.cli import main
from shoal.verification.case import Case
from shoal.verification.reference import fresh_model
from tests.rejects import rejects

pytest.importorskip("transformers")
import transformers
from safetensors.torch import save_file

from tests import huggingface

STEPS = 4


def saved(folder: Path, kind: str = "llama tied", **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = huggingface.build(kind)
    model.to(torch.bfloat16).save_pretrained(folder, **options)
    return type(model).from_pretrained(folder, dtype=torch.float32).train()


def batch_of(samples: int = 4) -> dict[str, Tensor]:
    tokens = torch.randint(huggingface.VOCABULARY, (samples, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}


def test_a_loop_with_a_schedule_trains_as_one_of_transformers(tmp_path: Path) -> None:
    plain, batch, expected = saved(tmp_path).double(), batch_of(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    for _ in range(STEPS):
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    model = shoal.from_pretrained(str(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    found = []
    with shoal.Run("fp64") as run:
        model, optimizer, schedule = run.prepare(model, optimizer, schedule)
        for _ in range(STEPS):
            found.append(run.step(batch).item())
            schedule.step()
    assert found == pytest.approx(expected, rel=1e-6)  # transformers computes its loss and norms in float32
    assert len({round(loss, 3) for loss in found}) > 2


def test_prepare_takes_a_name(tmp_path: Path) -> None:
    expected = saved(tmp_path).state_dict()
    with shoal.Run() as run:
        model = run.prepare(f"hf:{tmp_path}")
        run.prepare(torch.optim.SGD(run.parameters, lr=0.1))
        weights = run.weights()
        assert model.config.model_type == "llama"
        assert weights
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
        assert run.step(batch_of()).item() > 0
        with rejects("T002", "model"):
            run.prepare(f"hf:{tmp_path}")
    with shoal.Run() as run, rejects("T029", f"'{tmp_path}'", "hf:FOLDER"):
        run.prepare(str(tmp_path))


def test_a_save_is_exported_to_a_folder_of_transformers(tmp_path: Path) -> None:
    plain = saved(tmp_path / "folder")
    with shoal.Run() as run:
        model = shoal.from_pretrained(str(tmp_path / "folder"))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step(batch_of())
        run.save(tmp_path / "run")
        expected = run.weights()
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "huggingface"]) == 0
    found = type(plain).from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert not torch.equal(expected["model.norm.weight"], plain.state_dict()["model.norm.weight"])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_model_has_its_own_class_and_no_memory(tmp_path: Path) -> None:
    plain = saved(tmp_path)
    transformers.GenerationConfig(max_length=77).save_pretrained(tmp_path)
    model = shoal.from_pretrained(f"hf:{tmp_path}")
    assert isinstance(model, type(plain))
    assert type(model).__name__ == type(plain).__name__
    assert model.training
    assert model.generation_config.max_length == 77
    assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_values_of_the_config_are_replaced(tmp_path: Path) -> None:
    saved(tmp_path)
    model = shoal.from_pretrained(str(tmp_path), init="random", num_hidden_layers=1)
    assert len(model.model.layers) == 1
    with shoal.Run(seed=3) as run:
        run.prepare(model)
        first = run.module.model.embed_tokens.weight.clone()
    with shoal.Run(seed=4) as run:
        run.prepare(shoal.from_pretrained(str(tmp_path), init="random", num_hidden_layers=1))
        assert first.isfinite().all()
        assert not torch.equal(first, run.module.model.embed_tokens.weight)
    with rejects("M075", "belongs to no module"):
        shoal.from_pretrained(str(tmp_path), num_hidden_layers=1)
    with rejects("M077", "num_hiden_layers", "num_hidden_layers"):
        shoal.from_pretrained(str(tmp_path), num_hiden_layers=1)


def test_a_bad_folder_is_rejected_before_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)

    def reads(*_: Any) -> Any:
        raise AssertionError("a value was read")

    monkeypatch.setattr("shoal.checkpoint.formats.safetensors._rows", reads)
    with rejects("M075", "has the shape"):
        shoal.from_pretrained(str(tmp_path), intermediate_size=48)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with rejects("M074", "pytorch_model.bin", "init random"):
        shoal.from_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "mine", "auto_map": {"AutoConfig": "a.B"}})
    )
    with rejects("M072", "mine", "trust_remote_code"):
        shoal.from_pretrained(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with rejects("M070", "config.json"), shoal.Run() as run:
        run.prepare(f"hf:{tmp_path}")


def test_weights_of_a_part_are_rejected(tmp_path: Path) -> None:
    saved(tmp_path)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = shoal.from_pretrained(str(tmp_path))

        def forward(self, input_ids: Tensor) -> Tensor:
            logits: Tensor = self.base(input_ids=input_ids).logits
            return logits

    with shoal.Run() as run, rejects("T102", "base", "Wrapped", str(tmp_path)):
        run.prepare(Wrapped())


def test_adapters_lie_on_weights_that_are_read_later(tmp_path: Path) -> None:
    plain, batch = saved(tmp_path / "base", "llama"), batch_of()
    first = plain(**batch).loss.item()
    whole: Any = shoal.lora(plain, rank=2, targets=["q_proj"])
    for name, parameter in whole.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    expected = whole(**batch).loss.item()
    assert abs(expected - first) > 1e-4
    write_adapter(tmp_path / "adapter", whole)
    model = shoal.load_adapter(shoal.from_pretrained(str(tmp_path / "base")), tmp_path / "adapter")
    with shoal.Run() as run:
        run.prepare(model)
        run.prepare(torch.optim.SGD([p for p in run.parameters if p.requires_grad], lr=0.0))
        assert run.step(batch).item() == pytest.approx(expected, rel=1e-6)
    added = shoal.lora(shoal.from_pretrained(str(tmp_path / "base")), rank=2)
    with shoal.Run() as run:
        added, _ = run.prepare(added, torch.optim.SGD(added.parameters(), lr=0.1))
        assert run.step(batch).item() == pytest.approx(first, rel=1e-6)
        assert run.step(batch).item() < first


def write_adapter(folder: Path, model: nn.Module) -> None:
    """A folder as PEFT writes it."""
    own = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
    folder.mkdir()
    save_file({f"base_model.model.{name}.weight": p for name, p in own.items()}, folder / "adapter_model.safetensors")
    settings = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config_of(settings)))


def test_verify_takes_a_name_and_draws_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, cases = saved(tmp_path).state_dict(), list[Case]()
    monkeypatch.setattr("shoal.verification.api.verify_case", cases.append)
    shoal.verify(f"hf:{tmp_path}", plan="tp=2 pp=2 1f1b")
    shoal.verify(shoal.from_pretrained(str(tmp_path)), batch_of(), "dp_shard=2", lr=0.5)
    assert [case.lr for case in cases] == [1e-4, 0.5]
    batch = cases[0].batches[0]
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (8, 24)
    assert cases[1].batches[0]["input_ids"].shape == (4, 8)
    for case in cases:
        model: Any = fresh_model(pickle.loads(pickle.dumps(case)))
        fill_from_files(model)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with rejects("V051", f"'{tmp_path}'", "hf:FOLDER"):
        shoal.verify(str(tmp_path), plan="tp=2")
    with rejects("V050", "None"):
        shoal.verify(lambda: nn.Linear(2, 2), plan="dp_shard=2")
