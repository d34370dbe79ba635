"""A run to a checkpoint and back: what a run knows beside its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.load import load_newest, load_step
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.save import Snapshot, save
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.state import Holder
from shoal.checkpoint.store import Store
from shoal.errors import RunFailed, ShoalError

if TYPE_CHECKING:
    from shoal.train.run import Run


def holder_of(run: Run) -> Holder:
    """What holds the tensors of a run."""
    copies = run.host_copies
    return Holder(run.composed, run.optimizer, dict(copies.pairs) if copies is not None else {})


def state_of(run: Run) -> dict[str, Any]:
    """What a run knows beside its tensors, between two steps."""
    return {
        "seed": run.seed,
        "plan": str(run.plan),
        "ranks": run.world.size,
        "loss_scale": {"scale": run.loss_scale.scale, "good_steps": run.loss_scale.good_steps},
        "num_calls": run.optimizer.param_groups[0].get("num_calls", 0),
        "loaders": [loader.position for loader in run.loaders],
    }


def settle_to_save(run: Run) -> None:
    """Wait for the last step, and let what ranks learn on their own be the same on all of them."""
    run.settle()
    run.composed.before_evaluation()  # statistics of batch norm


def save_run(run: Run, directory: str | Path, *, wait: bool, keep: int | None) -> None:
    """All of a run between two steps."""
    settle_to_save(run)
    saver = run.savers.get(str(directory))
    if wait and saver is None:
        store = Store.at(directory)
        save(store, run.world, Snapshot.of(holder_of(run), step=run.steps_done, state=state_of(run)))
        if keep is not None and run.is_main:
            store.retain(keep)
        return
    if saver is None:
        saver = run.savers[str(directory)] = Saver(Store.at(directory), run.world.beside(), keep=keep or 2)
    saver.begin(holder_of(run), step=run.steps_done, state=state_of(run))
    if wait:
        wait_for(saver)


def wait_for(saver: Saver) -> None:
    """Wait for a save, and raise if it has failed."""
    saver.finish()
    for news in saver.take_news():
        if news.failure:
            raise RunFailed(news.failure)


def load_run(run: Run, directory: str | Path, step: int | None) -> int:
    """Returns how many steps the run had made."""
    store = Store.at(directory)
    if step is None:
        manifest = load_newest([store], run.world, holder_of(run))
        if manifest is None:
            raise ShoalError(f"there is no checkpoint in {store.where}", fix="the directory that a run was saved to")
    else:
        manifest = load_step(store, run.world, holder_of(run), step)
    restore(run, manifest)
    return manifest.step


def restore(run: Run, manifest: Manifest) -> None:
    """What a run knew beside its tensors."""
    scale = manifest.state.get("loss_scale", {})
    run.loss_scale.scale = float(scale.get("scale", run.loss_scale.scale))
    run.loss_scale.good_steps = int(scale.get("good_steps", 0))
    if calls := manifest.state.get("num_calls", 0):
        run.optimizer.param_groups[0]["num_calls"] = int(calls)
    for loader, position in zip(run.loaders, manifest.state.get("loaders", []), strict=False):
        loader.position = tuple(position)
    run.steps_done = manifest.step
