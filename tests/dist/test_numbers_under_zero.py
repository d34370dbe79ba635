"""Parameters of shape (), such as CLIP's `logit_scale`, stay whole on every rank under zero=1 to zero=3: losses,
gradients, weights, messages and bytes in float64 are those of plain torch and of the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal import Description
from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.parallel.checks import check_model
from shoal.parallel.policies import Policies, SyncPolicy
from shoal.train.run import Run
from shoal.verification.case import Case
from shoal.verification.rank import verify_in
from tests import huggingface
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks
from tests.rejects import has_all, rejects

STEPS, BATCH = 5, 8


class Block(nn.Module):
    """A layer with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Scaled(nn.Module):
    """Blocks with numbers, and a head with two, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def describe(self) -> shoal.Description:
        alike = {"blocks.*": shoal.Split.SEQUENCE, "head": shoal.Split.SEQUENCE, "head.layer": shoal.Split.SEQUENCE}
        splits = {**alike, "blocks.*.up": shoal.Split.COLUMN, "blocks.*.down": shoal.Split.ROW}
        return shoal.Description(blocks=("blocks.0", "blocks.1"), after_blocks=("head",), splits=splits)


class Head(nn.Module):
    """A layer with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.exp() + self.shift


def build() -> nn.Module:
    torch.manual_seed(0)
    return Scaled()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, BATCH, 6, generator=generator, dtype=torch.float64)
    return list(zip(inputs, torch.randint(5, (STEPS, BATCH), generator=generator), strict=True))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "lamb":
        return shoal.LAMB(trained, lr=1e-2)
    if kind == "own":
        return shoal.AdamW(trained, lr=1e-2)
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, foreach=kind == "foreach", fused=kind == "fused")


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        assert float((ours[name] - expected).abs().max()) < 1e-12, name


def reference(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of plain torch."""
    model, losses = build().double(), []
    optimizer = optimizer_of(model, kind)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def begin(world: World, plan: str, kind: str) -> Run:
    run = Run(f"fp64 {plan}", world=world, clip=0.5, check_replicas=1, ema=0.9)
    run.prepare(build())
    run.prepare(optimizer_of(run.module, kind))
    return run


def go_on(run: Run, first: int, last: int) -> list[float]:
    share = slice(run.coordinate * BATCH // run.degree, (run.coordinate + 1) * BATCH // run.degree)
    return [run.step((x[share], y[share])).item() for x, y in batches()[first:last]]


def train(world: World, plan: str, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    run = begin(world, plan, kind)
    return go_on(run, 0, STEPS), run.weights()


PLANS = [(2, "zero=1 mb=2"), (2, "zero=2 mb=2"), (2, "zero=3 mb=2"), (4, "dp_replicate=2 zero=3 mb=1")]
PLANS += [(4, "tp=2 zero=3 mb=2"), (4, "pp=2 zero=1 1f1b mb=1"), (2, "zero=3 offload=optimizer mb=2")]


@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_numbers_train_as_in_one_process(pool: Pool, size: int, plan: str) -> None:
    losses, weights = pool.run(train, size, plan, "foreach")[0]
    expected_losses, expected = reference("foreach")
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert_close(weights, expected)


@pytest.mark.parametrize("kind", ["own", "lamb", wide("fused")])
def test_optimizers_of_numbers_and_shards(pool: Pool, kind: str) -> None:
    losses, weights = pool.run(train, 2, "zero=3 mb=2", kind)[0]
    expected_losses, expected = reference(kind)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert_close(weights, expected)


def verified(world: World, plan: str, model: Any, inputs: Any, loss: Any) -> float:
    """The largest relative difference of a loss, gradient, norm or weight. Messages and bytes are as predicted, unless
    the model has parameters around the modules of its description."""
    case = Case(build=model, batches=[inputs] * 2, plan=Plan.parse(f"fp64 {plan}").resolve(world.size), loss=loss)
    found = verify_in(world, case)
    assert found.predicted_traffic is not None
    is_predicted = model is build
    assert found.predicted_memory == found.memory or not is_predicted
    for axis in {*found.predicted_traffic, *found.traffic} if is_predicted else ():
        counted, predicted = found.traffic.get(axis, {}), found.predicted_traffic.get(axis, {})
        sent = {name: (messages["calls"], messages["bytes"]) for name, messages in counted.items()}
        assert sent == {name: (messages.calls, messages.bytes) for name, messages in predicted.items()}, (plan, axis)
    if found.verdict is None:
        return 0.0
    assert found.verdict.equal, (found.verdict.first, found.verdict.worst)
    worst = found.verdict.worst
    return max(worst.loss, worst.grad, worst.weight, worst.grad_norm)


@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_messages_and_bytes_of_numbers_are_as_predicted(pool: Pool, size: int, plan: str) -> None:
    assert pool.run(verified, size, plan, build, batches()[0], None)[0] < 1e-12


class Chosen(nn.Module):
    """Uses a number for some batches, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5)
        self.sometimes, self.never = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * self.sometimes if bool((x[:, 0] > 0).any()) else y


def signed(signs: list[int]) -> tuple[Tensor, Tensor]:
    """Samples whose first feature has these signs."""
    x, y = batches()[0]
    return torch.cat([torch.tensor(signs)[:, None] * x[: len(signs), :1].abs(), x[: len(signs), 1:]], 1), y[
        : len(signs)
    ]


def use(world: World, plan: str, steps: list[list[int]]) -> dict[str, Tensor]:
    run, model = Run(f"fp64 {plan}", world=world, clip=1.0), Chosen()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for signs in steps:
        x, y = signed(signs)
        share = slice(world.rank * len(x) // world.size, (world.rank + 1) * len(x) // world.size)
        run.step((x[share], y[share]))
    return run.weights()


@on_ranks(2)
def test_a_number_that_no_rank_uses_has_no_gradient(world: World) -> None:
    """It is not even decayed."""
    steps = [[1, 1], [-1, -1], [1, 1]]
    model = Chosen().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for x, y in map(signed, steps):
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for plan in ("zero=1", "zero=3"):
        found = use(world, plan, steps)
        for name, weight in model.state_dict().items() if world.is_main else ():
            torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14, msg=name)


@on_ranks(2)
def test_a_number_that_one_rank_uses_is_rejected(world: World) -> None:
    with rejects("T100", "zero=3", *(["sometimes"] if world.rank else [])):
        use(world, "zero=3", [[1, 1], [1, -1]])


RING = [(2, "zero=3 mb=2"), (1, "mb=8"), (4, "dp_replicate=2 zero=2 mb=2"), (4, "pp=2 zero=1 1f1b mb=1"), (2, "tp=2")]


def visit(world: World, plan: str, folder: str, step: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Load a step, make one more and save it: its loss, the weights and their average."""
    run = begin(world, plan, "foreach")
    if step:
        assert run.load(folder, step=step) == step
    (loss,) = go_on(run, step, step + 1)
    run.save(folder)
    weights = run.weights()
    assert run.ema is not None
    with run.ema.applied():
        return loss, weights, run.weights()


def test_each_layout_loads_the_numbers_of_the_one_before(pool: Pool, tmp_path: Path) -> None:
    """Weights, states of the optimizer and averages."""
    model, averages = build().double(), dict[str, Tensor]()
    optimizer = optimizer_of(model, "foreach")
    for step, (size, plan) in enumerate(RING):
        x, y = batches()[step]
        expected = F.cross_entropy(model(x), y)
        expected.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        loss, weights, average = pool.run(visit, size, plan, str(tmp_path), step)[0]
        assert loss == pytest.approx(expected.item(), rel=1e-12), plan
        named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        averages = {name: averages.get(name, weight).lerp(weight, 0.1) for name, weight in named.items()}
        assert_close(weights, named)
        assert_close(average, averages)


@pytest.mark.parametrize(
    ("size", "plan", "sync", "values"),
    [
        (4, "dp_replicate=2 zero=3 compress=int8", {}, ("zero=3", "compress=int8", "scale")),
        (4, "dp_replicate=2 zero=3 sync=diloco:5", {}, ("zero=3", "sync=diloco:5", "scale")),
        (4, "dp_replicate=2 zero=3", {"algorithm": "ring"}, ("zero=3", "algorithm=ring", "scale")),
        (1, "zero=3 offload=parameters", {}, ("zero=3", "offload=parameters", "scale")),
    ],
)
def test_what_cannot_average_numbers_rejects_them(size: int, plan: str, sync: Any, values: tuple[str, ...]) -> None:
    """One of shape (1,) is accepted in its place."""
    policies = Policies(sync=SyncPolicy(**sync))
    for model in (Head(), nn.Linear(6, 5)):
        found = check_model(model, Plan.parse(plan).resolve(size), Description(), policies)
        assert [(problem.code, has_all(problem, values)) for problem in found] == [("M150", True)] * (
            model.__class__ is Head
        )


def build_clip() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = huggingface.config_of("CLIP", {})
    config.text_config.eos_token_id = 2  # a text ends with its largest token
    model: nn.Module = transformers.CLIPModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def pairs() -> dict[str, Tensor]:
    """Images and their texts."""
    images = huggingface.batch("clip")["pixel_values"]
    return {"pixel_values": images, "input_ids": huggingface.batch("llama")["input_ids"][: len(images)]}


def loss_of_pairs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of each image with its own text; the contrast with others of a batch depends on how ranks divide it."""
    return F.softplus(-model(**batch).logits_per_image.diagonal()).mean()


@pytest.mark.parametrize(
    ("size", "plan"),
    [(2, "zero=3 mb=1"), wide(2, "zero=1 mb=1"), wide(2, "zero=2 mb=2"), wide(4, "dp_replicate=2 zero=3 mb=1")],
)
def test_an_unmodified_clip_with_its_temperature(pool: Pool, size: int, plan: str) -> None:
    assert pool.run(verified, size, plan, build_clip, pairs(), loss_of_pairs)[0] < 1e-10
