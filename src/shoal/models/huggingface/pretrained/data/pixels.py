"""How a folder of transformers says that images become numbers: its preprocessor_config.json.

Bytes are multiplied by a factor (1/255), an offset is taken off (EfficientNet, some), mean and deviation are applied,
by EfficientNet the deviation once more, and some models have blue first (MobileViT). Keys that the file lacks have the
defaults of transformers' classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.formats.huggingface import read_json
from shoal.errors import ShoalError

PREPROCESSOR = "preprocessor_config.json"
MOST_PREPROCESSOR = 2**20
BYTE = 1 / 255
BLUE_FIRST, TWICE = "MobileViT", "EfficientNet"
"""Processors whose defaults are others: no mean and blue first; divided by the deviation a second time."""
OTHER_STEPS = ("do_color_quantize", "do_grayscale")
"""Keys of steps that no mean and no deviation express."""


@dataclass(frozen=True)
class PixelRule:
    """The mean and the deviation of each channel that a model was trained with, of values from 0 to 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    is_blue_first: bool = False

    def of(self, images: Tensor) -> Tensor:
        """Images that were normalised by 0.5 and 0.5."""
        mean, deviation = (images.new_tensor(values)[:, None, None] for values in (self.mean, self.deviation))
        ordered = images.flip(-3) if self.is_blue_first else images
        return (ordered * 0.5 + 0.5 - mean) / deviation


def pixel_rule(folder: Path) -> PixelRule | None:
    """How a folder says that images are normalised; None: it has no such file."""
    path = folder / PREPROCESSOR
    if not path.is_file() or path.stat().st_size > MOST_PREPROCESSOR:
        return None
    said = read_json(path)
    kind = str(said.get("image_processor_type") or said.get("feature_extractor_type") or "")
    if any(said.get(key) for key in OTHER_STEPS):
        what = f"has {' and '.join(key for key in OTHER_STEPS if said.get(key))}, which images of a recipe do not get"
        raise _wrong(path, what, "a loop of your own with shoal.Run, whose images the processor of transformers makes")
    is_blue_first = _flag(path, said, "do_flip_channel_order", kind.startswith(BLUE_FIRST))
    is_plain = kind.startswith(BLUE_FIRST) or not _flag(path, said, "do_normalize", True)
    mean, deviation = ((0.0,), (1.0,)) if is_plain else _mean_and_deviation(path, said)
    factor, offset = _factor(path, said), float(_flag(path, said, "rescale_offset", False))
    scale = factor / BYTE
    first = tuple((one + offset) / scale for one in mean)
    second = tuple(one / scale for one in deviation)
    if kind.startswith(TWICE) and _flag(path, said, "include_top", True):
        own = _mean_and_deviation(path, said)[1]
        wide = len(own) if len(second) == 1 else len(second)
        second = tuple(second[at % len(second)] * own[at % len(own)] for at in range(wide))
    return PixelRule(first, second, is_blue_first)


def _flag(path: Path, said: dict[str, Any], key: str, usual: bool) -> bool:
    value = said.get(key, usual)
    if value is not None and not isinstance(value, bool):
        raise _wrong(path, f"must have true or false as {key}, got {str(value)[:40]!r}")
    return bool(value)


def _factor(path: Path, said: dict[str, Any]) -> float:
    """What the bytes of an image are multiplied by."""
    if not _flag(path, said, "do_rescale", True):
        return 1.0
    factor = said.get("rescale_factor", BYTE)
    if not _is_number(factor) or factor <= 0:
        raise _wrong(path, f"must have a number above 0 as rescale_factor, got {str(factor)[:40]!r}")
    return float(factor)


def _mean_and_deviation(path: Path, said: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    values = [said.get(key) for key in ("image_mean", "image_std")]
    if not all(isinstance(one, list) and len(one) in (1, 3) and all(map(_is_number, one)) for one in values):
        raise _no_numbers(path, values)
    mean, deviation = (tuple(float(number) for number in one or ()) for one in values)
    if not all(number > 0 for number in deviation):
        raise _no_numbers(path, values)
    return mean, deviation


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _no_numbers(path: Path, values: Any) -> ShoalError:
    what = "must have lists of 1 or 3 numbers as image_mean and image_std, the second above 0,"
    return _wrong(path, f"{what} got {str(values)[:80]}")


def _wrong(path: Path, what: str, fix: str = "the file as save_pretrained writes it") -> ShoalError:
    return ShoalError(f"{str(path)!r} {what}", fix=fix, code="M073")
