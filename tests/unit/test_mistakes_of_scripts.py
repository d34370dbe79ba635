"""Mistakes that scripts make with a `Run`: each gets one message that names the fix, and no traceback of torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import ShoalError
from shoal.train.run import Run
from tests.rejects import rejects


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"mixed_precision": "bf16"}, r"Run\('bf16'\)"),
        ({"fp16": True}, r"Run\('fp16'\)"),
        ({"gradient_accumulation_steps": 4}, "mb="),
        ({"strategy": "fsdp"}, "zero=3"),
        ({"devices": 2}, "torchrun"),
        ({"accelerator": "gpu"}, "device="),
        ({"precision": "bf16-mixed"}, r"Run\('bf16'\)"),
        ({"clipp": 1.0}, r"Run\(clip=1.0\)"),
    ],
)
def test_words_of_other_systems(options: dict[str, Any], fix: str) -> None:
    with rejects("R046", match=rf"(?s)Run has no argument {next(iter(options))}.*{fix}"):
        Run(**options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def refused(batch: Any, said: str) -> None:
    with Run("fp32", device="cpu") as run:
        model = Model()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ShoalError, match=said):
            run.step(*batch)


def test_a_batch_in_two_arguments() -> None:
    refused(
        (torch.ones(2, 4), torch.zeros(2, dtype=torch.long)), r"(?s)one batch, and got 2 arguments.*run.step\(\(x, y"
    )


def test_a_batch_whose_names_the_forward_does_not_have() -> None:
    data = {"tokens": torch.ones(2, 4), "labels": torch.zeros(2, dtype=torch.long)}
    refused((data,), r"(?s)forward\(x: .*cannot be called with the batch's tokens.*def forward\(self, tokens\)")


def test_labels_that_are_no_class() -> None:
    refused(((torch.ones(2, 4), torch.tensor([0, 3])),), "(?s)a label is 3, and the model returns 3 logits.*4 classes")
    refused(((torch.ones(2, 4), torch.tensor([0, -1])),), "(?s)a label is -1.*-100")
    with Run("fp32", device="cpu") as run:  # in a later batch, too
        model = Model()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step((torch.ones(2, 4), torch.tensor([0, 1])))
        with rejects("T022", "is 7"):
            run.step((torch.ones(2, 4), torch.tensor([0, 7])))


def test_one_class_is_no_choice() -> None:
    with Run("fp32", device="cpu") as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with rejects("T024", "always 0"):
            run.step((torch.ones(2, 4), torch.zeros(2, dtype=torch.long)))


def test_labels_of_a_loss_function_that_are_no_class() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with Run("fp32", device="cpu", loss=loss) as run:
        model = Model()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with rejects("T022", match="no class of the model"):
            run.step((torch.ones(2, 4), torch.tensor([0, 3])))
