"""The mean loss over batches that are dealt out over the ranks, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.data.batch import to_device
from shoal.data.sharded_dataloader import ShardedDataLoader
from shoal.parallel.pipeline.pipeline import MicrobatchFeed
from shoal.train.loss.counting import Loss
from shoal.train.loss.objective import CrossEntropy, call_of, loss_of_output, reject_own_count
from shoal.train.loss.tally import Tally
from shoal.train.run_state import RunState


@torch.no_grad()
def evaluate(run: RunState, batches: Iterable[Any], stop: Callable[[], bool] | None = None) -> float | None:
    """What `Run.evaluate` returns; weights and modes of modules stay as they are."""
    composed = run.composed
    composed.before_evaluation()
    modes = {module: module.training for part in composed.parts for module in part.model.modules()}
    for part in composed.parts:
        part.model.eval()
    tally = Tally(run.device)
    was_stopped = False
    try:
        own = batches.own_batches() if isinstance(batches, ShardedDataLoader) else batches
        for one in _in_lockstep(run, iter(own), stop):
            if one is None:
                was_stopped = True
                break
            whole, counts = one
            reject_own_count(whole)
            batch = run.own_tokens(whole)
            if counts and isinstance(run.objective, CrossEntropy):
                run.objective.check(batch)
            weight = run.objective.weight(batch) if counts else 0
            loss = _loss(run, to_device(batch, run.device, run.precision.wide_dtype), weight)
            if counts and loss is not None:
                tally.add(loss, batch, weight)
    finally:
        for module, was_training in modes.items():
            module.training = was_training
        composed.after_evaluation()
    if was_stopped:
        return None
    is_owner_of_loss = run.mesh.coordinate["tp"] == 0 and (composed.pipeline is None or composed.pipeline.has_loss)
    return tally.mean(run.world, is_owner_of_loss=is_owner_of_loss)


def _loss(run: RunState, batch: Any, weight: float) -> Tensor | Loss | None:
    """The loss of one batch; None on a stage that does not see it."""
    pipeline = run.composed.pipeline
    if pipeline is None:
        return run.objective.loss_sum(run.module, batch, weight)
    losses: list[Tensor | Loss] = []

    def loss(output: Any, number: int) -> Tensor:
        losses.append(loss_of_output(run.objective, output, batch, weight))
        last = losses[-1]
        return last if isinstance(last, Tensor) else last.value

    with run.split_logits_for_loss():
        pipeline.forward(MicrobatchFeed([call_of(run.objective, batch)], loss))
    return losses[0] if losses else None


def _in_lockstep(
    run: RunState, batches: Iterator[Any], stop: Callable[[], bool] | None
) -> Iterator[tuple[Any, bool] | None]:
    """Batches, and whether they count; None in place of the next one, and then no more, if `stop()` is true on any
    rank. Where ranks communicate in a forward, one without a batch left repeats another, which does not count, until
    all are done; where they do not, it only waits for the flags of the others."""
    is_collective = run.composed.has_collective_forward
    if run.world.size == 1 or (stop is None and not is_collective):
        for batch in batches:
            if stop is not None and stop():
                yield None
                return
            yield batch, True
        return
    mine = next(batches, None)
    example: Any = None
    while True:
        is_stopped = stop is not None and stop()
        example = mine if mine is not None else example
        flags = (mine is not None, is_stopped, example is None)
        num_left, num_stopped, num_without = run.world.all_reduce_host([float(flag) for flag in flags]).wait()
        if not num_left:
            return
        if num_stopped:
            yield None
            return
        if is_collective and num_without:  # some rank has never seen a batch
            sent = next(one for one in run.world.all_gather_object(mine) if one is not None)
            example = sent if example is None else example
        if mine is not None or is_collective:
            yield (mine, True) if mine is not None else (example, False)
        mine = next(batches, None)
