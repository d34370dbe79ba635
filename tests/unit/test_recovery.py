"""What a run leaves and another one finds: optimizer states, records in memory, restarts, temporary folders."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.checkpoint.storage.manifest import Manifest
from shoal.checkpoint.storage.store import Store
from shoal.elastic import restart
from shoal.elastic.memory_tier import memory_tier
from shoal.elastic.restart import RestartBudget, with_restarts
from shoal.errors import RunFailed
from shoal.files import PrivateFolder
from shoal.launch import worker_group
from shoal.launch.local import launch
from shoal.launch.scratch import LOCK, scratch_folder
from shoal.launch.worker import value_path
from shoal.observe import run_lock
from shoal.observe.durable_write import sync
from shoal.train.recipe.saving.memory_flush import DISK
from shoal.train.run import Run
from tests.rejects import rejects
from tests.unit.test_power_loss import save_number

# ---- states of optimizers -------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Keeps `exp_avg` and no `step`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            parameter -= 1e-2 * torch.sign(0.9 * average + 0.1 * parameter.grad)
            average.lerp_(parameter.grad, 0.01)


class CountsPerGroup(Lion):
    """Keeps both moments, and its step in the group, as FusedAdam does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["exp_avg_sq"] = state["exp_avg"] ** 2


def one_run(kind: Any, seed: int) -> tuple[Run, nn.Module]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    run = Run("fp32", device="cpu", seed=0)
    run.prepare(model, kind(model.parameters()))
    return run, model


def one_step(run: Run) -> None:
    generator = torch.Generator().manual_seed(run.steps_done)
    run.step((torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)))


@pytest.mark.parametrize("kind", [Lion, CountsPerGroup])
def test_an_optimizer_without_a_step_of_each_parameter_is_loaded(kind: Any, tmp_path: Path) -> None:
    run, model = one_run(kind, 1)
    one_step(run)
    run.save(tmp_path)
    one_step(run)
    other, loaded = one_run(kind, 2)
    other.load(tmp_path)
    one_step(other)
    for first, second in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(first, second)
    run.close()
    other.close()


@pytest.mark.parametrize("without", [["weight"], ["weight", "bias"]], ids=["one", "all"])
def test_moments_of_adam_without_a_step_are_refused(without: list[str], tmp_path: Path) -> None:
    run, _ = one_run(torch.optim.AdamW, 1)
    one_step(run)
    run.save(tmp_path)
    path = Store(tmp_path).path(1) / "manifest.json"
    manifest = Manifest.parse(path.read_bytes())
    for name in without:
        del manifest.state["scalars"][name]["step"]
    path.write_bytes(manifest.to_bytes())
    with rejects("C012"):
        run.load(tmp_path)
    run.close()


# ---- launches -------------------------------------------------------------------------------------------------------


def late(place: Any, store: Any, folder: Path, seconds: float) -> int:
    """Rank 1 returns so many seconds after rank 0."""
    path = value_path(folder, 0)
    if place.rank == 1:
        while not list(folder.glob(f"*/{path.name}")):
            time.sleep(0.01)
        time.sleep(seconds)
    return int(place.rank)


def test_a_late_rank_that_ends_while_the_launcher_waits_for_earlier_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker_group, "SETTLE", 3.0)  # so that a busy machine is fast enough
    assert launch(late, (tmp_path, 2.0), nproc=2, timeout=1.0, start="forkserver") == [0, 1]


def test_a_launch_without_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    with rejects("N027", match=r"fix: export TMPDIR=") as caught:
        launch(late, (tmp_path, 0.0), nproc=1)
    assert str(tmp_path / "removed") in str(caught.value)


def test_the_folder_of_a_launcher_on_another_host_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as folder:
        host = folder.name.removeprefix(f"shoal-launch-{os.getuid()}-").partition("-")[0]
    here, there = tmp_path / f"{folder.name}x", tmp_path / f"{folder.name}x".replace(host, "0" * len(host))
    for path in (here, there):
        path.mkdir(mode=0o700)
        (path / LOCK).touch()
    with scratch_folder():
        assert not here.exists()  # of a dead launcher on this host
        assert there.exists()


def test_a_failure_with_the_text_of_an_earlier_one_is_restarted_after_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(restart, "LONGEST_PAUSE", 0.0)
    said: list[str] = []

    def start(generation: int) -> int:
        if generation == 3:
            return generation
        error = RunFailed("rank 1 of 2 failed: read error", code="N022")
        error.saved_step, error.cause, error.may_pass = 10 * generation, "read error", True
        raise error

    assert with_restarts(start, RestartBudget(most=2, say=said.append)) == 3
    assert not any("not restarted" in text for text in said)


def failed(saved_step: int, *, is_of_replacement: bool = False) -> RunFailed:
    error = RunFailed("rank 1 of 2 was killed by signal 9 (SIGKILL)", code="N024")
    error.may_pass, error.saved_step, error.is_of_replacement = True, saved_step, is_of_replacement
    return error


def test_a_replacement_and_the_restart_after_it_count_as_one() -> None:
    budget = RestartBudget(most=1, say=lambda text: None)
    assert budget.take(failed(3))
    assert budget.take(failed(3, is_of_replacement=True))
    assert budget.generation == 2
    assert not budget.take(failed(3))
    assert budget.take(failed(4))  # progress: the budget is full again


@pytest.mark.parametrize(("lives", "most_pauses"), [(2.0, 6), (20.0, 30)])
def test_pauses_grow_where_restarts_do_not_help(
    lives: float, most_pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that fails every 2 s gives few restarts a minute. A generation that has lived and saved starts anew."""
    clock, pauses = [0.0], list[float]()
    monkeypatch.setattr(restart.time, "monotonic", lambda: clock[0])

    def start(generation: int) -> None:
        clock[0] += lives
        error = RunFailed("host b is lost", code="N057")
        error.saved_step, error.may_pass = generation, clock[0] < 600
        raise error

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        pauses.append(seconds)

    with pytest.raises(RunFailed):
        with_restarts(start, RestartBudget(most=3, say=lambda text: None), sleep=sleep)
    assert max(pauses) == (30.0 if lives < 10 else restart.FIRST_PAUSE)
    assert len(pauses) == pytest.approx(600 / (lives + max(pauses)), abs=most_pauses)


# ---- states in memory -----------------------------------------------------------------------------------------------


@contextmanager
def no_room() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_private_file_keeps_its_content_where_there_is_no_room(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with PrivateFolder(tmp_path) as folder:
        folder.write(DISK, b"/old")
        with no_room():
            folder.write(DISK, b"/old")  # nothing to write
            with pytest.raises(OSError, match="large"):
                folder.write(DISK, b"/new")
        assert (folder.read(DISK, 10), folder.names()) == (b"/old", [DISK])
        folder.write(DISK, b"/new")
        assert (folder.read(DISK, 10), folder.names()) == (b"/new", [DISK])


def left_in_memory(memory: Path, place: str | None) -> Path:
    """What a launcher that was killed has left: step 5, and where it was to be saved."""
    folder = memory / f"shoal-tier-{os.geteuid()}-left"
    folder.mkdir(parents=True, mode=0o700)
    memory.chmod(0o700)
    save_number(folder, 5, 5)
    (folder / "lock").touch()
    if place is not None:
        (folder / DISK).write_text(place)
    return folder


@pytest.mark.parametrize("place", ["", None], ids=["empty", "missing"])
def test_a_state_in_memory_without_a_place_is_never_removed(place: str | None, tmp_path: Path) -> None:
    left, said = left_in_memory(tmp_path / "memory", place), list[str]()
    with memory_tier(str(tmp_path / "memory"), said.append, saves_to=str(tmp_path / "saves")):
        pass
    assert Store(left).steps() == [5]
    assert any(str(left) in text and "step 5" in text for text in said), said


def test_the_state_of_a_run_that_failed_without_a_place_is_never_removed(tmp_path: Path) -> None:
    memory, said = tmp_path / "memory", list[str]()
    memory.mkdir(mode=0o700)
    with (  # noqa: PT012
        pytest.raises(RunFailed),
        memory_tier(str(memory), said.append, saves_to=str(tmp_path / "saves")) as root,
    ):
        save_number(root, 5, 5)
        raise RunFailed("rank 1 was killed", code="N024")
    assert Store(root).steps() == [5]
    assert any(str(root) in text and "step 5" in text for text in said), said


def test_a_place_where_another_run_saves_now_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, said = tmp_path / "saves", list[str]()
    saves.mkdir()
    left = left_in_memory(tmp_path / "memory", str(saves))
    monkeypatch.setattr(run_lock, "LOCK_TIMEOUT", 0.1)
    with run_lock.locked(saves), memory_tier(str(tmp_path / "memory"), said.append, saves_to=str(saves)):
        pass
    assert (Store(saves).steps(), Store(left).steps()) == ([], [5])
    assert any(str(left) in text for text in said), said
    with memory_tier(str(tmp_path / "memory"), said.append, saves_to=str(saves)):
        pass
    assert (Store(saves).steps(), left.exists()) == ([5], False)


def test_a_memory_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    tmp_path.chmod(0o700)
    monkeypatch.setattr(fcntl, "flock", refuse)  # no file system of this machine is without them
    with (
        rejects("C031", match="cannot hold the state of this run: No locks available"),
        memory_tier(str(tmp_path), lambda text: None, saves_to=str(tmp_path / "saves")),
    ):
        pass
    assert not list(tmp_path.iterdir())


# ---- file systems ---------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_synced_is_used_without() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        sync(Path("/proc/self/status"))
    sync(Path("/proc/self"))
