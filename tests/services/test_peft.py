"""LoRA beside PEFT itself (`make test-peers`): gradients, files both ways and merged folders, in float64."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.cli import main
from shoal.parallel.lora.layers import adapted_layers
from shoal.verification.exact_casts import keeping_float64

SITE = os.environ.get("SHOAL_PEERS", "")
pytestmark = pytest.mark.skipif(not SITE, reason="needs the other systems: make test-peers")
RANK, ALPHA = 3, 7
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


class Peer(NamedTuple):
    """A small model of transformers, and what PEFT calls its task."""

    name: str
    """Of its class, without `ForCausalLM` and the like."""
    head: str
    sizes: dict[str, Any]
    task: str


LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4, **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0)}
BERT = {**LLAMA, "max_position_embeddings": 8}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
VIT = {**LLAMA, "image_size": 8, "patch_size": 4, "num_labels": 2}
ALL = {"vocab_size": 13, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PEERS = {
    "llama": Peer("Llama", "ForCausalLM", LLAMA, "CAUSAL_LM"),
    "qwen2": Peer("Qwen2", "ForCausalLM", LLAMA, "CAUSAL_LM"),  # biases of q, k and v
    "gpt2": Peer("GPT2", "LMHeadModel", GPT2, "CAUSAL_LM"),  # Conv1D, whose weight has its inputs first
    "llama classifier": Peer("Llama", "ForSequenceClassification", LLAMA, "SEQ_CLS"),
    "bert classifier": Peer("Bert", "ForSequenceClassification", BERT, "SEQ_CLS"),
    "t5": Peer("T5", "ForConditionalGeneration", T5, "SEQ_2_SEQ_LM"),
    "vit": Peer("ViT", "ForImageClassification", VIT, ""),
}


@pytest.fixture(scope="module")
def peft() -> Iterator[Any]:
    sys.path.append(SITE)
    yield pytest.importorskip("peft")
    sys.path.remove(SITE)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def base(peer: Peer) -> Any:
    """The model, with numbers of the size that trained ones have."""
    import transformers

    config = getattr(transformers, f"{peer.name}Config")(**ALL, **peer.sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{peer.name}{peer.head}")(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def batch(peer: Peer) -> dict[str, Tensor]:
    tokens = torch.randint(3, 13, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens if peer.task.endswith("LM") else torch.tensor([0, 1, 1, 0])
    if peer.name == "ViT":
        return {"pixel_values": tokens.double().mean(1)[:, None, None, None].expand(-1, 3, 8, 8), "labels": labels}
    return {"input_ids": tokens, "labels": labels}


def theirs(peft: Any, model: nn.Module, peer: Peer) -> Any:
    """PEFT around a model, with numbers in all that it trains."""
    whole = None if peer.task else ["classifier"]  # PEFT knows the heads of texts alone
    targets = shoal.lora(copy.deepcopy(model)) if peer.name == "ViT" else None
    targets = "all-linear" if targets is None else list(adapted_layers(targets))
    same = {"r": RANK, "lora_alpha": ALPHA, "fan_in_fan_out": peer.name == "GPT2", "task_type": peer.task or None}
    config = peft.LoraConfig(target_modules=targets, modules_to_save=whole, **same)
    found = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    for parameter in (one for one in found.parameters() if one.requires_grad):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    return found


def ours(model: Any) -> Any:
    return shoal.lora(model, rank=RANK, alpha=ALPHA)


def own_name(name: str) -> str:
    """PEFT's name of a trained parameter → shoal's."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    return name.replace(".default.weight", "") if "lora_" in name else name


def trained(model: nn.Module, name_of: Callable[[str], str] = str) -> dict[str, nn.Parameter]:
    return {name_of(name): one for name, one in model.named_parameters() if one.requires_grad}


def all_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert bool(one.any()), name
        torch.testing.assert_close(found[name].detach(), one.detach(), msg=name, **EXACT)


@pytest.mark.parametrize("name", PEERS)
def test_gradients_are_those_of_peft(peft: Any, name: str) -> None:
    """Of a plain backward, and of a step of a run with its fused layers."""
    peer = PEERS[name]
    wrapped, model = theirs(peft, base(peer), peer), ours(base(peer))
    values = trained(wrapped, own_name)
    own = trained(model)
    assert {name: one.shape for name, one in own.items()} == {name: one.shape for name, one in values.items()}
    for one, parameter in own.items():
        parameter.data.copy_(values[one])
    run_model = copy.deepcopy(model)
    with keeping_float64("fp64", is_foreign=True):  # else code of transformers rounds to float32 in both
        loss, expected = model(**batch(peer)).loss, wrapped(**batch(peer)).loss
        torch.testing.assert_close(loss, expected, **EXACT)
        loss.backward()
        expected.backward()
        gradients = {name: one.grad for name, one in values.items()}
        all_equal({name: one.grad for name, one in own.items()}, gradients)
        run = shoal.Run("fp64", device="cpu", fused_layers=True)
        run.prepare(run_model, torch.optim.SGD(trained(run_model).values(), lr=1.0))
        run.step(batch(peer))
    after = {name: weight for name, weight in run.weights().items() if name in values}
    all_equal({name: values[name] - one for name, one in after.items()}, gradients)


@pytest.mark.parametrize("name", PEERS)
def test_files_are_exchanged_both_ways(peft: Any, name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    wrapped = theirs(peft, base(peer), peer).eval()
    wrapped.save_pretrained(tmp_path / "theirs")
    loaded = shoal.load_adapter(base(peer), tmp_path / "theirs").eval()
    all_equal(trained(loaded), trained(wrapped, own_name))
    tokens = batch(peer)  # with labels, which T5 needs
    torch.testing.assert_close(loaded(**tokens).logits, wrapped(**tokens).logits, **EXACT)

    run = shoal.Run("fp64", device="cpu")
    run.prepare(loaded, torch.optim.SGD(trained(loaded).values(), lr=0.1))
    run.step(batch(peer))
    run.save(tmp_path / "run")
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "ours"), "--format", "peft"]) == 0
    again = peft.PeftModel.from_pretrained(base(peer), str(tmp_path / "ours"), autocast_adapter_dtype=False).eval()
    assert type(again) is type(wrapped)
    assert (again.peft_config["default"].task_type or "") == peer.task
    all_equal({own_name(name): one for name, one in adapters_of(again)}, trained(loaded))
    torch.testing.assert_close(again(**tokens).logits, loaded.eval()(**tokens).logits, **EXACT)
    assert not torch.equal(again(**tokens).logits, wrapped(**tokens).logits)  # a step was made


def adapters_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What PEFT has loaded: it freezes that."""
    return ((name, one) for name, one in model.named_parameters() if "lora_" in name or "modules_to_save" in name)


@pytest.mark.parametrize("name", PEERS)
def test_merged_folders_are_equal(peft: Any, name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    peer = PEERS[name]
    wrapped = theirs(peft, base(peer), peer)
    wrapped.save_pretrained(tmp_path / "adapter")
    own = shoal.merge_lora(shoal.load_adapter(base(peer), tmp_path / "adapter"))
    assert not adapted_layers(own)
    own.save_pretrained(tmp_path / "ours")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "theirs")
    found, expected = (load_file(tmp_path / one / "model.safetensors") for one in ("ours", "theirs"))
    all_equal(found, expected)
