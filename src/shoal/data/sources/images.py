"""Images from a folder with one folder per class, decoded when a batch is made."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data.dataset import Batch, Ids
from shoal.data.order import sample_ids
from shoal.data.sources.digest import digest_of_files
from shoal.data.sources.files import IMAGE_ENDINGS, files_under, reject_irregular
from shoal.data.task import Task
from shoal.errors import ShoalError, needs

LISTING_SEED = 0  # the same for every run, so that the held-out images are the same whatever the run's seed


class ImageFolder:
    """`images` (B, 3, S, S, float32, normalised by mean 0.5 and deviation 0.5 to [-1, 1]) and `labels` (B, int64).

    Files are numbered in a fixed shuffled order, so that the held-out last ones are of all classes.
    """

    task: Task = "image class"
    tokens_per_sample = None
    labels_per_sample = 1
    is_in_memory = False

    def __init__(self, path: Path, size: int) -> None:
        self._pillow = _Pillow()
        classes = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]
        files = [(file, label) for label, folder in enumerate(classes) for file in files_under(folder, IMAGE_ENDINGS)]
        if not files:
            loose = len(files_under(path, IMAGE_ENDINGS))
            raise ShoalError(
                f"{path} must have folders with images in them, got {len(classes)} folders and {loose} images",
                fix=f"one folder per class: {path}/cat/1.png, {path}/dog/2.png",
                code="D010",
            )
        shuffled = sample_ids(LISTING_SEED, len(files), 0, len(files))
        self._files = [files[number] for number in shuffled]
        self._root, self._size = path, size
        self.classes = tuple(folder.name for folder in classes)
        self.vocabulary: int | None = len(classes)
        self.num_classes: int | None = len(classes)
        self._origin = f"{len(files):,} images of {len(classes)} classes in {path}, scaled to {size} x {size}"

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, ids: Ids) -> Batch:
        """Decode, scale and normalise."""
        pixels = np.empty((len(ids), self._size, self._size, 3), dtype=np.uint8)
        labels = np.empty(len(ids), dtype=np.int64)
        for row, number in enumerate(ids):
            file, labels[row] = self._files[number]
            pixels[row] = self._pillow.decode(file, self._size)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float()
        return {"images": images.div_(127.5).sub_(1.0), "labels": torch.from_numpy(labels)}

    def describe(self) -> str:
        """Number of images, classes and path."""
        return self._origin

    def digest(self) -> str:
        """The digest of the names, which decide the labels, and of some of the content."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_of_files(self._root, [file for file, _ in self._files])


class _Pillow:
    def __init__(self) -> None:
        needs("PIL.Image", what="a folder of images", package="Pillow", extra="images")

    def decode(self, file: Path, size: int) -> Any:
        from PIL import Image, UnidentifiedImageError

        reject_irregular(file)
        try:
            with Image.open(file) as image:
                return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ShoalError(
                f"cannot decode the image {file}: {error}", fix=f"remove it: rm {file}", code="D011"
            ) from error
