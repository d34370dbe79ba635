"""QLoRA: frozen weights in 4 bits, products with them, and the gradients of adapters beside them."""

from __future__ import annotations

import itertools
import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.blueprint.plan import Plan
from shoal.checkpoint.formats.lazy_tensor import full
from shoal.checkpoint.full_tensor import FullTensors
from shoal.checkpoint.storage.locate import find
from shoal.config.checks.packed_base import check_packed_base
from shoal.config.load import build_recipe
from shoal.config.recipe import Recipe
from shoal.numerics.nf4 import CODES, Packed, cut, linear, pack
from shoal.parallel.lora.checks import check_adapters
from shoal.parallel.lora.quantize import quantized_layers
from shoal.train.inference.trained_model import trained_model
from shoal.train.recipe.invocation import RunInvocation
from shoal.train.recipe.loop import train
from shoal.train.recipe.preflight import preflight
from tests.rejects import rejects


def test_numbers_are_rounded_to_the_nearest_code() -> None:
    """Also where blocks and groups are not full, and where a block is zero."""
    torch.manual_seed(0)
    weight = torch.randn(70, 300)  # 329 blocks: 1.3 groups, and the last one is padded
    weight[0] = 0.0
    weight[1] *= 1e-4  # scales far below the mean
    packed = pack(weight)
    found = packed.unpacked()
    assert not found[0].any()
    flat, back = weight.reshape(-1), found.reshape(-1)
    scales = torch.nn.functional.pad(flat, (0, 56)).view(-1, 64).abs().amax(1)
    gap = max(b - a for a, b in itertools.pairwise(CODES)) / 2
    bound = scales.repeat_interleave(64)[: flat.numel()] * (gap + 0.02) + 0.02
    assert ((flat - back).abs() <= bound).all()
    assert float((flat - back).norm() / flat.norm()) < 0.1  # 4 bits of a normal distribution
    assert sum(tensor.nbytes for tensor in pack(torch.randn(512, 512)).tensors) < 0.52 * 512 * 512
    exact = torch.tensor(CODES).repeat(256, 4)  # blocks whose scales are alike
    torch.testing.assert_close(pack(exact).unpacked(), exact, rtol=0.0, atol=1e-6)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5, bias=False)).to(dtype)
    adapted = shoal.lora(net, rank=2)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_()
    return adapted


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradients_of_adapters_are_those_beside_the_rounded_weight(dtype: torch.dtype, rtol: float) -> None:
    packed, plain = shoal.quantize_base(model(dtype)), model(dtype)
    rounded = {name: layer.packed.unpacked() for name, layer in quantized_layers(packed).items()}
    assert sorted(rounded) == ["0", "2"]
    for name, weight in rounded.items():
        plain.get_submodule(name).weight.data.copy_(weight)
    x = torch.randn(3, 12, dtype=dtype)
    for net in (packed, plain):
        net(x).square().sum().backward()
    assert not {"0.weight", "2.weight"} & {name for name, _ in packed.named_parameters()}
    for name, parameter in packed.named_parameters():
        expected = plain.get_parameter(name)
        assert (parameter.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=rtol, atol=rtol)
    torch.testing.assert_close(shoal.merge_lora(packed)(x), shoal.merge_lora(plain)(x), rtol=rtol, atol=rtol)
    assert type(packed[0]) is nn.Linear  # type: ignore[index]


def test_autograd_keeps_the_packed_weight_alone() -> None:
    saved: list[int] = []
    weight, x = pack(torch.randn(64, 64)), torch.randn(2, 64, requires_grad=True)

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        linear(x, weight, None).sum().backward()
    assert max(saved, default=0) < 64 * 64
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, torch.ones(64)).dtype == torch.bfloat16


def test_adapters_of_a_packed_base_are_saved_and_loaded(tmp_path: Path) -> None:
    batch = torch.randn(4, 12), torch.tensor([0, 1, 2, 3])

    def start(net: nn.Module) -> shoal.Run:
        run = shoal.Run("fp32", device="cpu")
        run.prepare(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
        return run

    run, again = start(shoal.quantize_base(model())), start(shoal.quantize_base(model()))
    run.step(batch)
    run.save(tmp_path)
    again.load(tmp_path)
    assert float(run.step(batch)) == float(again.step(batch))
    other = model()
    other.get_submodule("0").weight.data[3] += 1.0  # type: ignore[operator, union-attr]
    with rejects("L010"):
        start(shoal.quantize_base(other)).load(tmp_path)


class Conv1D(nn.Module):
    """x W + b."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def recipe(folder: Path, base: str | None, steps: int, plan: str = "fp64") -> Recipe:
    tree = {
        "model": {"preset": "tiny", "num_layers": 1, "hidden": 32, "ffn": 48, "lora": {"rank": 4, "base": base}},
        "data": {"source": "synthetic", "seq_len": 16, "global_batch": 4, "validation": 0, "workers": 0},
        "launch": {"device": "cpu", "threads": 1},
        "plan": plan,
        "optim": {"lr": 0.05, "schedule": "constant"},
        "run": {"duration": f"{steps}step", "dir": str(folder), "log_every": 1},
    }
    return build_recipe(tree, title="test")


def losses(folder: Path, base: str | None, *durations: int) -> list[float]:
    """Of a run that is resumed after each duration but the last."""
    for steps in durations:
        job = preflight(recipe(folder, base, steps), 1)
        train(None, None, job, RunInvocation(quiet=True, start_time=0.0))
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_recipe_packs_its_base_and_resumes(tmp_path: Path) -> None:
    packed = losses(tmp_path / "a", "nf4", 4)
    assert losses(tmp_path / "b", "nf4", 2, 4) == packed
    plain = losses(tmp_path / "c", None, 4)
    assert packed != plain
    assert packed == pytest.approx(plain, rel=0.05)
    asked = recipe(tmp_path, "nf4", 4, "zero=3")
    assert not list(check_packed_base(asked))
    asked = asked.model_copy(update={"run": asked.run.model_copy(update={"compile": True})})
    assert [problem.code for problem in check_packed_base(asked)] == ["L033"]


def test_a_base_is_packed_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint of a whole model, and never two weights at once; the run knows its base again."""
    whole, tuned = recipe(tmp_path / "whole", None, 2), recipe(tmp_path / "tuned", "nf4", 3, "bf16")
    whole = whole.model_copy(update={"model": whole.model.model_copy(update={"lora": None})})
    tuned = tuned.model_copy(update={"run": tuned.run.model_copy(update={"start_from": str(tmp_path / "whole")})})
    read: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def note(weight: torch.Tensor) -> Packed:
        alive.append(sum(one() is not None for one in read))
        read.append(weakref.ref(weight))
        return pack(weight)

    train(None, None, preflight(whole, 1), RunInvocation(quiet=True, start_time=0.0))
    monkeypatch.setattr("shoal.parallel.lora.quantize.pack", note)
    train(None, None, preflight(tuned, 1), RunInvocation(quiet=True, start_time=0.0))
    assert len(alive) == 2 * 7  # drawn from the seed, and read
    assert max(alive) <= 1
    found = trained_model(tmp_path / "tuned").model  # raises L010 if the fingerprints of the base differ
    with FullTensors(find(tmp_path / "whole", None)) as full_tensors:
        name = "model.layers.0.mlp.up_proj.weight"
        saved = full(full_tensors.model()[name]).to(torch.bfloat16)
    assert torch.equal(found.get_parameter(name).to(torch.bfloat16), saved)


def test_weights_of_a_whole_model_are_packed_when_a_script_loads_them(tmp_path: Path) -> None:
    def start(net: nn.Module) -> shoal.Run:
        run = shoal.Run("fp32", device="cpu")
        run.prepare(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
        return run

    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5, bias=False))
    start(whole).save(tmp_path)
    tuned = shoal.quantize_base(model())
    start(tuned).load(tmp_path, only_weights=True)
    assert sorted(quantized_layers(tuned)) == ["0", "2"]
    for name, layer in quantized_layers(tuned).items():
        assert torch.equal(layer.packed.unpacked(), pack(whole.get_submodule(name).weight).unpacked())


@pytest.mark.parametrize(
    ("dim", "ranges"), [(0, [(2, 3)]), (0, [(0, 2), (4, 1), (6, 2)]), (1, [(64, 128)]), (1, [(0, 64), (128, 64)])]
)
def test_a_part_is_rounded_as_the_whole(dim: int, ranges: list[tuple[int, int]]) -> None:
    packed = pack(torch.randn(8, 192, dtype=torch.float64))
    found = cut(packed, dim, ranges)
    expected = torch.cat([packed.unpacked().narrow(dim, *one) for one in ranges], dim)
    assert found is not None
    assert torch.equal(found.unpacked(), expected)
    assert sum(one.nbytes for one in found.tensors) == expected.numel() * (0.5 + 4 / 64)
    assert (packed.shape, found.dtype) == ((8, 192), torch.float64)


def test_a_part_that_begins_inside_of_a_block_is_none() -> None:
    assert cut(pack(torch.randn(8, 192)), 1, [(32, 64)]) is None
    assert cut(pack(torch.randn(8, 96)), 1, [(0, 64)]) is None  # the second row begins inside of a block
    assert cut(pack(torch.randn(8, 96)), 0, [(1, 2)]) is None
    assert cut(pack(torch.randn(8, 96)), 0, [(2, 2)]) is not None


def test_what_cannot_be_packed() -> None:
    with rejects("L030", "Linear"):
        shoal.quantize_base(nn.Linear(2, 2))
    with rejects("L031", "packed already"):
        shoal.quantize_base(shoal.quantize_base(model()))
    with torch.device("meta"):
        net = shoal.lora(nn.Sequential(nn.Linear(4, 4)), rank=2)
    with rejects("L031", "meta"):
        shoal.quantize_base(net)
    shared = model()
    shared.register_module("copy", nn.Linear(12, 24))
    shared.copy.weight = shared.get_submodule("0").weight
    with rejects("L031", "shares its weight"):
        shoal.quantize_base(shared)
    transposed = shoal.lora(nn.Sequential(Conv1D(4, 8)), rank=2)
    with rejects("L031", "Conv1D, whose weight has its inputs first"):
        shoal.quantize_base(transposed)
    packed, plan = shoal.quantize_base(model()), Plan.parse("tp=2").resolve(2)
    found = check_adapters(packed, plan, shoal.Description(), compiles=True)
    assert [problem.code for problem in found] == ["L033"]
    assert not list(check_adapters(packed, Plan.parse("zero=3").resolve(2), shoal.Description()))
