"""Adapters in checkpoints and in folders of PEFT: both ways, without the frozen weights, and never on another base."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.checkpoint.formats.adapter import load_adapter, read_config
from shoal.cli import main
from shoal.models.llama import build
from shoal.numerics.init import initialise
from shoal.parallel.lora.apply import merge_lora
from shoal.train.run import Run
from tests.rejects import rejects


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


SIZES = {"vocabulary": 11, "hidden": 8, "ffn": 12, "num_layers": 2, "num_heads": 2}
TOKENS = torch.arange(10).view(2, 5)


def base(seed: int = 0) -> nn.Module:
    model = build(**SIZES)
    initialise(model, seed)
    return model


def trained(folder: Path, model: nn.Module, steps: int = 2) -> Tensor:
    """Train and save; returns the logits."""
    run = Run("")
    run.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05))
    for _ in range(steps):
        run.step({"tokens": TOKENS, "labels": TOKENS.roll(-1, 1)})
    run.save(folder)
    with torch.no_grad():
        return model(TOKENS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    folder = tmp_path_factory.mktemp("adapters")
    return folder, trained(folder, shoal.lora(base(), rank=3, alpha=9, targets=["q_proj", "up_proj"]))


def test_a_checkpoint_holds_adapters_alone_and_resumes(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    folder, logits = saved
    manifest = json.loads(next(folder.glob("step-*/manifest.json")).read_text())
    assert all("lora_" in name for name in manifest["tensors"])
    assert manifest["state"]["lora"] == {
        **{"rank": 3, "alpha": 9.0, "dropout": 0.0, "targets": ["q_proj", "up_proj"]},
        **{"fan_in_fan_out": False, "modules_to_save": [], "task_type": "CAUSAL_LM"},
    }
    model = shoal.lora(base(), rank=3, alpha=9, targets=["q_proj", "up_proj"])
    run = Run("")
    run.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05))
    assert run.load(folder) == 2
    assert torch.equal(model(TOKENS), logits)
    other = shoal.lora(base(seed=1), rank=3, alpha=9, targets=["q_proj", "up_proj"])
    run = Run("")
    run.prepare(other, torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.05))
    with rejects("L010", "step 2", manifest["state"]["base"]):
        run.load(folder)


def test_frozen_adapters_are_saved(tmp_path: Path) -> None:
    """LoRA-FA trains B alone, and its A is no part of the base."""

    def half(seed: int) -> nn.Module:
        model = shoal.lora(base(), rank=3, seed=seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("lora_B"))
        return model

    logits = trained(tmp_path / "run", half(seed=1))
    again, run = half(seed=2), Run("")
    run.prepare(again, torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=0.05))
    run.load(tmp_path / "run")
    assert torch.equal(again(TOKENS), logits)
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "peft"), "--format", "peft"]) == 0
    assert torch.equal(load_adapter(base(), tmp_path / "peft")(TOKENS), logits)


def test_other_trained_weights_are_not_lost_in_an_export(tmp_path: Path) -> None:
    model = shoal.lora(base(), rank=3)
    model.get_parameter("model.norm.weight").requires_grad_(True)
    trained(tmp_path / "run", model)
    with rejects("L024", "model.norm.weight", "modules_to_save=['model.norm']"):
        raise_from(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "peft"), "--format", "peft"])
    assert not (tmp_path / "peft").exists()
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "all.safetensors")]) == 0


def test_the_base_comes_from_a_checkpoint_of_a_whole_model(tmp_path: Path) -> None:
    logits = trained(tmp_path, base())
    model = shoal.lora(base(seed=1), rank=2)
    run = Run("")
    run.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    run.load(tmp_path, only_weights=True)
    assert torch.equal(model(TOKENS), logits)


def test_a_folder_of_peft_both_ways(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    folder, logits = saved
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "peft"), "--format", "peft"]) == 0
    names = set(__import__("safetensors.torch").torch.load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == 8
    config = read_config(tmp_path / "peft")
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 9, ["q_proj", "up_proj"])
    model = load_adapter(base(), tmp_path / "peft")
    assert torch.equal(model(TOKENS), logits)
    whole = merge_lora(copy.deepcopy(model))
    assert {type(module) for module in whole.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    torch.testing.assert_close(whole(TOKENS), logits, rtol=1e-4, atol=1e-5)
    with rejects("L014", "--format peft"):
        raise_from(["checkpoint", "export", str(folder), str(tmp_path / "hf"), "--format", "huggingface"])


def raise_from(words: list[str]) -> None:
    """The error of a command."""
    from importlib import import_module

    import_module(f"shoal.cli.{words[0]}").main(words[1:])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"peft_type": "IA3"}, "L012"),
        ({"use_dora": True}, "L012"),
        ({"rank_pattern": {"q_proj": 8}}, "L012"),
        ({"init_lora_weights": "pissa_niter_4"}, "L012"),
        ({"init_lora_weights": "olora"}, "L012"),
        ({"use_qalora": True}, "L012"),
        ({"alora_invocation_tokens": [1]}, "L012"),
        ({"use_bdlora": {"nblocks": 2}}, "L012"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "L012"),
        ({"a_formula_of_tomorrow": True}, "L012"),
    ],
)
def test_other_adapters_are_rejected(
    saved: tuple[Path, Tensor], tmp_path: Path, change: dict[str, object], code: str
) -> None:
    main(["checkpoint", "export", str(saved[0]), str(tmp_path / "a"), "--format", "peft"])
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with rejects(code, *change.values()):
        load_adapter(base(), tmp_path / "a")
    path.unlink()
    with rejects("L011", "adapter_config.json"):
        load_adapter(base(), tmp_path / "a")


def test_the_adapter_of_another_model_is_rejected(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    main(["checkpoint", "export", str(saved[0]), str(tmp_path / "a"), "--format", "peft"])
    wide = build(**{**SIZES, "hidden": 16})
    with rejects("L013", "lora_A"):
        load_adapter(wide, tmp_path / "a")


def test_an_adapter_without_the_head_of_a_classifier_is_rejected(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    """The head would keep its random weights, and nothing would say so."""
    transformers = pytest.importorskip("transformers")
    main(["checkpoint", "export", str(saved[0]), str(tmp_path / "a"), "--format", "peft"])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_labels=3)
    with rejects("L018", "'score'", "modules_to_save"):
        load_adapter(transformers.LlamaForSequenceClassification(config), tmp_path / "a")
