"""A batch with lists in place of tensors gets one message, which names the call that makes tensors of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from shoal.data.batch import length
from tests.rejects import rejects

ROWS: Any = [{"tokens": [1, 2, 3], "labels": [2, 3, 4]}] * 4


def test_a_loader_over_rows_of_lists() -> None:
    batch = next(iter(DataLoader(ROWS, batch_size=2)))
    assert isinstance(batch["tokens"], list)
    with rejects("D024", "'tokens'", "a list of 3 (Tensor)", 'dataset.with_format("torch")', "torch.tensor(values)"):
        length(batch)


@pytest.mark.parametrize("batch", [{"input_ids": [[1, 2], [3, 4]]}, {"tokens": torch.ones(2, 3), "labels": [0, 1]}])
def test_plain_lists(batch: dict[str, Any]) -> None:
    with rejects("D024", "got a list of 2", "torch.tensor(values)"):
        length(batch)


def test_numbers_alone() -> None:
    with rejects("D024", "no tensor in a list", "torch.tensor(values)"):
        length([1, 2])


def test_a_list_of_tensors_under_another_name_is_taken() -> None:
    assert length({"tokens": torch.ones(2, 3), "sizes": [torch.ones(2), torch.ones(2)], "names": ["a", "b"]}) == 2


@pytest.mark.parametrize("labels", [[torch.ones(2), torch.ones(2)], [{"boxes": torch.ones(2, 4)}]])
def test_labels_of_detectors_and_of_several_heads_are_taken(labels: Any) -> None:
    assert length({"pixels": torch.ones(2, 3), "labels": labels}) == 2
