"""ResNet 18 and 50, with the names and shapes of torchvision's, so that its weights load here unchanged.

torchvision has the same networks, but as a dependency with image codecs for the sake of one file, and without a stem
for small images. Shapes: B batch, C channels, Y and X the height and width of an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Description
from shoal.errors import Problem, ShoalError, listed, raise_if
from shoal.models.build_config import build_config, not_positive, uninitialized

NUM_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}  # per stage of one resolution
EXPANSION = {18: 1, 50: 4}  # channels that leave a block, relative to those inside it


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig:
    """The size of a ResNet. The defaults are the preset `tiny`."""

    depth: int = 18
    """18, of two 3x3 convolutions per block, or 50, of bottlenecks."""

    num_classes: int = 10
    """Number of classes."""

    width: int = 8
    """Channels of the first stage; 64 as published."""

    small_images: bool = True
    """True: a 3x3 stem without pooling, for images of some 32 pixels. False: the published one, for some 224."""

    def __post_init__(self) -> None:
        problems = not_positive(self, "num_classes", "width")
        if self.depth not in NUM_BLOCKS:
            problems.append(
                Problem(
                    "M008",
                    f"depth must be {listed(NUM_BLOCKS)}, got {self.depth}",
                    f"--model.depth {listed(NUM_BLOCKS)}",
                )
            )
        raise_if(problems, title="model 'resnet'")

    def training_flops(self, shape: tuple[int, ...]) -> float:
        """For images (batch, channels, height, width): each weight of a convolution is one multiply-add per output
        pixel; the backward costs twice the forward."""
        batch, _, *size = shape
        return 6.0 * batch * sum(self.costs(size).values())

    def costs(self, size: Sequence[int] = (256, 256)) -> dict[str, float]:
        """Submodule → multiply-adds of the forward of one image. Their ratios hold for images of any size."""
        stem = 1 if self.small_images else 2
        costs = {"conv1": float((9 if self.small_images else 49) * 3 * self.width * _pixels(size, stem))}
        stride = stem if self.small_images else 2 * stem
        for block in block_shapes(self):
            arriving, leaving = _pixels(size, stride), _pixels(size, stride * block.stride)
            stride *= block.stride
            costs[block.name] = block.macs(self.depth, arriving, leaving)
        return costs | {"fc": float(self.num_features * self.num_classes)}

    @property
    def num_features(self) -> int:
        """Channels of the classifier's input."""
        return self.width * 8 * EXPANSION[self.depth]


PRESETS = {
    "tiny": ResNetConfig(),
    "resnet18": ResNetConfig(depth=18, num_classes=1000, width=64, small_images=False),
    "resnet50": ResNetConfig(depth=50, num_classes=1000, width=64, small_images=False),
}


def build(**arguments: Any) -> ResNet:
    """A ResNet from `preset` and any field of `ResNetConfig`; its parameters are NaN until they are
    initialised."""
    return ResNet(build_config("resnet", PRESETS, ResNetConfig(), arguments))


def settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All settings, with those that the arguments leave out."""
    return asdict(build_config("resnet", PRESETS, ResNetConfig(), arguments))


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One residual block: its name, its input, inner and output channels, and its stride."""

    name: str
    arriving: int
    inside: int
    leaving: int
    stride: int

    @property
    def reshapes(self) -> bool:
        """Whether the shortcut needs a projection."""
        return self.stride != 1 or self.arriving != self.leaving

    def macs(self, depth: int, pixels_in: int, pixels_out: int) -> float:
        """Multiply-adds of the forward of one image."""
        shortcut = self.arriving * self.leaving * pixels_out if self.reshapes else 0
        if depth == 18:
            return shortcut + 9 * self.inside * (self.arriving + self.leaving) * pixels_out
        squeeze = self.arriving * self.inside * pixels_in
        return shortcut + squeeze + (9 * self.inside + self.leaving) * self.inside * pixels_out


def block_shapes(config: ResNetConfig) -> Iterator[BlockShape]:
    """Every block in the order of the forward; each stage but the first halves the image and doubles the channels."""
    arriving = config.width
    for stage, num_blocks in enumerate(NUM_BLOCKS[config.depth]):
        inside = config.width * 2**stage
        leaving = inside * EXPANSION[config.depth]
        for i in range(num_blocks):
            stride = 2 if stage > 0 and i == 0 else 1
            yield BlockShape(f"layer{stage + 1}.{i}", arriving, inside, leaving, stride)
            arriving = leaving


def _pixels(size: Sequence[int], stride: int) -> int:
    """Pixels that are left of an image; padding is such that every halving rounds up."""
    height, width = size
    return -(-height // stride) * -(-width // stride)


class ResNet(nn.Module):
    """Images to logits."""

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        kernel, stride = (3, 1) if config.small_images else (7, 2)
        self.conv1 = _convolution(3, config.width, kernel, stride)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if config.small_images else nn.MaxPool2d(3, stride=2, padding=1)
        kind = BasicBlock if config.depth == 18 else Bottleneck
        shapes = list(block_shapes(config))
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            setattr(self, stage, nn.Sequential(*(kind(s) for s in shapes if s.name.startswith(stage))))
        self.avgpool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.fc = uninitialized(nn.Linear, config.num_features, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """images_BCYX → logits, one row per image."""
        x_BCYX = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        self._refuse_one_value(images)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x_BCYX = stage(x_BCYX)
        logits: Tensor = self.fc(self.avgpool(x_BCYX))
        return logits

    def _refuse_one_value(self, images: Tensor) -> None:
        """Batch norm divides by the spread over a microbatch, which one value has none of."""
        size, halved = images.shape[-1], 8 if self.config.small_images else 32
        if self.training and images.shape[0] == 1 and max(images.shape[2:]) <= halved:
            raise ShoalError(
                f"batch norm needs two values of a channel, and a microbatch of one image of {size} x {size} has one"
                " in the last layers",
                fix=f"--plan.mb 2, or --data.image_size {2 * halved}",
                code="M012",
            )

    def describe(self) -> Description:
        """Describe it. No layer is worth splitting over a tensor-parallel group."""
        return Description(
            blocks=tuple(shape.name for shape in block_shapes(self.config)),
            before_blocks=("conv1", "bn1", "relu", "maxpool"),
            after_blocks=("avgpool", "fc"),
            costs=self.config.costs(),
            num_outputs=self.config.num_classes,
            training_flops=self.config.training_flops,
        )

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """He's law for convolutions, one and zero for norms, torch's own law for the classifier."""
        if parameter.dim() == 4:
            nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu", generator=generator)
        elif name.startswith("fc."):
            bound = self.config.num_features**-0.5
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        else:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.conv1 = _convolution(shape.arriving, shape.inside, 3, shape.stride)
        self.bn1 = nn.BatchNorm2d(shape.inside)
        self.conv2 = _convolution(shape.inside, shape.leaving, 3)
        self.bn2 = nn.BatchNorm2d(shape.leaving)
        self.downsample = _shortcut(shape)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """x_BCYX → x_BCYX."""
        y_BCYX = F.relu(self.bn1(self.conv1(x_BCYX)))
        y_BCYX = self.bn2(self.conv2(y_BCYX))
        return F.relu(y_BCYX + self.downsample(x_BCYX))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1, beside a shortcut."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.conv1 = _convolution(shape.arriving, shape.inside, 1)
        self.bn1 = nn.BatchNorm2d(shape.inside)
        self.conv2 = _convolution(shape.inside, shape.inside, 3, shape.stride)
        self.bn2 = nn.BatchNorm2d(shape.inside)
        self.conv3 = _convolution(shape.inside, shape.leaving, 1)
        self.bn3 = nn.BatchNorm2d(shape.leaving)
        self.downsample = _shortcut(shape)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """x_BCYX → x_BCYX."""
        y_BCYX = F.relu(self.bn1(self.conv1(x_BCYX)))
        y_BCYX = F.relu(self.bn2(self.conv2(y_BCYX)))
        y_BCYX = self.bn3(self.conv3(y_BCYX))
        return F.relu(y_BCYX + self.downsample(x_BCYX))


def _shortcut(shape: BlockShape) -> nn.Sequential:
    """A projection where the shape changes; empty, which changes nothing, where it does not."""
    if not shape.reshapes:
        return nn.Sequential()
    return nn.Sequential(_convolution(shape.arriving, shape.leaving, 1, shape.stride), nn.BatchNorm2d(shape.leaving))


def _convolution(arriving: int, leaving: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return uninitialized(nn.Conv2d, arriving, leaving, kernel, stride=stride, padding=kernel // 2, bias=False)
