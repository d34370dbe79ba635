"""Images of a recipe become the numbers that transformers' own processors make of the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rejects import rejects

pytest.importorskip("transformers")
from shoal.models.huggingface.pretrained.data.pixels import PixelRule, pixel_rule

PIXELS = torch.randint(256, (2, 3, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
VALUES = {"image_mean": MEAN, "image_std": DEVIATION}
RED, BLUE = PIXELS.double(), PIXELS.flip(1).double()
MEANS, DEVIATIONS = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, DEVIATION))
FILES: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    "mean": (VALUES, (RED / 255 - MEANS) / DEVIATIONS),
    "no mean": ({**VALUES, "do_normalize": False}, RED / 255),
    "bytes": ({"do_normalize": False, "do_rescale": False}, RED),
    "factor": ({**VALUES, "rescale_factor": 1 / 127.5}, (RED / 127.5 - MEANS) / DEVIATIONS),
    "blue first": ({**VALUES, "do_flip_channel_order": True}, (BLUE / 255 - MEANS) / DEVIATIONS),
    "MobileViT": ({**VALUES, "image_processor_type": "MobileViTImageProcessor"}, BLUE / 255),
    "MobileViT of old": ({"feature_extractor_type": "MobileViTFeatureExtractor"}, BLUE / 255),
    "EfficientNet": (
        {**VALUES, "image_processor_type": "EfficientNetImageProcessor"},
        (RED / 255 - MEANS) / DEVIATIONS**2,
    ),
    "EfficientNet with an offset": (
        {**VALUES, "image_processor_type": "EfficientNetImageProcessor", "include_top": False, "rescale_offset": True},
        (RED / 255 - 1 - MEANS) / DEVIATIONS,
    ),
}
"""Keys of a preprocessor_config.json, and what becomes of `PIXELS`."""
PROCESSORS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("ViT", "MobileViT", "EfficientNet", "PoolFormer", "ConvNext", "Levit", "Beit")},
    "ViT of bytes": {"do_rescale": False},
    "ViT without mean": {"do_normalize": False},
    "ViT from -1 to 1": {"rescale_factor": 1 / 127.5, "do_normalize": False},
    "EfficientNet without its end": {"include_top": False},
    "EfficientNet with an offset": {"rescale_offset": True, "rescale_factor": 1 / 127.5},
    "EfficientNet without mean": {"do_normalize": False},
    "MobileViT in order": {"do_flip_channel_order": False},
}


def written(folder: Path, said: dict[str, Any]) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return folder


def of_recipe(rule: PixelRule | None) -> torch.Tensor:
    images = (PIXELS.double() / 255 - 0.5) / 0.5
    assert rule is not None
    return rule.of(images)


@pytest.mark.parametrize("case", FILES)
def test_a_folder_says_what_becomes_of_bytes(case: str, tmp_path: Path) -> None:
    said, expected = FILES[case]
    torch.testing.assert_close(of_recipe(pixel_rule(written(tmp_path, said))), expected)


@pytest.mark.parametrize("case", PROCESSORS)
def test_numbers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    import transformers

    kind, still = case.split()[0], {"do_resize": False, "do_center_crop": False}
    size = {"size": {"shortest_edge": 512}} if kind == "ConvNext" else {}  # smaller ones are cropped
    processor = getattr(transformers, f"{kind}ImageProcessor")(**still, **size, **PROCESSORS[case])
    processor.save_pretrained(tmp_path)
    expected = processor(list(PIXELS), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(of_recipe(pixel_rule(tmp_path)).float(), expected.float(), rtol=1e-5, atol=1e-5)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a step that is not made": ({**VALUES, "do_color_quantize": True}, "do_color_quantize"),
    "no numbers": ({"do_normalize": True}, "image_mean"),
    "a factor of 0": ({**VALUES, "rescale_factor": 0}, "rescale_factor"),
    "no flag": ({**VALUES, "do_rescale": "yes"}, "do_rescale"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_made_is_rejected(case: str, tmp_path: Path) -> None:
    said, word = WRONG[case]
    with rejects("M073", word):
        pixel_rule(written(tmp_path, said))


def test_a_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert pixel_rule(tmp_path) is None
