"""A fingerprint of data: the same for a copy, another one for whatever was changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.recipe import DataSection
from shoal.data.fingerprint import Fingerprint
from shoal.data.sources import digest
from shoal.data.sources.digest import digest_of_streams
from shoal.data.sources.open import open_datasets


def taken(source: Path | str, **more: Any) -> Fingerprint:
    section = DataSection(**{"source": str(source), "seq_len": 8, "validation": 0.1, "token_dtype": "uint8", **more})
    return Fingerprint.of(*open_datasets(section, seed=0))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        (np.arange(400 + number) % 251).astype(np.uint8).tofile(folder / f"{number}.bin")
    return folder


def test_a_copy_is_the_same_data(shards: Path, tmp_path: Path) -> None:
    before = taken(shards)
    copied = shutil.copytree(shards, tmp_path / "elsewhere")
    for file in copied.iterdir():
        os.utime(file, (0, 0))
    assert taken(copied) == before
    assert before.difference(before.to_mapping()) == ""


def shorten(folder: Path) -> None:
    os.truncate(folder / "1.bin", 300)


def replace(folder: Path) -> None:
    (folder / "1.bin").write_bytes(bytes(401))


def edit(folder: Path) -> None:
    with (folder / "2.bin").open("r+b") as file:
        file.seek(123)
        file.write(b"\xff")


def add(folder: Path) -> None:
    (folder / "3.bin").write_bytes(bytes(9))


def swap(folder: Path) -> None:
    (folder / "0.bin").rename(folder / "4.bin")


@pytest.mark.parametrize("change", [shorten, replace, edit, add, swap])
def test_changed_shards_have_another_fingerprint(shards: Path, change: Callable[[Path], None]) -> None:
    before = taken(shards)
    change(shards)
    assert "fingerprint: " in taken(shards).difference(before.to_mapping())


def test_the_settings_of_samples_change_the_counts(shards: Path) -> None:
    before = taken(shards).to_mapping()
    assert "samples: 134 → 67; held-out samples: 15 → 7" in taken(shards, seq_len=16).difference(before)
    assert "held-out samples: 15 → 74" in taken(shards, validation=0.5).difference(before)
    assert taken("synthetic", synthetic_samples=50).difference(taken("synthetic").to_mapping()).startswith("samples")


def test_an_image_that_was_added_replaced_or_moved_to_another_class_is_seen(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    folder = tmp_path / "images"
    for number in range(12):
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        images.new("RGB", (4, 4), (number, 0, 0)).save(folder / f"class{number % 2}" / f"{number}.bmp")
    before = taken(folder)
    (folder / "class0" / "0.bmp").rename(folder / "class1" / "0.bmp")
    moved = taken(folder)
    assert moved.difference(before.to_mapping()).startswith("fingerprint: ")
    images.new("RGB", (4, 4), (99, 0, 0)).save(folder / "class1" / "1.bmp")
    replaced = taken(folder)
    assert replaced.difference(moved.to_mapping()).startswith("fingerprint: ")
    shutil.copy(folder / "class1" / "1.bmp", folder / "class1" / "more.bmp")
    assert "samples: 11 → 12; fingerprint: " in taken(folder).difference(replaced.to_mapping())


def test_large_streams_are_hashed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is too large to hash, lengths, both ends and blocks decide; a token between two blocks does not."""
    monkeypatch.setattr(digest, "WHOLE", 1000)
    monkeypatch.setattr(digest, "END", 16)
    monkeypatch.setattr(digest, "BLOCK", 8)
    monkeypatch.setattr(digest, "NUM_BLOCKS", 10)
    streams = [np.arange(600, dtype=np.uint16), np.arange(400, dtype=np.uint16)]
    before = digest_of_streams(streams)

    def changed(stream: int, place: int) -> bool:
        other = [each.copy() for each in streams]
        other[stream][place] += 1
        return digest_of_streams(other) != before

    assert all(changed(stream, place) for stream, place in [(0, 0), (0, 599), (1, 0), (1, 399), (0, 100), (1, 303)])
    assert not changed(0, 50)
    assert digest_of_streams([streams[0][:-1], streams[1]]) != before
    assert digest_of_streams([streams[1], streams[0]]) != before


def test_fingerprints_of_another_method_are_not_compared(shards: Path) -> None:
    now = taken(shards)
    assert now.difference({**now.to_mapping(), "method": 0, "digest": "other"}) == ""
    assert now.difference({}) == ""
    assert now.difference({**now.to_mapping(), "samples": 3}) == "samples: 3 → 134"
