"""ResNet against a plain functional reference in float64, its published sizes, and its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Run
from shoal.models.resnet import PRESETS, build
from shoal.numerics.init import initialise, materialise
from tests.rejects import rejects

PUBLISHED = {"resnet18": 11_689_512, "resnet50": 25_557_032}
PUBLISHED_GMACS = {"resnet18": 1.814, "resnet50": 4.089}


def reference(state: dict[str, Tensor], x: Tensor, num_blocks: list[int], small_images: bool) -> Tensor:
    """The network by its weights alone, in training mode; a block has as many convolutions as the state holds."""

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = state[name + ".weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        var = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
        scale, shift = (state[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
        return (x - mean) / torch.sqrt(var + 1e-5) * scale + shift

    x = norm(conv(x, "conv1", 1 if small_images else 2), "bn1").clamp(min=0)
    x = x if small_images else F.max_pool2d(x, 3, stride=2, padding=1)
    for stage, count in enumerate(num_blocks):
        for i in range(count):
            at = f"layer{stage + 1}.{i}."
            stride = 2 if stage > 0 and i == 0 else 1
            bottleneck = at + "conv3.weight" in state
            y = norm(conv(x, at + "conv1", 1 if bottleneck else stride), at + "bn1").clamp(min=0)
            y = norm(conv(y, at + "conv2", stride if bottleneck else 1), at + "bn2")
            if bottleneck:
                y = norm(conv(y.clamp(min=0), at + "conv3"), at + "bn3")
            if at + "downsample.0.weight" in state:
                x = norm(conv(x, at + "downsample.0", stride), at + "downsample.1")
            x = (x + y).clamp(min=0)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize("small_images", [True, False])
@pytest.mark.parametrize(("depth", "num_blocks"), [(18, [2, 2, 2, 2]), (50, [3, 4, 6, 3])])
def test_logits_and_gradients_equal_the_reference(depth: int, num_blocks: list[int], small_images: bool) -> None:
    model = build(depth=depth, width=4, num_classes=5, small_images=small_images).double()
    initialise(model, seed=0)
    images = torch.randn(2, 3, 19, 25, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits, expected = model(images=images), reference(state, images, num_blocks, small_images)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, state[name].grad, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_size_and_cost(preset: str) -> None:
    with torch.device("meta"):
        model = build(preset=preset)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[preset]
    flops = model.config.training_flops((2, 3, 224, 224))
    assert flops == pytest.approx(2 * 6 * PUBLISHED_GMACS[preset] * 1e9, rel=1e-3)


@pytest.mark.parametrize("small_images", [True, False])
@pytest.mark.parametrize("depth", [18, 50])
def test_cost_equals_a_count_of_every_convolution(depth: int, small_images: bool) -> None:
    macs: list[int] = []

    def count(convolution: nn.Module, _: object, output: Tensor) -> None:
        macs.append(convolution.weight.numel() * output.shape[2] * output.shape[3])

    with torch.device("meta"):
        model = build(depth=depth, small_images=small_images)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(count)
        model(torch.empty(1, 3, 35, 41))
    assert model.config.training_flops((1, 3, 35, 41)) == 6 * (sum(macs) + model.fc.weight.numel())


def test_names_are_those_of_torchvision() -> None:
    with torch.device("meta"):
        names = set(build(preset="resnet50").state_dict())
    assert {"conv1.weight", "bn1.running_mean", "bn1.num_batches_tracked", "fc.bias"} < names
    assert {"layer1.0.downsample.0.weight", "layer1.0.downsample.1.running_var", "layer4.2.conv3.weight"} < names
    assert len(names) == 320  # as torchvision's


@pytest.mark.parametrize("preset", PRESETS)
def test_description_names_what_exists_and_forgets_nothing(preset: str) -> None:
    with torch.device("meta"):
        model = build(preset=preset)
    description = model.describe()
    parts = [*description.before_blocks, *description.blocks, *description.after_blocks]
    assert all(name in dict(model.named_modules()) for name in parts)
    assert description.num_outputs == model.fc.out_features
    for name, _ in model.named_parameters():
        assert any(name.startswith(part + ".") for part in parts), name


def test_stages_one_after_another_equal_the_whole() -> None:
    def whole() -> nn.Module:
        model = build(small_images=False)
        initialise(model, seed=0)
        return model.eval()

    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    description = whole().describe()
    x = images
    for start, stop in ((0, 3), (3, 8)):
        part = whole()
        gone = [*description.blocks[:start], *description.blocks[stop:]]
        gone += description.before_blocks if start else description.after_blocks
        for name in gone:
            part.set_submodule(name, nn.Identity())
        x = part(x)
    assert torch.equal(x, whole()(images))


def test_from_meta_statistics_and_weights_are_filled() -> None:
    with torch.device("meta"):
        model = build()
    materialise(model, "cpu")
    initialise(model, seed=0)
    early = build()
    initialise(early, seed=0)
    for (name, tensor), expected in zip(model.state_dict().items(), early.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name
    assert torch.equal(model.bn1.running_var, torch.ones(8))
    assert torch.equal(model.bn1.weight, torch.ones(8))
    conv = model.layer4[1].conv2.weight
    assert conv.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)
    assert model.fc.bias.abs().max().item() <= 64**-0.5


def test_mistakes_come_together() -> None:
    with rejects("M008", "or 50") as caught:
        build(depth=34, width=0)
    assert len(caught.value.problems) == 2
    with rejects("M006", match=r"unknown preset 'resnet51'[\s\S]*resnet50"):
        build(preset="resnet51")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, while it compiles
def test_blocks_of_many_shapes_are_compiled_with_all_that_is_between_them() -> None:
    graphs: list[str] = []
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    model = build(preset="resnet18", num_classes=10)
    initialise(model, 0)
    with Run("fp32", device="cpu", compile=backend) as run:  # type: ignore[arg-type]
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step((torch.randn(2, 3, 32, 32), torch.tensor([0, 1])))
    assert len(graphs) == 1
    assert "modules_conv1" in graphs[0]
    assert "modules_fc" in graphs[0]
