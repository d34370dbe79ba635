"""A loss function's microbatches are put together by what each counts: every loss and gradient is that of the whole
batch at once, or the function is rejected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.plan import Plan
from shoal.train.checks import rule_under
from shoal.train.loss.counting import Kind, read_loss
from shoal.train.loss.objective import LabelRule
from shoal.train.run import Run
from tests.rejects import rejects

CLASSES = 5


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (8, 4), generator=generator)
    for row in range(8):
        labels[row, : row % 4] = -100
    labels[3] = -100
    return {"x": torch.randn(8, 4, 6, dtype=torch.float64, generator=generator), "labels": labels}


def whole() -> dict[str, Tensor]:
    """Every label counts, and 0 may be padding."""
    batch = data()
    labels = batch["labels"].clamp_min(0)
    labels[3, 1:3] = 1  # a mean over nothing has a gradient of NaN, if torch's cross-entropy did not take it
    return {"x": batch["x"], "labels": labels}


def rows(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    key = "labels" if "labels" in batch else "target"
    return model(batch["x"]).flatten(0, -2), batch[key].flatten()


def by_mask(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = rows(model, batch)
    counts = labels != 0
    return (F.cross_entropy(logits, labels, reduction="none") * counts).sum() / counts.sum()


def pair(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, labels = rows(model, batch)
    return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


def shifting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


WEIGHTS = torch.tensor([0.1, 3.0, 0.5, 1.0, 7.0], dtype=torch.float64)
LOSSES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Tensor]]]] = {
    "pair": (pair, data),
    "shifted": (shifting, data),
    "class weights": (lambda m, b: F.cross_entropy(*rows(m, b), weight=WEIGHTS), data),
    "criterion": (lambda m, b: nn.CrossEntropyLoss(ignore_index=0)(*rows(m, b)), whole),
    "smoothed": (lambda m, b: F.cross_entropy(*rows(m, b), label_smoothing=0.1), data),
    "masked": (by_mask, whole),
    "scaled": (lambda m, b: 0.5 * F.cross_entropy(*rows(m, b)) / 7, data),
    "other key": (lambda m, b: F.cross_entropy(*rows(m, b)), lambda: {"x": data()["x"], "target": data()["labels"]}),
    "squares": (
        lambda m, b: F.mse_loss(
            m(b["x"]), torch.zeros(CLASSES, dtype=torch.float64).expand(*b["x"].shape[:2], CLASSES)
        ),
        whole,
    ),
    "soft labels": (
        lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), F.one_hot(b["labels"], CLASSES).double().flatten(0, 1)),
        whole,
    ),
    "mean of a mean": (lambda m, b: F.cross_entropy(*rows(m, b)).mean(), data),
    "mean of sums of rows": (lambda m, b: m(b["x"]).square().sum(2).sum(1).mean(), whole),
    "mean of means over samples": (lambda m, b: m(b["x"]).square().mean(0).mean(), whole),
    "sum of means over samples": (lambda m, b: m(b["x"]).square().mean(0).sum(), whole),
    "mean over moved samples": (lambda m, b: m(b["x"]).square().transpose(0, 1).sum(1).mean() / len(b["x"]), whole),
    "mean of two": (
        lambda m, b: torch.stack([m(b["x"])[..., 0].square().mean(), m(b["x"]).abs().mean()]).mean(),
        whole,
    ),
    "sum of two": (lambda m, b: torch.stack([m(b["x"]).square().mean(), m(b["x"])[:, 0].abs().mean()]).sum(), whole),
    "two sums by one count": (lambda m, b: (m(b["x"]).abs().sum() + m(b["x"]).sum()) / (b["labels"] != 0).sum(), whole),
    "smoothed with weights": (
        lambda m, b: F.cross_entropy(*rows(m, b), label_smoothing=0.1, weight=WEIGHTS),
        data,
    ),
    "by name": (lambda m, b: torch.div(torch.sum(input=m(b["x"]).square()), other=b["x"].numel()), whole),
    "of two terms": (lambda m, b: m(b["x"]).square().mean() + F.cross_entropy(*rows(m, b)), whole),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mb", [1, 3])
def test_microbatches_change_nothing(name: str, mb: int) -> None:
    loss, batches = LOSSES[name]
    torch.manual_seed(0)
    model, batch = nn.Linear(6, CLASSES).double(), batches()
    told = loss(model, batch)
    expected = told[0] / told[1] if isinstance(told, tuple) else told
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    with Run(f"fp64 mb={mb}", device="cpu", loss=loss, clip=1e9) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        run.on_gradients = lambda: [
            torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-14)  # type: ignore[func-returns-value]
            for p, g in zip(model.parameters(), gradients, strict=True)
        ]
        assert run.step(batch).item() == pytest.approx(expected.item(), rel=1e-13)
        several = [{key: value[start : start + 3] for key, value in batch.items()} for start in (0, 3, 6)]
        assert run.evaluate(several) == pytest.approx(expected.item(), rel=1e-13)
        for part in run.microbatches(batch):  # a loop of one's own
            run.backward(loss(run.model, part))
        assert run.update().loss.item() == pytest.approx(expected.item(), rel=1e-13)


def unknown(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean whose count no graph shows."""
    return torch.stack([F.cross_entropy(*rows(model, batch))]).mean() + 0.0 * model(batch["x"]).mean()


def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - 1.0).square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: error(m, b).sqrt(),
        lambda m, b: error(m, b).log() + 0.1,
        lambda m, b: m(b["x"]).std(),
        lambda m, b: m(b["x"]).abs().max(),
        lambda m, b: error(m, b) * m(b["x"]).abs().mean(),
    ],
)
def test_a_loss_that_is_no_mean_is_rejected_in_parts(loss: Any) -> None:
    """The mean of roots is not the root of the mean: the loss would depend on the microbatches."""
    with Run("fp64 mb=2", device="cpu", loss=loss) as run:
        model = nn.Linear(6, CLASSES)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with rejects("T041"):
            run.step(whole())
    with Run("fp64", device="cpu", loss=loss) as run:  # of one microbatch, it is the loss
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        run.step(whole())


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: error(m, b) + 0.1 * m.weight.norm(),
        lambda m, b: error(m, b) + (m.weight @ m.weight.T).square().sum().sqrt(),
        lambda m, b: error(m, b) * m.bias.exp().sum() + m.bias.square().sum().log(),
    ],
)
def test_a_penalty_on_weights_may_be_any_function(loss: Any) -> None:
    """It is the same in every microbatch."""
    losses = []
    for plan in ("fp64", "fp64 mb=2"):
        with Run(plan, device="cpu", loss=loss) as run:
            torch.manual_seed(0)
            model = nn.Linear(6, CLASSES)
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            losses.append([run.step(whole()).item() for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "batch", "said"),
    [
        (unknown, data(), "some labels or elements do not count"),
        (lambda m, b: 2 * F.cross_entropy(*rows(m, b)) + m(b["x"]).mean(), data(), "some labels or elements do not"),
        (lambda m, b: torch.stack([F.cross_entropy(*rows(m, b))] * 2).mean(), data(), "some labels or elements do not"),
        (lambda m, b: m(b["x"]).square().sum(0).sum(), whole(), "returned a sum"),
        (unknown, {**whole(), "mask": torch.rand(8, 4) > 0.5}, "some labels or elements do not count"),
        (lambda m, b: F.cross_entropy(*rows(m, b), reduction="sum"), whole(), "returned a sum"),
        (lambda m, b: m(b["x"]).square().sum(), whole(), "returned a sum"),
    ],
)
def test_a_mean_whose_count_cannot_be_known_is_rejected(loss: Any, batch: dict[str, Tensor], said: str) -> None:
    with Run("fp64 mb=2", device="cpu", loss=loss) as run:
        model = nn.Linear(6, CLASSES)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = model.weight.detach().clone()
        with rejects("T017", match=said) as caught:
            run.step(batch)
        assert "(sum, count)" in str(caught.value)
        assert torch.equal(model.weight, before)
    with Run("fp64", device="cpu", loss=loss) as run:  # of one microbatch, it is the loss
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        assert run.step(batch).item() == pytest.approx(loss(model, batch).item(), rel=1e-13)


def test_samples_that_are_alike_need_no_count() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(6, CLASSES).double(), whole()
    expected = F.cross_entropy(*rows(model, batch)).item()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(*rows(model, batch)) * torch.ones((), dtype=torch.float64).clone().requires_grad_()

    with Run("fp64 mb=3", device="cpu", loss=loss) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        assert run.step(batch).item() == pytest.approx(expected, rel=1e-13)


def test_what_a_graph_shows() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    assert read_loss(x.mean()).count == 20
    assert read_loss(x.sum() / 7).count == 7
    assert read_loss(x.sum()).kind is Kind.SUM
    assert read_loss(-x.mean().double() * 3).count == 20
    assert read_loss(x.mean() + x[0].mean()).kind is Kind.MEAN
    assert read_loss((x.sum(), 9)).kind is Kind.PAIR
    with rejects("T012", match="a sum, a tensor of one number, and a count"):
        read_loss((x, 9))


def test_fp16_and_its_scale() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(6, CLASSES), data()
    expected = F.cross_entropy(model(batch["x"].float()).flatten(0, 1), batch["labels"].flatten())
    (gradient, _) = torch.autograd.grad(expected, list(model.parameters()))
    with Run("fp16 mb=3", device="cpu", loss=pair, loss_scale=256.0) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.weight.detach().clone()
        assert run.step(batch).item() == pytest.approx(expected.item(), rel=1e-2)
    torch.testing.assert_close(before - model.weight.detach(), gradient, rtol=3e-2, atol=2e-3)


def test_losses_that_count_the_same_by_chance_are_not_trusted() -> None:
    """Two targets have as many labels in the first microbatch and not in the second."""
    x = torch.randn(4, 3, requires_grad=True) * 1
    a, c = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, -100])
    kinds = {
        read_loss(F.cross_entropy(x[part], a[part]) + F.cross_entropy(x[part], c[part])).kind
        for part in (slice(2), slice(2, 4))
    }
    assert kinds == {Kind.MEAN}


def counted() -> int:
    return int((data()["labels"] != -100).sum())


@pytest.mark.parametrize("divisor", [counted(), data()["labels"].numel()], ids=["counted", "all"])
def test_a_count_of_the_whole_batch_is_rejected(divisor: int) -> None:
    """As the loss of transformers with num_items_in_batch computes it: each microbatch would be divided by it."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(batch["x"]).flatten(0, -2), batch["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum") / divisor

    for plan, is_rejected in (("fp64", False), ("fp64 mb=4", True), ("fp64 mb=2", True)):
        model = nn.Linear(6, CLASSES).double()
        with Run(plan, device="cpu", loss=loss) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            if is_rejected:
                with rejects("T107", f"by {divisor}"):
                    run.step(data())
            else:  # one microbatch is the whole batch
                expected = loss(model, data()).item()
                assert run.step(data()).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("divisor", "warns"), [(4, True), (3, False)])
def test_a_mean_that_is_divided_by_the_number_of_microbatches(divisor: int, warns: bool) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(*rows(model, batch)) / divisor

    model = nn.Linear(6, CLASSES).double()
    with Run("fp64 mb=2", device="cpu", loss=loss) as run, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step(data())
    assert any("divided by 4, the number of microbatches" in str(one.message) for one in seen) is warns


def test_parameters_outside_of_the_model_are_corrected() -> None:
    torch.manual_seed(0)
    model, scale = nn.Linear(4, 3).double(), nn.Parameter(torch.ones((), dtype=torch.float64))
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]) * scale, batch[1])

    (expected,) = torch.autograd.grad(loss(model, (x, y)), [scale])
    with Run("fp64 mb=1", device="cpu", loss=loss) as run:
        with pytest.warns(UserWarning, match="1 of 3 parameters of the optimizer are not of this model"):
            run.prepare(model, torch.optim.SGD([*model.parameters(), scale], lr=1.0))
        run.step((x, y))
    assert 1 - scale.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("ends", ["mean", "log of exp"])
def test_a_mean_that_is_alone_is_the_loss_whatever_its_data_weighs(ends: str) -> None:
    model, batch = nn.Linear(6, CLASSES).double(), data()
    batch["labels"][:] = -100  # which this loss does not use

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mean = model(batch["x"]).square().mean()
        return mean if ends == "mean" else mean.exp().log()

    with Run("fp64", device="cpu", loss=loss) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        expected = loss(model, batch).item()
        assert run.step(batch).item() == pytest.approx(expected, rel=1e-12)
        assert run.report is not None
        assert run.report.grad_norm.item() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_count_does_not_fit_into_the_losss_own_16_bits(dtype: torch.dtype) -> None:
    loss = read_loss(torch.ones(3, 60001, dtype=dtype, requires_grad=True).mean())
    assert loss.total.item() == 180003


def test_a_compiled_model_is_evaluated_with_labels_that_do_not_count() -> None:
    model, batch = nn.Linear(6, CLASSES), data()
    with Run("mb=3", device="cpu", loss=lambda m, b: F.cross_entropy(*rows(m, b)), compile="eager") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        several = [{key: value[start : start + 3] for key, value in batch.items()} for start in (0, 3, 6)]
        assert run.evaluate(several) == pytest.approx(run.step(batch).item(), rel=1e-6)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.out(self.norm(x))  # type: ignore[no-any-return]


def test_a_model_that_takes_labels_and_returns_logits_runs_once_a_step() -> None:
    with Run(device="cpu") as run:
        model = Normed()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step({"x": torch.randn(4, 4), "labels": torch.tensor([0, 1, 2, 0])})
        assert int(run.weights()["norm.num_batches_tracked"]) == 1


@pytest.mark.parametrize("plan", ["pp=2 mb=1", "cp=2"])
def test_a_model_that_takes_labels_may_shift_them(plan: str) -> None:
    with rejects("T004", match=r"(?s)takes labels.*cannot be seen under.*Run\(loss="):
        rule_under(Plan.of(plan).resolve(2), LabelRule.of(Normed()))


def test_a_branch_of_a_loss_that_returns_another_kind_is_rejected() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return pair(model, batch) if bool((batch["labels"] == -100).any()) else F.cross_entropy(*rows(model, batch))

    with Run("fp64 mb=1", device="cpu", loss=loss) as run:
        model = nn.Linear(6, CLASSES)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with rejects("T016", match=r"for one microbatch and .* for another"):
            run.step(data())
