"""LoRA on one device: the formula in plain torch, which layers get it, and what is rejected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.blueprint.plan import Plan
from shoal.config.recipe import Recipe
from shoal.models.llama import build
from shoal.numerics.init import can_fill, initialise, materialise
from shoal.parallel.lora.layers import LoRALinear, adapted_layers
from shoal.train.build_model import describe
from shoal.verification.recipe.cases import smaller_model
from tests.rejects import rejects

SIZES = {"vocabulary": 11, "hidden": 8, "ffn": 12, "num_layers": 2, "num_heads": 2}


def llama() -> nn.Module:
    model = build(**SIZES)
    initialise(model, seed=0)
    return model.double()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_gradients_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    layer = shoal.lora(nn.Sequential(nn.Linear(6, 5)).double(), rank=3, alpha=12)[0]
    assert isinstance(layer, LoRALinear)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(4, 7, 6, dtype=torch.float64, requires_grad=True)
    weights = [layer.lora_A.detach().clone().requires_grad_(), layer.lora_B.detach().clone().requires_grad_()]
    whole = layer.weight + 12 / 3 * weights[1] @ weights[0]
    y = x.detach().requires_grad_()
    expected = y @ whole.T + layer.bias
    slope = torch.randn_like(expected)
    found = layer(x)
    found.backward(slope)
    expected.backward(slope)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
    for one, other in zip((layer.lora_A, layer.lora_B), weights, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert layer.weight.grad is None
    assert layer(x[0, 0]).shape == (5,)


def test_the_first_forward_is_that_of_the_base_and_only_adapters_are_trained() -> None:
    base, tokens = llama(), torch.randint(11, (2, 5))
    expected = base(tokens)
    model = shoal.lora(base, rank=4)
    assert model is base
    assert torch.equal(model(tokens), expected)
    assert len(trained(model)) == 2 * 7 * 2
    assert all(name.endswith(("lora_A", "lora_B")) for name in trained(model))
    assert not any("lm_head" in name for name in trained(model))
    model(tokens).sum().backward()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in trained(model))


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    """Also where the model is built without values, and filled later."""
    given = shoal.lora(build(**SIZES).float(), rank=2, seed=5)
    with torch.device("meta"):
        hollow = shoal.lora(build(**SIZES), rank=2)
    assert can_fill(hollow)
    materialise(hollow, "cpu")
    initialise(hollow, 5)
    filled = dict(hollow.named_parameters())
    for name, parameter in trained(given).items():
        assert torch.equal(parameter, filled[name]), name
        assert bool(parameter.any()) == name.endswith("lora_A")
    bound = SIZES["hidden"] ** -0.5
    assert 0.5 * bound < filled["model.layers.0.self_attn.q_proj.lora_A"].abs().max() <= bound


def test_a_seed_of_its_own_is_kept_until_the_model_has_memory() -> None:
    given = shoal.lora(build(**SIZES).float(), rank=2, seed=5)
    with torch.device("meta"):
        hollow = shoal.lora(build(**SIZES), rank=2, seed=5)
    materialise(hollow, "cpu")
    initialise(hollow, 7)  # the seed of a run
    for name, parameter in trained(given).items():
        assert torch.equal(parameter, hollow.get_parameter(name)), name


def test_targets_are_last_parts_of_names_or_an_expression() -> None:
    assert set(adapted_layers(shoal.lora(llama(), targets=["q_proj", "layers.1.mlp.up_proj"]))) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    assert set(adapted_layers(shoal.lora(llama(), targets=r"model\.layers\.0\.mlp\..*"))) == {
        f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    }


def test_dropout_is_of_training_alone() -> None:
    layer = shoal.lora(nn.Sequential(nn.Linear(64, 4)), rank=2, dropout=0.5)[0]
    nn.init.ones_(layer.lora_B)
    x = torch.ones(3, 64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("code", "options", "value"),
    [
        ("L001", {"rank": 0}, "got 0"),
        ("L001", {"alpha": -1}, "alpha"),
        ("L001", {"dropout": 1.0}, "dropout"),
        ("L003", {"targets": ["q_porj"]}, 'targets=["q_proj"]'),
        ("L003", {"targets": "nothing"}, "nothing"),
        ("L004", {"targets": ["lm_head"]}, "lm_head"),
    ],
)
def test_rejected(code: str, options: dict[str, object], value: str) -> None:
    with rejects(code, value):
        shoal.lora(llama(), **options)


class Quantized(nn.Linear):
    """As of bitsandbytes."""


def test_layers_that_would_lose_the_update_are_rejected() -> None:
    with rejects("L007", "0", "Quantized"):
        shoal.lora(nn.Sequential(Quantized(4, 4)))
    whole = nn.Sequential(nn.Linear(4, 4))
    whole[0].weight = nn.Parameter(whole[0].weight.detach().to(torch.int8), requires_grad=False)
    with rejects("L007", "torch.int8"):
        shoal.lora(whole)
    with rejects("L007", "linear1"):
        shoal.lora(nn.TransformerEncoderLayer(8, 2, 8), targets=["linear1"])


class ReadsWeights(nn.Module):
    """A layer that is never called, one that is called, and one that is both."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called, self.both = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.called.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.called(x.to(self.called.weight.dtype)) @ self.read.weight
        return self.both(x) if x.is_cpu else x @ self.both.weight


def test_layers_whose_weight_is_read_without_a_call() -> None:
    with rejects("L007", "read", "ReadsWeights"):
        shoal.lora(ReadsWeights())
    with pytest.warns(UserWarning, match="both"):
        shoal.lora(ReadsWeights(), targets=["called", "both"])
    assert set(adapted_layers(shoal.lora(ReadsWeights(), targets=["called"]))) == {"called"}


@pytest.mark.parametrize("layer", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_layers_of_wavlm_that_torch_reads(layer: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.WavLMConfig(**sizes, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    with rejects("L007", layer, "WavLMAttention"):
        shoal.lora(transformers.WavLMModel(config), targets=[layer])


def test_layers_that_share_their_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    with rejects("L019", "0"):
        shoal.lora(model, targets=["0", "1"])
    assert set(adapted_layers(shoal.lora(model))) == {"1"}
    layer = nn.Linear(4, 4)
    assert set(adapted_layers(shoal.lora(nn.Sequential(layer, nn.ReLU(), layer)))) == {"0"}  # one module, twice


def test_the_small_copy_of_verify_has_lora_too() -> None:
    recipe = Recipe.model_validate({"model": {"name": "llama", "preset": "tiny", "lora": {"rank": 3, "adapter": "x"}}})
    small, is_small = smaller_model(recipe.model, Plan.parse("zero=3").resolve(2))
    assert is_small
    assert small.lora is not None
    assert (small.lora.rank, small.lora.adapter) == (3, None)


def test_an_optimizer_that_was_built_before() -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shoal.lora(model, rank=2)
    with shoal.Run() as run, rejects("T027", "before shoal.lora"):
        run.prepare(model, optimizer)


def test_a_second_call_is_rejected() -> None:
    with rejects("L002", "Llama"):
        shoal.lora(shoal.lora(llama()))


def test_layers_whose_weight_has_its_inputs_first() -> None:
    """Conv1D of GPT-2: the formula, every layer but the head, and the class that it had after merging."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = shoal.lora(transformers.GPT2LMHeadModel(config).double().eval(), rank=2, alpha=6)
    kind = transformers.pytorch_utils.Conv1D
    names = {f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert adapted_layers(model).keys() == names
    layer = model.transformer.h[0].mlp.c_fc
    nn.init.normal_(layer.lora_B)
    assert (layer.lora_A.shape, layer.lora_B.shape) == ((2, 8), (32, 2))
    x, tokens = torch.randn(3, 5, 8, dtype=torch.float64), torch.randint(11, (2, 5))
    weights = [one.detach().clone().requires_grad_() for one in (layer.lora_A, layer.lora_B)]
    expected = x @ (layer.weight + (6 / 2 * weights[1] @ weights[0]).T) + layer.bias
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip((layer.lora_A, layer.lora_B), weights, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    before = model(tokens).logits
    torch.testing.assert_close(shoal.merge_lora(model)(tokens).logits, before, rtol=1e-12, atol=1e-12)
    assert {type(model.get_submodule(name)) for name in names} == {kind}
    assert not any("lora" in name for name in vars(layer))


def test_adapters_change_no_split() -> None:
    """Of a model that declares none: its blocks are tried without adapters, which are cut as their layers."""
    pytest.importorskip("transformers")
    from tests import huggingface

    plain, adapted = (describe(make(huggingface.build("bert"))) for make in (nn.Module.eval, shoal.lora))
    assert shoal.Split.COLUMN in plain.splits.values()
    assert adapted == plain


@pytest.mark.parametrize("targets", ["all-linear", ["embed"], r".*conv"])
def test_a_model_without_layers_for_lora_is_told_why(targets: str | list[str]) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 3), "conv": nn.Conv1d(3, 3, 1)})
    with rejects("L003", "(none)", "without shoal.lora") as caught:
        shoal.lora(model, rank=2, targets=targets)
    assert "targets=" not in str(caught.value)


def test_a_fix_names_layers_that_get_lora() -> None:
    with rejects("L003", "lm_heads", "_proj") as caught:
        shoal.lora(llama(), targets=["lm_heads"])
    assert "lm_head" not in caught.value.problems[0].fix
