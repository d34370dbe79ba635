"""An invalid layout raises one message on every rank, and no rank is left waiting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.parallel.checks import check_model
from shoal.parallel.policies import Policies
from shoal.train.run import Run
from tests.dist.pool import on_ranks
from tests.rejects import rejects

BLOCKS = tuple(f"blocks.{i}" for i in range(4))


class Tower(nn.Module):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def describe(self) -> shoal.Description:
        return shoal.Description(blocks=BLOCKS, after_blocks=("head",))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def prepared(world: World, plan: str, model: nn.Module) -> Run:
    run = Run(plan, world=world)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run


@on_ranks(2)
def test_too_few_microbatches(world: World) -> None:
    with pytest.raises(ShoalError, match="2 microbatches"):
        prepared(world, "pp=2 dualpipev mb=4", Tower()).step(batch())


class Reader(nn.Module):
    """Reads the weight of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight)


@on_ranks(2)
def test_a_parameter_that_is_read_where_it_is_not_gathered(world: World) -> None:
    model = Reader()
    model.layer.bias.requires_grad_(False)
    with rejects("M142", "under zero"):
        prepared(world, "zero=3", model).step(batch())


@on_ranks(2)
def test_a_loop_of_ones_own_in_a_pipeline(world: World) -> None:
    run = prepared(world, "pp=2 mb=2", Tower())
    with pytest.raises(ShoalError, match=r"run\.step\(batch\)"):
        next(run.microbatches(batch()))
    with pytest.raises(ShoalError, match=r"run\.step\(batch\)"):
        run.backward(torch.ones((), requires_grad=True))


def test_a_loss_that_asks_the_model_twice() -> None:
    with pytest.raises(ShoalError, match="the loss must call the model once"):
        shoal.verify(Tower, batch(), "pp=2 mb=4", loss=asks_twice)


def asks_twice(model: nn.Module, two: tuple[Tensor, Tensor]) -> Tensor:
    return (model(two[0]) - 2 * model(two[0])).mean()


@on_ranks(2)
def test_a_validation_that_some_ranks_would_miss(world: World) -> None:
    run = prepared(world, "zero=3", Tower())
    loader = run.prepare(DataLoader(TensorDataset(*batch()), batch_size=7))  # 7 and 1: nothing for one of the ranks
    with pytest.raises(ShoalError, match=r"run\.evaluate\(loader\)"):
        list(loader)
    assert run.evaluate(loader) > 0


@on_ranks(2)
def test_layers_that_were_cut_before_they_had_values(world: World) -> None:
    run = Run("tp=2", world=world)
    with torch.device("meta"):
        model = nn.Sequential(shoal.ColumnParallelLinear(6, 8, tensor=run.tensor))
    with pytest.raises(ShoalError, match="cut before it had values"):
        run.prepare(model)


@on_ranks(2)
def test_tokens_that_nothing_divides(world: World) -> None:
    class Norms(Tower):
        def describe(self) -> shoal.Description:
            splits = {"blocks.*.0": shoal.Split.SEQUENCE, "head": shoal.Split.SEQUENCE}
            return shoal.Description(blocks=BLOCKS, after_blocks=("head",), splits=splits)

    with pytest.raises(ShoalError, match="that are split by vocabulary"):
        prepared(world, "tp=2 sp=on", Norms())
    assert not prepared(world, "tp=2", Norms()).tensor.splits_tokens


class Capped(Tower):
    """Something is computed after the last module, once and not on every stage."""

    def forward(self, x: Tensor) -> Tensor:
        return 5 * torch.tanh(super().forward(x) / 5)


def test_what_follows_the_last_module_is_computed_once() -> None:
    proof = shoal.verify(Capped, batch(), "pp=2 1f1b mb=2")
    assert proof.equal, proof.cause


@on_ranks(2)
def test_ranks_that_start_apart(world: World) -> None:
    torch.manual_seed(world.rank)
    with pytest.raises(ShoalError, match="must have the same values on every rank"):
        prepared(world, "pp=2 mb=2", Tower())


@on_ranks(2)
def test_a_tie_that_nobody_declared(world: World) -> None:
    model = Tower()
    model.blocks[1][0].weight = model.blocks[0][0].weight
    with pytest.raises(ShoalError, match="are one parameter"):
        prepared(world, "zero=3", model)


@on_ranks(2)
def test_an_update_in_the_middle_of_a_batch(world: World) -> None:
    run = prepared(world, "mb=2", Tower())
    for inputs, labels in run.microbatches(tuple(part[:4] for part in batch())):
        run.backward(nn.functional.cross_entropy(run.model(inputs), labels))
        break
    with pytest.raises(ShoalError, match="1 of 2 microbatches had a backward"):
        run.update()


def test_hooks_of_parameters_that_are_replaced_are_rejected() -> None:
    """They were lost without a word, and gradients were other ones than on one device."""
    for register in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
        model = Tower()
        assert check_model(model, Plan.parse("zero=3").resolve(2), model.describe(), Policies()) == []
        register(model.head.weight, lambda gradient: None)
        for words, size in (("zero=1", 2), ("zero=3", 2), ("tp=2", 2), ("zero=0", 2), ("zero=3", 1), ("pp=2 1f1b", 2)):
            found = check_model(model, Plan.parse(words).resolve(size), model.describe(), Policies())
            is_replaced = size == 2 and words in ("zero=1", "zero=3", "tp=2")
            assert [(p.code, f"{words} " in p.what, "head.weight" in p.what) for p in found] == [
                ("M151", True, True)
            ] * is_replaced, words
