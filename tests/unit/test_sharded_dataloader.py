"""A user's DataLoader over ranks: the global batches of one process, each sample once, ragged ends, own samplers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from shoal.data.order import sample_ids
from shoal.data.sharded_dataloader import ShardedDataLoader, Share
from tests.rejects import rejects

NUMBERS = TensorDataset(torch.arange(10))


def sharded(loader: DataLoader[Any], degree: int, seed: int = 3) -> list[ShardedDataLoader]:
    return [ShardedDataLoader(loader, seed=seed, coordinate=rank, degree=degree) for rank in range(degree)]


def epoch_of(ranks: list[ShardedDataLoader]) -> list[list[list[int]]]:
    """Per step and rank, the samples that count."""
    per_rank = [[counted(share) for share in rank.shares()] for rank in ranks]
    return [list(step) for step in zip(*per_rank, strict=True)]  # strict: every rank takes part in every step


def counted(share: Share) -> list[int]:
    (numbers,) = share.batch if not isinstance(share.batch, Tensor) else (share.batch,)
    assert len(numbers) > 0  # also a rank that has nothing to add must compute something
    return numbers.tolist() if share.counts else []


def global_batches(steps: list[list[list[int]]]) -> list[list[int]]:
    return [[*chain(*step)] for step in steps]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_in_order(degree: int) -> None:
    steps = epoch_of(sharded(DataLoader(NUMBERS, batch_size=4), degree))
    assert global_batches(steps) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_shares_are_as_equal_as_can_be() -> None:
    assert epoch_of(sharded(DataLoader(NUMBERS, batch_size=4), 2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    last = epoch_of(sharded(DataLoader(NUMBERS, batch_size=4), 4))[-1]
    assert sorted(map(len, last)) == [0, 0, 1, 1]  # two ranks have nothing to add, and say so


@pytest.mark.parametrize(("size", "steps"), [(10, 2), (8, 2), (7, 1), (12, 3)])
def test_drop_last_drops_what_is_not_full_and_nothing_else(size: int, steps: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(size)), batch_size=4, drop_last=True)
    ranks = sharded(loader, 2)
    expected = [list(range(start, start + 4)) for start in range(0, steps * 4, 4)]
    assert global_batches(epoch_of(ranks)) == expected
    assert len(ranks[0]) == steps


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_shuffled_by_seed_and_epoch_alone(degree: int) -> None:
    ranks = sharded(DataLoader(NUMBERS, batch_size=4, shuffle=True), degree)
    for epoch in range(3):
        order = sample_ids(3, 10, epoch * 10, 10).tolist()  # the first epoch is number 0
        assert sorted(order) == list(range(10))
        torch.manual_seed(epoch)  # nothing that happened before matters
        assert [*chain(*global_batches(epoch_of(ranks)))] == order
    assert ranks[0].epoch == 3


def test_another_seed_is_another_order() -> None:
    loader = DataLoader(NUMBERS, batch_size=10, shuffle=True)
    assert epoch_of(sharded(loader, 1, seed=3)) != epoch_of(sharded(loader, 1, seed=4))


def test_only_the_share_is_loaded() -> None:
    class Counting(Dataset[int]):
        loaded: list[int]

        def __init__(self) -> None:
            self.loaded = []

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            self.loaded.append(index)
            return index

    numbers = Counting()
    list(sharded(DataLoader(numbers, batch_size=4), 2)[1])
    assert numbers.loaded == [2, 3, 6, 7]


def test_an_own_sampler_draws_the_same_on_every_rank() -> None:
    sampler = WeightedRandomSampler([1.0] * 10, num_samples=12)
    ranks = sharded(DataLoader(NUMBERS, batch_size=4, sampler=sampler), 2)
    shares, again = epoch_of(ranks), epoch_of(ranks)
    (alone,) = sharded(DataLoader(NUMBERS, batch_size=4, sampler=sampler), 1)
    assert global_batches(shares) == global_batches(epoch_of([alone]))
    assert shares != again


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": RandomSampler(NUMBERS, num_samples=6), "batch_size": 4},
        {"sampler": RandomSampler(NUMBERS, replacement=True, num_samples=6), "batch_size": 4},
        {"batch_sampler": BatchSampler(SequentialSampler(NUMBERS), batch_size=3, drop_last=False)},
    ],
    ids=["some", "with replacement", "batch sampler"],
)
def test_samplers_that_are_cut_after_loading(options: dict[str, Any]) -> None:
    ranks, (alone,) = sharded(DataLoader(NUMBERS, **options), 2), sharded(DataLoader(NUMBERS, **options), 1)
    assert global_batches(epoch_of(ranks)) == global_batches(epoch_of([alone]))


def test_a_stream() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.arange(5))

    steps = epoch_of(sharded(DataLoader(Stream(), batch_size=4), 2))
    assert global_batches(steps) == [[0, 1, 2, 3], [4]]


def test_a_collate_function_stays() -> None:
    loader = DataLoader(NUMBERS, batch_size=4, collate_fn=lambda rows: torch.stack([row[0] for row in rows]) * 10)
    assert global_batches(epoch_of(sharded(loader, 2)))[0] == [0, 10, 20, 30]


def test_a_distributed_sampler_is_rejected() -> None:
    loader = DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, num_replicas=2, rank=0))
    with rejects("D030", "batch_size=GLOBAL"):
        sharded(loader, 2)


def test_taken_directly_every_sample_comes_once_and_none_stands_in() -> None:
    ranks = sharded(DataLoader(NUMBERS, batch_size=4), 4)
    taken = [[number for (batch,) in rank for number in batch.tolist()] for rank in ranks]
    assert sorted(chain(*taken)) == list(range(10))
    assert not any(rank.is_iterated_directly for rank in ranks)


DRAWS = {"torch": lambda: torch.rand(1).item(), "numpy": np.random.rand, "random": random.random}


class Noisy(Dataset[Any]):
    """Samples that are augmented when they are read."""

    def __init__(self, generator: str = "torch") -> None:
        self.draw = DRAWS[generator]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.draw())


def test_every_rank_augments_in_its_own_way() -> None:
    first, second = (
        [share.batch.tolist() for share in rank.shares()] for rank in sharded(DataLoader(Noisy(), batch_size=4), 2)
    )
    assert first != second


def read_after_other_draws(loader: ShardedDataLoader, rank: int) -> list[list[float]]:
    """The batches of a rank whose step draws numbers of its own, as a stage of a pipeline does."""
    found = []
    for share in loader.shares():
        found.append(share.batch.tolist())
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
    return found


@pytest.mark.parametrize("generator", DRAWS)
def test_ranks_that_share_samples_augment_them_alike(generator: str) -> None:
    """The first stage of a pipeline had other inputs than the last one had labels for, from the second batch on; with
    numpy and `random` from the first one."""
    whole = DataLoader(Noisy(generator), batch_size=4)
    stages = [ShardedDataLoader(whole, seed=3, coordinate=0, degree=1) for _ in range(2)]
    first, second = (read_after_other_draws(one, rank) for rank, one in enumerate(stages))
    assert first == second
    assert len({number for batch in first for number in batch}) == 8
    resumed = ShardedDataLoader(whole, seed=3, coordinate=0, degree=1)
    resumed.position = (0, 1)
    assert read_after_other_draws(resumed, 2) == first[1:]


def test_generators_of_the_script_are_left_as_they_were() -> None:
    np.random.seed(5)
    random.seed(5)
    expected = np.random.rand(), random.random()
    np.random.seed(5)
    random.seed(5)
    epoch_of(sharded(DataLoader(NUMBERS, batch_size=4, sampler=Shuffled("numpy")), 2))
    assert (np.random.rand(), random.random()) == expected


class Shuffled(Sampler[int]):
    """An order of its own, drawn at once or sample by sample."""

    def __init__(self, generator: str) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        if self.generator == "numpy":
            yield from np.random.permutation(10).tolist()
        elif self.generator == "random":
            yield from random.sample(range(10), 10)
        else:
            yield from (int(torch.randint(10, ())) for _ in range(10))


@pytest.mark.parametrize("generator", DRAWS)
def test_a_sampler_that_draws_from_any_generator_gives_the_same_batches_on_every_rank(generator: str) -> None:
    """Ranks took their rows of different batches: samples were lost, and others came twice."""
    loader = DataLoader(NUMBERS, batch_size=4, sampler=Shuffled(generator))
    ranks = [[*rank_of(loader, number, 2)] for number in range(2)]
    assert [[*first, *second] for first, second in zip(*ranks, strict=True)] == [*rank_of(loader, 7, 1)]


def rank_of(loader: DataLoader[Any], number: int, degree: int) -> Iterator[list[int]]:
    random.seed(number)
    np.random.seed(number)
    for share in ShardedDataLoader(loader, seed=3, coordinate=number % degree, degree=degree).shares():
        yield counted(share)
        torch.manual_seed(number)


def test_a_subclass_of_a_sampler_keeps_its_order() -> None:
    class Backwards(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9, -1, -1))

    steps = epoch_of(sharded(DataLoader(NUMBERS, batch_size=4, sampler=Backwards(NUMBERS)), 2))
    assert [*chain(*global_batches(steps))] == list(range(9, -1, -1))
