"""A run to a checkpoint and back: what a run knows beside its tensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.async_saver import AsyncSaver
from shoal.checkpoint.load import load_newest, load_step
from shoal.checkpoint.save import Snapshot, save
from shoal.checkpoint.state.base_fingerprint import adapter_state, reject_other_base
from shoal.checkpoint.state.model_state import Holder
from shoal.checkpoint.storage.manifest import Manifest
from shoal.checkpoint.storage.store import Store, find
from shoal.comm.all_or_none import on_main
from shoal.data.sharded_dataloader import ShardedDataLoader
from shoal.errors import Problem, RunFailed, ShoalError, raise_if
from shoal.train.optim.evaluation_weights import restore_numbers, saved_numbers
from shoal.train.run_state import RunState
from shoal.train.schedulers import (
    restore_schedulers,
    saved_schedulers,
    scheduler_problems,
    set_numbers,
    warn_of_unprepared,
)

LR = ("lr", "initial_lr")
"""Of a group of parameters: the learning rate, and what a schedule multiplies."""


def holder_of(run: RunState) -> Holder:
    """What holds the tensors of a run."""
    copies = run.host_copies
    averages = run.ema.averages if run.ema is not None else {}
    return Holder(run.composed, run.optimizer, dict(copies.pairs) if copies is not None else {}, averages)


def state_of(run: RunState) -> dict[str, Any]:
    """What a run knows beside its tensors, between two steps."""
    groups = run.optimizer.param_groups
    return {
        "seed": run.seed,
        "precision": run.plan.precision,
        "param_dtype": str(run.precision.weight_dtype).removeprefix("torch."),
        "optimizer": type(run.optimizer).__name__,
        "state_dtype": groups[0].get("state_dtype", "fp32"),  # which torch's own have, too
        "lr": [{name: float(group[name]) for name in LR if name in group} for group in groups],
        "plan": str(run.plan),
        "ranks": run.world.size,
        "loss_scale": {"scale": run.loss_scale.scale, "good_steps": run.loss_scale.good_steps},
        "num_calls": run.optimizer.param_groups[0].get("num_calls", 0),
        "loaders": [{"position": loader.position, **loader.kind} for loader in run.loaders],
        **saved_schedulers(run.schedulers, run.optimizer),
        **saved_numbers(run.optimizer),
        **_local_sgd(run),
        **adapter_state(run.composed, run.world),
        **({"ema": run.ema.num_updates} if run.ema is not None else {}),
        **({"model": run.model_section} if run.model_section is not None else {}),
    }


def _local_sgd(run: RunState) -> dict[str, Any]:
    """Under `sync=`, what is sent and not yet applied: fragment → the step after which it is. And how far the gradients
    of the replicas lie apart."""
    local_sgd = run.composed.local_sgd
    if local_sgd is None:
        return {}
    waiting = {str(fragment): step for fragment, step in local_sgd.waiting.items()}
    step_scale = {"step_scale": local_sgd.step_scale.squares.tolist()} if local_sgd.step_scale is not None else {}
    together = run.steps_done <= local_sgd.warmup_steps
    return {
        "local_sgd": {"fragments": len(local_sgd.fragments), "waiting": waiting, "together": together, **step_scale}
    }


def prepare_to_save(run: RunState) -> None:
    """Wait for the last step, and let what ranks learn on their own be the same on all of them."""
    run.reject_open_step("to save")
    run.check_last_step()
    run.composed.before_evaluation()  # statistics of batch norm
    if run.composed.local_sgd is not None:
        run.composed.local_sgd.synchronize()  # what is on its way


def save_run(
    run: RunState, directory: str | Path, *, wait: bool, keep: int | None, extra: Mapping[str, Any] | None
) -> None:
    """All of a run between two steps."""
    prepare_to_save(run)
    if run.is_main:
        lost = "its state is not saved"
        warn_of_unprepared(run.schedulers, run.optimizer, has_extra=bool(extra), lost=lost)
    state = {**state_of(run), "extra": _plain(extra)}
    saver = run.savers.get(str(directory))
    if wait and saver is None:
        store = Store.at(directory)
        note = save(store, run.world, Snapshot.of(holder_of(run), step=run.steps_done, state=state))
        if note and run.is_main:
            warnings.warn(note, stacklevel=3)
        elif keep is not None and run.is_main:
            store.retain(keep)
        _warn_of(store)
        return
    if saver is None:
        saver = run.savers[str(directory)] = AsyncSaver(Store.at(directory), run.world.with_own_connections())
    saver.keep = keep if wait else keep or 2
    saver.begin(holder_of(run), step=run.steps_done, state=state)
    if wait:
        wait_for(saver)


def wait_for(saver: AsyncSaver) -> None:
    """Wait for a save, and raise if it has failed."""
    saver.finish()
    _warn_of(saver.store)
    for result in saver.take_results():
        if result.failure is not None:
            raise RunFailed(*result.failure.problems, title=result.failure.title)
        if result.note and saver.world.is_main:
            warnings.warn(result.note, stacklevel=3)


def _warn_of(store: Store) -> None:
    for note in store.take_notes():
        warnings.warn(note, stacklevel=4)


def _plain(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a user adds, as JSON gives it back."""
    try:
        return dict(json.loads(json.dumps(dict(extra or {}), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ShoalError(
            f"what is saved beside a run has to be numbers, texts, lists and mappings: {error}",
            fix="run.save(directory, extra={'best_accuracy': 0.93})",
            code="C017",
        ) from None


def load_run(run: RunState, directory: str | Path, step: int | None, *, only_weights: bool) -> int:
    """Returns how many steps the run has made now."""
    run.reject_open_step("to load")
    store, named = find(directory)
    step = named if step is None else step
    known = on_main(run.world, store.steps, failed=f"{store.where} was not read")
    if not known:
        raise ShoalError(
            f"there is no checkpoint in {store.where}",
            fix="run.save(directory) first, or run.load(OTHER_DIRECTORY)",
            code="C001",
        )
    if only_weights:
        newest = known[-1] if step is None else step
        weights = load_step(store, run.world, holder_of(run), newest, only_weights=True)
        reject_other_base(run.composed, run.world, weights, store.where)
        if run.ema is not None:
            run.ema.num_updates = 0  # the average starts over from these weights
        return run.steps_done
    if step is None:
        manifest = load_newest([store], run.world, holder_of(run))
        assert manifest is not None
    else:
        manifest = load_step(store, run.world, holder_of(run), step)
    reject_other_base(run.composed, run.world, manifest, store.where)
    raise_if(_changes(run, manifest.state), title=f"what step {manifest.step} of {store.where} was saved by")
    restore(run, manifest)
    if run.is_main:
        lost = f"it is not moved to step {manifest.step}, from which the run resumes"
        warn_of_unprepared(run.schedulers, run.optimizer, has_extra=bool(run.extra), lost=lost)
    return manifest.step


def _changes(run: RunState, state: Mapping[str, Any]) -> Iterator[Problem]:
    """What would make the run another one. Checkpoints of others do not say all of it."""
    here = state_of(run)
    fix = "as it was saved; or run.load(..., only_weights=True) for another run with the same weights"
    for name in ("seed", "precision", "param_dtype", "optimizer", "state_dtype"):
        if name in state and state[name] != here[name]:
            yield Problem("C018", f"{name} was {state[name]}, and is {here[name]}", fix)
    was, now = state.get("loaders", ()), here["loaders"]
    if was and now and len(was) != len(now):
        yield Problem("C018", f"it had {len(was)} loaders, and has {len(now)}", fix)
    for number, (known, loader) in enumerate(zip(was, run.loaders, strict=False)):
        yield from loader_changes(number, known, loader)
    yield from scheduler_problems(run.schedulers, run.optimizer, state)


def loader_changes(number: int, known: Mapping[str, Any], loader: ShardedDataLoader) -> Iterator[Problem]:
    """Where a loader would give other batches than the one that was saved. What it did not say is not compared."""
    was = {**loader.kind, **known}
    found = [f"{name} was {was[name]}, and is {now}" for name, now in loader.kind.items() if was[name] != now]
    if found:
        fix = "the DataLoader as it was; or run.load(..., only_weights=True) for another run with the same weights"
        yield Problem("C018", f"loader {number} of the run is another one: {'; '.join(found)}", fix)


def restore(run: RunState, manifest: Manifest) -> None:
    """What a run knew beside its tensors."""
    state = manifest.state
    scale = state.get("loss_scale", {})
    run.loss_scale.scale = float(scale.get("scale", run.loss_scale.scale))
    run.loss_scale.good_steps = int(scale.get("good_steps", 0))
    if calls := state.get("num_calls", 0):
        run.optimizer.param_groups[0]["num_calls"] = int(calls)
    if len(rates := state.get("lr", [])) == len(run.optimizer.param_groups):
        for group, known in zip(run.optimizer.param_groups, rates, strict=True):
            set_numbers(group, {name: known[name] for name in LR if name in known})
    restore_schedulers(run.schedulers, run.optimizer, state)
    restore_numbers(run.optimizer, state)
    run.saved_loaders = list(state.get("loaders", []))
    for loader, known in zip(run.loaders, run.saved_loaders, strict=False):  # others may be prepared later
        loader.position = tuple(known["position"])
    saved, local_sgd = state.get("local_sgd", {}), run.composed.local_sgd
    if local_sgd is not None and local_sgd.outer.delay and saved.get("fragments") == len(local_sgd.fragments):
        local_sgd.waiting = {int(fragment): int(step) for fragment, step in saved.get("waiting", {}).items()}
    if local_sgd is not None and saved and not saved.get("together", False):
        local_sgd.warmup_steps = 0
    if local_sgd is not None and local_sgd.step_scale is not None:
        squares = [float(one) for one in saved.get("step_scale", (0.0, 0.0))]
        local_sgd.step_scale.squares = local_sgd.step_scale.squares.new_tensor(squares)
        local_sgd.step_scale.begins_equal = "step_scale" not in saved
    run.saved_ema = int(state.get("ema", 0))
    if run.ema is not None:
        run.ema.resume(run.saved_ema, _averaged(run, manifest))
        run.saved_ema = 0
    run.extra = dict(state.get("extra", {}))
    run.steps_done = manifest.step
    run.replicas_agreed_at = None


def _averaged(run: RunState, manifest: Manifest) -> set[str]:
    """The parameters of this rank whose averages a checkpoint has; of a tied one, the first name is saved."""
    firsts = {second: first for first, second in run.composed.tied}
    return {name for name in run.composed.named if f"ema/{firsts.get(name, name)}" in manifest.tensors}
