"""First values depend on (seed, name) and on nothing else."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models import llama, mlp, moe, resnet
from shoal.models.llama import build
from shoal.numerics.init import init_missing, initialise, key, materialise
from tests.rejects import rejects


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def fresh_llama(seed: int = 0, **settings: object) -> nn.Module:
    model = build(hidden=32, ffn=48, num_layers=2, **settings)
    initialise(model, seed)
    return model


def test_key_is_a_hash_of_the_parts() -> None:
    digest = hashlib.blake2b(digest_size=8)
    for part in (b"7", b"layers.0.weight"):
        digest.update(len(part).to_bytes(8, "little") + part)
    assert key(7, "layers.0.weight") == int.from_bytes(digest.digest(), "little")
    assert key(7, "layers.0.weight") == 15862610065012741939  # written down: a change would move every run's start
    assert len({key(0, "ab", "c"), key(0, "a", "bc"), key(0, "abc"), key(1, "abc"), key(0, 1, 2), key(0, 12)}) == 6


def test_the_global_stream_and_the_state_before_do_not_matter() -> None:
    expected = values(fresh_llama())
    torch.manual_seed(99)
    torch.randn(3)
    before = torch.get_rng_state()
    model = fresh_llama(seed=5)
    initialise(model, seed=0)
    assert_same(values(model), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_seeds_and_names_differ() -> None:
    zero, one = values(fresh_llama(0)), values(fresh_llama(1))
    for name, tensor in zero.items():
        assert torch.equal(tensor, one[name]) == ("norm" in name), name
    q = [tensor for name, tensor in zero.items() if "q_proj" in name]
    assert not torch.equal(*q)


def test_other_layers_do_not_matter() -> None:
    law = {"init_std": 0.1}
    shallow = values(fresh_llama(**law))
    deep = build(hidden=32, ffn=48, num_layers=3, **law)
    initialise(deep, 0)
    for name, tensor in shallow.items():
        depth_scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
        factor = (2 / 3) ** 0.5 if depth_scaled else 1.0
        torch.testing.assert_close(deep.state_dict()[name], tensor * factor, rtol=1e-6 if depth_scaled else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_start_at_the_cast_of_float32(dtype: torch.dtype) -> None:
    model = build(hidden=32, ffn=48, num_layers=2).to(dtype)
    initialise(model, 0)
    assert_same(values(model), {name: tensor.to(dtype) for name, tensor in values(fresh_llama()).items()})


class Mixed(nn.Module):
    """Layers of torch with laws of their own, made in either order, and one bare parameter."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        makers = {
            "linear": lambda: nn.Linear(20, 30),
            "norm": lambda: nn.BatchNorm1d(30),
            "lstm": lambda: nn.LSTM(6, 5),
            "twin": lambda: nn.Linear(20, 30),
        }
        for name in reversed(makers) if reverse else makers:
            self.add_module(name, makers[name]())
        self.bare = nn.Parameter(torch.full((3,), 7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layers_of_torch_follow_their_own_law_in_any_order(dtype: torch.dtype) -> None:
    first, second = Mixed(), Mixed(reverse=True).to(dtype)
    initialise(first, 3)
    before = torch.get_rng_state()
    initialise(second, 3)
    assert torch.equal(torch.get_rng_state(), before)
    found, expected = values(second), values(first)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    assert torch.equal(first.bare, torch.full((3,), 7.0))
    assert not torch.equal(first.linear.weight, first.twin.weight)

    torch.manual_seed(key(3, "linear"))
    assert torch.equal(first.linear.weight, nn.Linear(20, 30).weight)


def test_statistics_of_batch_norm_are_reset() -> None:
    model = Mixed()
    model.norm(torch.randn(8, 30))
    assert model.norm.num_batches_tracked == 1
    initialise(model, 0)
    assert model.norm.num_batches_tracked == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(30))


def test_inside_another_module_the_nearest_law_counts() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = build(hidden=32, ffn=48, num_layers=2)
            self.probe = nn.Linear(32, 2)

    class WrapperWithLaw(Wrapper):
        def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
            assert name in ("probe.weight", "probe.bias")
            parameter.fill_(3.0)

    wrapper, with_law = Wrapper(), WrapperWithLaw()
    initialise(wrapper, 0)
    initialise(with_law, 0)
    assert torch.equal(with_law.probe.weight, torch.full((2, 32), 3.0))
    assert_same(values(with_law.llama), values(wrapper.llama))
    assert wrapper.llama.model.layers[0].mlp.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert torch.equal(wrapper.llama.model.norm.weight, torch.ones(32))
    assert wrapper.probe.weight.abs().max() <= 32**-0.5
    alone = fresh_llama()
    assert not torch.equal(wrapper.llama.lm_head.weight, alone.lm_head.weight)  # another full name is another stream


def test_a_tied_parameter_is_drawn_once_under_its_first_name() -> None:
    tied, untied = fresh_llama(tied=True), fresh_llama()
    assert torch.equal(tied.lm_head.weight, untied.model.embed_tokens.weight)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_meta_is_refused_until_materialised() -> None:
    with torch.device("meta"):
        model = build(hidden=32, ffn=48, num_layers=2, tied=True)
    with rejects("M050", "model.embed_tokens.weight"):
        initialise(model, 0)
    materialise(model, "cpu")
    initialise(model, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(values(model), values(fresh_llama(tied=True)))


def test_materialise_keeps_values_flags_and_identity() -> None:
    model = Mixed()
    model.bare.requires_grad_(False)
    with torch.device("meta"):
        model.linear = nn.Linear(20, 30, dtype=torch.bfloat16)
    bare = model.bare
    materialise(model, "cpu")
    assert model.bare is bare
    assert not model.bare.requires_grad
    assert torch.equal(model.bare, torch.full((3,), 7.0))
    assert (model.linear.weight.device.type, model.linear.weight.dtype) == ("cpu", torch.bfloat16)
    assert isinstance(model.linear.weight, nn.Parameter)


def test_a_meta_tensor_that_nothing_would_fill_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.ones(2))
            self.linear = nn.Linear(2, 2)

    with torch.device("meta"):
        model = nn.Sequential(Bare())
    with pytest.raises(ShoalError) as caught:
        materialise(model, "cpu")
    assert [p.what.split()[0] for p in caught.value.problems] == ["0.scale", "0.table"]
    assert "Bare" in caught.value.problems[0].fix


SMALL = {"num_layers": 1, "hidden": 32, "num_heads": 2, "num_kv_heads": 2, "vocabulary": 16}
MODELS = {
    "llama": lambda: llama.build(**SMALL, ffn=48),
    "mlp": mlp.build,
    "moe": lambda: moe.build(**SMALL, num_experts=2, expert_ffn=48),
    "resnet": lambda: resnet.build(preset="resnet18"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_nobody_has_drawn_starts_as_every_other_one(name: str) -> None:
    """Experts and routers kept what torch's global stream had drawn, and an MLP, whose law is torch's, no number."""
    model, expected = MODELS[name](), MODELS[name]()
    init_missing(model, seed=3)
    initialise(expected, seed=3)
    assert_same(values(model), values(expected))


def test_what_somebody_has_filled_is_not_drawn_again() -> None:
    """A bias was missing in a file of weights, and its layer forgot the weight that was there."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    expected = values(model)
    with torch.no_grad():
        model[1].running_mean.fill_(5.0)  # type: ignore[operator, union-attr]
        for parameter in (model[0].bias, model[1].weight):
            parameter.fill_(torch.nan)  # type: ignore[operator, union-attr]
    init_missing(model, seed=0)
    assert torch.equal(model[0].weight, expected["0.weight"])  # type: ignore[arg-type]
    assert model[0].bias.isfinite().all()  # type: ignore[operator, union-attr]
    assert torch.equal(model[1].weight, expected["1.weight"])  # type: ignore[arg-type]
    assert (model[1].running_mean == 5.0).all()  # type: ignore[union-attr]
