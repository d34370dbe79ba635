"""The loss inside of the model's last layer: as with logits, and refused where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Run
from shoal.blueprint.description import Description
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.ops import fused_linear_cross_entropy as fused
from shoal.train.loss.objective import CrossEntropy
from tests.rejects import rejects


def llama(**settings: Any) -> Llama:
    model = Llama(LlamaConfig(hidden=32, ffn=48, num_layers=2, vocabulary=61, **settings)).double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter.data, generator)
    return model


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[0, :5] = -100
    return {"tokens": tokens[:, :-1], "labels": labels}


def trained(fused_loss: bool | None, **settings: Any) -> tuple[list[float], dict[str, Tensor], float]:
    model = llama(**settings)
    with Run("fp64 mb=2", fused_loss=fused_loss, clip=0.5) as run:
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert isinstance(run.objective, CrossEntropy)
        assert (run.objective.head is not None) == (fused_loss is not False)
        losses = [float(run.step(batch())) for _ in range(3)]
        return losses, {name: p.detach() for name, p in model.named_parameters()}, run.evaluate([batch()])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused_loss", [True, None])  # None: on a CPU a small one has its logits whole
def test_it_trains_as_with_logits(fused_loss: bool | None, tied: bool) -> None:
    (losses, weights, score), (expected, theirs, their_score) = (trained(how, tied=tied) for how in (fused_loss, False))
    assert losses == pytest.approx(expected, rel=1e-13)
    assert score == pytest.approx(their_score, rel=1e-13)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-10, atol=1e-12)


def test_a_step_gives_it_the_factor_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    left_over: list[float] = []
    times = fused._times_
    monkeypatch.setattr(fused, "_times_", lambda x, by: (left_over.append(float(by)), times(x, by))[1])
    model = llama()
    with Run("fp64 mb=2", fused_loss=True) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        run.step(batch())
        assert left_over == [], "the backward had to multiply the gradients once more"
        assert run.composed.head is not None
        assert run.composed.head.factor == 1.0, "it would be multiplied by what belonged to another step"


def test_the_factor_is_read_at_the_end_of_the_forward() -> None:
    """The sum over the ranks that it depends on travels while the layers before the head compute."""
    seen: list[str] = []
    model = llama()
    with Run("fp64") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        model.model.layers[-1].register_forward_hook(lambda *_: seen.append("last block"))
        factor = run.engine.factor
        run.engine.factor = lambda: (seen.append("factor"), factor())[1]  # type: ignore[method-assign]
        run.step(batch())
    assert seen[:2] == ["last block", "factor"]


def test_a_model_that_is_called_returns_logits() -> None:
    with Run("fp64") as run:
        model = run.prepare(llama())
        logits = model(batch()["tokens"])
    assert logits.shape == (4, 16, 61)
    expected = F.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten())
    assert float(expected.detach()) == pytest.approx(4.1, abs=0.3)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens))
        return logits

    def describe(self) -> Description:
        return Description(head="head")


@pytest.mark.parametrize(
    ("model", "reason"), [(Biased(), "has a bias"), (nn.Sequential(nn.Embedding(61, 61)), "names no head")]
)
def test_where_it_cannot_be_it_is_refused_if_it_was_asked_for(model: nn.Module, reason: str) -> None:
    with Run("fp64", fused_loss=True) as run, rejects("M024", match=reason):
        run.prepare(model)


def test_where_it_cannot_be_logits_are_used() -> None:
    torch.manual_seed(0)
    model = Biased()
    with Run("fp64") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert float(run.step(batch())) == pytest.approx(4.2, abs=0.5)


class Careless(Biased):
    """A head without a bias, and an author who forgets it, or does something to its logits."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong, self.head = wrong, nn.Linear(8, 61, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.wrong == "forgets":
            return x @ self.head.weight.T
        logits: Tensor = self.head(x)
        return logits[..., None] if self.wrong == "changes" else logits


@pytest.mark.parametrize(("wrong", "message"), [("forgets", "did not call it"), ("changes", "must return the output")])
def test_a_head_that_is_none(wrong: str, message: str) -> None:
    model = Careless(wrong)
    with Run("fp64") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with rejects("M040", match=message):
            run.step(batch())


@pytest.mark.parametrize("labels", [torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 16)])
def test_labels_that_do_not_fit(labels: Tensor) -> None:
    model = Careless("")
    with Run("fp64") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with rejects("T020", match="labels must be one integer for each"):
            run.step({"tokens": batch()["tokens"], "labels": labels})


class Flat(nn.Module):
    """A model without blocks, which is compiled as a whole, its loss included."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.lm_head = nn.Linear(32, 61, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.embed(tokens).tanh())

    def describe(self) -> Description:
        return Description(head="lm_head")


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
def test_a_compiled_model_trains_as_one_that_is_not() -> None:
    found = []
    for backend in (False, "aot_eager"):
        torch.manual_seed(0)
        model = Flat()
        with Run("fp64 mb=2", compile=backend) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            assert run.objective.head is not None
            losses = [float(run.step(batch())) for _ in range(3)]
        found.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    (plain, weights), (compiled, compiled_weights) = found
    assert plain[2] < plain[0]
    assert compiled == pytest.approx(plain, rel=1e-12)
    torch.testing.assert_close(compiled_weights, weights)
    torch._dynamo.reset()


def halved(kind: str) -> nn.Module:
    model = llama()
    if kind == "hook":
        model.lm_head.register_forward_hook(lambda layer, inputs, logits: logits * 0.5)
    else:
        model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight) * 0.5  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("kind", ["hook", "forward"])
def test_a_head_whose_logits_somebody_changes_returns_logits(kind: str) -> None:
    """A hook that scales logits, as some models do, was given the loss and halved that; a forward was left out."""

    def loss(fused_loss: bool | None) -> float:
        model = halved(kind)
        with Run("fp64", fused_loss=fused_loss) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
            return float(run.step(batch()))

    assert loss(None) == pytest.approx(loss(False), rel=1e-13)
    with rejects("M024", match="its head has a"):
        loss(True)


def test_a_second_run_of_a_model_has_a_head_that_computes_the_loss_too() -> None:
    model, losses = llama(), []
    for fused_loss in (True, True, False):
        with Run("fp64", fused_loss=fused_loss) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
            losses.append(float(run.step(batch())))
            assert (run.composed.head is not None) == fused_loss
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-12)


class Changed(Llama):
    """Its description is wrong: the forward does not return what the head did."""

    change: Any = None

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        changed: Tensor = self.change(super().forward(*arguments, **options))
        return changed


@pytest.mark.parametrize("change", [lambda y: y * 0.5, lambda y: y.mul_(0.5), lambda y: (y / 30).tanh() * 30])
def test_a_forward_that_changes_logits_is_not_given_a_loss_to_change(change: Any) -> None:
    """Scaled or capped logits, as some models have them, were a scaled or capped loss, without a word."""
    model = llama()
    model.__class__, model.change = Changed, staticmethod(change)  # type: ignore[assignment]
    nothing = {**batch(), "labels": torch.full((4, 16), -100)}
    with Run("fp64") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        run.evaluate([nothing])  # of which any change is the same
        with rejects("M040", match="must return the output of the head"):
            run.step(batch())


def test_labels_of_32_bits_are_labels() -> None:
    losses = []
    for kind in (torch.int64, torch.int32):
        model = llama()
        with Run("fp64", fused_loss=True) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
            losses.append(float(run.step({name: x.to(kind) for name, x in batch().items()})))
    assert losses[0] == losses[1]
