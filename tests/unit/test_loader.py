"""A loader gives every sample once per epoch, resumes on any degree, and leaves no thread or process behind."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.batch import weight_of
from shoal.data.dataset import Batch, Ids
from shoal.data.loader import Loader, RankStream, evaluation_batches
from shoal.data.order import sample_ids
from shoal.data.task import Task
from shoal.errors import ShoalError


class Numbers:
    """Each sample is its own number. It can be slow, and it can fail at one sample."""

    task: Task = "next token"
    num_classes = None
    tokens_per_sample = 1
    labels_per_sample = None
    is_in_memory = False
    vocabulary = None

    def __init__(
        self, size: int, *, seconds: float = 0.0, fails_at: int = -1, error: type[Exception] = KeyError
    ) -> None:
        self.size, self.seconds, self.fails_at, self.error = size, seconds, fails_at, error

    def __len__(self) -> int:
        return self.size

    def batch(self, ids: Ids) -> Batch:
        time.sleep(self.seconds)
        if self.fails_at in ids:
            options = {"code": "D028"} if self.error is ShoalError else {}
            raise self.error(f"no sample {self.fails_at}", **options)
        return {"numbers": torch.from_numpy(ids.copy())}

    def describe(self) -> str:
        return f"the numbers below {self.size}"

    def digest(self) -> str:
        return ""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    assert not _children()
    assert {thread for thread in threading.enumerate() if thread.name == "shoal-prefetch"} <= threads


def taken(loader: Loader, steps: int) -> list[list[int]]:
    return [batch["numbers"].tolist() for batch in islice(loader, steps)]


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def global_steps(size: int, batch: int, degree: int, position: int, steps: int) -> list[list[int]]:
    """What all ranks of a world get, put together per step."""
    ranks = []
    for coordinate in range(degree):
        loader = Loader(
            RankStream(Numbers(size), seed=3, batch=batch, coordinate=coordinate, degree=degree),
            position=position,
            workers=0,
        )
        ranks.append(taken(loader, steps))
        assert loader.position == position + steps * batch
        loader.close()
    return [flat(parts) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_ledger_every_sample_once_per_epoch(degree: int) -> None:
    size, batch, epochs = 30, 4, 4
    seen = flat(global_steps(size, batch, degree, 0, steps=size * epochs // batch))
    for epoch in range(epochs):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_ledger_when_the_world_changes_midway() -> None:
    size, batch = 29, 8
    whole = flat(global_steps(size, batch, 1, 0, steps=29))
    pieces: list[int] = []
    for degree, steps in [(4, 5), (3, 7), (1, 2), (2, 15)]:
        pieces += flat(global_steps(size, batch, degree, len(pieces), steps))
    assert pieces == whole
    assert sorted(pieces) == sorted(8 * list(range(size)))


@given(size=st.integers(1, 50), batch=st.integers(1, 20), position=st.integers(0, 300))
@settings(max_examples=25, deadline=None)
def test_batches_are_those_of_the_order(size: int, batch: int, position: int) -> None:
    loader = Loader(RankStream(Numbers(size), seed=5, batch=batch), position=position, workers=0)
    assert taken(loader, 3) == sample_ids(5, size, position, 3 * batch).reshape(3, batch).tolist()
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_equals_uninterrupted(workers: int) -> None:
    first = Loader(RankStream(Numbers(50), seed=1, batch=8), workers=workers, prefetch=3)
    before = taken(first, 4)
    time.sleep(0.05)  # let it run ahead: what is prefetched does not count
    assert first.position == 32
    assert first.epoch == pytest.approx(32 / 50)
    first.close()
    second = Loader(RankStream(Numbers(50), seed=1, batch=8), workers=workers, position=first.position)
    after = taken(second, 6)
    second.close()
    assert before + after == sample_ids(1, 50, 0, 80).reshape(10, 8).tolist()


def test_thread_and_processes_give_the_same_batches() -> None:
    got = []
    for workers in (0, 1, 2):
        loader = Loader(RankStream(Numbers(100), seed=2, batch=6, coordinate=1, degree=2), workers=workers)
        got.append(taken(loader, 10))
        assert loader.decision.endswith("as set")
        loader.close()
    assert got[0] == got[1] == got[2]


def test_processes_do_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    loader = Loader(RankStream(Numbers(10), seed=0, batch=2), workers=1)
    next(loader)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_auto_keeps_a_thread_for_fast_data() -> None:
    loader = Loader(RankStream(Numbers(40), seed=2, batch=4))
    assert taken(loader, 5) == sample_ids(2, 40, 0, 20).reshape(5, 4).tolist()
    assert loader.position == 20
    assert loader.decision.startswith("one thread: a batch took ")
    assert not _children()
    loader.close()


@pytest.mark.alone
def test_auto_makes_fast_data_from_memory_at_once() -> None:
    data, before = Numbers(40), set(threading.enumerate())
    data.is_in_memory = True  # files may take any time, and a thread is waited for no longer than the timeout
    loader = Loader(RankStream(data, seed=2, batch=4, coordinate=1, degree=2))
    assert taken(loader, 5) == sample_ids(2, 40, 0, 20).reshape(5, 4)[:, 2:].tolist()
    assert loader.position == 20
    assert loader.decision.startswith("no thread: a batch took 0.")
    assert not any(thread.name == "shoal-prefetch" for thread in set(threading.enumerate()) - before)
    loader.close()


@pytest.mark.alone
def test_auto_starts_processes_for_slow_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    loader = Loader(RankStream(Numbers(40, seconds=0.015), seed=2, batch=4))
    assert taken(loader, 5) == sample_ids(2, 40, 0, 20).reshape(5, 4).tolist()
    assert loader.decision.startswith("2 processes: a batch took ")
    assert len(_children()) == 2
    loader.close()


@pytest.mark.alone
def test_waiting_is_measured() -> None:
    loader = Loader(RankStream(Numbers(40, seconds=0.2), seed=0, batch=4), workers=0)
    next(loader)
    assert loader.seconds_waited > 0.15
    time.sleep(0.6)  # the next ones are ready by now
    before = loader.seconds_waited
    next(loader)
    assert loader.seconds_waited - before < 0.1
    loader.close()


def test_the_thread_makes_no_more_than_prefetch_batches_ahead() -> None:
    made: list[int] = []

    class Counted(Numbers):
        def batch(self, ids: Ids) -> Batch:
            made.append(len(ids))
            return super().batch(ids)

    loader = Loader(RankStream(Counted(40), seed=0, batch=4), workers=0, prefetch=3)
    next(loader)
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 4
    loader.close()


@pytest.mark.parametrize("workers", [0, 2, "auto"])
@pytest.mark.parametrize("error", [KeyError, ShoalError])
def test_an_exception_reaches_the_consumer_with_its_traceback(workers: int, error: type[Exception]) -> None:
    last = int(sample_ids(0, 20, 15, 1)[0])
    loader = Loader(RankStream(Numbers(20, fails_at=last, error=error), seed=0, batch=4), workers=workers)
    with pytest.raises(error, match=f"no sample {last}") as caught:
        taken(loader, 5)
    if error is ShoalError and workers:  # a person's mistake: as it was raised, without the traceback of a process
        assert str(caught.value) == f"no sample {last} [D028]"
    else:
        assert "in batch" in "".join(traceback.format_exception(caught.value))
    assert loader.position == 12
    assert not _children()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["close", "forget", "raise"])
def test_nothing_is_left_behind(workers: int, how: str) -> None:
    loader: Loader | None = Loader(RankStream(Numbers(20), seed=0, batch=4), workers=workers)
    assert loader is not None
    next(loader)
    assert len(_children()) == workers
    assert _has_thread() == (workers == 0)
    if how == "close":
        loader.close()
        loader.close()
    elif how == "forget":
        loader = None
    else:
        with pytest.raises(ZeroDivisionError):
            _fail_in_the_middle(loader)
        loader = None
    gc.collect()
    assert not _children()
    assert not _has_thread()


@pytest.mark.parametrize(("size", "batch", "degree"), [(23, 8, 3), (10, 4, 1), (9, 4, 4), (1, 8, 3), (0, 4, 2)])
def test_evaluation_sees_every_sample_once(size: int, batch: int, degree: int) -> None:
    ranks = [list(evaluation_batches(Numbers(size), batch=batch, coordinate=c, degree=degree)) for c in range(degree)]
    batches = [part["numbers"] for rank in ranks for part in rank]
    assert all(len(part) for part in batches)
    assert sorted(np.concatenate([[], *batches]).astype(int).tolist()) == list(range(size))
    assert [sample for part in ranks[0] for sample in part["numbers"].tolist()] == sorted(
        sample for part in ranks[0] for sample in part["numbers"].tolist()
    )


def test_weight_of_a_batch() -> None:
    assert weight_of({"tokens": torch.zeros(2, 3), "labels": torch.tensor([[1, -100, 2], [-100, -100, 0]])}) == 3
    assert weight_of({"numbers": torch.zeros(5)}) == 5


@pytest.mark.parametrize(
    ("settings", "position", "message"),
    [({"batch": 2, "degree": 4}, 0, "each of 4 .*, got 2"), ({"batch": 4}, -1, "at least 0, got -1"),
     ({"batch": 4, "coordinate": 2, "degree": 2}, 0, "coordinate must be from 0 to 1, got 2")],
)  # fmt: skip
def test_invalid_settings_are_rejected(settings: dict[str, int], position: int, message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        Loader(RankStream(Numbers(10), seed=0, **settings), position=position)
    with pytest.raises(ShoalError, match="at least one sample, got 0"):
        Loader(RankStream(Numbers(0), seed=0, batch=1))


def _fail_in_the_middle(loader: Loader) -> None:
    for _ in loader:
        1 / 0  # noqa: B018


def _children() -> list[object]:
    """Without the ranks of tests/dist/pool.py, if there are any."""
    return [child for child in multiprocessing.active_children() if not child.name.startswith("rank ")]


def _has_thread() -> bool:
    return any(thread.name == "shoal-prefetch" for thread in threading.enumerate())
