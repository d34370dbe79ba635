"""A machine that loses its power at any moment of a save: what was reported as saved loads, bit for bit.

kill -9 does not show this: what a killed process wrote is in the page cache, synced or not. So the operations of saves
are recorded, and every part of the record is replayed with all that was not synced lost, in part or in any order: see
`tests/power.py`. With one sync left out of the record, any of them, the same check finds a loss.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.formats import dcp, export, safetensors
from shoal.checkpoint.save import Snapshot, save
from shoal.checkpoint.state.model_state import LocalShard
from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.locate import find, read_manifest
from shoal.checkpoint.storage.manifest import NAME
from shoal.checkpoint.storage.store import STEP, Store
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.files import PrivateFolder
from shoal.observe.metrics import JsonLines
from shoal.observe.run_directory import RunDirectory
from shoal.train.recipe.saving.memory_flush import flush_memory_tier
from tests.power import Operation, Recorder, Replay, Tree, read_tree, states, write_tree

RANKS = 2
RUN = "runs/run"
ROOT = f"{RUN}/checkpoints"


@dataclass(frozen=True)
class Story:
    """What a program does, and what it promises of a directory that a power loss leaves."""

    act: Callable[[Path, Callable[[Any], None]], None]
    """Called with the directory, and with what to call when something is reported as done."""
    look: Callable[[Path], tuple[Any, list[str]]]
    """The newest thing that is there, and all that should never be there."""
    before: Callable[[Path], None] = lambda path: None
    """Makes what is on the disk already."""


# ---- saves of two ranks ---------------------------------------------------------------------------------------------


class Rank:
    """One of two ranks that are threads of this process: all that a save asks of a world."""

    def __init__(self, rank: int, meeting: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size, self.is_main, self._meeting, self._board = rank, RANKS, rank == 0, meeting, board

    def all_gather_object(self, value: Any, kinds: Sequence[type] = ()) -> list[Any]:
        self._board[self.rank] = value
        self._meeting.wait(30)
        found = list(self._board)
        self._meeting.wait(30)
        return found


def values(number: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def save_number(root: Path, step: int, number: int, *, keep: int | None = None, main: Store | None = None) -> None:
    """Save one step by two ranks, as a run does; `number` is the number of the save, and makes its values."""
    board: list[Any] = [None] * RANKS
    meeting = threading.Barrier(RANKS)

    def act(rank: int) -> None:
        world: Any = Rank(rank, meeting, board)
        value = values(number, rank)
        held = LocalShard("model/x", (3 * RANKS, 5), (3 * rank, 0), value, is_saved=True)
        store = main if main is not None and rank == 0 else Store(root)
        save(store, world, Snapshot(step, [held], [value], {}, {"number": number}))
        if rank == 0 and keep is not None:
            store.retain(keep)

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def number_of(folder: Path) -> int:
    """Which save the folder of a step is of; raises unless every value is that of this save."""
    manifest = read_manifest(folder)
    number = int(manifest.state["number"])
    for rank, piece in enumerate(manifest.tensors["model/x"].pieces):
        with shard_file.Reader(folder / piece.file, manifest.files[piece.file]) as reader:
            assert torch.equal(reader.rows(piece.key, "F32", (3, 5), 0, 3), values(number, rank)), "a mix of two saves"
    return number


def saves_in(root: Path) -> tuple[int, list[str]]:
    """The save that `latest` names; and steps that do not load, and a `latest` that names none of them."""
    numbers, wrong = {"": 0}, []
    for folder in sorted(root.glob("step-*")):
        try:
            if STEP.fullmatch(folder.name) and (folder / NAME).exists():
                numbers[folder.name] = number_of(folder)
        except (ShoalError, AssertionError) as error:
            wrong.append(f"{folder.name} is there, and does not load: {error}")
    latest = (root / "latest").read_text().strip() if (root / "latest").exists() else ""
    if latest not in numbers or (not latest and (root / "latest").exists()):
        wrong.append(f"latest names {latest!r}, which is not there")
    newest = Store(root).steps()[-1:]
    if newest and numbers.get(Store(root).path(newest[0]).name) != max(numbers.values()):
        wrong.append("the newest save is not the one that a run goes on from")
    return numbers.get(latest, 0), wrong


def look_for_saves(path: Path) -> tuple[Any, list[str]]:
    return saves_in(path / ROOT)


def first_save(path: Path, done: Callable[[Any], None]) -> None:
    store = Store(path / ROOT)
    store.room(1)
    save_number(path / ROOT, 1, 1, main=store)
    done(1)


def second_save(path: Path, done: Callable[[Any], None]) -> None:
    """Retention removes the first one."""
    save_number(path / ROOT, 2, 2, keep=1)
    done(2)


def save_again(path: Path, done: Callable[[Any], None]) -> None:
    """The step that is there, with other values."""
    save_number(path / ROOT, 1, 2)
    done(2)


def after_a_kill(path: Path, done: Callable[[Any], None]) -> None:
    """A process that was killed has made directories, and synced none of them."""
    (path / ROOT).mkdir(parents=True)
    save_number(path / ROOT, 1, 1)
    done(1)


def over_damage(path: Path, done: Callable[[Any], None]) -> None:
    """A folder without a manifest has the name of the step, and a draft was never finished."""
    save_number(path / ROOT, 2, 2, keep=1)
    done(2)


def damage(path: Path) -> None:
    save_number(path / ROOT, 1, 1)
    for name in ("step-00000002", ".draft-step-00000009", ".draft-gone-step-00000000"):
        (path / ROOT / name).mkdir()
        (path / ROOT / name / "shard-00000.safetensors").write_bytes(b"of a person")


def archive(path: Path, done: Callable[[Any], None]) -> None:
    """A run that goes on from step 1, and then makes step 2 once more."""
    Store(path / ROOT).archive(after=1)
    save_number(path / ROOT, 2, 3)
    done(3)


def only_set_aside(path: Path, done: Callable[[Any], None]) -> None:
    Store(path / ROOT).archive(after=1)
    done(2)


def look_for_aside(path: Path) -> tuple[Any, list[str]]:
    """2: step 1 is the newest one."""
    return 3 - Store(path / ROOT).steps()[-1], saves_in(path / ROOT)[1]


def reset(path: Path, done: Callable[[Any], None]) -> None:
    Store(path / ROOT).archive(after=-1)
    save_number(path / ROOT, 1, 3)
    done(3)


def one_save(path: Path) -> None:
    save_number(path / ROOT, 1, 1)


def two_saves(path: Path) -> None:
    save_number(path / ROOT, 1, 1)
    save_number(path / ROOT, 2, 2)


def from_memory(path: Path, done: Callable[[Any], None]) -> None:
    """A run has ended, and what it kept in memory goes to the disk."""
    with PrivateFolder(path / "memory") as folder:
        assert flush_memory_tier(folder, Store(path / ROOT)) == 5
    done(5)


def memory(path: Path) -> None:
    (path / "memory").mkdir(mode=0o700)
    save_number(path / "memory", 5, 5)


# ---- other files ----------------------------------------------------------------------------------------------------

RECIPE = Recipe.model_validate({"run": {"dir": RUN}})


def run_directory(path: Path, done: Callable[[Any], None]) -> None:
    """A run from its begin to its end, whose checkpoints are elsewhere."""
    with chdir(path):
        directory = RunDirectory.claim(RECIPE)
        directory.begin(RECIPE)
        done(1)
        sink = JsonLines(Path(RUN) / "metrics.jsonl")
        for step in (1, 2):
            sink.write({"step": step, "loss": 1.0})
        sink.close()
        done(2)
        directory.write_summary({"steps": 2, "was_stopped": False})
        done(3)
        directory.close()


def goes_on(path: Path, done: Callable[[Any], None]) -> None:
    """The same from step 1 of a run that has ended: what was told of later steps is told once more."""
    with chdir(path):
        directory = RunDirectory.claim(RECIPE, "1")
        directory.begin(RECIPE)
        done(1)
        directory.drop_metrics_after(1)
        sink = JsonLines(Path(RUN) / "metrics.jsonl")
        sink.write({"step": 2, "loss": 7.0})
        sink.close()
        done(2)
        directory.close()


def look_at_run(path: Path) -> tuple[int, list[str]]:
    """0: there is no run; 1: there is one that has not ended; 2: with all its metrics; 3: it has ended."""
    folder = path / RUN
    if not (folder / "recipe.yaml").exists():
        return 0, []
    try:
        with chdir(path):
            RunDirectory.preview(RECIPE, "latest").drop_metrics_after(2)
        json.loads((folder / "environment.json").read_text())
        has_ended = (folder / "summary.json").exists() and json.loads((folder / "summary.json").read_text())["steps"]
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
        told = [json.loads(line)["step"] for line in lines] == [1, 2]
    except FileNotFoundError:
        return 0, []  # it has a recipe and no more
    except (ShoalError, ValueError) as error:
        return 0, [f"a run directory cannot be read: {error}"]
    return (3 if has_ended else 2) if told else 1, []


def look_at_second_run(path: Path) -> tuple[int, list[str]]:
    """0: it is the first run still, or no run can be found; 1: the second one; 2: with all its metrics."""
    stage, wrong = look_at_run(path)
    lines = (path / RUN / "metrics.jsonl").read_text()
    if '"step": 1' not in lines:
        wrong.append("the metrics of a step that is not made again are lost")
    return {0: 0, 1: 1, 2: 1 + ("7.0" in lines), 3: 0}[stage], wrong


def one_run(path: Path) -> None:
    run_directory(path, lambda what: None)


def start_over(path: Path, done: Callable[[Any], None]) -> None:
    """`--resume fresh` where a run of step 2 is: no step of it comes back beside those of the new run."""
    with chdir(path):
        directory = RunDirectory.claim(RECIPE, "fresh", command="this command")
        directory.begin(RECIPE)
        save_number(Path(ROOT), 1, 3)
        done(3)
        directory.close()


def ended_run(path: Path) -> None:
    one_run(path)
    save_number(path / ROOT, 2, 2)


def look_after_start_over(path: Path) -> tuple[int, list[str]]:
    """Steps of the run before may be there in part: they are being removed."""
    found = set()
    for folder in (path / ROOT).glob("step-*"):
        with suppress(ShoalError, AssertionError):
            found.add(number_of(folder))
    wrong = ["a step of the run before is beside one of the new run"] * (found == {2, 3})
    with chdir(path):
        if 3 in found and not RunDirectory.has_begun(RECIPE, "this command"):
            wrong.append("a restart would start over, and remove a step of this run")
    return max(found, default=0), wrong


def exported(kind: str) -> Callable[[Path, Callable[[Any], None]], None]:
    def act(path: Path, done: Callable[[Any], None]) -> None:
        """The second one takes the place of the first."""
        for step in (1, 2):
            how = export.ExportSettings(format=kind, overwrite=True)
            export.export(find(path / ROOT, step), path / "new" / "out", how, lambda size: None)
            done(step)

    return act


def look_at_export(path: Path) -> tuple[int, list[str]]:
    """Which save it is of; 0: there is none. What was there before may have another name, which the next one mends."""
    found = next((out for out in (path / "new" / "out", path / "new" / ".draft-gone-out") if out.exists()), None)
    if found is None:
        return 0, []
    try:
        is_dcp = found.is_dir() and not (found / "model.safetensors").exists()
        file = found if found.is_file() else found / "model.safetensors"
        tensor = (dcp.read(found)[0] if is_dcp else safetensors.read(file))["x"]
        whole = torch.cat([box.read() for box in tensor.boxes])
    except Exception as error:  # torch has its own
        return 0, [f"{found.name} is there, and cannot be read: {error}"]
    numbers = [n for n in (1, 2) if torch.equal(whole, torch.cat([values(n, rank) for rank in range(RANKS)]))]
    return (numbers[0], []) if numbers else (0, ["an export has other values"])


STORIES = {
    "first save": Story(first_save, look_for_saves),
    "second save": Story(second_save, look_for_saves, one_save),
    "save again": Story(save_again, look_for_saves, one_save),
    "after a kill": Story(after_a_kill, look_for_saves),
    "over damage": Story(over_damage, look_for_saves, damage),
    "set aside": Story(archive, look_for_saves, two_saves),
    "only set aside": Story(only_set_aside, look_for_aside, two_saves),
    "begin anew": Story(reset, look_for_saves, two_saves),
    "from memory": Story(from_memory, look_for_saves, memory),
    "run directory": Story(run_directory, look_at_run),
    "run that goes on": Story(goes_on, look_at_second_run, one_run),
    "run that starts over": Story(start_over, look_after_start_over, ended_run),
    "export to a file": Story(exported("safetensors"), look_at_export, two_saves),
    "export to a folder": Story(exported("huggingface"), look_at_export, two_saves),
    "export for torch": Story(exported("dcp"), look_at_export, two_saves),
}


# ---- the check ------------------------------------------------------------------------------------------------------


class Told:
    """A story that was carried out once: its record, and what directories that a power loss leaves look like."""

    def __init__(self, story: Story, folder: Path) -> None:
        self.story, self.folder, self._seen = story, folder, dict[frozenset[Any], tuple[Any, list[str]]]()
        path = folder / "real"
        path.mkdir()
        story.before(path)
        with Recorder(path) as recorder:
            story.act(path, recorder.done)
        self.base, self.log, self.after = recorder.base, recorder.log, read_tree(path)

    def violations(self, log: list[Operation], most: int = 40, seed: int = 0) -> Iterator[str]:
        """Losses that the story has promised not to have, at any moment of a record."""
        rng, disk, promised = random.Random(seed), Replay(self.base), 0
        for number, operation in enumerate([None, *log]):
            if operation is not None:
                disk.apply(operation)
                promised = operation.done or promised
            if operation is not None and operation.kind in ("sync file", "done") and number < len(log):
                continue  # leaves less than the operation before
            for tree in states(disk, most, rng):
                newest, wrong = self._look(tree)
                where = f"after operation {number} of {len(log)}, {operation}: {sorted(tree)}"
                if newest < promised:
                    yield f"{promised} was reported as done and {newest} is left, {where}"
                yield from (f"{one}, {where}" for one in wrong)

    def _look(self, tree: Tree) -> tuple[Any, list[str]]:
        key = frozenset(tree.items())
        if key not in self._seen:
            path = self.folder / f"{len(self._seen)}"
            write_tree(path, tree)
            self._seen[key] = self.story.look(path)
            shutil.rmtree(path)
        return self._seen[key]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Told]:
    known: dict[str, Told] = {}

    def of(name: str) -> Told:
        if name not in known:
            known[name] = Told(STORIES[name], tmp_path_factory.mktemp("story"))
        return known[name]

    return of


def without(log: list[Operation], is_left_out: Callable[[Operation], bool]) -> list[Operation]:
    return [operation for operation in log if not is_left_out(operation)]


@pytest.mark.parametrize("name", STORIES)
def test_what_was_reported_survives_a_power_loss(told: Callable[[str], Told], name: str) -> None:
    story = told(name)
    disk = Replay(story.base)
    for operation in story.log:
        disk.apply(operation)
    assert disk.everything() == story.after, "an operation was not recorded"
    assert next(story.violations(story.log), None) is None


@pytest.mark.parametrize("kind", ["sync file", "sync directory"])
@pytest.mark.parametrize("name", STORIES)
def test_a_kind_of_sync_left_out_is_found(told: Callable[[str], Told], name: str, kind: str) -> None:
    story = told(name)
    log = without(story.log, lambda operation: operation.kind == kind)
    assert next(story.violations(log), None) is not None


def test_every_sync_left_out_is_found(told: Callable[[str], Told]) -> None:
    """One by one: each is needed in some story."""
    sites: dict[str, bool] = {}
    for name in STORIES:
        story = told(name)
        for site in {operation.site for operation in story.log if operation.site} - {s for s in sites if sites[s]}:
            log = without(story.log, lambda operation, site=site: operation.site == site)  # type: ignore[misc]
            sites[site] = next(story.violations(log), None) is not None
    assert len(sites) > 15
    superfluous = [site for site, is_found in sites.items() if not is_found]
    assert not superfluous, "\n".join(superfluous)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STORIES)
def test_many_power_losses(told: Callable[[str], Told], name: str, seed: int) -> None:
    story = told(name)
    assert next(story.violations(story.log, most=1000, seed=seed), None) is None
