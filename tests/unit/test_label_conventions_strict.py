"""A model's own loss is taken for plain cross-entropy only if its graph says so, whatever its first value is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.train.loss.labels import is_shifting
from shoal.train.run import Run
from tests.rejects import rejects

CLASSES = 5
Compare = Callable[[Tensor, Tensor], Tensor]


class Output(dict[str, Any]):
    """As transformers returns it."""

    __getattr__ = dict.get


class Model(nn.Module):
    """A classifier of tokens that computes its own loss."""

    def __init__(self, compare: Compare) -> None:
        super().__init__()
        self.layer = nn.Linear(6, CLASSES)
        self.compare = compare

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.layer(x)
        loss = None if labels is None else self.compare(logits.flatten(0, -2), labels.flatten())
        return Output(loss=loss, logits=logits)


def batch(label: int = 1) -> dict[str, Tensor]:
    """All labels have one class, so that class weights cancel, and most of what else is possible does not show."""
    x = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))
    return {"x": x, "labels": torch.full((8, 4), label)}


def step(compare: Compare, data: dict[str, Tensor] | None = None, words: str = "fp32 mb=4") -> float:
    torch.manual_seed(0)
    model = Model(compare)
    with Run(words, device="cpu") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return run.step(batch() if data is None else data).item()


def cross_entropy(**options: Any) -> Compare:
    return lambda logits, labels: F.cross_entropy(logits, labels, **options)


WEIGHTS = torch.arange(1.0, CLASSES + 1)
EQUAL: dict[str, Compare] = {
    "plain": cross_entropy(),
    "equal weights": cross_entropy(weight=torch.full((CLASSES,), 3.0)),
    "an ignored label that is no class": cross_entropy(ignore_index=-1),
    "unused parameters": lambda logits, labels: F.cross_entropy(logits, labels) + 0.0 * logits.pow(2).sum(),
    "unused parameters, each": lambda logits, labels: F.cross_entropy(logits, labels) + (logits * 0).sum() * 2.0,
    "a sum of one": lambda logits, labels: sum([F.cross_entropy(logits, labels)]) / 1,  # type: ignore[dict-item, return-value]
    "a constant": lambda logits, labels: F.cross_entropy(logits, labels) + torch.zeros(()),
    "by hand": lambda logits, labels: -logits.log_softmax(-1).gather(-1, labels[:, None]).mean(),
}
OTHER: dict[str, Compare] = {
    "weights classes": cross_entropy(weight=WEIGHTS),
    "ignore_index=-100": cross_entropy(ignore_index=3),
    "another term": lambda logits, labels: F.cross_entropy(logits, labels) + 1e-9 * logits.pow(2).mean(),
    "has another term": cross_entropy(label_smoothing=1e-8),
    "put together otherwise": lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum") / len(labels),
    "is put together": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none").mean(),
    "than by the mean": lambda logits, labels: F.cross_entropy(logits, labels) * torch.ones(()),
    "of torch's cross-entropy": lambda logits, labels: torch.stack(
        [F.cross_entropy(logits, labels), 1e-9 * logits.pow(2).mean()]
    ).sum(),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_loss_that_is_the_mean_is_taken(name: str) -> None:
    assert step(EQUAL[name]) == pytest.approx(step(EQUAL["plain"]), rel=1e-6)


@pytest.mark.parametrize("said", OTHER)
def test_another_loss_is_rejected_although_its_first_value_is_the_same(said: str) -> None:
    """It was trained without its weights, terms and other ignored labels."""
    with rejects("T014", said):
        step(OTHER[said])


def test_the_same_value_alone_does_not_tell_class_weights() -> None:
    """The reason for the tests above."""
    model, data = Model(OTHER["weights classes"]), batch()
    plain = Model(EQUAL["plain"])
    plain.load_state_dict(model.state_dict())
    assert model(**data).loss.item() == pytest.approx(plain(**data).loss.item(), rel=1e-6)


def test_a_label_that_is_no_class_is_rejected_in_every_batch() -> None:
    """So it does no harm that the model ignores it."""
    model = Model(cross_entropy(ignore_index=-1))
    with Run("fp32 mb=4", device="cpu") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step(batch())
        later = batch()
        later["labels"][3, 2] = -1
        with rejects("T022", -1):
            run.step(later)


def test_a_small_loss_of_routers_is_a_term() -> None:
    logits, labels = torch.randn(2, 4, CLASSES, requires_grad=True), torch.ones(2, 4, dtype=torch.int64)
    plain, routers = F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits.exp().mean()
    with rejects("T014", "routers"):
        is_shifting(plain + 1e-7 * routers, logits, labels, adds_routers=True)
    assert is_shifting(plain + 0.0 * routers, logits, labels, adds_routers=True) is False
    assert is_shifting(plain + 0 * routers, logits, labels, adds_routers=True) is False


def test_the_printed_fix_trains_with_class_weights() -> None:
    """Rows of several classes, in ragged microbatches: the loss is that of the whole batch."""
    data = batch()
    data["labels"] = torch.arange(32).reshape(8, 4) % CLASSES
    data["labels"][:3, :2] = -100
    torch.manual_seed(0)
    model = Model(cross_entropy(weight=WEIGHTS))
    theirs = model(**data).loss.item()
    with Run("fp32 mb=3", device="cpu", loss=lambda model, batch: model(**batch).loss) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert run.step(data).item() == pytest.approx(theirs, rel=1e-6)


def test_a_model_that_changes_its_labels_is_rejected() -> None:
    """Its loss was that of the changed labels in the first batch, and later ones were not changed."""

    def ignoring_pads(logits: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 0] = -100
        return F.cross_entropy(logits, labels)

    data = batch()
    data["labels"][3, 1] = 0
    with rejects("T014", "0 to -100", "-100 in place of 0"):
        step(ignoring_pads, data)
